"""Finding out what joins the devices of this machine."""

from __future__ import annotations

from collections.abc import Sequence

from tfcdo.plan import topology as topology_lib


def detect(devices: Sequence[str]) -> topology_lib.Topology:
    """The topology of some devices of this machine.

    Args:
      devices: TensorFlow device names.

    Returns:
      A topology over `len(devices)` devices, in their order.
    """
    if all("GPU" in device for device in devices):
        return topology_lib.preset("fully_connected", len(devices))
    return topology_lib.shared_memory(len(devices))
