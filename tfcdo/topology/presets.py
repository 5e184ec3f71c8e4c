"""Names the machines that tfcdo knows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping

from tfcdo import checks
from tfcdo.topology.links import LATENCY, Resource, link_name, ordered_pairs
from tfcdo.topology.routes import NVLINK_V100, Route, crossbar_routes, mesh_routes, pcie_routes
from tfcdo.topology.topology import Topology

NVLINK_P100 = 20e9
# One core adds two float streams in memory at about this rate.
CPU_ADDITION = 10e9

_DGX1_LINKS = {
    (0, 1): 2, (0, 2): 1, (0, 3): 1, (0, 4): 2, (1, 2): 1, (1, 3): 2, (1, 5): 1, (2, 3): 2,
    (2, 6): 2, (3, 7): 1, (4, 5): 2, (4, 6): 1, (4, 7): 1, (5, 6): 1, (5, 7): 2, (6, 7): 2,
}  # fmt: skip
_DGX1_P100_LINKS = {
    (0, 1): 1, (0, 2): 1, (0, 3): 1, (1, 2): 1, (1, 3): 1, (2, 3): 1,
    (4, 5): 1, (4, 6): 1, (4, 7): 1, (5, 6): 1, (5, 7): 1, (6, 7): 1,
    (0, 4): 1, (1, 5): 1, (2, 6): 1, (3, 7): 1,
}  # fmt: skip


def _dgx1(name: str, nvlinks: Mapping[tuple[int, int], int], bandwidth: float) -> Topology:
    speeds = {pair: count * bandwidth for pair, count in nvlinks.items()}
    return Topology.from_routes(name, 8, mesh_routes(8, speeds, sockets=[0] * 4 + [1] * 4))


def dgx1() -> Topology:
    """Describes an NVIDIA DGX-1 with V100: 8 GPUs, 6 NVLinks of 25 GB/s each, a hybrid cube mesh.

    A pair with two NVLinks is one link of 50 GB/s. A pair without goes through the host at 10 GB/s,
    which all transfers from one socket (0-3, 4-7) to the same or the other share.

    References:
      NVIDIA, "NVIDIA DGX-1 With Tesla V100 System Architecture", 2017.
    """
    return _dgx1("dgx1", _DGX1_LINKS, NVLINK_V100)


def dgx1_p100() -> Topology:
    """Describes an NVIDIA DGX-1 with P100: 8 GPUs, 4 NVLinks of 20 GB/s each.

    Two fully joined groups of four, and one link between each device and its partner, four further.
    """
    return _dgx1("dgx1_p100", _DGX1_P100_LINKS, NVLINK_P100)


def nvswitch(num_devices: int = 8) -> Topology:
    """Describes devices on a full crossbar: each has a port in and a port out, of 12 x 25 GB/s."""
    return Topology.from_routes(
        "nvswitch", num_devices, crossbar_routes(num_devices, 12 * NVLINK_V100)
    )


def pcie(num_devices: int = 4) -> Topology:
    """Describes pairs of devices under PCIe switches that the host bridge joins.

    A device's port carries 12 GB/s each way; a transfer to another pair also holds its own switch's
    path up and the other's path down, 10 GB/s each.
    """
    switches = [device // 2 for device in range(num_devices)]
    return Topology.from_routes("pcie", num_devices, pcie_routes(switches, {}))


def shared_memory(num_devices: int = 8) -> Topology:
    """Describes virtual CPU devices: copies cost nothing, additions cost memory bandwidth.

    All devices add with the same cores, so it does not matter where; one pack is as good as many.
    """
    return Topology.from_routes(
        "shared_memory",
        num_devices,
        _separate_wires(num_devices, math.inf, latency=0.0),
        addition_bandwidth=CPU_ADDITION,
        serial_reduction=True,
    )


def fully_connected(num_devices: int = 8) -> Topology:
    """Describes links of 25 GB/s each way between every two devices, for unknown machines."""
    routes = _separate_wires(num_devices, NVLINK_V100)
    return Topology.from_routes("fully_connected", num_devices, routes)


def _separate_wires(
    num_devices: int, bandwidth: float, latency: float = LATENCY
) -> Iterator[Route]:
    for source, target in ordered_pairs(num_devices):
        wire = Resource(link_name(source, target), bandwidth)
        yield Route(source, target, [wire], latency=latency)


_FIXED: Mapping[str, Callable[[], Topology]] = {"dgx1": dgx1, "dgx1_p100": dgx1_p100}
_SCALABLE: Mapping[str, Callable[..., Topology]] = {
    make.__name__: make for make in (nvswitch, pcie, shared_memory, fully_connected)
}
PRESETS: tuple[str, ...] = (*_FIXED, *_SCALABLE)
# Every two devices have a link: more would be a mistake, and fill the memory.
_MAX_DEVICES = 512


def preset(name: str, num_devices: int | None = None) -> Topology:
    """Returns a known machine.

    Args:
      name: one of `PRESETS`.
      num_devices: the number of devices; by default the machine's usual number. A machine of fixed
        size gives its first devices.

    Returns:
      The topology.

    Raises:
      ValueError: if there is no such preset or it does not have that many devices.
      TypeError: if `num_devices` is not an int.

    Example:
      >>> preset("nvswitch", 16).num_devices
      16
    """
    if num_devices is not None:
        checks.check_int("num_devices", num_devices, at_least=1)
    return _preset(name, num_devices)


# Behind the check, because to the cache True and 1.0 are the same as 1.
@functools.lru_cache(maxsize=64)
def _preset(name: str, num_devices: int | None) -> Topology:
    if name not in PRESETS:
        raise ValueError(f"unknown topology {name!r}; known are {', '.join(PRESETS)}")
    most = _MAX_DEVICES if name in _SCALABLE else 8
    if num_devices is not None and num_devices > most:
        raise ValueError(f"num_devices of {name!r} must be at most {most}; got {num_devices}")
    if name in _FIXED:
        return _FIXED[name]().subset(range(num_devices or most))
    return _SCALABLE[name]() if num_devices is None else _SCALABLE[name](num_devices)
