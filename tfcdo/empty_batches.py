"""Replicas without examples: they change no moving statistic, and their NaN is not summed.

A layer such as `BatchNormalization` divides by the number of its examples. On a replica whose part
of a batch is empty, its statistics and the gradient of its scale are 0 / 0.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

_LOCAL = threading.local()  # TensorFlow traces each replica in a thread of its own.


@contextlib.contextmanager
def step_with(arguments: Sequence[tf.Tensor]) -> Iterator[None]:
    """Notes whether a replica has examples, while its step is traced with its batch's tensors."""
    before = vars(_LOCAL).copy()
    sizes = [tf.shape(one)[0] for one in arguments if one.shape.rank and one.shape[0] is None]
    _LOCAL.has_examples = tf.reduce_any(tf.stack(sizes) > 0) if sizes else None
    _LOCAL.has_statistics = False
    try:
        yield
    finally:
        vars(_LOCAL).clear()
        vars(_LOCAL).update(before)


def keep_statistic(variable: Any) -> None:
    """Has a distributed variable keep its number on a replica without examples."""
    variable.__class__ = _statistic_class(variable.__class__)


def without_nan(values: Any) -> Any:
    """Returns values of a replica to sum; NaN counts as 0 on a replica without examples."""
    # A step that assigns no moving statistic gets its values as they are.
    if not getattr(_LOCAL, "has_statistics", False):
        return values
    return tf.nest.map_structure(_without_nan, values)


def _without_nan(value: Any) -> Any:
    if not tf.is_tensor(value) or not value.dtype.is_floating:
        return value
    if isinstance(value, tf.IndexedSlices):
        return value  # It has no rows.
    keep = tf.logical_or(_LOCAL.has_examples, tf.math.is_finite(value))
    return tf.where(keep, value, tf.zeros([], value.dtype))


@functools.cache
def _statistic_class(variable_class: type[Any]) -> type[Any]:
    return type(variable_class.__name__, (_Statistic, variable_class), {})


class _Statistic:
    """The difference from TensorFlow's class of variables."""

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        has_examples = getattr(_LOCAL, "has_examples", None)
        if has_examples is not None and not tf.executing_eagerly():
            _LOCAL.has_statistics = True
            value = tf.cast(value, self.dtype)  # type: ignore[attr-defined]
            value = tf.where(has_examples, value, self.read_value())  # type: ignore[attr-defined]
        return super().assign(value, *args, **kwargs)  # type: ignore[misc]
