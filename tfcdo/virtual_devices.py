"""Configures virtual CPU devices: several logical devices on one processor.

They let a machine without a GPU run everything a machine with eight runs. TensorFlow accepts their
number only before it starts, so this is the one place of tfcdo that configures them: the demo, the
bench and the tests all come through here.
"""

from __future__ import annotations

import tensorflow as tf

from tfcdo import checks


def configure_virtual_cpus(count: int) -> list[str]:
    """Makes TensorFlow see at least `count` logical CPU devices.

    Call it before the first op, tensor or variable. Calling it again is harmless: devices that are
    already there are used as they are, so the largest number asked for before TensorFlow starts
    is the number the process gets.

    Args:
      count: How many devices are needed, at least 1.

    Returns:
      The names of the first `count` devices, `["CPU:0", ..., f"CPU:{count - 1}"]`, ready for
      `tf.distribute.MirroredStrategy(devices)`.

    Raises:
      TypeError: If `count` is not an int (a bool is not one here).
      ValueError: If `count` is smaller than 1.
      RuntimeError: If TensorFlow has already started with fewer devices.

    Example:
      >>> from tfcdo.virtual_devices import configure_virtual_cpus
      >>> configure_virtual_cpus(3)
      ['CPU:0', 'CPU:1', 'CPU:2']
    """
    checks.check_int("count", count, at_least=1)
    processor = tf.config.list_physical_devices("CPU")[0]
    # TensorFlow reports None for a processor that nobody has divided: one logical device.
    existing = tf.config.get_logical_device_configuration(processor) or [None]
    if len(existing) < count:
        try:
            tf.config.set_logical_device_configuration(
                processor, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"{count} virtual CPU devices are needed, but TensorFlow has already started with "
                f"{len(existing)}: call configure_virtual_cpus({count}) before the first "
                "TensorFlow op, tensor or variable"
            ) from error
    return [f"CPU:{index}" for index in range(count)]
