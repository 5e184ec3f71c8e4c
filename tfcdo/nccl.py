"""Knowing when NCCL can run, and why not."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo import validation
from tfcdo.plan import checks

OP = "NcclAllReduce"


@dataclasses.dataclass(frozen=True)
class NcclStatus:
    """Whether NCCL can all-reduce over some devices.

    Attributes:
      can_run: whether it can.
      reason: why, or why not.
      remedy: what to do if it cannot; empty if it can.
    """

    can_run: bool
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


def nccl_status(devices: Sequence[str], dtype: Any = tf.float32) -> NcclStatus:
    """Says whether `tf.raw_ops.NcclAllReduce` can run over some devices, and why not.

    In a function that is being traced, the answer is for that function. To look for the devices
    starts TensorFlow: configure virtual or logical devices before.

    Args:
      devices: TensorFlow device names, one per replica; `""` for one that is not known.
      dtype: the dtype of the values; anything `tf.as_dtype` takes.

    Returns:
      The status.

    Raises:
      ValueError: if `devices` is empty or holds something that is no device name.
      TypeError: if `dtype` is no dtype.

    Example:
      >>> nccl_status(["/cpu:0", "/cpu:1"]).can_run
      False
    """
    dtype = tf.as_dtype(dtype)
    names = checks.check_device_list(devices)
    for name in names:
        if name != "":
            validation.check_device("each of devices", name)
    problem = _problem_of_devices(names) or _problem_of_dtype(dtype) or _problem_of_function()
    if problem is None:
        return NcclStatus(True, f"an {OP} kernel is registered for these devices", "")
    return NcclStatus(False, *problem)


def _problem_of_devices(devices: Sequence[str]) -> tuple[str, str] | None:
    """The reason why NCCL cannot run and what to do about it, or None if it can."""
    if not all(devices):
        return (
            "the devices of the values are not known while this function is traced",
            "pass values that were made on the replicas, as strategy.run does",
        )
    specs = [tf.DeviceSpec.from_string(tf_internals.canonical_device(name)) for name in devices]
    if len(specs) == 1:
        return "there is only one device", "use several devices; one needs no all-reduce"
    if len({(spec.job, spec.replica, spec.task) for spec in specs}) > 1:
        return (
            f"{OP} works within one process, and the devices {list(devices)} are of several",
            "use tf.distribute.MultiWorkerMirroredStrategy between hosts",
        )
    types = sorted({spec.device_type for spec in specs})
    if len(types) > 1:
        return (
            f"NCCL does not mix device types, and the devices are {' and '.join(types)}",
            "give the strategy devices of one type",
        )
    if types[0] not in tf_internals.device_types_with_kernel(OP):
        return (
            f"no {OP} kernel is registered for {types[0]} devices in this TensorFlow",
            "use tfcdo.HierarchicalCopyAllReduce() here, or GPUs and a TensorFlow built with NCCL",
        )
    return _problem_of_cards([spec.device_index for spec in specs], types[0])


def _problem_of_dtype(dtype: tf.DType) -> tuple[str, str] | None:
    taken = tf_internals.dtypes_of_op(OP, "T")
    if dtype in taken:
        return None
    names = ", ".join(sorted(known.name for known in taken))
    return (f"{OP} does not take {dtype.name} but {names}", "cast the values to one of these")


def _problem_of_function() -> tuple[str, str] | None:
    if not tf_internals.compiled_by_xla():
        return None
    return (
        f"XLA compiles this function (jit_compile=True), and it does not know {OP}",
        "compile only what is called between the all-reduces",
    )


def _problem_of_cards(indices: Sequence[int], device_type: str) -> tuple[str, str] | None:
    """The problem of devices that do not exist or share a physical one, if there is one."""
    cards = _card_of_each_device(device_type)
    missing = sorted(index for index in indices if index >= len(cards))
    if missing:
        return (
            f"there is no {device_type}:{missing[0]}; TensorFlow sees {len(cards)} {device_type} "
            "devices",
            "use devices that tf.config.list_logical_devices() lists",
        )
    if len(set(indices)) < len(indices):
        return "several of the values are on one device", "give each replica a device of its own"
    uses = collections.Counter(cards[index] for index in indices)
    shared = sorted(card for card, count in uses.items() if count > 1)
    if device_type != "GPU" or not shared:
        return None
    return (
        f"several of the devices are logical devices of one card, {', '.join(shared)}, "
        "and NCCL takes each card once",
        "use tfcdo.HierarchicalCopyAllReduce() on logical devices",
    )


def _card_of_each_device(device_type: str) -> list[str]:
    """The physical device that each logical device is a part of, in the order of their numbers."""
    cards: list[str] = []
    for card in tf.config.get_visible_devices(device_type):
        # TensorFlow reports None for a card that nobody has divided: one logical device.
        parts = tf.config.get_logical_device_configuration(card) or [None]
        cards += [card.name] * len(parts)
    return cards
