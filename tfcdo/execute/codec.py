"""The codec: how the values of a pack are cast where they are copied, and cast back.

Between devices, float32 and float64 may be rounded to 16 bits where they are copied, and between
hosts to 16 or 8 bits; sums are formed in their own dtype. docs/wire.md derives the error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo.execute import gradients, numerics
from tfcdo.execute.feedback import Residuals
from tfcdo.plan import dtypes
from tfcdo.plan.plan import Codec

# The dtypes that `wire_dtype=` and `wire_between=` accept.
WIRE_DTYPES = ("bfloat16", "float16")
BETWEEN_DTYPES = (*WIRE_DTYPES, "int8")
# The largest error of rounding to them: relative to the number; for int8, to the largest one of its
# block, which is sent as 127.
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": (1 + 2.0**-13) / 254}
# How to find the power of two in a float: the integer to read its bits as, and its exponent's bits.
_EXPONENT_BITS = {
    tf.float32: (tf.int32, 0x7F800000),
    tf.float64: (tf.int64, 0x7FF0000000000000),
}


def check_wire_dtype(name: str, value: Any, allowed: Sequence[str] = WIRE_DTYPES) -> str | None:
    """Returns the argument `name` as the name of one of the allowed dtypes, or None."""
    names = ", ".join(map(repr, allowed))
    accepted = f"{name} must be {names}, the tf.DType of one of them, or None"
    if value is None:
        return None
    if not isinstance(value, (str, tf.DType)):
        raise TypeError(f"{accepted}; got {value!r}")
    dtype = value if isinstance(value, str) else value.name
    if dtype not in allowed:
        raise ValueError(f"{accepted}; got {value!r}")
    return dtype


@dataclasses.dataclass(frozen=True)
class PackCodec:
    """The codec of one pack, with the rounding errors that its devices keep."""

    codec: Codec
    dtype: tf.DType  # Of the values.
    residuals: Residuals | None = None  # None without error feedback.
    pack: int = 0  # Its number.
    cast: str = ""  # Which of a pack's casts on one device; "" for copies between devices.

    def encode(self, tensors: Sequence[tf.Tensor], node: int) -> list[tf.Tensor]:
        """Encodes tensors on the current device, a node's; a scale, if any, comes last."""
        if not tensors:
            return []
        carried = self.carry(tensors, node)
        scale = scale_for(largest_magnitude(carried), self.codec) if self.codec.scale else None
        sent = self.round(carried, node, scale)
        return sent if scale is None else [*sent, scale]

    def decode(self, sent: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Makes the tensors again, on the current device, of a copy of the result of `encode`."""
        if not self.codec.scale or not sent:
            return [decode(bits, self.dtype) for bits in sent]
        *encoded, scale = sent
        return [decode(bits, self.dtype, scale) for bits in encoded]

    def encode_rows(self, rows: tf.Tensor, node: int) -> tf.Tensor:
        """Encodes shares `[rows, blocks, values]` as rows of float16, scales at the end of each."""
        # Collective ops copy neither bfloat16 nor int8.
        [carried] = self.carry([rows], node)
        scales = [block_scales(carried, self.codec)] if self.codec.scale else []
        sent = self.round([carried], node, *(scales or [None]))
        parts = [_as_halves(part, rows.shape[0]) for part in [*sent, *scales]]
        return parts[0] if len(parts) == 1 else tf.concat(parts, 1)

    def decode_rows(self, sent: tf.Tensor, blocks: Any, block: Any) -> tf.Tensor:
        """Makes shares of so many blocks of so many values again of rows of `encode_rows`."""
        wire = tf.as_dtype(self.codec.dtype)
        if not self.codec.scale:
            return decode(_from_halves(sent, wire, blocks, block), self.dtype)
        bits, scales = tf.split(sent, numerics.stack([blocks * block * wire.size // 2, -1]), 1)
        encoded = _from_halves(bits, wire, blocks, block)
        return decode(encoded, self.dtype, _from_halves(scales, self.dtype, blocks, 1))

    def carry(self, tensors: Sequence[tf.Tensor], node: int) -> list[tf.Tensor]:
        """Adds the rounding errors of the step before, on the current device."""
        if self.residuals is None:
            return list(tensors)
        errors = self.residuals.on(node, self.pack, tensors, self.cast)
        return [tensor + error.read_value() for tensor, error in zip(tensors, errors, strict=True)]

    def round(
        self, tensors: Sequence[tf.Tensor], node: int, scale: tf.Tensor | None
    ) -> list[tf.Tensor]:
        """Casts tensors to the wire's dtype, on the current device, and keeps the errors."""
        assert self.codec.dtype is not None
        sent = [encode(tensor, self.codec.dtype, scale) for tensor in tensors]
        if self.residuals is not None:
            errors = self.residuals.on(node, self.pack, tensors, self.cast)
            for error, tensor, bits in zip(errors, tensors, sent, strict=True):
                arrived = decode(bits, self.dtype, scale)
                # Infinity and NaN are not used where they arrive, so the old error is kept.
                error.assign(tf.where(tf.math.is_finite(arrived), tensor - arrived, error))
        return sent


def _as_halves(tensor: tf.Tensor, rows: int) -> tf.Tensor:
    """Returns the bits of a tensor's rows as rows of float16."""
    if tensor.dtype.size == 1:
        tensor = tf.reshape(tensor, numerics.int64([-1, 2]))
    return tf.reshape(tf.bitcast(tensor, tf.float16), numerics.int64([rows, -1]))


def _from_halves(halves: tf.Tensor, dtype: tf.DType, blocks: Any, block: Any) -> tf.Tensor:
    """Returns the tensor `[rows, blocks, block]` of a dtype that `_as_halves` has returned."""
    if dtype.size > 2:
        halves = tf.reshape(halves, numerics.int64([-1, dtype.size // 2]))
    return tf.reshape(tf.bitcast(halves, dtype), numerics.stack([-1, blocks, block]))


def block_scales(rows: tf.Tensor, codec: Codec) -> tf.Tensor:
    """Returns the scale of each block `[row, block]` of shares, as `[row, block, 1]`."""
    # For int8 it brings the largest magnitude to 127. It is NaN where a number is not finite, for
    # which int8 has no code: then all numbers of the block arrive as NaN.
    if codec.dtype != "int8":
        magnitudes = tf.where(tf.math.is_finite(rows), tf.abs(rows), tf.zeros_like(rows))
        return scale_for(tf.reduce_max(magnitudes, -1, keepdims=True), codec)
    # Each pass over the numbers costs time, and these three write nothing.
    largest = tf.maximum(
        tf.reduce_max(rows, -1, keepdims=True), -tf.reduce_min(rows, -1, keepdims=True)
    )
    # Finite if all numbers are: they are too small to overflow. Not every `reduce_max` passes NaN.
    small = tf.fill(numerics.stack([numerics.shape(rows)[-1]]), tf.constant(2.0**-10, rows.dtype))
    is_finite = tf.math.is_finite(tf.tensordot(rows, small, 1))[..., tf.newaxis]
    # Limited so that the scale for tiny numbers, or zeros, does not overflow.
    least = 2.0 ** (8 - dtypes.LARGEST_EXPONENT[rows.dtype.name])
    scales = 127 / tf.maximum(largest, tf.constant(least, rows.dtype))
    return tf.where(is_finite, scales, tf.constant(math.nan, rows.dtype))


def largest_magnitude(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the largest finite magnitude in tensors of one dtype, at least one; 0 for none."""
    zero = tf.constant(0, tensors[0].dtype)
    largest = [tf.reduce_max(tf.where(tf.math.is_finite(t), tf.abs(t), zero)) for t in tensors]
    # The zero matters for empty tensors, whose maximum is minus infinity.
    return tf.reduce_max(tf.stack([zero, *largest]))


def scale_for(largest: tf.Tensor, codec: Codec, num_terms: int = 1) -> tf.Tensor:
    """Returns the power of two that brings a magnitude just below the wire dtype's largest."""
    # Nothing overflows, few numbers are too small, and a power of two rounds nothing. `num_terms`
    # numbers of these magnitudes can then be added in the wire's dtype.
    dtype, wire = largest.dtype, codec.dtype
    assert wire is not None
    # Halved so that rounding the maximum up cannot overflow.
    power = _power_of_two(largest * (0.5 * (1 + ROUNDOFF[wire])))
    exponent = dtypes.LARGEST_EXPONENT[wire] - 1 - math.ceil(math.log2(num_terms))
    # Limited so that the scale for tiny numbers does not overflow.
    least = 2.0 ** (exponent - dtypes.LARGEST_EXPONENT[dtype.name] + 1)
    power = tf.maximum(power, tf.constant(least, dtype))
    return tf.constant(2.0**exponent, dtype) / power


def _power_of_two(number: tf.Tensor) -> tf.Tensor:
    """Returns the largest power of two that is not larger than a number; 0 for tiny ones."""
    integer, mask = _EXPONENT_BITS[number.dtype]
    bits = tf.bitwise.bitwise_and(tf.bitcast(number, integer), tf.constant(mask, integer))
    return tf.bitcast(bits, number.dtype)


def encode(tensor: tf.Tensor, wire_dtype: str, scale: tf.Tensor | None = None) -> tf.Tensor:
    """Casts a tensor to the wire's dtype; its gradient passes as it is, in the tensor's dtype."""
    scaled = tensor if scale is None else tensor * scale
    # A cast to an integer would cut the digits behind the point off.
    scaled = tf.round(scaled) if wire_dtype == "int8" else scaled
    return gradients.with_gradient_of(tf.cast(scaled, wire_dtype), tensor)


def decode(sent: tf.Tensor, dtype: tf.DType, scale: tf.Tensor | None = None) -> tf.Tensor:
    """Casts a copy of an encoded tensor back to its own dtype; nothing is rounded."""
    wide = tf.cast(sent, dtype)
    wide = wide if scale is None else wide / scale
    # The gradient of a cast would be cast to the wire's dtype, and several of them added in it.
    return gradients.with_gradient_of(wide, sent)
