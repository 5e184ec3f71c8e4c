"""Shared by both strategies: reducing structures, and the work for TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import (
    checks,
    datasets,
    empty_batches,
    keras_calls,
    keras_steps,
    log,
    moving_statistics,
    tf_internals,
)
from tfcdo.cluster import session
from tfcdo.cross_device_ops import AllReduceCrossDeviceOps, NcclAllReduce, ReductionToOneDevice
from tfcdo.execute import nccl
from tfcdo.execute.base import ConfiguredCrossDeviceOps
from tfcdo.execute.explain import Explanation


class ReducesStructures:
    """Has a strategy reduce and gather structures of values, as Keras 3 asks it to."""

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces a value, or each component of a structure of values."""
        # Keras 3 asks for two things that TensorFlow's strategies do not do: it reduces scalars
        # along axis 0, where they have none, and whole batches, only to learn their shapes.
        reduce = super().reduce  # type: ignore[misc]
        if moving_statistics.is_averaged(value):
            return moving_statistics.reduced(reduce, reduce_op, value, axis)
        if axis is None and _is_symbolic_build(reduce_op):
            several_hosts = self.extended._in_multi_worker_mode()  # type: ignore[attr-defined]
            return tf.nest.map_structure(
                lambda one: _for_its_shape(reduce, reduce_op, one, several_hosts), value
            )
        return tf.nest.map_structure(
            lambda one: reduce(reduce_op, one, axis=None if _is_scalar(one) else axis), value
        )

    def gather(self, value: Any, axis: Any) -> Any:
        """Concatenates a value, or each of a structure of values over the replicas, in one go."""
        extended = self.extended  # type: ignore[attr-defined]
        flat = tf.nest.flatten(value)
        on_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
        if not tf.nest.is_nested(value) or not flat or on_replica:
            # One value as TensorFlow has it; on a replica, its error. On several hosts what follows
            # would take a replica's tensor for a component, and gather it.
            return super().gather(value, axis)  # type: ignore[misc]
        device = tf_internals.current_device() or extended._default_device or "/device:CPU:0"
        gathered = extended._batch_gather_to([(one, device) for one in flat], axis)
        return tf.nest.pack_sequence_as(value, [extended._local_results(g)[0] for g in gathered])

    def explain(
        self, shapes: Iterable[Any], dtype: Any = "float32", shard_optimizer_state: bool = False
    ) -> Explanation:
        """Describes the all-reduce of such a batch in this strategy, without running it.

        Packs are in the order in which they are sent. On several hosts these are the devices, links
        and packs of this host; `bytes_between_hosts` is what it sends to the others.

        Args:
          shapes: the shape of each value, fully known, in any form that `tf.TensorShape` takes.
          dtype: the dtype of all values.
          shard_optimizer_state: whether the values are the gradients of variables whose optimizer
            state is sharded; see `tfcdo.keras.DistributedOptimizer`.

        Returns:
          The algorithm and why, packs, copy trees, bytes between devices and to other hosts, and
          graph ops; its `str` is made to be read.

        Raises:
          ValueError: if a shape is not fully known; and as `reduce` of the cross-device ops.
          TypeError: if `shapes` is not a list, `dtype` is not a dtype, or the strategy's
            `cross_device_ops` is not one of tfcdo's.
          RuntimeError: as `reduce` of the cross-device ops.

        Example:
          >>> import tfcdo
          >>> tfcdo.MirroredStrategy(["/cpu:0"]).explain([(1000,), (10,)]).num_packs
          1
        """
        extended = self.extended  # type: ignore[attr-defined]
        ops = extended._cross_device_ops
        if not isinstance(ops, ConfiguredCrossDeviceOps):
            raise TypeError(f"cross_device_ops must be one of tfcdo's to be explained; got {ops!r}")
        return ops.explain(shapes, dtype, extended.worker_devices, shard_optimizer_state)


def _components(value: Any) -> tuple[Any, ...]:
    return value.values if isinstance(value, tf_internals.DistributedValues) else (value,)


def _is_scalar(value: Any) -> bool:
    component = _components(value)[0]
    shape = getattr(component, "shape", None)
    return isinstance(component, (int, float, complex)) or (
        shape is not None and tf.TensorShape(shape).rank == 0
    )


def _is_symbolic_build(reduce_op: Any) -> bool:
    """Tells whether Keras asks for a batch's shapes, by reducing it; nobody else may."""
    is_mean = str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"
    return is_mean and keras_calls.is_in("symbolic_build")


def _for_its_shape(reduce: Any, reduce_op: Any, value: Any, several_hosts: bool) -> Any:
    """Returns the mean of a batch's component, or, where nobody can add it, a stand-in."""
    # On several hosts always the stand-in. Keras asks outside of the strategy's scope, so the
    # current strategy does not tell whether there are several.
    if several_hosts or not _can_be_added(_components(value)):
        return _components(value)[0]
    return reduce(reduce_op, value, axis=None)


def _can_be_added(components: Sequence[Any]) -> bool:
    if not all(isinstance(component, tf.Tensor) for component in components):
        return False
    dtype, shape = components[0].dtype, components[0].shape
    numeric = dtype.is_floating or dtype.is_integer or dtype.is_complex
    return numeric and all(component.shape == shape for component in components)


class ReplicaExtended:
    """Starts a step on all replicas or on none, and has each keep its own moving statistics."""

    meets_outside_xla = True  # For `keras_steps`.

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        arguments = tf_internals.tensors_of_graph((args, kwargs))
        if not arguments:
            return super()._call_for_each_replica(fn, args, kwargs)  # type: ignore[misc]
        # Else a replica whose iterator has ended would stop after some of the others' updates.
        all_have_data = tf.group(*arguments)

        def step(*args: Any, **kwargs: Any) -> Any:
            own = tf_internals.tensors_of_graph((args, kwargs))
            with tf.control_dependencies([all_have_data]), empty_batches.step_with(own):
                return fn(*args, **kwargs)

        # TensorFlow runs a tf.function for all replicas at once, else a thread for each.
        is_function = isinstance(fn, tf.types.experimental.PolymorphicFunction)
        with tf.control_dependencies([all_have_data]):
            run = super()._call_for_each_replica  # type: ignore[misc]
            return run(fn if is_function else step, args, kwargs)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if not self._use_merge_call():  # type: ignore[attr-defined]
            return super()._replica_ctx_all_reduce(reduce_op, value, options)  # type: ignore[misc]
        # Where replicas meet. On several hosts, TensorFlow has each replica start a collective.
        reduce = tf.distribute.StrategyExtended._replica_ctx_all_reduce
        return reduce(self, reduce_op, value, options)

    def _create_variable(self, next_creator: Any, **options: Any) -> Any:
        keras_steps.install()  # Keras is imported by now, if its model is made.
        kept = moving_statistics.as_kept(options)
        with tf.control_dependencies(None):  # Its first value does not depend on data.
            variable = super()._create_variable(next_creator, **kept)  # type: ignore[misc]
        if moving_statistics.is_averaged(variable):
            empty_batches.keep_statistic(variable)
        return variable

    def _batch_gather_to(self, value_destination_pairs: Any, axis: Any, options: Any = None) -> Any:
        ops = self._cross_device_ops  # type: ignore[attr-defined]
        pairs = [(self._distributed(one), to) for one, to in value_destination_pairs]
        distributed = (isinstance(one, tf_internals.DistributedValues) for one, _ in pairs)
        if isinstance(ops, ConfiguredCrossDeviceOps) and all(distributed):
            return ops._batch_gather([(one, self._located(to)) for one, to in pairs], axis, options)
        return super()._batch_gather_to(pairs, axis, options)  # type: ignore[misc]

    def _distributed(self, value: Any) -> Any:
        """Returns a value as it is to be gathered; for several hosts to say otherwise."""
        return value

    def _located(self, destinations: Any) -> Any:
        """Returns where results are to be; for several hosts to say otherwise."""
        return destinations

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if tf.executing_eagerly() and isinstance(dataset, tf.data.Dataset):
            several = self._in_multi_worker_mode()  # type: ignore[attr-defined]
            dataset = datasets.prepared(dataset, session.current() if several else None)
        return super()._experimental_distribute_dataset(dataset, options)  # type: ignore[misc]


def runs_flat(hint: str, ops: Any, devices: Sequence[str]) -> bool:
    """Returns whether NCCL all-reduces over all devices of all hosts at once, or logs why not."""
    # One device a host: the collective between the hosts is over all devices already.
    if hint == "ring" or len(devices) == 1:
        return False
    status = nccl.nccl_status(devices)
    if ops is not None and not isinstance(ops, NcclAllReduce):
        problem = (
            f"cross_device_ops is {type(ops).__name__}, which sums inside each host; leave it out, "
            "or give tfcdo.NcclAllReduce(), for one collective over all devices"
        )
    elif status.can_run:
        return True
    else:
        problem = str(status)
    if hint == "nccl":
        log.warn_once(
            "NCCL is asked for between hosts, but instead of one collective over all devices of "
            f"all hosts, one device a host takes part for each pack: {problem}"
        )
    return False


def check_host_arguments(options: Any, ops: Any, devices_per_worker: Any) -> None:
    """Raises an error for arguments of `MultiWorkerMirroredStrategy` of another type."""
    if not isinstance(options, tf_internals.OPTIONS_TYPE):
        raise TypeError(
            "communication_options must be a tf.distribute.experimental.CommunicationOptions or "
            f"None; got {options!r}"
        )
    if ops is not None and not isinstance(ops, (AllReduceCrossDeviceOps, ReductionToOneDevice)):
        raise TypeError(
            "cross_device_ops must be one of tfcdo's, such as tfcdo.HierarchicalCopyAllReduce(), "
            f"or None; got {ops!r}"
        )
    if devices_per_worker is not None:
        checks.check_int("devices_per_worker", devices_per_worker, at_least=1)
