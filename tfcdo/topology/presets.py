"""Known machines, by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from tfcdo import checks
from tfcdo.topology.topology import Topology
from tfcdo.topology.topology import TopologyBuilder
from tfcdo.topology.topology import link_name
from tfcdo.topology.topology import ordered_pairs

NVLINK_V100 = 25e9
NVLINK_P100 = 20e9
HOST = 10e9
PCIE = 12e9
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


def nvlinks_and_host(
    name: str, num_devices: int, nvlinks: Mapping[tuple[int, int], float], socket: Sequence[int]
) -> Topology:
    """A machine of point-to-point links, whose other pairs meet in the host.

    Args:
      name: the topology's name.
      num_devices: how many devices there are.
      nvlinks: bytes per second, each way, of each joined pair `(a, b)` with `a < b`.
      socket: the socket of each device; one resource carries all host traffic from one socket to
        the same socket or another.

    Returns:
      The topology.
    """
    builder = TopologyBuilder()
    for source, target in ordered_pairs(num_devices):
        bandwidth = nvlinks.get((min(source, target), max(source, target)))
        if bandwidth:
            builder.link(source, target, [(link_name(source, target), bandwidth)])
        else:
            bridge = f"host {link_name(socket[source], socket[target])}"
            builder.link(source, target, [(bridge, HOST)], via_host=True)
    return builder.build(name, num_devices)


def crossbar(name: str, num_devices: int, port: float) -> Topology:
    """A machine whose devices meet in a switch that is never the slowest part.

    Args:
      name: the topology's name.
      num_devices: how many devices there are.
      port: bytes per second of each device's way in, and of its way out.

    Returns:
      The topology.
    """
    builder = TopologyBuilder()
    for source, target in ordered_pairs(num_devices):
        builder.link(source, target, [(f"{source} out", port), (f"{target} in", port)])
    return builder.build(name, num_devices)


def dgx1() -> Topology:
    """NVIDIA DGX-1 with V100: 8 GPUs, 6 NVLinks of 25 GB/s each, a hybrid cube mesh.

    A pair with two NVLinks is one link of 50 GB/s. A pair without goes through the host at 10 GB/s,
    which all transfers from one socket (0-3, 4-7) to the same or the other share.

    References:
      NVIDIA, "NVIDIA DGX-1 With Tesla V100 System Architecture", 2017.
    """
    links = {pair: count * NVLINK_V100 for pair, count in _DGX1_LINKS.items()}
    return nvlinks_and_host("dgx1", 8, links, socket=(0, 0, 0, 0, 1, 1, 1, 1))


def dgx1_p100() -> Topology:
    """NVIDIA DGX-1 with P100: 8 GPUs, 4 NVLinks of 20 GB/s each.

    Two fully joined groups of four, and one link between each device and its partner, four further.

    References:
      NVIDIA, "NVIDIA DGX-1 With Tesla V100 System Architecture", 2017.
    """
    links = {pair: count * NVLINK_P100 for pair, count in _DGX1_P100_LINKS.items()}
    return nvlinks_and_host("dgx1_p100", 8, links, socket=(0, 0, 0, 0, 1, 1, 1, 1))


def nvswitch(num_devices: int = 8) -> Topology:
    """Devices on a full crossbar: each has one port in and one out, of 12 x 25 GB/s.

    Args:
      num_devices: how many devices there are.
    """
    return crossbar("nvswitch", num_devices, 12 * NVLINK_V100)


def pcie(num_devices: int = 4) -> Topology:
    """Devices in pairs, each pair under a PCIe switch, the switches joined by the host bridge.

    A device's port carries 12 GB/s each way; a transfer to another pair also holds its own switch's
    way up and the other's way down, 10 GB/s each.

    Args:
      num_devices: how many devices there are; an odd one is alone under its switch.
    """
    builder = TopologyBuilder()
    for source, target in ordered_pairs(num_devices):
        way = [(f"{source} out", PCIE)]
        if source // 2 != target // 2:
            way += [(f"switch {source // 2} up", HOST), (f"switch {target // 2} down", HOST)]
        builder.link(source, target, [*way, (f"{target} in", PCIE)])
    return builder.build("pcie", num_devices)


def shared_memory(num_devices: int = 8) -> Topology:
    """Virtual CPU devices of one host: copies cost nothing, additions cost memory bandwidth.

    All devices add with the same cores, so it does not matter where; one pack is as good as many.

    Args:
      num_devices: how many devices there are.
    """
    builder = TopologyBuilder()
    for source, target in ordered_pairs(num_devices):
        builder.link(source, target, [(link_name(source, target), math.inf)])
    return builder.build(
        "shared_memory",
        num_devices,
        latency=0.0,
        addition_bandwidth=CPU_ADDITION,
        serial_reduction=True,
    )


def fully_connected(num_devices: int = 8) -> Topology:
    """Every pair has a link of its own, of 25 GB/s each way: what to assume of unknown devices.

    Args:
      num_devices: how many devices there are.
    """
    builder = TopologyBuilder()
    for source, target in ordered_pairs(num_devices):
        builder.link(source, target, [(link_name(source, target), NVLINK_V100)])
    return builder.build("fully_connected", num_devices)


_FIXED: Mapping[str, Callable[[], Topology]] = {"dgx1": dgx1, "dgx1_p100": dgx1_p100}
_SCALABLE: Mapping[str, Callable[..., Topology]] = {
    "nvswitch": nvswitch,
    "pcie": pcie,
    "shared_memory": shared_memory,
    "fully_connected": fully_connected,
}
PRESETS: tuple[str, ...] = (*_FIXED, *_SCALABLE)
# Every two devices have a link: more would be a mistake, and fill the memory.
_MOST_DEVICES = 512


def preset(name: str, num_devices: int | None = None) -> Topology:
    """A known machine.

    Args:
      name: one of `PRESETS`.
      num_devices: how many devices; the machine's usual number by default. Of a machine of fixed
        size, the first ones.

    Returns:
      The topology.

    Raises:
      ValueError: if there is no such preset or it does not have that many devices.
      TypeError: if `num_devices` is no int.

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
    machine = {**_FIXED, **_SCALABLE}[name]()
    if num_devices is None:
        return machine
    most = _MOST_DEVICES if name in _SCALABLE else machine.num_devices
    if num_devices > most:
        raise ValueError(f"num_devices of {name!r} must be at most {most}; got {num_devices}")
    if name in _SCALABLE:
        return _SCALABLE[name](num_devices)
    return machine.subset(range(num_devices))
