"""Routes: links before their resources are numbered, and the wirings that machines share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfcdo.topology.links import LATENCY, Resource, link_name, ordered_pairs

# Bytes per second, each way: one NVLink of a V100 (and of its successors up to the H200), a path
# through the host, a device's PCIe port.
NVLINK_V100 = 25e9
HOST = 10e9
PCIE = 12e9


class Route(NamedTuple):
    """Describes the link from one device to another before the topology numbers its resources.

    Attributes:
      source: the sending device.
      target: the receiving device.
      resources: the resources that a transfer holds, in their order; resources of one name are one.
      via_host: whether the path through the host stands in for a missing direct one.
      latency: seconds that a transfer takes on top of its bytes.
    """

    source: int
    target: int
    resources: Sequence[Resource]
    via_host: bool = False
    latency: float = LATENCY


def mesh_routes(
    num_devices: int, nvlinks: Mapping[tuple[int, int], float], sockets: Sequence[int]
) -> list[Route]:
    """Returns the routes of point-to-point links; other pairs meet in the host."""
    routes = []
    for source, target in ordered_pairs(num_devices):
        bandwidth = nvlinks.get((min(source, target), max(source, target)))
        name = link_name(source, target)
        if not bandwidth:
            name = f"host {link_name(sockets[source], sockets[target])}"
        routes.append(
            Route(source, target, [Resource(name, bandwidth or HOST)], via_host=not bandwidth)
        )
    return routes


def crossbar_routes(num_devices: int, bandwidth: float) -> list[Route]:
    """Returns the routes of devices that meet in a switch, which is never the slowest part."""
    return [
        Route(
            source,
            target,
            [Resource(f"{source} out", bandwidth), Resource(f"{target} in", bandwidth)],
        )
        for source, target in ordered_pairs(num_devices)
    ]


def pcie_routes(
    switches: Sequence[int], sockets: Mapping[tuple[int, int], tuple[int, int]]
) -> list[Route]:
    """Returns the routes of devices that meet in PCIe switches, which the host joins."""
    routes = []
    for source, target in ordered_pairs(len(switches)):
        between = []
        if switches[source] != switches[target]:
            between.append(Resource(f"switch {switches[source]} up", HOST))
            if (source, target) in sockets:
                name = f"socket {link_name(*sockets[source, target])}"
                between.append(Resource(name, HOST))
            between.append(Resource(f"switch {switches[target]} down", HOST))
        ports = Resource(f"{source} out", PCIE), Resource(f"{target} in", PCIE)
        routes.append(Route(source, target, [ports[0], *between, ports[1]]))
    return routes
