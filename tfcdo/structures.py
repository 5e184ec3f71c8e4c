"""Reducing structures of values, as Keras 3 asks strategies to, and gathering them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo import keras_calls, moving_statistics, tf_internals


def reduce_structure(
    reduce: Any, reduce_op: Any, value: Any, axis: Any, several_hosts: bool = False
) -> Any:
    """Reduces each component of a structure, as TensorFlow's method `reduce` does a single value.

    Keras 3 asks for two things that TensorFlow's strategies do not do: it reduces scalars along
    axis 0, where they have none, and whole batches, only to learn their shapes. Replicas on several
    hosts may hold unlike shapes without knowing of each other.
    """
    if moving_statistics.is_averaged(value):
        return moving_statistics.reduced(reduce, reduce_op, value, axis)
    if axis is None and _is_symbolic_build(reduce_op):
        return tf.nest.map_structure(
            lambda one: _for_its_shape(reduce, reduce_op, one, several_hosts), value
        )
    return tf.nest.map_structure(
        lambda one: reduce(reduce_op, one, axis=None if _is_scalar(one) else axis), value
    )


def gather_structure(extended: Any, gather: Any, value: Any, axis: Any) -> Any:
    """Concatenates each component of a structure over the replicas, all in one go.

    `gather` is TensorFlow's method for a single value. The shapes may differ along the axis;
    results are on the current device.
    """
    flat = tf.nest.flatten(value)
    on_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if not tf.nest.is_nested(value) or not flat or on_replica:
        # One value as TensorFlow has it; on a replica, its error. On several hosts what follows
        # would take a replica's tensor for a component, and gather it.
        return gather(value, axis)
    device = tf_internals.current_device() or extended._default_device or "/device:CPU:0"
    gathered = extended._batch_gather_to([(one, device) for one in flat], axis)
    return tf.nest.pack_sequence_as(value, [extended._local_results(one)[0] for one in gathered])


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
    """Returns the mean of a batch's component, or, where nobody can add it, a stand-in.

    On several hosts it is always the stand-in: the value of this host's first replica. (Keras asks
    outside of the strategy's scope, so the current strategy does not tell whether there are.)
    """
    if several_hosts or not _can_be_added(_components(value)):
        return _components(value)[0]
    return reduce(reduce_op, value, axis=None)


def _can_be_added(components: Sequence[Any]) -> bool:
    if not all(isinstance(component, tf.Tensor) for component in components):
        return False
    dtype, shape = components[0].dtype, components[0].shape
    numeric = dtype.is_floating or dtype.is_integer or dtype.is_complex
    return numeric and all(component.shape == shape for component in components)
