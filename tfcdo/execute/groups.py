"""Groups: the reductions of a batch that run together, and what each of them adds."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo.execute import alike
from tfcdo.execute import handles
from tfcdo.execute import nccl_choice
from tfcdo.execute import numerics
from tfcdo.execute.config import AllReduceConfig
from tfcdo.execute.reduction import Reduction
from tfcdo.execute.travel import AS_IT_IS
from tfcdo.execute.travel import Wire
from tfcdo.plan.batch_plan import BatchPlan
from tfcdo.plan.batch_plan import ValueSpec


class Transport(enum.Enum):
    """Names how the values of a group travel."""

    ONE_DEVICE = "one device"
    SLICES = "rows along copy trees"
    NCCL = "NCCL"
    NCCL_ACROSS_HOSTS = "NCCL across hosts"
    COPY_TREES = "copy trees"


@dataclasses.dataclass(frozen=True)
class Group:
    """Holds the reductions of a batch that run together.

    Attributes:
      transport: how their values travel.
      devices: the devices that each reduction's values are on.
      config: how they are to be reduced.
      indices: their positions in the batch.
      wire: how they travel; `AS_IT_IS` unless all of them are cast.
      between: the dtype that they are cast to between hosts; None for their own.
    """

    transport: Transport
    devices: tuple[str, ...]
    config: AllReduceConfig
    indices: tuple[int, ...]
    wire: Wire = AS_IT_IS
    between: tf.DType | None = None


def group_batch(
    reduce_op: tf.distribute.ReduceOp,
    reductions: Sequence[Reduction],
    configs: Sequence[AllReduceConfig],
    wire: Wire = AS_IT_IS,
) -> list[Group]:
    """Groups the reductions of a batch by their transport, devices, config and wires.

    Args:
      reduce_op: SUM or MEAN.
      reductions: the checked pairs.
      configs: how to reduce each of them.
      wire: how values travel between devices.

    Returns:
      The groups, in the order of their first members.

    Raises:
      RuntimeError: as `reduce`.
    """
    sizes = _sizes(reductions, wire)

    # Asking TensorFlow for its kernels takes longer than tracing a value, so ask once per dtype.
    @functools.cache
    def uses_nccl(config: AllReduceConfig, devices: tuple[str, ...], dtype: tf.DType) -> bool:
        return nccl_choice.uses_nccl(config, devices, dtype, sizes[devices])

    # By identity of the config, whose hash would take longer than all the rest.
    keys: list[tuple[Any, ...]] = []
    for reduction, config in zip(reductions, configs, strict=True):
        used = wire if _is_cast(reduction, wire) else AS_IT_IS
        transport = _transport(reduce_op, reduction, config, used, uses_nccl)
        hosts = config.across_hosts
        between = None if hosts is None else hosts.wire_for(reduction)
        keys.append((transport, reduction.devices, used, between, id(config)))
    groups = []
    for indices in alike.group(keys):
        transport, devices, used, between, _ = keys[indices[0]]
        groups.append(Group(transport, devices, configs[indices[0]], indices, used, between))
    return groups


def _is_cast(reduction: Reduction, wire: Wire) -> bool:
    """Returns whether values are rounded where they are copied: not where nothing is."""
    if not wire.casts(reduction.values[0].dtype) or reduction.is_sparse or reduction.is_exact:
        return False
    devices = {*reduction.devices, *reduction.destinations}
    if wire.feedback is not None and set(reduction.devices) == {""} and len(devices) > 2:
        # One argument of a function that all replicas have: nobody could keep what a cast loses.
        return False
    # Values whose devices are not known are taken to be on different ones.
    return len(devices) > 1 or (devices == {""} and len(reduction.devices) > 1)


def _transport(
    reduce_op: tf.distribute.ReduceOp,
    reduction: Reduction,
    config: AllReduceConfig,
    wire: Wire,
    uses_nccl: Callable[[AllReduceConfig, tuple[str, ...], tf.DType], bool],
) -> Transport:
    if config.root is not None or not reduction.is_all_reduce:
        return Transport.ONE_DEVICE
    if reduction.is_sparse:
        return Transport.SLICES
    if config.across_hosts is not None and config.across_hosts.runs_flat(reduction):
        return Transport.NCCL_ACROSS_HOSTS
    nccl_choice.check_between_hosts(config, reduction.devices, dtype_added(reduce_op, reduction))
    # NCCL adds what is cast in 16 bits, so only who asks for it gets that.
    wants_nccl = config.nccl == "always" or (config.nccl == "auto" and wire.dtype is None)
    dtype = wire.dtype or dtype_added(reduce_op, reduction)
    if wants_nccl and reduction.num_hosts == 1 and uses_nccl(config, reduction.devices, dtype):
        return Transport.NCCL
    return Transport.COPY_TREES


def _sizes(reductions: Sequence[Reduction], wire: Wire) -> collections.Counter[tuple[str, ...]]:
    """Returns the bytes that each device sends of dense values, where known, by the devices."""
    sizes: collections.Counter[tuple[str, ...]] = collections.Counter()
    for reduction in reductions:
        if not reduction.is_sparse:
            value = reduction.values[0]
            used = wire if _is_cast(reduction, wire) else AS_IT_IS
            itemsize = (used.dtype or value.dtype).size
            sizes[reduction.devices] += (value.shape.num_elements() or 0) * itemsize
    return sizes


def plan_group(group: Group, reductions: Sequence[Reduction]) -> BatchPlan:
    """Plans the packs of a group of dense all-reduces.

    Args:
      group: the group; its transport is NCCL, on one host or across hosts, or copy trees.
      reductions: its reductions, in the dtypes that they are added in.

    Returns:
      The plan.
    """
    specs = [_value_spec(reduction, group.wire) for reduction in reductions]
    if group.transport in (Transport.NCCL, Transport.NCCL_ACROSS_HOSTS):
        return group.config.plan_for_nccl(specs, group.devices)
    wire_dtype = group.wire.dtype
    widening = reductions[0].values[0].dtype.size / wire_dtype.size if wire_dtype else 1.0
    return group.config.plan(specs, group.devices, widening)


def final_op_for(reduce_op: tf.distribute.ReduceOp, reduction: Reduction) -> numerics.FinalOp:
    """Returns the final op (divide, round) for this reduction."""
    return numerics.FinalOp(reduction.num_replicas if _is_mean(reduce_op, reduction) else None)


def _is_mean(reduce_op: tf.distribute.ReduceOp, reduction: Reduction) -> bool:
    # One replica that keeps its value keeps its dtype too; any other mean of integers is a float.
    return reduce_op == tf.distribute.ReduceOp.MEAN and not (
        reduction.num_replicas == 1 and reduction.is_all_reduce
    )


def dtype_added(reduce_op: tf.distribute.ReduceOp, reduction: Reduction) -> tf.DType:
    """Returns the dtype that the values of a reduction are added in, before `add` widens them."""
    dtype = reduction.values[0].dtype
    return numerics.dtype_of_mean(dtype) if _is_mean(reduce_op, reduction) else dtype


def structure_of(
    devices: Sequence[str], reductions: Sequence[Reduction], plan: BatchPlan | None
) -> tuple[Any, ...]:
    """Describes what residuals of a batch depend on, the same in another process.

    Args:
      devices: the names of the devices that cast.
      reductions: what is reduced.
      plan: how it is packed; None if it is not.

    Raises:
      ValueError: if the shape of a value is not known while a function is traced.
    """
    values = [reduction.values[0] for reduction in reductions]
    for value in values:
        if not value.shape.is_fully_defined():
            raise ValueError(
                "error_feedback needs values whose shapes are known while a function is traced; "
                f"got {value.dtype.name} of shape {value.shape}"
            )
    specs = tuple((value.dtype.name, tuple(value.shape.as_list())) for value in values)
    trees = () if plan is None else tuple((p.tree.parents, p.fused_tensors) for p in plan.packs)
    return tuple(map(handles.device_number, devices)), specs, trees


def _value_spec(reduction: Reduction, wire: Wire) -> ValueSpec:
    """Describes a value to a plan, which counts the bytes that travel."""
    shapes = [value.shape for value in reduction.values]
    known = all(shape.is_fully_defined() for shape in shapes)
    dtype = reduction.values[0].dtype
    itemsize = (wire.dtype or dtype).size
    return ValueSpec(dtype.name, itemsize, tuple(shapes[0].as_list()) if known else None)
