"""Losses: each example counts the same, however the examples are dealt to the replicas.

Keras divides a replica's loss by that replica's number of values, and by the number of replicas.
These functions stand before Keras's own and divide by the numbers of all replicas. `global_batch`
is for losses that compare the examples of a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfcdo import keras_internals, log
from tfcdo.execute.device_ops import Gradient
from tfcdo.training import step

Function = Callable[..., Any]
_NONE = (None, "none")  # Keras's reductions that leave a loss as it is.


def scaled(own: Function, value: Any) -> Any:
    """Stands for `scale_loss_for_distribution`: a mean counts by this replica's share of rows."""
    here = step.current_several()
    if here is None:
        return value if _is_of_all() else own(value)
    return here.keep(value * here.share(value.dtype))


def _is_of_all() -> bool:
    """Returns whether a loss is one of all examples: in the scope, outside of a step."""
    return step.is_ours(tf.distribute.get_strategy()) and tf.distribute.in_cross_replica_context()


def unscaled(own: Function, value: Any) -> Any:
    """Stands for `unscale_loss_for_distribution`: Keras weights the result by the examples."""
    here = step.current_several()
    if here is not None and _rank(value):  # One of each example.
        return here.without_stand_in(value)
    # Where Keras does not know their number, it counts each replica's loss once.
    if here is None or here.is_even or here.rows is None or here.reports:
        return value if _is_of_all() else own(value)
    ratio = tf.cast(here.total, tf.float64) / tf.cast(tf.maximum(here.rows, 1), tf.float64)
    return value * tf.cast(ratio, value.dtype)


def compiled(own: Function, loss: Any, y_true: Any, y_pred: Any, *args: Any, **kw: Any) -> Any:
    """Stands for `CompileLoss.call`, which also reports the loss of each output."""
    several = step.current_several() is not None
    if several and tf.is_tensor(y_true) and keras.tree.is_nested(y_pred):
        y_true = [y_true]  # Run eagerly, Keras takes as many rows as outputs for their targets.
    outputs = [one for one in keras.tree.flatten(y_pred) if one is not None] if several else []
    if None not in [one.shape[0] if len(one.shape) else 0 for one in outputs]:
        return own(loss, y_true, y_pred, *args, **kw)
    with step.changed(reports=True):
        return own(loss, y_true, y_pred, *args, **kw)


def resolved(own: Function, *args: Any) -> Any:
    """Stands for `get_loss`, which finds a loss of `compile`: one with a `__call__` of its own."""
    loss = own(*args)
    if loss is None or not keras_internals.has_own(loss, "__call__", keras.losses.Loss):
        return loss
    scaled: Any = functools.partial(of_means, loss)
    scaled.name = loss.name
    return scaled


def of_means(own: Function, *args: Any, **kw: Any) -> Any:
    """Stands for a loss, or `Distiller.compute_loss`, that adds its own means to Keras's losses."""
    here, reduction = step.current_several(), getattr(own, "reduction", "mean")
    if here is None:
        return own(*args, **kw)
    inner = None if reduction == "sum" else functools.partial(_mean_of, here)
    with step.changed(of_inner=inner, reports=False):
        value = own(*args, **kw)
    return value if _rank(value) else _of_batch(here, here.keep(value), reduction)


def _mean_of(here: step.ReplicaStep, part: Any) -> Any:
    """Returns the mean of this replica's examples, which another loss multiplies by its share."""
    return tf.math.divide_no_nan(part, here.share(part.dtype))


def _of_batch(here: step.ReplicaStep, value: Any, reduction: Any) -> Any:
    """Returns this replica's part of a loss of the whole batch, which Keras does not scale."""
    return here.loss(value if reduction == "sum" else value * here.share(value.dtype))


def called(own: Function, one: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """Stands for `Loss.__call__` and a metric's `update_state`: functions that may call a loss."""
    here = step.current_several()
    if here is None:
        return own(one, y_true, y_pred, sample_weight)
    reduction = one.reduction if isinstance(one, keras.losses.Loss) else "mean"
    inner = _of_inner(here, y_pred, sample_weight, reduction)
    with step.changed(of_inner=inner, reports=False):  # A loss may update metrics of its own.
        part = own(one, y_true, y_pred, sample_weight)
    return here.of_inner(part) if here.of_inner and id(part) in here.losses else part


def _of_inner(here: step.ReplicaStep, y_pred: Any, sample_weight: Any, reduction: Any) -> Any:
    """Returns what makes a loss's part the number that another loss, which calls it, expects."""
    if sample_weight is not None or keras_internals.has_mask(y_pred):
        return step.summed  # The other one multiplies by this replica's part of all weights.
    if reduction == "sum" or (reduction in _NONE and not step.now.scales_losses):
        return None
    return functools.partial(_mean_of, here)


def reduced(
    own: Function, values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size"
) -> Any:
    """Stands for `reduce_values`, which sums or averages the losses of examples."""
    here = step.current_several()
    # A number is a mean, also with reduction=None, unless an own loop gets it from a loss.
    if here is None or (reduction in _NONE and (_rank(values) or not step.now.scales_losses)):
        return own(values, sample_weight, reduction)
    values = here.keep(values)
    if tuple(values.shape) == (0,):  # Keras would return it; other replicas have a number.
        return here.loss(tf.reduce_sum(values))
    # Also a number, as of Dice: with weights of two examples Keras makes it one of each.
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        total = step.summed(tf.reduce_sum(here.keep(tf.cast(sample_weight, values.dtype))))
        return here.loss(tf.math.divide_no_nan(tf.reduce_sum(values), total))
    if values.shape.rank == 0:
        return _of_batch(here, values, reduction)
    return here.loss(own(values, sample_weight, reduction))


def of_rows(
    own: Function, per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Any:
    """Stands for `tf.nn.compute_average_loss`, for which all replicas have as many examples."""
    here, value = step.current_several(), own(per_example_loss, sample_weight, global_batch_size)
    if here is None or global_batch_size is not None:
        return value
    part = here.loss(here.keep(value) * (here.replicas * here.share(value.dtype)))
    return here.of_inner(part) if here.of_inner else part


def computed(own: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for `Model.compute_loss`, which adds up losses."""
    here = step.current_several()
    if here is None:
        return own(model, *args, **kwargs)
    before = len(here.losses)
    with step.during(scales_losses=True):
        total = own(model, *args, **kwargs)
    if total is None:
        return None
    if not total.shape.rank:
        return here.loss(total)
    if len(here.losses) > before:
        log.warn_once(
            "a model has losses with reduction=None and losses that are numbers: Keras adds a "
            "number to the loss of each example, so it counts once per example of the batch on one "
            f"device, and of a replica's part on {here.replicas} replicas. Give all losses of the "
            "model a reduction, or none of them"
        )
    here.loss(tf.reduce_sum(total))  # Losses of examples have the gradient of their sum.
    return total


def added(own: Function, layer: Any, loss: Any) -> None:
    """Stands for `Layer.add_loss`: replicas that meet in a step call a layer at the same time."""
    own(layer, loss)
    here = step.current_several()
    if here is not None:
        here.added.setdefault(id(layer), []).extend(keras_internals.take_added(layer))


def of_layer(own: Function, layer: Any) -> list[Any]:
    """Stands for `Layer._get_own_losses`, which reads what `add_loss` got."""
    here, found = step.current_several(), list(own(layer))
    if here is not None:
        found += here.added.get(id(layer), ())
        numbers = [one for one in found if not _rank(one)]  # A sum of vectors is one of all rows.
        _tell_of_whole(here, [one for one in numbers if id(one) not in here.losses])
    return found


def regularized(own: Function, layer: Any) -> list[Any]:
    """Stands for `Layer._get_regularization_losses`: Keras's `compute_loss` gets numbers."""
    here, found = step.current_several(), list(own(layer))
    if here is not None and step.now.scales_losses:  # A vector has no losses of examples.
        return [tf.reduce_sum(one) if _rank(one) else one for one in found]
    if here is not None:
        _tell_of_whole(here, found)
    return found


def _tell_of_whole(here: step.ReplicaStep, found: list[Any]) -> None:
    """Warns where a step reads layers' losses that Keras does not scale."""
    if found and step.now.method == "fit" and not step.now.scales_losses:
        log.warn_once(
            "a train_step or compute_loss reads the losses of layers: losses of regularizers, and "
            f"means that add_loss got, are whole on each replica, and count {here.replicas} times "
            f"on {here.replicas} replicas. Divide them as docs/own-loops.md says under Losses, or "
            "call Keras's compute_loss, which adds them. If you have done so, nothing is wrong"
        )


def cleared(own: Function, layer: Any) -> None:
    """Stands for `Layer._clear_losses`, with which a layer's call begins."""
    own(layer)
    here = step.current_several()
    if here is not None:
        here.added.pop(id(layer), None)


def additional(own: Function, model: Any, loss: Any) -> Any:
    """Stands for `_aggregate_additional_loss`, which scales the losses that `add_loss` got."""
    here = step.current_several()
    if here is None:
        return own(model, loss)
    if _are_per_row(here, loss):  # Keras sums the losses of examples, which then are no mean.
        return here.loss(tf.reduce_sum(here.keep(loss)))
    # One that a loss function has returned is scaled already.
    return loss if id(loss) in here.losses else own(model, loss)


def masked(own: Function, sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
    """Stands for `apply_mask`: a mean is one over all values that masks keep on any replica."""
    here = step.current_several()
    if here is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return own(sample_weight, mask, dtype, reduction)
    # Keras multiplies by the ratio of all values to those kept, of this replica.
    mask = here.keep(tf.cast(mask, dtype))
    kept = tf.reduce_sum(mask)
    ratio = tf.math.divide_no_nan(kept, step.summed(kept) * here.share(dtype))
    return own(sample_weight, mask, dtype, reduction) * ratio


def _rank(value: Any) -> Any:
    return tf.convert_to_tensor(value).shape.rank


def _are_per_row(here: step.ReplicaStep, values: Any) -> bool:
    """Returns whether there are values for each row of this replica; not one number, or a few."""
    shape, rows = tf.convert_to_tensor(values).shape, here.known_rows
    if not shape.rank:
        return False
    return shape[0] is None or (rows is not None and shape[0] % max(rows, 1) == 0)


def averaged(own: Function, metric: Any, values: Any, sample_weight: Any = None) -> Any:
    """Stands for `Mean.update_state`: numbers of a batch count by this replica's rows."""
    here = step.current_several()
    if here is None or keras_internals.has_mask(values):  # A mask gives each row a weight.
        return own(metric, values, sample_weight)
    if isinstance(values, (list, tuple)) and sample_weight is None and not any(map(_rank, values)):
        for number in values:  # Each counts as one.
            averaged(own, metric, number)
        return None
    if here.reports and sample_weight is None and not _rank(values):
        # Keras does not know the batch's size: the loss of all replicas counts once.
        return own(metric, values, 1.0 / here.replicas)
    # With one weight for a batch, Keras takes the mean of values. An int may count a part's rows.
    is_loss, weight = id(values) in here.losses, 1.0 if sample_weight is None else sample_weight
    are_of_rows = sample_weight is None and (here.reports or _are_per_row(here, values))
    if not is_loss and (are_of_rows or not isinstance(weight, float)):
        return own(metric, values, sample_weight)
    share = here.share(metric.dtype)
    mean = here.keep(tf.cast(values, metric.dtype))
    if is_loss:  # It is multiplied by the share already.
        mean = tf.math.divide_no_nan(mean, share)
    return own(metric, mean, share * weight if isinstance(weight, float) else weight)


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

    Raises:
      ValueError: if a tensor is a scalar.

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


def _gathered(here: step.ReplicaStep, value: Any) -> Any:
    if value is None:  # Such as a mask that is optional.
        return None
    # A tensor of its own for each replica: TensorFlow would take one of all of them once.
    value = tf.identity(value)
    if value.shape.rank == 0:
        raise ValueError(f"values must have rows, tensors [rows, ...]; got a scalar, {value}")
    value = here.without_stand_in(value)  # Which is not sent.
    # While a step is traced, sizes are known on all replicas or on none.
    if here.is_even and not tf.executing_eagerly() and value.shape[0] == here.rows:
        [total], before = _of_all([value]), tf.constant(here.before)
    else:
        total, counts = _of_all([value, tf.shape(value)[:1]])
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        before = tf.reduce_sum(counts[:replica])
    has_gradient = value.dtype.is_floating or value.dtype.is_complex
    return _OF_ALL.of(total, value, before) if has_gradient else total


def _of_all(values: list[tf.Tensor]) -> list[tf.Tensor]:
    context = tf.distribute.get_replica_context()
    return list(context.merge_call(lambda s, values: s.extended.gather_rows(values), [values]))


def _own_rows(upstream: tf.Tensor, value: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    return step.summed_gradient(upstream)[before : before + tf.shape(value)[0]]


_OF_ALL = Gradient("TfcdoOfAll", _own_rows)
