"""Random numbers of the whole batch: each replica gets the rows that one device would draw for it.

Philox, TensorFlow's generator, counts: each of its numbers makes four of 32 bits. So elements
[start, start + n) of a draw need the counter start // 4 further on, and at most three elements too
many. Where that does not hold, the whole batch's numbers are drawn, and the replica's rows taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfcdo import keras_internals
from tfcdo.training import step
from tfcdo.training.step import ReplicaStep

Function = Callable[..., Any]
_PHILOX = 1  # `tf.random.Algorithm.PHILOX`.
_FOUR_PER_COUNT = (tf.float32, tf.float16, tf.bfloat16)


def seed(own: Function, seed: Any) -> Any:
    """Stands for `draw_seed`: each replica draws the same seeds as the others."""
    here = step.now.step
    is_ours = seed is None or isinstance(seed, keras.random.SeedGenerator)
    if here is None or not is_ours:
        return own(seed)
    if here.written is not None:
        raise ValueError(
            "shard_optimizer_state must be False for an optimizer whose update draws random "
            "numbers, which a device would draw for its share of the variables only; got True"
        )
    strategy = tf.distribute.get_strategy()
    with tf.init_scope():
        generator = keras_internals.seed_generator(seed, here.keras_state)
        value = keras_internals.value_of(generator.state)
        # In a `keras.StatelessScope` it is a tensor.
        is_variable = isinstance(value, tf.Variable)
        if is_variable and getattr(value, "distribute_strategy", None) is not strategy:
            keras_internals.move_here(generator)
    return generator.next(ordered=seed is not None)


def dropout(
    own: Function, inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None
) -> Any:
    """Stands for `dropout`: drops the elements that one device would drop."""
    shape = tf.shape(inputs) if noise_shape is None else noise_shape
    is_of_rows = noise_shape is None or noise_shape[0] is None
    first = inputs.shape[0] if is_of_rows else _first(noise_shape)
    here = _step_of_rows(first, multiples=True)
    # A weight's rows are no examples, also if their number is a multiple.
    if here is None or rate in (0.0, 1.0) or isinstance(inputs, keras.Variable):
        return own(inputs, rate, noise_shape, seed)
    if noise_shape is not None:
        known = tf.shape(inputs)
        shape = tf.stack([known[i] if n is None else n for i, n in enumerate(noise_shape)])
    dtype = inputs.dtype
    drawn = _rows_of(here, tf.raw_ops.StatelessRandomUniformV2, shape, dtype, seed)
    scale = tf.constant(1 / (1 - rate), dtype)
    return tf.where(drawn >= tf.convert_to_tensor(rate, dtype), inputs * scale, tf.zeros([], dtype))


def uniform(
    own: Function,
    shape: Any,
    minval: Any = 0.0,
    maxval: Any = 1.0,
    dtype: Any = None,
    seed: Any = None,
) -> Any:
    """Stands for `uniform`: draws the rows that one device would draw."""
    here = _step_of_rows(_first(shape))
    if here is None:
        return own(shape, minval, maxval, dtype, seed)
    kind = tf.as_dtype(dtype or keras.config.floatx())
    drawn = _rows_of(here, tf.raw_ops.StatelessRandomUniformV2, shape, kind, seed)
    minval, maxval = tf.cast(minval, kind), tf.cast(maxval, kind)
    return drawn * (maxval - minval) + minval


def normal(
    own: Function,
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = None,
    seed: Any = None,
) -> Any:
    """Stands for `normal`: draws the rows that one device would draw."""
    here = _step_of_rows(_first(shape))
    if here is None:
        return own(shape, mean, stddev, dtype, seed)
    kind = tf.as_dtype(dtype or keras.config.floatx())
    drawn = _rows_of(here, tf.raw_ops.StatelessRandomNormalV2, shape, kind, seed)
    return drawn * tf.convert_to_tensor(stddev, kind) + tf.convert_to_tensor(mean, kind)


def whole_batch(own: Function, shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws for the whole batch, and takes this replica's rows."""
    here = _step_of_rows(_first(shape))
    if here is None:
        return own(shape, *args, **kwargs)
    return _taken(here, own, shape, *args, **kwargs)


def categorical(
    own: Function, logits: Any, num_samples: Any, dtype: Any = "int64", seed: Any = None
) -> Any:
    """Stands for `categorical`: draws the rows that one device would draw."""
    here = _step_of_rows(logits.shape[0], multiples=True)
    if here is None:
        return own(logits, num_samples, dtype, seed)
    return _taken(
        here, lambda _, whole: own(whole, num_samples, dtype, seed), tf.shape(logits), logits
    )


def _taken(here: ReplicaStep, draw: Function, shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns this replica's rows of what is drawn for the whole batch, with some parameters."""
    rows, *others = tf.unstack(shape) if tf.is_tensor(shape) else shape
    first = _first(shape)
    before, total = _place(here, rows, first)
    ends = [[before, total - before - rows], *([0, 0] for _ in others)]

    def of_whole(value: Any) -> Any:
        # What is drawn for a row depends on its place and its own parameters.
        has_axes = tf.is_tensor(value) and value.shape.rank == len(ends)
        of_rows = has_axes and value.shape[0] in (None, first)
        return tf.pad(value, ends, constant_values=1) if of_rows else value

    args, kwargs = tf.nest.map_structure(of_whole, (args, kwargs))
    return draw([total, *others], *args, **kwargs)[before : before + rows]


def _place(here: ReplicaStep, rows: Any, first: int | None) -> tuple[Any, Any]:
    """Returns where this replica's rows begin in the whole batch, and how many this has."""
    present = here.present_rows
    if first is None:  # Others, such as time steps, are equal on all replicas.
        per_row = rows // _as(present, rows)
        per_row = tf.where(per_row * _as(present, rows) == rows, per_row, 0)
        before, total = (_as(count, rows) * per_row for count in (here.before, here.total))
    else:
        before, total = (_as(count * first // present, rows) for count in (here.before, here.total))
    end = before + rows  # The row of a stand-in may come after all others.
    return before, tf.maximum(total, end) if tf.is_tensor(end) else max(total, end)


def _as(count: Any, like: Any) -> Any:
    return tf.cast(count, like.dtype) if tf.is_tensor(like) else count


def _first(shape: Any) -> Any:
    """Returns the first size in a shape: an int, or None if it is known only when a step runs."""
    if not tf.is_tensor(shape):
        first = next(iter(shape), 0)
        if not tf.is_tensor(first):
            return None if first is None else int(first)
        shape = [first]
    known = tf.zeros(shape[:1]).shape  # As of `tf.shape(inputs)[0]`, and of `tf.shape(inputs)[:2]`.
    return next(iter(known), 0) if known.rank is not None else None


def _step_of_rows(first: int | None, multiples: bool = False) -> ReplicaStep | None:
    """Returns the step if numbers with such a first size belong to the rows of its batch."""
    here = step.current_several()
    if here is None or here.rows is None:
        return None
    known = here.known_rows
    if first is None:  # `_place` compares them when the step runs.
        return here
    if known is None:  # A size that does not depend on the batch.
        return None
    sizes = {max(known, 1), *here.sizes}
    is_multiple = multiples and any(first % size == 0 for size in sizes)
    return here if first in sizes or is_multiple else None


def _rows_of(here: ReplicaStep, op: Function, shape: Any, dtype: tf.DType, seed: Any) -> tf.Tensor:
    """Draws this replica's rows of an op's numbers for the whole batch."""
    seed = keras_internals.seed_of(seed)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    draw = functools.partial(op, key=key, counter=counter, alg=_PHILOX, dtype=dtype)
    if dtype not in _FOUR_PER_COUNT or here.trace is not None:  # XLA draws in another order.
        return _taken(here, lambda whole: draw(shape=whole), shape)
    first, shape = _first(shape), tf.cast(tf.convert_to_tensor(shape), tf.int64)
    start = _place(here, shape[0], first)[0] * tf.reduce_prod(shape[1:])
    extra = start % 4
    moved = tf.stack([counter[0] + tf.cast(start // 4, tf.uint64), counter[1]])
    drawn = draw(shape=[tf.reduce_prod(shape) + extra], counter=moved)
    return tf.reshape(drawn[extra:], shape)
