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


def as_kept(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of `tf.Variable` that also say whether each replica keeps its own."""
    kept = dict(options)
    if options.get("trainable") is not False or options.get("synchronization") not in _AUTO:
        return kept
    aggregation, dtype = options.get("aggregation"), options.get("dtype")
    is_float = dtype is not None and tf.as_dtype(dtype).is_floating
    # A statistic belongs to no other variable, as an optimizer's slots do.
    if aggregation in _NONE and is_float and options.get("colocate_with") is None:
        kept["synchronization"] = tf.VariableSynchronization.ON_READ
        kept["aggregation"] = tf.VariableAggregation.MEAN
    elif (
        aggregation == tf.VariableAggregation.SUM
        and keras_calls.adds_metrics_twice()
        and keras_calls.is_in("initialize")
    ):  # A metric's: each replica keeps its own part, which are summed when they are read.
        kept["synchronization"] = tf.VariableSynchronization.ON_READ
    return kept


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
