"""`weight_by_examples`: batches that do not divide by the number of replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfcdo import xla

SUM = tf.distribute.ReduceOp.SUM


def weight_by_examples(model: keras.Model) -> keras.Model:
    """Has each replica's gradients count by the number of its examples.

    Keras takes the mean of the replicas' mean losses. When a batch does not divide by the number of
    replicas, an example on a replica that got fewer of them counts for more than another; most
    often this is the last batch. With this, each example counts the same, as on one device. One
    number more is summed over the replicas each step; the losses that Keras reports are right
    either way and stay as they are.

    It is for losses that are means over examples, which all of Keras's are by default, not for
    those with `reduction="sum"`. A model that is loaded from a file needs it again.

    Args:
      model: the model; it is changed.

    Returns:
      The model.

    Raises:
      TypeError: if `model` is not a Keras model.

    Example:
      >>> import keras
      >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
      >>> model = weight_by_examples(model)
      >>> model.compile("sgd", "mse")
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"model must be a keras.Model, of Keras 3; got {model!r}")
    model.compute_loss = functools.partial(_weighted_loss, model.compute_loss)
    return model


def _weighted_loss(
    compute_loss: Callable[..., Any], x: Any = None, *args: Any, **options: Any
) -> Any:
    loss = compute_loss(x, *args, **options)
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1 or tf.distribute.in_cross_replica_context():
        return loss
    examples = tf.cast(tf.shape(tf.nest.flatten(x)[0])[0], tf.float32)
    if xla.weight_put_off(examples):
        return loss
    of_all = tf.distribute.get_replica_context().all_reduce(SUM, examples)
    return _with_gradient_times(loss, examples * strategy.num_replicas_in_sync / of_all)


@tf.custom_gradient
def _with_gradient_times(loss: tf.Tensor, weight: tf.Tensor) -> Any:
    """Returns the loss as it is; its gradient is multiplied by a weight."""
    return tf.identity(loss), lambda upstream: (upstream * tf.cast(weight, loss.dtype), None)
