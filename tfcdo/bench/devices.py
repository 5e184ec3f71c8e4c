"""Which devices are measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo import virtual_devices


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run.

    Attributes:
      names: their full names.
      description: what they are, for people.
      on_cpu: whether they are virtual devices of one processor.
    """

    names: tuple[str, ...]
    description: str
    on_cpu: bool


def choose(count: int) -> Devices:
    """Takes GPUs if there are enough of them, and otherwise virtual CPU devices.

    Args:
      count: how many devices.

    Returns:
      The devices.

    Raises:
      RuntimeError: if virtual devices are needed but TensorFlow has started with fewer.
    """
    cards = tf.config.list_physical_devices("GPU")
    if len(cards) >= count:
        details = tf.config.experimental.get_device_details(cards[0])
        name = details.get("device_name", "GPU")
        return Devices(_in_full([f"GPU:{n}" for n in range(count)]), f"{count} x {name}", False)
    names = virtual_devices.configure_virtual_cpus(count)
    because = f", because there are only {len(cards)} GPUs" if cards else ""
    return Devices(_in_full(names), f"{count} virtual CPU devices{because}", True)


def _in_full(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(tf_internals.canonical_device, names))
