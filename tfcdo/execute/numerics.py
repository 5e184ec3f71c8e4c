"""Numerics: the dtype that values are added in, and the final op on the sum at the root."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Adding K values in 16 bits rounds K - 1 times, and a large sum swallows small terms. Partial sums
# are therefore kept in 32 bits; only the root rounds, once.
_WIDER = {tf.float16: tf.float32, tf.bfloat16: tf.float32}


def dtype_of_sum(dtype: tf.DType) -> tf.DType:
    """Returns the dtype that sums of values of a dtype are formed in."""
    return _WIDER.get(dtype, dtype)


def widened(value: tf.Tensor) -> tf.Tensor:
    """Casts a value to the dtype that sums are formed in: 16-bit floats to 32 bits."""
    # Without a call where there is nothing to cast: with thousands of values it would be felt.
    return tf.cast(value, _WIDER[value.dtype]) if value.dtype in _WIDER else value


def dtype_of_mean(dtype: tf.DType) -> tf.DType:
    """Returns the dtype that the values of a mean are added in, before `add` widens them.

    A mean of integers is a float, and their sum might not fit the integers; as floats they keep
    every bit. 64-bit integers are summed as integers, then divided.
    """
    if not dtype.is_integer or dtype.size > 4:
        return dtype
    return tf.float32 if dtype.size <= 2 else tf.float64


def cast(value: Any, dtype: tf.DType, device: str) -> Any:
    """Casts a value on its own device.

    Args:
      value: a tensor or `tf.IndexedSlices`.
      dtype: the dtype.
      device: the device that the value is on; `""` if that is not known.

    Returns:
      The same numbers in the other dtype.
    """
    if isinstance(value, tf.IndexedSlices):
        rows = cast(value.values, dtype, device)
        return tf.IndexedSlices(rows, value.indices, value.dense_shape)
    with tf.device(device or None):
        return tf.cast(value, dtype)


def add(values: Sequence[tf.Tensor], name: str | None = None) -> tf.Tensor:
    """Adds tensors of one shape on the current device, 16-bit floats in 32 bits.

    Args:
      values: tensors of equal shapes; each either of the values' dtype or already a partial sum.
      name: the op's name in a graph.

    Returns:
      The (partial) sum; float32 for 16-bit floats, otherwise of the values' dtype.
    """
    if len(values) == 1:
        return values[0]
    # All are tensors already, so there is nothing that tf.add_n has to convert or check.
    return tf.raw_ops.AddN(inputs=[widened(value) for value in values], name=name)


@dataclasses.dataclass(frozen=True)
class FinalOp:
    """Divides and rounds a sum on the root before it is copied to all devices.

    Attributes:
      divisor: how many replicas to average over; None leaves the sum as it is.
    """

    divisor: int | None = None

    def __call__(self, total: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Divides, and rounds back to the values' dtype.

        Args:
          total: the sum of all replicas.
          dtype: the dtype of the replicas' values.

        Returns:
          The result; of `dtype`, but for the mean of integers, which is a float as in TensorFlow
          (float64 for 32 and 64 bits).
        """
        if self.divisor is not None:
            total = total / tf.cast(self.divisor, total.dtype)
        return tf.cast(total, dtype) if dtype in _WIDER else total
