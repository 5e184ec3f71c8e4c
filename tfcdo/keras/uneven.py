"""`weight_by_examples`: batches of which replicas get unlike parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcdo import xla

MEAN = tf.distribute.ReduceOp.MEAN


def weight_by_examples(model: keras.Model) -> keras.Model:
    """Has each replica's gradients count by the number of its examples.

    Keras takes the mean of the replicas' mean losses. When a batch does not divide by the number of
    replicas, an example on a replica that got fewer of them counts for more than another; most
    often this is the last batch. With this, each example counts the same, as on one device. So does
    each element that a mask or a loss's `ignore_class` keeps, where Keras takes the mean of these.
    The losses that Keras reports are one device's, too, unless there is a mask and XLA compiles the
    step or the model has several outputs. A few numbers more are summed over the replicas each
    step.

    It is for losses with Keras's default reduction, not for those with `reduction="sum"`, or with
    `"mean_with_sample_weight"` and sample weights. A model that is loaded from a file needs it
    again.

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
    model.compute_loss = functools.partial(_weighted_loss, model, model.compute_loss)
    return model


def _weighted_loss(
    model: keras.Model,
    compute_loss: Callable[..., Any],
    x: Any = None,
    y: Any = None,
    y_pred: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1 or tf.distribute.in_cross_replica_context():
        return compute_loss(x, y, y_pred, *args, **options)
    examples = tf.cast(tf.shape(tf.nest.flatten(x)[0])[0], tf.float32)
    kept = _kept_of_each_output(model, y, y_pred)
    count = examples
    if len(kept) == 1 and kept[0] is not None:
        count = kept[0]  # One weight for the whole loss, which can be put off.
    elif any(one is not None for one in kept):
        y_pred = _outputs_weighted(y_pred, kept, examples)
    loss = compute_loss(x, y, y_pred, *args, **options)
    if xla.weight_put_off(count):
        return loss
    weight, of_examples = _weights([count, examples])
    # Where Keras reports the loss, it weights it by the examples, but not in the gradient.
    ratio = tf.cast(tf.math.divide_no_nan(weight, of_examples), loss.dtype)
    return _with_gradient_times(loss * ratio, of_examples)


def _kept_of_each_output(model: keras.Model, y: Any, y_pred: Any) -> list[tf.Tensor | None]:
    """Returns how many elements of each output Keras takes the mean of; None for all."""
    outputs, targets = tf.nest.flatten(y_pred), tf.nest.flatten(y)
    losses = tf.nest.flatten(model.loss)
    losses = losses * len(outputs) if len(losses) == 1 else losses
    if not len(outputs) == len(targets) == len(losses):
        return []  # Only a loss of the model's own knows what belongs together.
    return list(map(_kept, losses, targets, outputs))


def _kept(loss: Any, target: Any, output: Any) -> tf.Tensor | None:
    mask, ignored = getattr(output, "_keras_mask", None), getattr(loss, "ignore_class", None)
    if ignored is not None:
        valid = tf.not_equal(target, tf.cast(ignored, target.dtype))
        mask = valid if mask is None else tf.reshape(valid, tf.shape(mask)) & tf.cast(mask, tf.bool)
    return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))


def _outputs_weighted(y_pred: Any, kept: Sequence[tf.Tensor | None], examples: tf.Tensor) -> Any:
    """Weights the gradient of each output by what it keeps, relative to the examples."""
    counts = [examples if count is None else count for count in kept]
    weight, *weights = _weights([examples, *counts])
    weighted = []
    for output, own in zip(tf.nest.flatten(y_pred), weights, strict=True):
        weighted.append(_with_gradient_times(output, tf.math.divide_no_nan(own, weight)))
        if hasattr(output, "_keras_mask"):
            weighted[-1]._keras_mask = output._keras_mask
    return tf.nest.pack_sequence_as(y_pred, weighted)


def _weights(counts: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns counts of this replica relative to the means over the replicas."""
    # As one value, because cross-device ops with a wire dtype take several for gradients.
    context, own = tf.distribute.get_replica_context(), tf.stack(counts)
    weights: list[tf.Tensor] = tf.unstack(tf.math.divide_no_nan(own, context.all_reduce(MEAN, own)))
    return weights


@tf.custom_gradient
def _with_gradient_times(value: tf.Tensor, weight: tf.Tensor) -> Any:
    """Returns a value as it is; its gradient is multiplied by a weight."""
    return tf.identity(value), lambda upstream: (upstream * tf.cast(weight, value.dtype), None)
