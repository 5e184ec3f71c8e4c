"""Moving statistics, of which each replica keeps its own: averaged when they are read together.

A layer such as `BatchNormalization` updates its statistics on each replica from that replica's part
of a batch. TensorFlow takes such a variable for one that all replicas hold alike, and reads and
saves the first replica's. tfcdo's strategies make it one of which each replica has its own and
whose value, where replicas meet, is the mean: what tf.keras asked for and Keras 3 does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfcdo import keras_calls, tf_internals

_AUTO = (None, tf.VariableSynchronization.AUTO)
_NONE = (None, tf.VariableAggregation.NONE)
_OWN_MEAN = {
    "synchronization": tf.VariableSynchronization.ON_READ,
    "aggregation": tf.VariableAggregation.MEAN,
}


def averaged_when_read(options: Mapping[str, Any]) -> dict[str, Any]:
    """Chooses how a new variable is kept: a statistic by each replica, averaged when read.

    A statistic is a floating-point variable that is not trained, about whose replicas its creator
    says nothing, and that belongs to no other variable, as an optimizer's do. Takes and returns the
    arguments of `tf.Variable`.
    """
    dtype = options.get("dtype")
    is_statistic = (
        options.get("trainable") is False
        and options.get("colocate_with") is None
        and options.get("synchronization") in _AUTO
        and options.get("aggregation") in _NONE
        and dtype is not None
        and tf.as_dtype(dtype).is_floating
    )
    return {**options, **_OWN_MEAN} if is_statistic else dict(options)


def summed_when_read(options: Mapping[str, Any]) -> dict[str, Any]:
    """Has each replica keep its own part of a metric's variable: summed when it is read."""
    is_metrics = (
        options.get("trainable") is False
        and options.get("synchronization") in _AUTO
        and options.get("aggregation") == tf.VariableAggregation.SUM
        and keras_calls.adds_metrics_twice()
        and keras_calls.is_in("initialize")
    )
    own = {"synchronization": tf.VariableSynchronization.ON_READ}
    return {**options, **own} if is_metrics else dict(options)


def is_averaged(value: Any) -> bool:
    """Tells whether a value is a variable whose replicas are averaged when it is read."""
    return (
        isinstance(value, tf_internals.DistributedValues)
        and getattr(value, "synchronization", None) == tf.VariableSynchronization.ON_READ
        and value.aggregation == tf.VariableAggregation.MEAN
    )


def reduced(reduce: Callable[..., Any], reduce_op: Any, variable: Any, axis: Any) -> tf.Tensor:
    """Reduces a variable that `is_averaged`, in 64 bits, by a strategy's method."""
    # There the mean of equal numbers is that number: weights of a frozen layer stay as they are.
    own = [tf.cast(component.read_value(), tf.float64) for component in variable.values]
    result = reduce(reduce_op, tf_internals.per_replica(own), axis=axis)
    return tf.cast(result, variable.dtype)
