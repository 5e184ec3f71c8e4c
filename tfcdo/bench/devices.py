"""Chooses the devices that are measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo import virtual_devices

# How many to make where there are not several GPUs and nobody says how many.
_VIRTUAL_DEVICES = 4


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices of one run.

    Attributes:
      names: their full names.
      description: what they are, for people.
      on_cpu: whether they are virtual devices of one processor.
    """

    names: tuple[str, ...]
    description: str
    on_cpu: bool


def choose_devices(count: int | None) -> Devices:
    """Chooses GPUs if there are enough of them, and otherwise virtual CPU devices.

    Args:
      count: how many devices; None for all GPUs if there are several, else 4 virtual CPU devices.

    Returns:
      The devices.

    Raises:
      RuntimeError: if virtual devices are needed but TensorFlow has started with fewer.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if count is None:
        count = len(gpus) if len(gpus) > 1 else _VIRTUAL_DEVICES
    if len(gpus) >= count:
        details = tf.config.experimental.get_device_details(gpus[0])
        name = details.get("device_name", "GPU")
        return Devices(_canonical([f"GPU:{n}" for n in range(count)]), f"{count} x {name}", False)
    names = virtual_devices.configure_virtual_cpus(count)
    reason = f", because there are only {len(gpus)} GPUs" if gpus else ""
    return Devices(_canonical(names), f"{count} virtual CPU devices{reason}", True)


def _canonical(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(tf_internals.canonical_device, names))
