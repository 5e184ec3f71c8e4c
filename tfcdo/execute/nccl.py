"""NCCL: whether it can run, and all-reducing with `tf.raw_ops.NcclAllReduce`."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import uuid
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo import checks, tf_internals, virtual_devices
from tfcdo.exchange import rounding
from tfcdo.execute import device_ops
from tfcdo.execute.device_ops import JointGradient, PackCodec, on_each
from tfcdo.execute.request import check_device, check_dtype
from tfcdo.plan.plan import Pack

OP = "NcclAllReduce"
# The kernels of one pack find each other by a name that is unique in this process and in others,
# where graphs may be loaded. `next` is atomic.
_numbers = itertools.count()
_PROCESS = uuid.uuid4().hex[:12]
_HOST = "/cpu:0"


@dataclasses.dataclass(frozen=True)
class NcclStatus:
    """Says whether NCCL can all-reduce over some devices.

    Attributes:
      can_run: whether it can.
      reason: why, or why not.
      remedy: the remedy if it cannot; empty if it can.
    """

    can_run: bool
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


def nccl_status(devices: Sequence[str], dtype: Any = tf.float32) -> NcclStatus:
    """Says whether `tf.raw_ops.NcclAllReduce` can run over some devices, and why not.

    In a function that is being traced, the answer is for that function. Looking for the devices
    starts TensorFlow: configure virtual or logical devices before.

    Args:
      devices: TensorFlow device names, one per replica; `""` for one that is not known.
      dtype: the dtype of the values; anything `tf.as_dtype` takes.

    Returns:
      The status.

    Raises:
      ValueError: if `devices` is empty or holds something that is not a device name.
      TypeError: if `dtype` is not a dtype.

    Example:
      >>> nccl_status(["/cpu:0", "/cpu:1"]).can_run
      False
    """
    dtype = check_dtype("dtype", dtype)
    names = checks.check_device_list(devices)
    for name in names:
        if name != "":
            check_device("each of devices", name)
    problem = _problem(names, dtype)
    if problem is None:
        return NcclStatus(True, f"an {OP} kernel is registered for these devices", "")
    return NcclStatus(False, *problem)


def _problem(devices: Sequence[str], dtype: tf.DType) -> tuple[str, str] | None:
    """Returns the reason why NCCL cannot run and the remedy, or None if it can."""
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
            "use tfcdo.MultiWorkerMirroredStrategy between hosts",
        )
    types = sorted({spec.device_type for spec in specs})
    if len(types) > 1:
        return (
            f"NCCL does not mix device types, and the devices are {' and '.join(types)}",
            "give the strategy devices of one type",
        )
    [kind], indices = types, sorted(spec.device_index for spec in specs)
    if kind not in tf_internals.device_types_with_kernel(OP):
        return (
            f"no {OP} kernel is registered for {kind} devices in this TensorFlow",
            "use tfcdo.AutoAllReduce() here, or GPUs and a TensorFlow built with NCCL",
        )
    physical = [  # The device of each logical one, by its number.
        device.name
        for device in tf.config.get_visible_devices(kind)
        for _ in range(virtual_devices.num_logical(device))
    ]
    missing = [index for index in indices if index >= len(physical)]
    if missing:
        return (
            f"there is no {kind}:{missing[0]}; TensorFlow sees {len(physical)} {kind} devices",
            "use devices that tf.config.list_logical_devices() lists",
        )
    if len(set(indices)) < len(indices):
        return "several of the values are on one device", "give each replica a device of its own"
    uses = collections.Counter(physical[index] for index in indices)
    shared = sorted(name for name, count in uses.items() if count > 1)
    if kind == "GPU" and shared:
        return (
            f"several of the devices are logical devices of one physical GPU, {', '.join(shared)}, "
            "and NCCL takes each physical GPU once",
            "use tfcdo.AutoAllReduce() on logical devices",
        )
    taken = tf_internals.dtypes_of_op(OP)
    if dtype not in taken:
        names = ", ".join(sorted(known.name for known in taken))
        return f"{OP} does not take {dtype.name} but {names}", "cast the values to one of these"
    if tf_internals.compiled_by_xla():
        return (
            f"XLA compiles this function (jit_compile=True), and it does not know {OP}",
            "compile only what is called between the all-reduces",
        )
    return None


def reduce_pack(
    pack: Pack,
    held: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    codec: PackCodec | None,
) -> list[list[tf.Tensor]]:
    """All-reduces a pack: `held[d]` are the tensors of device `d`; the results likewise."""
    scales: list[list[tf.Tensor]] = []
    if codec is None:
        sent = on_each(devices, lambda own: [*map(device_ops.upcast, own)], held)
    else:  # Encoded values are added in 16 bits, with one scale for all devices.
        carried = on_each(devices, codec.carry, held, range(len(devices)))
        if codec.scaled:
            largest = _emit(on_each(devices, rounding.largest_magnitude, carried), devices, "max")
            scale = functools.partial(rounding.scale_for, wire=codec.wire, num_terms=len(devices))
            scales = [on_each(devices, scale, largest)]
        sent = on_each(devices, codec.round, carried, range(len(devices)), *scales)
    sums = [differentiable_sum(own, tuple(devices)) for own in zip(*sent, strict=True)]

    def finish(totals: Sequence[tf.Tensor], *scale: tf.Tensor) -> list[tf.Tensor]:
        wide = totals if codec is None else codec.decode([*totals, *scale])
        dtype = tf.as_dtype(pack.dtype)
        return [device_ops.finish(total, pack.root.divide, dtype) for total in wide]

    return on_each(devices, finish, [*zip(*sums, strict=True)], *scales)


def differentiable_sum(tensors: Sequence[tf.Tensor], devices: tuple[str, ...]) -> list[tf.Tensor]:
    """Sums one tensor per device with NCCL; the gradient is an all-reduce again, of any order."""
    return _gradient_of_sum(devices).of(_emit(tensors, devices), tensors, devices)


@functools.cache
def _gradient_of_sum(devices: tuple[str, ...]) -> JointGradient:
    return JointGradient(lambda *upstream: differentiable_sum(upstream, devices))


def _emit(
    tensors: Sequence[tf.Tensor], devices: Sequence[str], reduction: str = "sum"
) -> list[tf.Tensor]:
    shared_name = f"tfcdo_{_PROCESS}_{next(_numbers)}"
    sums = []
    for rank, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
        with tf.device(device):
            sums.append(
                tf.raw_ops.NcclAllReduce(
                    input=tf.stop_gradient(tensor),  # See `JointGradient.of`.
                    reduction=reduction,
                    num_devices=len(devices),
                    shared_name=shared_name,
                    name=f"nccl/{rank}",
                )
            )
    _serialize_calls(sums)
    # Each kernel waits for all others, but TensorFlow does not know: it prunes those whose results
    # are not used, and the rest would hang. So each result depends on all of them.
    with tf.control_dependencies(sums):
        return on_each(devices, tf.identity, sums)


def _serialize_calls(sums: Sequence[tf.Tensor]) -> None:
    """Makes repeated calls of the `tf.function` that is being traced wait for each other."""
    # A function that is called twice in one step runs twice with the same shared names: kernels
    # of one call would meet the other's. TensorFlow runs the calls in turn if they write to the
    # same resource and the function waits for the write. A graph of TensorFlow 1 does not order
    # calls: with one, call such a function once per step.
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return
    counter = device_ops.bare_variable(_PROCESS, _HOST, tf.int32)
    with tf.control_dependencies(sums), tf.device(_HOST):
        write = tf.raw_ops.AssignAddVariableOp(resource=tf_internals.captured(counter), value=1)
    tf_internals.run_before_function_returns(write)
