"""Running a checked batch: each value by the way that fits it, the results in the batch's order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfcdo import log
from tfcdo import tf_internals
from tfcdo.execute import copy_trees
from tfcdo.execute import gather
from tfcdo.execute import nccl
from tfcdo.execute import numerics
from tfcdo.execute import one_device
from tfcdo.execute import packs
from tfcdo.execute.hosts import Hosts
from tfcdo.execute.reduction import Reduction
from tfcdo.plan import copy_tree
from tfcdo.plan.batch_plan import UNKNOWN
from tfcdo.plan.batch_plan import BatchPlan
from tfcdo.plan.batch_plan import ValueSpec
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.packing import PackingOptions
from tfcdo.plan.packing import plan_batch
from tfcdo.topology.detection import detect
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

Key = TypeVar("Key")
# Reduces values that are on the same devices; returns one wrapped result per value.
Way = Callable[[Sequence[Reduction], numerics.FinalOp, "AllReduceConfig"], list[Any]]


@dataclasses.dataclass(frozen=True)
class AllReduceConfig:
    """How an all-reduce is to be done.

    Attributes:
      algorithm: the name of the algorithm that gives the copy trees, or the trees themselves.
      packing: how values are packed.
      topology: the machine; None to find out.
      nccl: whether to use NCCL where it can run.
      require_nccl: whether to raise where NCCL is asked for and cannot run.
      across_hosts: the hosts that all-reduce together; None for one host.
    """

    algorithm: str | tuple[CopyTree, ...]
    packing: PackingOptions
    topology: Topology | None
    nccl: bool = False
    require_nccl: bool = False
    across_hosts: Hosts | None = None

    def plan(self, specs: Sequence[ValueSpec], devices: Sequence[str]) -> BatchPlan:
        """The plan for values on some devices; remembered for as long as nothing differs."""
        topology = self.topology or detect(tuple(devices))
        algorithm, packing = self.algorithm, self.packing
        if self.across_hosts is not None:
            algorithm, packing = self.across_hosts.packing_for(algorithm, packing, topology, specs)
        return plan_batch(tuple(specs), packing, algorithm, topology)

    def check_topology(self, reductions: Iterable[Reduction]) -> None:
        """Raises `ValueError` unless the topology, if one was given, fits all all-reduces."""
        for reduction in reductions:
            if (
                self.topology
                and reduction.is_all_reduce
                and self.topology.num_devices != len(reduction.devices)
            ):
                raise ValueError(
                    "topology must have as many devices as the values have replicas, "
                    f"{len(reduction.devices)}; {self.topology.name!r} has "
                    f"{self.topology.num_devices}"
                )

    def with_nccl(self, devices: Sequence[str], dtype: tf.DType) -> bool:
        """Whether values are summed with NCCL; if not but asked for, says why, or raises.

        Raises:
          RuntimeError: if `require_nccl` and NCCL cannot run.
        """
        if not self.nccl or len(devices) == 1:
            return False
        status = nccl.nccl_status(devices, dtype)
        if status.can_run:
            return True
        if self.require_nccl:
            raise RuntimeError(f"NCCL cannot run (require_nccl=True): {status}")
        log.warn_once(f"NCCL is asked for but copy trees are used: {status}")
        return False


def reduce(
    reduce_op: tf.distribute.ReduceOp, reductions: Sequence[Reduction], config: AllReduceConfig
) -> list[Any]:
    """Reduces a batch.

    All-reduces of dense values on the same devices are packed together; slices travel as rows; what
    is not an all-reduce is reduced on its first destination.

    Args:
      reduce_op: SUM or MEAN.
      reductions: the checked pairs.
      config: how to all-reduce.

    Returns:
      One result per reduction, in order.
    """
    config.check_topology(reductions)
    if config.across_hosts is not None:
        reductions = [config.across_hosts.placed(reduction) for reduction in reductions]
    # Asking TensorFlow for its kernels takes longer than tracing a value, so ask once per dtype.
    with_nccl = functools.cache(config.with_nccl)

    def key_of(reduction: Reduction) -> tuple[Way, tuple[str, ...]]:
        return _way(reduction, _dtype_added(reduce_op, reduction), with_nccl), reduction.devices

    def run(key: tuple[Way, tuple[str, ...]], group: Sequence[Reduction]) -> list[Any]:
        way, _ = key
        return way(_as_added(reduce_op, group), final_op_for(reduce_op, group[0]), config)

    return _in_groups(reductions, key_of, run)


def reduce_on_roots(
    reduce_op: tf.distribute.ReduceOp,
    reductions: Sequence[Reduction],
    root_of: Callable[[Reduction], str],
    hosts: Hosts | None = None,
) -> list[Any]:
    """Reduces each value of a batch on one device.

    Args:
      reduce_op: SUM or MEAN.
      reductions: the checked pairs.
      root_of: the device that a value is reduced on.
      hosts: the hosts that reduce together; None for one host.

    Returns:
      One result per reduction, in order.
    """
    if hosts is not None:
        reductions = [hosts.placed(reduction) for reduction in reductions]

    def run(key: tuple[str, bool, tuple[str, ...]], group: Sequence[Reduction]) -> list[Any]:
        root, all_reduce, devices = key
        if all_reduce and root in devices:
            # One device is the simplest copy tree: a star, whose centre is that device.
            star = copy_tree.star(len(devices), devices.index(root))
            config = AllReduceConfig((star,), PackingOptions(1), None, across_hosts=hosts)
            return reduce(reduce_op, group, config)
        final_op = final_op_for(reduce_op, group[0])
        return [
            reduce_on_one_device(reduction, root, numerics.add, final_op, hosts)
            for reduction in _as_added(reduce_op, group)
        ]

    return _in_groups(
        reductions,
        lambda reduction: (root_of(reduction), reduction.is_all_reduce, reduction.devices),
        run,
    )


def _as_added(
    reduce_op: tf.distribute.ReduceOp, reductions: Sequence[Reduction]
) -> list[Reduction]:
    """The reductions with their values in the dtype that they are added in."""
    return [_cast(reduction, _dtype_added(reduce_op, reduction)) for reduction in reductions]


def _dtype_added(reduce_op: tf.distribute.ReduceOp, reduction: Reduction) -> tf.DType:
    dtype = reduction.values[0].dtype
    return numerics.dtype_of_mean(dtype) if _is_mean(reduce_op, reduction) else dtype


def _cast(reduction: Reduction, dtype: tf.DType) -> Reduction:
    if reduction.values[0].dtype == dtype:
        return reduction
    values = [
        numerics.cast(value, dtype, device)
        for value, device in zip(reduction.values, reduction.devices, strict=True)
    ]
    return dataclasses.replace(reduction, values=tuple(values))


def final_op_for(reduce_op: tf.distribute.ReduceOp, reduction: Reduction) -> numerics.FinalOp:
    """What is done to a sum of this reduction's values where it was formed."""
    return numerics.FinalOp(reduction.num_replicas if _is_mean(reduce_op, reduction) else None)


def _is_mean(reduce_op: tf.distribute.ReduceOp, reduction: Reduction) -> bool:
    # One replica that keeps its value keeps its dtype too; any other mean of integers is a float.
    return reduce_op == tf.distribute.ReduceOp.MEAN and not (
        reduction.num_replicas == 1 and reduction.is_all_reduce
    )


def _in_groups(
    reductions: Sequence[Reduction],
    key_of: Callable[[Reduction], Key],
    run: Callable[[Key, Sequence[Reduction]], Sequence[Any]],
) -> list[Any]:
    """Runs the reductions of one key together; returns their results in the batch's order."""
    groups: dict[Key, list[int]] = {}
    for index, reduction in enumerate(reductions):
        groups.setdefault(key_of(reduction), []).append(index)
    results: list[Any] = [None] * len(reductions)
    for key, indices in groups.items():
        group = [reductions[index] for index in indices]
        for index, result in zip(indices, run(key, group), strict=True):
            results[index] = result
    return results


def _way(
    reduction: Reduction,
    dtype: tf.DType,
    with_nccl: Callable[[Sequence[str], tf.DType], bool],
) -> Way:
    if not reduction.is_all_reduce:
        return _on_first_destination
    if reduction.is_sparse:
        return _all_reduce_slices
    if reduction.num_hosts == 1 and with_nccl(reduction.devices, dtype):
        return _all_reduce_with_nccl
    return _all_reduce_along_trees


def _on_first_destination(
    group: Sequence[Reduction], final_op: numerics.FinalOp, config: AllReduceConfig
) -> list[Any]:
    hosts = config.across_hosts
    return [
        reduce_on_one_device(reduction, reduction.destinations[0], numerics.add, final_op, hosts)
        for reduction in group
    ]


def _all_reduce_along_trees(
    group: Sequence[Reduction], final_op: numerics.FinalOp, config: AllReduceConfig
) -> list[Any]:
    devices = group[0].devices
    hosts, across_hosts = config.across_hosts, None
    if hosts is not None:
        # The backward pass makes the gradients of the last variables first: these leave first.
        group = group[::-1]
    plan = config.plan([_value_spec(reduction) for reduction in group], devices)
    if hosts is not None:
        across_hosts = hosts.exchange_packs(plan, group, final_op).all_reduce
    tensors_by_device = packs.all_reduce(
        plan,
        _by_device(group),
        devices,
        lambda pack, tensors: copy_trees.reduce_pack(
            pack.tree, tensors, devices, final_op, across_hosts
        ),
    )
    results = _by_value(tensors_by_device, group)
    return results if hosts is None else results[::-1]


def _all_reduce_with_nccl(
    group: Sequence[Reduction], final_op: numerics.FinalOp, config: AllReduceConfig
) -> list[Any]:
    devices = group[0].devices
    # NCCL knows the machine itself; every pack is to be one tensor, whatever the topology.
    config = dataclasses.replace(config, topology=preset("nvswitch", len(devices)))
    plan = config.plan([_value_spec(reduction) for reduction in group], devices)
    return _by_value(nccl.all_reduce(plan, _by_device(group), devices, final_op), group)


def _all_reduce_slices(
    group: Sequence[Reduction], final_op: numerics.FinalOp, config: AllReduceConfig
) -> list[Any]:
    devices = group[0].devices
    # The number of rows differs between devices and steps, so each value is a pack of its own.
    plan = config.plan([UNKNOWN] * len(group), devices)
    exchange = None
    if config.across_hosts is not None:
        roots = [devices[pack.tree.root] for pack in plan.packs]
        exchange = config.across_hosts.exchange_slices(roots, group, final_op)
    return [
        to_mirrored(
            gather.all_reduce_slices(pack.tree, reduction.values, devices, final_op, exchange),
            reduction,
        )
        for pack, reduction in zip(plan.packs, group, strict=True)
    ]


def _by_device(group: Sequence[Reduction]) -> list[tuple[tf.Tensor, ...]]:
    return list(zip(*(reduction.values for reduction in group), strict=True))


def _by_value(
    tensors_by_device: Sequence[Sequence[tf.Tensor]], group: Sequence[Reduction]
) -> list[Any]:
    return [
        to_mirrored(results, reduction)
        for results, reduction in zip(zip(*tensors_by_device, strict=True), group, strict=True)
    ]


def reduce_on_one_device(
    reduction: Reduction,
    device: str,
    accumulate: one_device.Accumulate,
    final_op: numerics.FinalOp,
    hosts: Hosts | None = None,
) -> Any:
    """Reduces one value on any device and copies the result to its destinations."""
    exchange = None if hosts is None else hosts.exchange_on(device, reduction, final_op)
    result = one_device.reduce_on(reduction.values, device, accumulate, final_op, exchange)
    return tf_internals.mirrored(one_device.copy_to(result, reduction.destinations))


def to_mirrored(results: Sequence[Any], reduction: Reduction) -> Any:
    """Wraps the results on the values' devices in the order that the destinations have."""
    if reduction.devices == reduction.destinations:
        return tf_internals.mirrored(results)
    by_device = dict(zip(reduction.devices, results, strict=True))
    return tf_internals.mirrored([by_device[device] for device in reduction.destinations])


def _value_spec(reduction: Reduction) -> ValueSpec:
    shapes = [value.shape for value in reduction.values]
    known = all(shape.is_fully_defined() for shape in shapes)
    dtype = reduction.values[0].dtype
    return ValueSpec(dtype.name, dtype.size, tuple(shapes[0].as_list()) if known else None)
