"""Measures how much memory a step needs while it runs."""

from __future__ import annotations

import tensorflow as tf

from tfcdo.bench import steps
from tfcdo.bench.devices import Devices


def peak_of(step: steps.Step, devices: Devices) -> int | None:
    """Runs a step once and reads the counts of TensorFlow's allocators.

    Args:
      step: what to run; it has run before, so that building it is not counted.
      devices: the devices it runs on.

    Returns:
      How many bytes were in use at most beyond those in use before, over all devices; None if an
      allocator keeps no count. TensorFlow's allocator for processors does not count tensors of less
      than 256 KiB.
    """
    # The virtual devices of one processor share its allocator.
    counted = devices.names[:1] if devices.on_cpu else devices.names
    try:
        for device in counted:
            tf.config.experimental.reset_memory_stats(device)
        before = [tf.config.experimental.get_memory_info(device)["current"] for device in counted]
        step()
        after = [tf.config.experimental.get_memory_info(device)["peak"] for device in counted]
    except ValueError:
        return None
    return int(sum(after) - sum(before))
