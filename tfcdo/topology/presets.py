"""Names the machines that tfcdo knows."""

from __future__ import annotations

import math

from tfcdo import checks
from tfcdo.topology import links
from tfcdo.topology.topology import Topology

# The NVLinks of each pair: NVIDIA, "NVIDIA DGX-1 With Tesla V100 System Architecture", 2017. Other
# pairs share the path through the host from one socket to the same or the other.
_DGX1_SOCKETS = (0, 0, 0, 0, 1, 1, 1, 1)
_DGX1_LINKS = {
    (0, 1): 2, (0, 2): 1, (0, 3): 1, (0, 4): 2, (1, 2): 1, (1, 3): 2, (1, 5): 1, (2, 3): 2,
    (2, 6): 2, (3, 7): 1, (4, 5): 2, (4, 6): 1, (4, 7): 1, (5, 6): 1, (5, 7): 2, (6, 7): 2,
}  # fmt: skip
PRESETS = ("dgx1", "dgx1_p100", "nvswitch", "pcie", "shared_memory", "fully_connected")


def _routes(name: str, num_devices: int) -> list[links.Route]:
    match name:
        case "dgx1":  # NVIDIA's with V100: 8 GPUs, 6 NVLinks of 25 GB/s each, a cube mesh.
            speeds = {pair: count * links.NVLINK_V100 for pair, count in _DGX1_LINKS.items()}
            return links.mesh(num_devices, speeds, _DGX1_SOCKETS)
        case "dgx1_p100":  # NVIDIA's with P100: the same pairs, one NVLink of 20 GB/s each.
            return links.mesh(num_devices, dict.fromkeys(_DGX1_LINKS, 20e9), _DGX1_SOCKETS)
        case "nvswitch":  # A full crossbar: each has a port in and a port out, of 12 x 25 GB/s.
            return links.crossbar(num_devices, 12 * links.NVLINK_V100)
        case "pcie":  # Pairs of devices under PCIe switches that the host bridge joins.
            return links.pcie([device // 2 for device in range(num_devices)], {})
        case "shared_memory":  # Virtual CPU devices: copies cost nothing.
            return links.wires(num_devices, math.inf, latency=0.0)
    # Links of 25 GB/s each way between every two devices, for unknown machines.
    return links.wires(num_devices, links.NVLINK_V100)


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
    count = num_devices or (4 if name == "pcie" else 8)
    is_dgx1 = name.startswith("dgx1")
    # Every two devices have a link: more than 512 would be a mistake, and fill the memory.
    most = 8 if is_dgx1 else 512
    if count > most:
        raise ValueError(f"num_devices of {name!r} must be at most {most}; got {count}")
    whole = 8 if is_dgx1 else count
    # All CPU devices add with the same cores: one adds two float streams at about this rate.
    shared_cores = {"addition_bandwidth": 10e9, "serial_reduction": True}
    costs = shared_cores if name == "shared_memory" else {}
    return Topology.from_routes(name, whole, _routes(name, whole), **costs).subset(range(count))
