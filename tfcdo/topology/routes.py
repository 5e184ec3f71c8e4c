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


def wires(num_devices: int, bandwidth: float, latency: float = LATENCY) -> list[Route]:
    """Returns the routes of devices every two of which have a wire each way."""
    return [
        Route(a, b, [Resource(link_name(a, b), bandwidth)], latency=latency)
        for a, b in ordered_pairs(num_devices)
    ]


def mesh(
    num_devices: int, nvlinks: Mapping[tuple[int, int], float], sockets: Sequence[int]
) -> list[Route]:
    """Returns the routes of point-to-point links; other pairs meet in the host."""
    routes = []
    for a, b in ordered_pairs(num_devices):
        if bandwidth := nvlinks.get((min(a, b), max(a, b))):
            routes.append(Route(a, b, [Resource(link_name(a, b), bandwidth)]))
        else:
            host = Resource(f"host {link_name(sockets[a], sockets[b])}", HOST)
            routes.append(Route(a, b, [host], via_host=True))
    return routes


def crossbar(num_devices: int, bandwidth: float) -> list[Route]:
    """Returns the routes of devices that meet in a switch, which is never the slowest part."""
    return [
        Route(a, b, [Resource(f"{a} out", bandwidth), Resource(f"{b} in", bandwidth)])
        for a, b in ordered_pairs(num_devices)
    ]


def pcie(
    switches: Sequence[int], sockets: Mapping[tuple[int, int], tuple[int, int]]
) -> list[Route]:
    """Returns the routes of devices that meet in PCIe switches, which the host joins."""
    routes = []
    for a, b in ordered_pairs(len(switches)):
        path = [Resource(f"{a} out", PCIE), Resource(f"{b} in", PCIE)]
        if switches[a] != switches[b]:
            names = [f"switch {switches[a]} up", f"switch {switches[b]} down"]
            if (a, b) in sockets:
                names.insert(1, f"socket {link_name(*sockets[a, b])}")
            path[1:1] = [Resource(name, HOST) for name in names]
        routes.append(Route(a, b, path))
    return routes
