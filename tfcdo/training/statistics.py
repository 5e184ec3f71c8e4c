"""Variables with a value per replica: moving statistics, metrics, accumulators.

A layer such as `BatchNormalization` updates its statistics on each replica from that replica's part
of a batch. TensorFlow expects the same value on all replicas, and reads and saves the first
replica's. Under tfcdo's strategies each replica keeps its own value, and where replicas meet the
variable's value is the mean. tf.keras asked for that, and Keras 3 does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcdo import keras_internals, tf_internals
from tfcdo.training import step

_AUTO = (None, tf.VariableSynchronization.AUTO)
_NONE = (None, tf.VariableAggregation.NONE)
MEAN = tf.VariableAggregation.MEAN


class OwnVariable(tf_internals.SyncOnReadVariable):
    """A variable with a value per replica; a replica without examples does not change its value."""

    is_shared = False  # Whether all replicas assign the same number, examples or not.

    def _assign(self, method: str, value: Any, *args: Any, **kw: Any) -> Any:
        """Assigns, adds or subtracts a value, of this replica or of all."""
        has_rows = self._note_write()
        if has_rows is not None:  # Without examples nothing changes.
            instead = self.read_value() if method == "assign" else tf.zeros([], self.dtype)
            value = tf.where(has_rows, tf.cast(value, self.dtype), instead)
        return getattr(super(), method)(value, *args, **kw)

    assign = functools.partialmethod(_assign, "assign")
    assign_add = functools.partialmethod(_assign, "assign_add")
    assign_sub = functools.partialmethod(_assign, "assign_sub")

    def _note_write(self) -> Any:
        """Notes a write; returns whether this replica has examples, None if it writes anyway."""
        here = step.current_several()
        if here is None or self.is_shared or here.reports or not here.some_can_be_empty:
            return None
        here.writes[id(self)] = self
        # It takes a mean when the step ends. Until then it has what it writes, which may depend on
        # no examples, such as a momentum that follows a schedule.
        return None if is_averaged(self) else here.has_rows

    def _scatter(self, method: str, sparse_delta: Any, *args: Any, **kw: Any) -> Any:
        """Changes rows of this replica's value, or of all replicas'."""
        if tf_internals.saves_one_replica():
            return getattr(super(), method)(sparse_delta, *args, **kw)
        has_rows = self._note_write()
        if has_rows is not None:
            count = tf.where(has_rows, tf.size(sparse_delta.indices), 0)
            values, indices = sparse_delta.values[:count], sparse_delta.indices[:count]
            sparse_delta = tf.IndexedSlices(values, indices, sparse_delta.dense_shape)
        on_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
        for at, component in enumerate(self.values):
            if not on_replica or at == tf_internals.replica_on_host():
                with tf.device(component.device):
                    getattr(component, method)(sparse_delta, *args, **kw)
        return self

    scatter_add = functools.partialmethod(_scatter, "scatter_add")
    scatter_div = functools.partialmethod(_scatter, "scatter_div")
    scatter_max = functools.partialmethod(_scatter, "scatter_max")
    scatter_min = functools.partialmethod(_scatter, "scatter_min")
    scatter_mul = functools.partialmethod(_scatter, "scatter_mul")
    scatter_sub = functools.partialmethod(_scatter, "scatter_sub")
    scatter_update = functools.partialmethod(_scatter, "scatter_update")


def as_kept(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of `tf.Variable` that also say whether each replica keeps its own."""
    kept = dict(options)
    if options.get("trainable") is not False or options.get("synchronization") not in _AUTO:
        return kept
    aggregation, dtype = options.get("aggregation"), options.get("dtype")
    first = options.get("initial_value")
    if dtype is None and not callable(first):  # `tf.Variable(0.0, trainable=False)`.
        dtype = tf.convert_to_tensor(first).dtype
    is_float = dtype is not None and tf.as_dtype(dtype).is_floating
    # A statistic belongs to no other variable, as an optimizer's slots do.
    if aggregation in _NONE and is_float and options.get("colocate_with") is None:
        kept["synchronization"] = tf.VariableSynchronization.ON_READ
        kept["aggregation"] = MEAN
    elif aggregation == tf.VariableAggregation.SUM and keras_internals.adds_metrics_twice:
        # A metric's: each replica keeps its own part, which are summed when they are read. Keras
        # 3.7 to 3.9 has them summed when they are written, twice (keras-team/keras#21467).
        kept["synchronization"] = tf.VariableSynchronization.ON_READ
    return kept


def is_averaged(value: Any) -> bool:
    """Tells whether a value is a variable whose replicas are averaged when it is read."""
    return isinstance(value, OwnVariable) and value.aggregation == MEAN


def is_summed(value: Any) -> bool:
    """Tells whether a value is a variable for which replicas' values are summed when written."""
    sums = getattr(value, "aggregation", None) == tf.VariableAggregation.SUM
    return bool(sums and value.synchronization != tf.VariableSynchronization.ON_READ)


def adopt(extended: Any, steps: Sequence[step.ReplicaStep]) -> None:
    """Has replicas without examples take the mean of the others' new statistics, of all hosts."""
    written = {key: one for here in steps for key, one in here.writes.items()}
    statistics = [one for one in written.values() if is_averaged(one)]
    replicas = steps[0].replicas
    if not statistics or replicas == 1:
        return
    have = [tf.cast(here.has_rows, tf.bool) for here in steps]
    count = tf.add_n([tf.cast(rows > 0, tf.float64) for rows in steps[0].rows_of_all])

    def take() -> None:
        # In 64 bits. What a row of zeros has made here may be NaN.
        values = [
            [tf.cast(one.read_value(), tf.float64) for one in variable.values]
            for variable in statistics
        ]
        sums = [
            tf.add_n([here.keep(one) for here, one in zip(steps, own, strict=True)])
            for own in values
        ]
        if replicas > len(steps):
            of_hosts = [step.of_host(one, extended.worker_devices) for one in sums]
            of_all = extended.batch_reduce_to("SUM", [(one, one) for one in of_hosts])
            sums = [tf_internals.components(one)[0] for one in of_all]
        for variable, own, total in zip(statistics, values, sums, strict=True):
            step.assign(variable, [tf.where(h, one, total / count) for h, one in zip(have, own)])

    some_empty = tf.logical_and(count > 0, count < replicas)
    tf.cond(some_empty, take, lambda: None)


def synchronize(model: keras.Model) -> None:
    """Gives all replicas, on all hosts, the mean of a model's moving statistics."""
    strategy = model.distribute_strategy
    variables = [one for one in model.non_trainable_variables if is_averaged(one.value)]
    if not variables or strategy.num_replicas_in_sync == 1:
        return

    def flattened(*own: tf.Variable) -> tf.Tensor:
        wide = (tf.cast(component.read_value(), tf.float64) for component in own)
        return tf.concat([tf.reshape(one, [-1]) for one in wide], 0)

    devices = strategy.extended.worker_devices
    # As one value: it is sent once, and exactly.
    of_replicas = step.on_each(devices, flattened, *(one.value.values for one in variables))
    with strategy.scope():
        means = strategy.reduce("MEAN", of_replicas, axis=None)
    sizes = [variable.value.shape.num_elements() for variable in variables]
    for variable, mean in zip(variables, tf.split(means, sizes), strict=True):
        step.assign(variable, [tf.reshape(mean, variable.shape)] * len(devices))


def build_layer(own: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Has a `BatchNormalization` normalize over the whole batch, if its strategy wants that."""
    if getattr(tf.distribute.get_strategy().extended, "synchronize_batch_norm", False):
        layer.synchronized = True
    own(layer, *args, **kwargs)


def moments(own: Callable[..., Any], layer: Any, inputs: Any, mask: Any) -> Any:
    """Stands for `_moments`: mean and variance of the examples of all replicas, if asked for."""
    here = step.current_several()
    if here is None or not layer.synchronized:
        return own(layer, inputs, mask)
    for variable in (layer.moving_mean, layer.moving_variance):
        if isinstance(variable.value, OwnVariable):
            variable.value.is_shared = True
    axes = [axis for axis in range(len(inputs.shape)) if axis != layer.axis % len(inputs.shape)]
    inputs = here.keep(inputs)
    weights = tf.ones([], inputs.dtype)
    if mask is not None:
        weights = tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
    weights = here.keep(tf.broadcast_to(weights, tf.shape(inputs)))
    sums = tf.reduce_sum(weights, axes), tf.reduce_sum(inputs * weights, axes)
    # In one value, which is alone: a wire dtype leaves it exact.
    count, total = tf.unstack(step.summed(tf.stack(sums)))
    # Sums of the differences from a mean: the difference of two large numbers has few digits.
    mean = tf.math.divide_no_nan(total, count)
    shape = [-1 if axis not in axes else 1 for axis in range(len(inputs.shape))]
    squares = tf.square(inputs - tf.reshape(mean, shape)) * weights
    square = step.summed(tf.reduce_sum(squares, axes))
    return mean, tf.math.divide_no_nan(square, count)


def synchronized(own: Callable[..., Any], x: Any, *args: Any) -> Any:
    """Stands for `_compute_moments_sync`, as of `keras.ops.moments`: leaves a stand-in out."""
    here = step.current_several()
    if here is None:
        return own(x, *args)
    # So does a gradient of a user's own, which TensorFlow's all-reduce hands on.
    return [step.with_kept_gradient(one, one) for one in own(here.without_stand_in(x), *args)]
