"""Running a checked batch: grouped by transport and devices, run group by group, in order again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.execute import alike
from tfcdo.execute import copy_trees
from tfcdo.execute import gather
from tfcdo.execute import nccl
from tfcdo.execute import numerics
from tfcdo.execute import one_device
from tfcdo.execute import packs
from tfcdo.execute import rows
from tfcdo.execute.config import AllReduceConfig
from tfcdo.execute.feedback import Residuals
from tfcdo.execute.groups import Group
from tfcdo.execute.groups import Transport
from tfcdo.execute.groups import dtype_added
from tfcdo.execute.groups import final_op_for
from tfcdo.execute.groups import group_batch
from tfcdo.execute.groups import plan_group
from tfcdo.execute.groups import structure_of
from tfcdo.execute.hosts import Hosts
from tfcdo.execute.reduction import Reduction
from tfcdo.execute.travel import AS_IT_IS
from tfcdo.execute.travel import Wire
from tfcdo.plan.batch_plan import BatchPlan


def reduce(
    reduce_op: tf.distribute.ReduceOp,
    reductions: Sequence[Reduction],
    configs: Sequence[AllReduceConfig],
    wire: Wire = AS_IT_IS,
) -> list[Any]:
    """Groups reductions by transport and devices, runs each group, restores the order.

    Args:
      reduce_op: SUM or MEAN.
      reductions: the checked pairs.
      configs: how to reduce each of them.
      wire: how values travel between devices.

    Returns:
      One result per reduction, in order.

    Raises:
      RuntimeError: if a config requires NCCL and it cannot run; no op has been created then.
    """
    dense = [config.sparse_as_dense is True for config in configs]
    # Before tables are formed: a group that cannot run as required is refused before any op.
    specs = [_spec_of_table(one) if own else one for one, own in zip(reductions, dense)]
    groups = group_batch(reduce_op, specs, configs, wire)
    reductions = [rows.as_tables(one) if own else one for one, own in zip(reductions, dense)]
    results = [_run(reduce_op, one, alike.members(reductions, one.indices)) for one in groups]
    return alike.in_order([one.indices for one in groups], results)


def _spec_of_table(reduction: Reduction) -> Reduction:
    """Returns a reduction of slices as one of specs of the tables that `as_tables` forms."""
    if not reduction.is_sparse or reduction.values[0].dense_shape is None:
        return reduction
    specs = tuple(tf.TensorSpec(value.shape, value.dtype) for value in reduction.values)
    return dataclasses.replace(reduction, values=specs)


def _run(
    reduce_op: tf.distribute.ReduceOp, group: Group, reductions: Sequence[Reduction]
) -> list[Any]:
    """Reduces the reductions of a group; returns one result for each."""
    config = group.config
    final_op = final_op_for(reduce_op, reductions[0])
    if config.accumulate is None or reductions[0].is_sparse:
        reductions = as_added(reduce_op, reductions)
    with tf.name_scope("tfcdo"):
        return _run_added(group, reductions, final_op)


def _run_added(
    group: Group, reductions: Sequence[Reduction], final_op: numerics.FinalOp
) -> list[Any]:
    if group.last_values_first:
        return _run_in_order(group, reductions[::-1], final_op)[::-1]
    return _run_in_order(group, reductions, final_op)


def _run_in_order(
    group: Group, reductions: Sequence[Reduction], final_op: numerics.FinalOp
) -> list[Any]:
    match group.transport:
        case Transport.ONE_DEVICE:
            return [_reduce_on_one_device(group, reduction, final_op) for reduction in reductions]
        case Transport.SLICES:
            return _all_reduce_slices(group, reductions, final_op)
        case Transport.NCCL:
            return _all_reduce_with_nccl(group, reductions, final_op)
        case Transport.NCCL_ACROSS_HOSTS:
            return _all_reduce_flat(group, reductions, final_op)
        case Transport.COPY_TREES:
            return _all_reduce_along_trees(group, reductions, final_op)


def _reduce_on_one_device(group: Group, reduction: Reduction, final_op: numerics.FinalOp) -> Any:
    """Reduces one value on a device and copies the result to its destinations."""
    config, devices = group.config, reduction.devices
    root, hosts = config.root or reduction.destinations[0], config.across_hosts
    exchange = (
        None if hosts is None else hosts.exchange_on(root, reduction, final_op, group.between)
    )
    accumulate = config.accumulate or numerics.add
    residuals = None
    if reduction.is_all_reduce:  # What goes elsewhere is no gradient that comes again.
        residuals = _residuals(group, (*devices, root), [reduction])
    values: Sequence[Any] = reduction.values
    if not reduction.is_sparse:
        travel = group.wire.travel(values[0].dtype, residuals)
        values = one_device.bring(values, devices, root, travel)
    result = one_device.reduce_on(values, root, accumulate, final_op, exchange)
    stays = root and set(reduction.destinations) == {root}
    if reduction.is_sparse or stays:
        return tf_internals.mirrored(one_device.copy_to(result, reduction.destinations))
    travel = group.wire.travel(result.dtype, residuals, pack=1)
    return tf_internals.mirrored(one_device.send_to(result, root, reduction.destinations, travel))


def _residuals(
    group: Group,
    devices: Sequence[str],
    reductions: Sequence[Reduction],
    plan: BatchPlan | None = None,
) -> Residuals | None:
    """Returns what earlier casts of such a batch have lost; None without error feedback."""
    if group.wire.feedback is None:
        return None
    return group.wire.feedback.residuals(structure_of(devices, reductions, plan), devices)


def _all_reduce_slices(
    group: Group, reductions: Sequence[Reduction], final_op: numerics.FinalOp
) -> list[Any]:
    groups = alike.group(reduction.values[0].dtype for reduction in reductions)
    # How many rows there are differs between devices and steps: those of a dtype have one tree.
    trees = group.config.trees(len(groups), group.devices)
    results = []
    for pack, (indices, tree) in enumerate(zip(groups, trees, strict=True)):
        members, exchange = alike.members(reductions, indices), None
        if group.config.across_hosts is not None:
            root = group.devices[tree.root]
            exchange = group.config.across_hosts.exchange_slices(root, members, final_op)
        with tf.name_scope(f"rows{pack}"):
            totals = rows.all_reduce(
                tree,
                [one.values for one in members],
                group.devices,
                final_op,
                with_tables=group.config.sparse_as_dense == "auto",
                exchange=exchange,
            )
        results.append([to_mirrored(*pair) for pair in zip(totals, members, strict=True)])
    return alike.in_order(groups, results)


def _all_reduce_with_nccl(
    group: Group, reductions: Sequence[Reduction], final_op: numerics.FinalOp
) -> list[Any]:
    plan = plan_group(group, reductions)
    residuals = _residuals(group, group.devices, reductions, plan)
    results = nccl.all_reduce(
        plan, _by_device(reductions), group.devices, final_op, group.wire.dtype, residuals
    )
    return _by_value(results, reductions)


def _all_reduce_flat(
    group: Group, reductions: Sequence[Reduction], final_op: numerics.FinalOp
) -> list[Any]:
    """All-reduces with one collective a pack, over all devices of all hosts.

    The members of a collective are told apart by their devices, so each replica takes part with its
    own, even where several replicas' values lie on one: TensorFlow would wait for ever for others.
    """
    hosts = group.config.across_hosts
    assert hosts is not None
    devices = hosts.devices
    # Without the values, which a function that is kept would keep too.
    specs = tuple(
        dataclasses.replace(
            reduction,
            devices=devices,
            values=tuple(tf.TensorSpec(value.shape, value.dtype) for value in reduction.values),
        )
        for reduction in reductions
    )
    plan = plan_group(dataclasses.replace(group, devices=devices), specs)
    values = [list(own) for own in _by_device(reductions)]
    if tf.executing_eagerly():
        # The collectives of a pack wait for each other, so they must run at the same time: in a
        # concrete function, even where tf.config.run_functions_eagerly(True) rules.
        function = _flat_function(hosts, plan, specs, final_op)
        results = function.get_concrete_function(values)(values)
    else:
        results = _run_flat(hosts, plan, specs, final_op, values)
    return _by_value(
        [copy_trees.copy(own, device) for own, device in zip(results, group.devices, strict=True)],
        reductions,
    )


# Tracing takes ten times as long as running.
@functools.lru_cache(maxsize=64)
def _flat_function(
    hosts: Hosts, plan: BatchPlan, specs: tuple[Reduction, ...], final_op: numerics.FinalOp
) -> Any:
    run = functools.partial(_run_flat, hosts, plan, specs, final_op)
    return tf.function(lambda values: run(values), autograph=False)


def _run_flat(
    hosts: Hosts,
    plan: BatchPlan,
    specs: Sequence[Reduction],
    final_op: numerics.FinalOp,
    values: Sequence[Sequence[tf.Tensor]],
) -> list[list[tf.Tensor]]:
    exchange, devices = hosts.exchange_packs(plan, specs, final_op), hosts.devices

    def reduce_pack(_: Any, tensors: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        flat = [tensor for (tensor,) in tensors]
        results = []
        for total, device in zip(exchange.all_reduce_flat(flat, devices), devices, strict=True):
            with tf.device(device):
                results.append([final_op(total, flat[0].dtype)])
        return results

    here = [copy_trees.copy(own, device) for own, device in zip(values, devices, strict=True)]
    return packs.all_reduce(plan, here, devices, reduce_pack)


def _all_reduce_along_trees(
    group: Group, reductions: Sequence[Reduction], final_op: numerics.FinalOp
) -> list[Any]:
    plan = plan_group(group, reductions)
    hosts, across_hosts = group.config.across_hosts, None
    if hosts is not None:
        across_hosts = hosts.exchange_packs(plan, reductions, final_op, group.between).all_reduce
    residuals = _residuals(group, group.devices, reductions, plan)

    def reduce_pack(index: int, tensors: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        travel = group.wire.travel(tensors[0][0].dtype, residuals, index)
        tree = plan.packs[index].tree
        return copy_trees.reduce_pack(tree, tensors, group.devices, final_op, across_hosts, travel)

    tensors_by_device = packs.all_reduce(plan, _by_device(reductions), group.devices, reduce_pack)
    return _by_value(tensors_by_device, reductions)


def as_added(reduce_op: tf.distribute.ReduceOp, reductions: Sequence[Reduction]) -> list[Reduction]:
    """Returns the reductions with their values in the dtypes that they are added in."""
    return [_cast(reduction, dtype_added(reduce_op, reduction)) for reduction in reductions]


def _cast(reduction: Reduction, dtype: tf.DType) -> Reduction:
    if reduction.values[0].dtype == dtype:
        return reduction
    values = [
        numerics.cast(value, dtype, device)
        for value, device in zip(reduction.values, reduction.devices, strict=True)
    ]
    return dataclasses.replace(reduction, values=tuple(values))


def _by_device(reductions: Sequence[Reduction]) -> list[tuple[tf.Tensor, ...]]:
    return list(zip(*(reduction.values for reduction in reductions), strict=True))


def _by_value(
    tensors_by_device: Sequence[Sequence[tf.Tensor]], reductions: Sequence[Reduction]
) -> list[Any]:
    return [
        to_mirrored(per_device, reduction)
        for per_device, reduction in zip(
            zip(*tensors_by_device, strict=True), reductions, strict=True
        )
    ]


def gather_values(
    reductions: Sequence[Reduction], axis: Any, configs: Sequence[AllReduceConfig]
) -> list[Any]:
    """Concatenates the values of all replicas, those with the same ways together.

    Args:
      reductions: the checked values and destinations.
      axis: the axis to concatenate along, an int or a 0-D tensor of ints.
      configs: for each value, which device or copy tree to concatenate along.

    Returns:
      For each value, the concatenation on each of its destinations.
    """
    groups = alike.group(
        (reduction.devices, reduction.destinations, id(config))
        for reduction, config in zip(reductions, configs, strict=True)
    )
    results = []
    for indices in groups:
        members, config = alike.members(reductions, indices), configs[indices[0]]
        is_all_gather = config.root is None and members[0].is_all_reduce
        gather_group = _all_gather if is_all_gather else _gather_on_one_device
        results.append(gather_group(members, axis, config))
    return alike.in_order(groups, results)


def _gather_on_one_device(
    reductions: Sequence[Reduction], axis: Any, config: AllReduceConfig
) -> list[Any]:
    root = config.root or reductions[0].destinations[0]
    with tf.device(root):
        gathered = [tf.concat(list(reduction.values), axis) for reduction in reductions]
    if config.across_hosts is not None:
        exchange = config.across_hosts.exchange_gather(root, reductions, axis)
        gathered = exchange.concat(gathered, axis, root)
    return [
        tf_internals.mirrored(one_device.copy_to(value, reduction.destinations))
        for value, reduction in zip(gathered, reductions, strict=True)
    ]


def _all_gather(reductions: Sequence[Reduction], axis: Any, config: AllReduceConfig) -> list[Any]:
    devices, hosts = reductions[0].devices, config.across_hosts
    (tree,) = config.trees(1, devices)
    root = devices[tree.root]
    exchange = None if hosts is None else hosts.exchange_gather(root, reductions, axis)
    return _by_value(
        gather.all_gather(tree, _by_device(reductions), devices, axis, exchange), reductions
    )


def to_mirrored(results: Sequence[Any], reduction: Reduction) -> Any:
    """Wraps the results on the values' devices in the order of the destinations."""
    if reduction.devices == reduction.destinations:
        return tf_internals.mirrored(results)
    by_device = dict(zip(reduction.devices, results, strict=True))
    return tf_internals.mirrored([by_device[device] for device in reduction.destinations])
