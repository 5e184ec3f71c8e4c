"""The wire: how values are cast to travel, and what TensorFlow's collective ops take.

Between devices, float32 and float64 may be cast to 16 bits where they are copied, which rounds
them; `docs/wire.md` derives the error. Between hosts, every dtype has to be one that a collective
op takes, which loses nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcdo import tf_internals

# What `CollectiveReduceV2` adds, or what to turn other dtypes into for it, losing nothing: sums of
# integers are right modulo their size in wider ones too, and a complex number is two real ones.
_SUMMED_AS = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}
_SUMMED_BITS = {tf.uint64: tf.int64, tf.complex64: tf.float32, tf.complex128: tf.float64}
# The same for ops that only copy.
_COPIED_AS = {tf.bool: tf.int32, tf.int8: tf.int32, tf.uint8: tf.int32}
_COPIED_BITS = {
    tf.bfloat16: tf.float16,
    tf.int16: tf.float16,
    tf.uint16: tf.float16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
    tf.complex128: tf.float64,
}


def as_summed(tensor: tf.Tensor) -> tf.Tensor:
    """Turns a tensor into a dtype that `CollectiveReduceV2` adds, losing nothing."""
    if tensor.dtype in _SUMMED_BITS:
        return tf.bitcast(tensor, _SUMMED_BITS[tensor.dtype])
    return tf.cast(tensor, _SUMMED_AS.get(tensor.dtype, tensor.dtype))


def dtype_copied(dtype: tf.DType) -> tf.DType:
    """Returns the dtype that `as_copied` turns tensors of a dtype into."""
    return _COPIED_BITS.get(dtype, _COPIED_AS.get(dtype, dtype))


def as_copied(tensor: tf.Tensor) -> tf.Tensor:
    """Turns a tensor into a dtype that TensorFlow's other collective ops copy, losing nothing."""
    if tensor.dtype in _COPIED_BITS:
        return tf.bitcast(tensor, _COPIED_BITS[tensor.dtype])
    return tf.cast(tensor, _COPIED_AS.get(tensor.dtype, tensor.dtype))


def from_wire(received: tf.Tensor, like: tf.Tensor, summed: bool = False) -> tf.Tensor:
    """Turns what travelled back into the dtype that was sent; sums of 16-bit floats stay wide.

    Args:
      received: the result of a collective.
      like: the tensor that was sent, before it was turned into another dtype.
      summed: whether it was added on its way.
    """
    if like.dtype in (_SUMMED_BITS if summed else _COPIED_BITS):
        return tf.bitcast(received, like.dtype)
    if summed and like.dtype in (tf.float16, tf.bfloat16):
        return received
    return tf.cast(received, like.dtype)


# What `wire_dtype=` takes.
WIRE_DTYPES = {"bfloat16": tf.bfloat16, "float16": tf.float16}
# Values of these dtypes are cast to travel; others, 16-bit ones among them, travel as they are.
_CAST = (tf.float32, tf.float64)


@dataclasses.dataclass(frozen=True)
class _Format:
    """Describes a dtype of floats.

    Attributes:
      roundoff: the largest relative error of rounding to it, u.
      exponent: that of its largest power of two.
      lost: the largest absolute error of rounding a number too small to be a normal one. For
        bfloat16 it is that of setting such numbers to 0, as TensorFlow's CPU kernels may.
    """

    roundoff: float
    exponent: int
    lost: float


_FORMATS = {
    tf.bfloat16: _Format(2.0**-8, 127, 2.0**-126),
    tf.float16: _Format(2.0**-11, 15, 2.0**-25),
    tf.float32: _Format(2.0**-24, 127, 2.0**-126),
    tf.float64: _Format(2.0**-53, 1023, 2.0**-1022),
}
# How to find the power of two in a float: as which integers its bits are read, and its exponent's.
_EXPONENT_BITS = {
    tf.float32: (tf.int32, 0x7F800000),
    tf.float64: (tf.int64, 0x7FF0000000000000),
}


def check_wire_dtype(name: str, value: Any) -> tf.DType | None:
    """Returns the argument `name` as a dtype to travel in, or None.

    Args:
      name: the argument's name, for the message.
      value: "bfloat16", "float16", one of these as a `tf.DType`, or None.

    Raises:
      TypeError: if it is something else than a string, a dtype or None.
      ValueError: if it is another dtype.
    """
    accepted = f"{name} must be 'bfloat16', 'float16', the tf.DType of one of them, or None"
    if value is None:
        return None
    if not isinstance(value, (str, tf.DType)):
        raise TypeError(f"{accepted}; got {value!r}")
    found = WIRE_DTYPES.get(value if isinstance(value, str) else value.name)
    if found is None:
        raise ValueError(f"{accepted}; got {value!r}")
    return found


def is_cast(dtype: tf.DType) -> bool:
    """Returns whether values of a dtype are cast where there is a wire dtype."""
    return dtype in _CAST


def needs_scale(wire_dtype: tf.DType, dtype: tf.DType) -> bool:
    """Returns whether the wire dtype does not have the range of the values' dtype."""
    return _FORMATS[wire_dtype].exponent < _FORMATS[dtype].exponent


def scale_for(
    tensors: Sequence[tf.Tensor], wire_dtype: tf.DType, num_terms: int = 1
) -> tf.Tensor | None:
    """Returns the power of two that numbers are multiplied by before they are cast.

    It brings the largest finite magnitude just below the largest number of the wire dtype: nothing
    overflows, as little as possible is too small, and a power of two rounds nothing.

    Args:
      tensors: tensors of one dtype on the current device, at least one.
      wire_dtype: what they will be cast to.
      num_terms: how many numbers of these magnitudes must not overflow when they are added in the
        wire dtype; 1 where they are added after they have been decoded.

    Returns:
      A scalar of the tensors' dtype; None if the wire dtype has the range of the tensors'.
    """
    if not needs_scale(wire_dtype, tensors[0].dtype):
        return None
    return scale_for_largest(largest_magnitude(tensors), wire_dtype, num_terms)


def largest_magnitude(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the largest finite magnitude in tensors of one dtype, at least one; 0 for none."""
    zero = tf.constant(0, tensors[0].dtype)
    largest = [
        tf.reduce_max(tf.where(tf.math.is_finite(one), tf.abs(one), zero)) for one in tensors
    ]
    # Of no numbers at all, the largest is minus infinity.
    return tf.reduce_max(tf.stack([zero, *largest]))


def scale_for_largest(largest: tf.Tensor, wire_dtype: tf.DType, num_terms: int = 1) -> tf.Tensor:
    """Returns the power of two that `scale_for` returns for tensors.

    Args:
      largest: the largest finite magnitude in them; a scalar of their dtype.
      wire_dtype: as for `scale_for`.
      num_terms: as for `scale_for`.
    """
    dtype = largest.dtype
    wire, wide = _FORMATS[wire_dtype], _FORMATS[dtype]
    # One half, lest it overflows, of the number that the largest one may be rounded up to.
    power = _power_of_two(largest * (0.5 * (1 + wire.roundoff)))
    exponent = wire.exponent - 1 - math.ceil(math.log2(num_terms))
    # Limited, lest a scale for tiny numbers overflows.
    power = tf.maximum(power, tf.constant(2.0 ** (exponent - wide.exponent + 1), dtype))
    return tf.constant(2.0**exponent, dtype) / power


def _power_of_two(number: tf.Tensor) -> tf.Tensor:
    """Returns the largest power of two that is not larger than a number; 0 for tiny ones."""
    integer, mask = _EXPONENT_BITS[number.dtype]
    bits = tf.bitwise.bitwise_and(tf.bitcast(number, integer), tf.constant(mask, integer))
    return tf.bitcast(bits, number.dtype)


def encode(tensor: tf.Tensor, wire_dtype: tf.DType, scale: tf.Tensor | None = None) -> tf.Tensor:
    """Casts a tensor to the wire's dtype, on the current device, before it is copied.

    NaN and infinity stay what they are. The gradient passes as it is, in the tensor's own dtype.

    Args:
      tensor: a tensor of float32 or float64.
      wire_dtype: bfloat16 or float16.
      scale: what `scale_for` says, of this tensor and those that travel with it.

    Returns:
      The nearest numbers of the wire dtype to the tensor times the scale.
    """
    scaled = tensor if scale is None else tensor * scale
    return tf_internals.with_gradient_of(tf.cast(scaled, wire_dtype), tensor)


def decode(sent: tf.Tensor, dtype: tf.DType, scale: tf.Tensor | None = None) -> tf.Tensor:
    """Casts what was copied back to its own dtype, on the current device; nothing is rounded.

    Args:
      sent: what `encode` returned, or a copy of it.
      dtype: the dtype of the tensor that was encoded.
      scale: the scale that it was encoded with, or a copy of it.
    """
    wide = tf.cast(sent, dtype)
    wide = wide if scale is None else wide / scale
    # The gradient of a cast would be cast to 16 bits, and several of them added in 16 bits.
    return tf_internals.with_gradient_of(wide, sent)


def roundoff(wire_dtype: tf.DType, dtype: tf.DType = tf.float32) -> float:
    """Returns the largest relative error of one cast to the wire's dtype.

    TensorFlow casts float64 to 16 bits by way of float32, so such numbers are rounded twice.
    """
    once = _FORMATS[wire_dtype].roundoff
    return once if dtype == tf.float32 else once * (1 + 2.0**-12)


def error_bound(
    magnitudes: Any,
    depth: int,
    num_devices: int,
    wire_dtype: tf.DType,
    dtype: tf.DType = tf.float32,
) -> np.ndarray:
    """Bounds the error of a sum or mean over copy trees whose copies are cast.

    A value is rounded on each of the at most `depth` edges to the root, as part of a partial sum,
    and once more at the root, as part of the result; in between it is added up to K - 1 times and
    divided once, in its own dtype. With u and v the two roundoffs, its part in the result is
    therefore wrong by at most (1 + u)^(depth + 1) (1 + v)^K - 1, relative to its magnitude. What
    is too small to be a normal number is rounded with an absolute error instead, on at most K
    devices.

    Args:
      magnitudes: the sum over the devices of the absolute values of a pack, of each element; or
        the mean, for a mean.
      depth: the most edges between the root and a device, over all packs; 1 for one device.
      num_devices: the number of devices, K.
      wire_dtype: bfloat16 or float16.
      dtype: the values' dtype.

    Returns:
      The bound of the absolute error of each element, as float64. It holds where no partial sum is
      so near the largest number of its own dtype that the nearest one of the wire's is infinity:
      closer than half of the wire's roundoff.

    References:
      Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, 2002, chapter 4.

    Example:
      >>> error_bound([4.0], 1, 4, tf.bfloat16) < 0.032
      array([ True])
    """
    magnitudes = np.asarray(magnitudes, np.float64)
    wire, wide = _FORMATS[wire_dtype], _FORMATS[dtype]
    growth = (1 + roundoff(wire_dtype, dtype)) ** (depth + 1) * (1 + wide.roundoff) ** num_devices
    lost = wide.lost
    if needs_scale(wire_dtype, dtype):
        # A scale leaves the largest magnitude at least at half of 2^exponent, less one rounding.
        largest = np.max(magnitudes, initial=0.0)
        lost += wire.lost * largest * (1 + wire.roundoff) * 2.0**-wire.exponent
    else:
        lost += wire.lost
    return np.asarray((growth - 1) * magnitudes + num_devices * growth * lost)


def feedback_error_bound(
    magnitudes_by_step: Any,
    depth: int,
    num_devices: int,
    wire_dtype: tf.DType,
    dtype: tf.DType = tf.float32,
) -> np.ndarray:
    """Bounds by how much the sum of all results differs from that of all values, with feedback.

    Each cast hands on, in the next step, exactly what it has lost, so after any number of steps
    only the residuals are missing: what the casts of one step lose. They are added to values that
    are cast, so they are themselves part of what is rounded: with c the bound of one step, relative
    to the magnitudes, they are at most c / (1 - c) of the largest. Additions in the values' own
    dtype round in every step, and that is not fed back.

    Args:
      magnitudes_by_step: `magnitudes` of `error_bound` for each step, along the first axis.
      depth: as for `error_bound`.
      num_devices: the same.
      wire_dtype: the same.
      dtype: the same.

    Returns:
      The bound of the absolute difference of each element, as float64.

    References:
      Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
      ICML 2019, whose lemma 3 bounds the residual of any such cast.
    """
    magnitudes = np.asarray(magnitudes_by_step, np.float64)
    wide = _FORMATS[dtype]
    growth = (1 + roundoff(wire_dtype, dtype)) ** (depth + 1) * (1 + wide.roundoff) ** num_devices
    once = error_bound(np.max(magnitudes, 0), depth, num_devices, wire_dtype, dtype)
    held = once / (2 - growth)
    added = np.sum(magnitudes + held, 0) * wide.roundoff + len(magnitudes) * wide.lost
    return np.asarray(held + 2 * num_devices * added)
