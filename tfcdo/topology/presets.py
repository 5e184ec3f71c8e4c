"""Names the machines that tfcdo knows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

from tfcdo import checks
from tfcdo.topology import links
from tfcdo.topology.topology import Topology

# The NVLinks of each pair: NVIDIA, "NVIDIA DGX-1 With Tesla V100 System Architecture", 2017. Other
# pairs share the path through the host from one socket (0-3, 4-7) to the same or the other.
_DGX1_LINKS = {
    (0, 1): 2, (0, 2): 1, (0, 3): 1, (0, 4): 2, (1, 2): 1, (1, 3): 2, (1, 5): 1, (2, 3): 2,
    (2, 6): 2, (3, 7): 1, (4, 5): 2, (4, 6): 1, (4, 7): 1, (5, 6): 1, (5, 7): 2, (6, 7): 2,
}  # fmt: skip
_DGX1_P100_LINKS = {
    (0, 1): 1, (0, 2): 1, (0, 3): 1, (1, 2): 1, (1, 3): 1, (2, 3): 1,
    (4, 5): 1, (4, 6): 1, (4, 7): 1, (5, 6): 1, (5, 7): 1, (6, 7): 1,
    (0, 4): 1, (1, 5): 1, (2, 6): 1, (3, 7): 1,
}  # fmt: skip


def _dgx1(
    name: str, num_devices: int, nvlinks: Mapping[tuple[int, int], int], bandwidth: float
) -> Topology:
    speeds = {pair: count * bandwidth for pair, count in nvlinks.items()}
    whole = Topology.from_routes(name, 8, links.mesh(8, speeds, sockets=[0] * 4 + [1] * 4))
    return whole.subset(range(num_devices))


def dgx1(num_devices: int = 8) -> Topology:
    """Describes an NVIDIA DGX-1 with V100: 8 GPUs, 6 NVLinks of 25 GB/s each, a cube mesh."""
    return _dgx1("dgx1", num_devices, _DGX1_LINKS, links.NVLINK_V100)


def dgx1_p100(num_devices: int = 8) -> Topology:
    """Describes an NVIDIA DGX-1 with P100: 8 GPUs, 4 NVLinks of 20 GB/s each."""
    return _dgx1("dgx1_p100", num_devices, _DGX1_P100_LINKS, 20e9)


def nvswitch(num_devices: int = 8) -> Topology:
    """Describes devices on a full crossbar: each has a port in and a port out, of 12 x 25 GB/s."""
    ports = links.crossbar(num_devices, 12 * links.NVLINK_V100)
    return Topology.from_routes("nvswitch", num_devices, ports)


def pcie(num_devices: int = 4) -> Topology:
    """Describes pairs of devices under PCIe switches that the host bridge joins."""
    switches = [device // 2 for device in range(num_devices)]
    return Topology.from_routes("pcie", num_devices, links.pcie(switches, {}))


def shared_memory(num_devices: int = 8) -> Topology:
    """Describes virtual CPU devices: copies cost nothing, and all add with the same cores."""
    free = links.wires(num_devices, math.inf, latency=0.0)
    # One core adds two float streams in memory at about this rate.
    costs = {"addition_bandwidth": 10e9, "serial_reduction": True}
    return Topology.from_routes("shared_memory", num_devices, free, **costs)


def fully_connected(num_devices: int = 8) -> Topology:
    """Describes links of 25 GB/s each way between every two devices, for unknown machines."""
    wires = links.wires(num_devices, links.NVLINK_V100)
    return Topology.from_routes("fully_connected", num_devices, wires)


_MAKERS: Mapping[str, Callable[..., Topology]] = {
    make.__name__: make
    for make in (dgx1, dgx1_p100, nvswitch, pcie, shared_memory, fully_connected)
}
PRESETS: tuple[str, ...] = tuple(_MAKERS)


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
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"name must be one of {', '.join(PRESETS)}; got {name!r}")
    if num_devices is not None:
        checks.check_int("num_devices", num_devices, at_least=1)
    return _preset(name, num_devices)


# Behind the check, because to the cache True and 1.0 are the same as 1.
@functools.lru_cache(maxsize=64)
def _preset(name: str, num_devices: int | None) -> Topology:
    # Every two devices have a link: more than 512 would be a mistake, and fill the memory.
    most = 8 if name.startswith("dgx1") else 512
    if num_devices is not None and num_devices > most:
        raise ValueError(f"num_devices of {name!r} must be at most {most}; got {num_devices}")
    return _MAKERS[name]() if num_devices is None else _MAKERS[name](num_devices)
