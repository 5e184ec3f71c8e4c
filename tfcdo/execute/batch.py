"""Running a checked batch: each value by the way that fits it, the results in the batch's order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo import topology as topology_detection
from tfcdo import validation
from tfcdo.execute import arithmetic
from tfcdo.execute import copy_trees
from tfcdo.execute import gather
from tfcdo.execute import one_device
from tfcdo.plan import packing
from tfcdo.plan import topology as topology_lib


@dataclasses.dataclass(frozen=True)
class Method:
    """How an all-reduce is to be done.

    Attributes:
      algorithm: the name of the algorithm that gives the copy trees.
      packing: how values are packed.
      topology: the machine; None to find out.
    """

    algorithm: str
    packing: packing.Packing
    topology: topology_lib.Topology | None

    def plan(
        self, specs: Sequence[packing.ValueSpec], devices: Sequence[str]
    ) -> packing.BatchPlan:
        """The plan for values on some devices; remembered for as long as nothing differs."""
        topology = self.topology or topology_detection.detect(tuple(devices))
        if topology.num_devices != len(devices):
            raise ValueError(
                f"topology must have as many devices as the values have replicas, {len(devices)}; "
                f"{topology.name!r} has {topology.num_devices}"
            )
        return packing.plan_batch(tuple(specs), self.packing, self.algorithm, topology)


def reduce(
    reduce_op: tf.distribute.ReduceOp, reductions: Sequence[validation.Reduction], method: Method
) -> list[Any]:
    """Reduces a batch.

    All-reduces of dense values on the same devices are packed together; slices travel as rows; what
    is not an all-reduce is reduced on its first destination.

    Args:
      reduce_op: SUM or MEAN.
      reductions: the checked pairs.
      method: how to all-reduce.

    Returns:
      One result per reduction, in order.
    """
    results: list[Any] = [None] * len(reductions)
    for indices in _groups(reductions):
        group = [reductions[index] for index in indices]
        finish = finish_for(reduce_op, group[0])
        for index, result in zip(indices, _reduce_group(group, finish, method), strict=True):
            results[index] = result
    return results


def finish_for(
    reduce_op: tf.distribute.ReduceOp, reduction: validation.Reduction
) -> arithmetic.Finish:
    """What is done to a sum of this reduction's values where it was formed."""
    mean = reduce_op == tf.distribute.ReduceOp.MEAN
    return arithmetic.Finish(len(reduction.values) if mean else 1)


def _groups(reductions: Sequence[validation.Reduction]) -> list[list[int]]:
    """The indices of the reductions that can be done together."""
    groups: dict[Any, list[int]] = {}
    for index, reduction in enumerate(reductions):
        kind = reduction.devices, reduction.sparse, reduction.all_reduce
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


def _reduce_group(
    group: Sequence[validation.Reduction], finish: arithmetic.Finish, method: Method
) -> list[Any]:
    if not group[0].all_reduce:
        return [
            reduce_to_one_device(one, one.destinations[0], arithmetic.add, finish) for one in group
        ]
    columns = _all_reduce_slices if group[0].sparse else _all_reduce_dense
    return [
        in_destination_order(result, one)
        for result, one in zip(columns(group, finish, method), group, strict=True)
    ]


def reduce_to_one_device(
    reduction: validation.Reduction,
    device: str,
    accumulate: one_device.Accumulate,
    finish: arithmetic.Finish,
) -> Any:
    """Reduces one value on one device and copies the result to its destinations."""
    result = one_device.reduce_on(reduction.values, device, accumulate, finish)
    return tf_internals.mirrored(one_device.copy_to(result, reduction.destinations))


def in_destination_order(results: Sequence[Any], reduction: validation.Reduction) -> Any:
    """Wraps the results on the values' devices in the order that the destinations have."""
    if reduction.devices == reduction.destinations:
        return tf_internals.mirrored(results)
    by_device = dict(zip(reduction.devices, results, strict=True))
    return tf_internals.mirrored([by_device[device] for device in reduction.destinations])


def _all_reduce_dense(
    group: Sequence[validation.Reduction], finish: arithmetic.Finish, method: Method
) -> list[list[tf.Tensor]]:
    """All-reduces dense values; the results of each value, one per device."""
    devices = group[0].devices
    plan = method.plan([_value_spec(one) for one in group], devices)
    held = list(zip(*(one.values for one in group)))
    return [list(own) for own in zip(*copy_trees.all_reduce(plan, held, devices, finish))]


def _all_reduce_slices(
    group: Sequence[validation.Reduction], finish: arithmetic.Finish, method: Method
) -> list[list[tf.IndexedSlices]]:
    """All-reduces slices, each along one tree; the results of each value, one per device."""
    devices = group[0].devices
    # The number of rows differs between devices and steps, so each value is a pack of its own.
    plan = method.plan([packing.UNKNOWN] * len(group), devices)
    return [
        gather.all_reduce_slices(pack.tree, one.values, devices, finish)
        for pack, one in zip(plan.packs, group, strict=True)
    ]


def _value_spec(reduction: validation.Reduction) -> packing.ValueSpec:
    shapes = [value.shape for value in reduction.values]
    known = all(shape.is_fully_defined() for shape in shapes)
    dtype = reduction.values[0].dtype
    return packing.ValueSpec(dtype.name, dtype.size, shapes[0].num_elements() if known else None)
