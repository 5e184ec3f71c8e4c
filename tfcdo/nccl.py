"""Knowing when NCCL can run, and why not."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals

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

    Args:
      devices: TensorFlow device names, one per replica.
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
    if isinstance(devices, str) or not devices:
        raise ValueError(f"devices must be a list of at least one device name; got {devices!r}")
    problem = _problem_of_devices(devices) or _problem_of_dtype(tf.as_dtype(dtype))
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
    return _shared_card(specs) if types[0] == "GPU" else None


def _problem_of_dtype(dtype: tf.DType) -> tuple[str, str] | None:
    taken = tf_internals.dtypes_of_op(OP, "T")
    if dtype in taken:
        return None
    names = ", ".join(sorted(known.name for known in taken))
    return (f"{OP} does not take {dtype.name} but {names}", "cast the values to one of these")


def _shared_card(specs: Sequence[tf.DeviceSpec]) -> tuple[str, str] | None:
    """The problem of several logical devices on one physical GPU, if there is one."""
    card_of_logical: list[str] = []
    for card in tf.config.list_physical_devices("GPU"):
        parts = tf.config.get_logical_device_configuration(card) or [None]
        card_of_logical += [card.name] * len(parts)
    cards = collections.Counter(
        card_of_logical[spec.device_index]
        for spec in specs
        if spec.device_index < len(card_of_logical)
    )
    shared = sorted(card for card, count in cards.items() if count > 1)
    if not shared:
        return None
    return (
        f"several of the devices are logical devices of one card, {', '.join(shared)}, "
        "and NCCL takes each card once",
        "use tfcdo.HierarchicalCopyAllReduce() on logical devices",
    )
