"""Configures virtual CPU devices: several logical devices on one processor.

They let a machine without a GPU run everything a machine with eight runs. TensorFlow accepts their
number only before it starts, so this is the one place of tfcdo that configures them: the demo, the
bench and the tests all come through here.
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from tfcdo import checks

# Threads that start ops. TensorFlow runs the most recently ready op first: while all threads are in
# the backward pass, gradients that no other op needs are computed only at its end.
_THREADS_PER_DEVICE = 4


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
    existing = num_logical(processor)
    if existing < count:
        try:
            tf.config.set_logical_device_configuration(
                processor, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"{count} virtual CPU devices are needed, but TensorFlow has already started with "
                f"{existing}: call configure_virtual_cpus({count}) before the first "
                "TensorFlow op, tensor or variable"
            ) from error
    return [f"CPU:{index}" for index in range(count)]


def num_logical(physical: tf.config.PhysicalDevice) -> int:
    """Returns the number of logical devices of a physical one."""
    # TensorFlow reports None for an unpartitioned device: one logical device.
    return len(tf.config.get_logical_device_configuration(physical) or [None])


def _num_visible(kind: str) -> int:
    return sum(map(num_logical, tf.config.get_visible_devices(kind)))


def configure_threads(num_devices: int, num_cores: int | None) -> None:
    """Gives TensorFlow enough threads to sum gradients of CPU devices while others are made."""
    # By default it has as many as cores that it may use. With few of them no gradient is finished
    # before the backward pass is, so nothing would hide the network. Call it before TensorFlow
    # starts. A number that the user has chosen stays.
    number = tf.config.threading.get_inter_op_parallelism_threads()
    chosen = number or os.environ.get("TF_NUM_INTEROP_THREADS")
    wanted = _THREADS_PER_DEVICE * num_devices
    if not chosen and wanted > (num_cores or 1):
        tf.config.threading.set_inter_op_parallelism_threads(wanted)


def devices_here(resolver: Any, wanted: int | None = None) -> tuple[str, int]:
    """Returns which devices a worker has, GPU or CPU, and how many; does not start TensorFlow."""
    if resolver is not None and not isinstance(
        resolver, tf.distribute.cluster_resolver.TFConfigClusterResolver
    ):
        gpus = resolver.num_accelerators().get("GPU", 0)
        seen = _num_visible("GPU")
        if gpus > seen and not (seen and wanted):  # TensorFlow would train on the CPU.
            raise ValueError(
                f"cluster_resolver must count GPUs that TensorFlow sees, {seen} here; got {gpus}"
            )
        if gpus:
            return "GPU", min(gpus, seen)
    for kind in ("GPU", "CPU"):
        if count := _num_visible(kind):
            return kind, count
    raise RuntimeError("TensorFlow sees neither GPUs nor a CPU")


def names_here() -> tuple[str, ...]:
    """Returns the short names of this host's devices, all GPUs or all CPUs."""
    kind, count = devices_here(None)
    return tuple(f"{kind}:{index}" for index in range(count))
