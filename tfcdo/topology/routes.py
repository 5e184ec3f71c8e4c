"""Describes how a machine is wired, as one route for each ordered pair of its devices.

`Topology.from_routes` makes a topology of them. The functions here stand for the wirings that
several machines share; they serve the presets and the reader of nvidia-smi's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfcdo.topology.links import LATENCY, Resource, link_name, ordered_pairs

# Bytes per second, each way: one NVLink of a V100 (and of its successors up to the H200), a path
# through the host, a device's PCIe port.
NVLINK_V100 = 25e9
HOST = 10e9
PCIE = 12e9
# What a V100 reads or writes of its own memory, in bytes per second; later GPUs have more.
GPU_MEMORY = 900e9


class Route(NamedTuple):
    """Describes the link from one device to another before the topology numbers its resources.

    Attributes:
      source: the sending device.
      target: the receiving device.
      resources: what a transfer holds, in the order of travel. Routes that share something name
        the same resource.
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
    """Describes a machine of point-to-point links, whose other pairs meet in the host.

    Example:
      >>> [route.via_host for route in mesh_routes(3, {(0, 1): 25e9, (1, 2): 25e9}, [0, 0, 1])]
      [False, True, False, False, True, False]
    """
    routes = []
    for source, target in ordered_pairs(num_devices):
        bandwidth = nvlinks.get((min(source, target), max(source, target)))
        if bandwidth:
            wire = Resource(link_name(source, target), bandwidth)
            routes.append(Route(source, target, [wire]))
        else:
            bridge = Resource(f"host {link_name(sockets[source], sockets[target])}", HOST)
            routes.append(Route(source, target, [bridge], via_host=True))
    return routes


def crossbar_routes(num_devices: int, bandwidth: float) -> list[Route]:
    """Describes a machine whose devices meet in a switch that is never the slowest part.

    Example:
      >>> [resource.name for resource in crossbar_routes(2, 300e9)[0].resources]
      ['0 out', '1 in']
    """
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
    """Describes a machine whose devices meet in PCIe switches, which the host joins.

    Example:
      >>> [resource.name for resource in pcie_routes([0, 1], {})[0].resources]
      ['0 out', 'switch 0 up', 'switch 1 down', '1 in']
    """
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
