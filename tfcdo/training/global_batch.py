"""`global_batch`: the rows of all replicas, for losses that compare the examples of a batch."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcdo.training import step
from tfcdo.training.step import SUM


def global_batch(values: Any) -> Any:
    """Returns the rows of all replicas, in the order of the batch.

    A loss that compares the examples of a batch, such as `Circle`, `Dice`, `Tversky` or a
    contrastive loss, sees only a replica's part of the batch. With the rows of all replicas it is
    one device's: the gradient with respect to each row is the sum of all replicas' gradients.
    Outside of a step on several replicas, `values` itself is returned.

    All values are sent to all replicas, and their gradients back.

    Args:
      values: a tensor `[rows, ...]` or a structure of such tensors; on each replica its part, of
        any number of rows.

    Returns:
      Tensors `[rows of all replicas, ...]` in the same structure.

    Example:
      >>> import keras
      >>> class GlobalDice(keras.losses.Dice):
      ...     def call(self, y_true, y_pred):
      ...         return super().call(global_batch(y_true), global_batch(y_pred))
      >>> round(float(GlobalDice()(tf.ones([2, 1]), tf.ones([2, 1]))), 6)
      0.0
    """
    here = step.current_several()
    if here is None:
        return values
    return tf.nest.map_structure(lambda value: _gathered(here, value), values)


def _gathered(here: step.ReplicaStep, value: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    if here.can_be_empty:  # A stand-in is not sent.
        value = value[: tf.where(here.has_rows, tf.shape(value)[0], 0)]
    if value.dtype.is_floating:
        return _with_gradient(here, value)
    return _of_all(value)


def _of_all(value: tf.Tensor) -> tf.Tensor:
    def gather(strategy: tf.distribute.Strategy, value: Any) -> Any:
        return strategy.extended.batch_gather([value], 0)[0]

    gathered: tf.Tensor = tf.distribute.get_replica_context().merge_call(gather, args=(value,))
    return gathered


def _with_gradient(here: step.ReplicaStep, value: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def gathered(value: tf.Tensor) -> Any:
        rows = tf.shape(value)[0]
        total = _of_all(value)

        def gradient(upstream: Any) -> tf.Tensor:
            summed = tf.distribute.get_replica_context().all_reduce(
                SUM, tf.convert_to_tensor(upstream)
            )
            if isinstance(here.before, int):
                return summed[here.before : here.before + rows]
            per_row = rows // tf.cast(tf.maximum(here.rows, 1), tf.int32)
            before = tf.cast(here.before, tf.int32) * per_row
            return summed[before : before + rows]

        return total, gradient

    return gathered(value)
