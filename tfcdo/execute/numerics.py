"""Numerics: additions, casts, and the last op on the sum at the root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo.plan import dtypes

_WIDER = {tf.as_dtype(dtype): tf.as_dtype(wide) for dtype, wide in dtypes.SUM_DTYPE.items()}


def upcast_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype that sums of values of a dtype are formed in."""
    return _WIDER.get(dtype, dtype)


def upcast(value: tf.Tensor) -> tf.Tensor:
    """Casts a value to the dtype that sums are formed in: 16-bit floats to 32 bits."""
    # Without a call where there is nothing to cast: with thousands of values it would be felt.
    return tf.cast(value, _WIDER[value.dtype]) if value.dtype in _WIDER else value


def cast(value: Any, dtype: tf.DType, device: str) -> Any:
    """Casts a tensor or `tf.IndexedSlices` on its own device; `""` if that is not known."""
    if value.dtype == dtype:
        return value
    if isinstance(value, tf.IndexedSlices):
        rows = cast(value.values, dtype, device)
        return tf.IndexedSlices(rows, value.indices, value.dense_shape)
    with tf.device(device or None):
        return tf.cast(value, dtype)


def add(values: Sequence[tf.Tensor], name: str | None = None) -> tf.Tensor:
    """Adds tensors of one shape on the current device, 16-bit floats in 32 bits.

    Each is of the values' dtype or already a partial sum; `name` is the op's name in a graph.
    """
    if len(values) == 1:
        return values[0]
    # All are tensors already, so there is nothing that tf.add_n has to convert or check.
    return tf.raw_ops.AddN(inputs=[upcast(value) for value in values], name=name)


def finish(total: tf.Tensor, divide: int | None, dtype: tf.DType) -> tf.Tensor:
    """Divides a sum, if it is for a mean, and rounds it to the dtype of the values."""
    if divide is not None:
        total = total / tf.cast(divide, total.dtype)
    return tf.cast(total, dtype) if dtype in _WIDER else total
