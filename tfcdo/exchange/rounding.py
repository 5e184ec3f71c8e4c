"""The numerics of casts to 16 and 8 bits: scales, casts there and back, and the sum of shares.

They serve the exchanges and the copies between devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfcdo.exchange import dtypes
from tfcdo.exchange.protocol import Peers

# The largest error of rounding to a dtype: relative to the number; for int8, to the largest one of
# its block, which is sent as 127.
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": (1 + 2.0**-13) / 254}
# How to find the power of two in a float: the integer to read its bits as, and its exponent's bits.
_EXPONENT_BITS = {tf.float32: (tf.int32, 0x7F800000), tf.float64: (tf.int64, 0x7FF0000000000000)}


def sum_of_shares(
    flat: tf.Tensor,
    wire: str,
    layout: tuple[int, int],
    state: Mapping[str, tf.Tensor],
    peers: Peers,
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Adds up the hosts' vectors, encoded; returns the sum and the errors, if any are kept."""
    host, hosts = peers.rank, peers.size
    [size] = flat.shape
    if missing := hosts * math.prod(layout) - size:
        flat = tf.concat([flat, tf.zeros(int64(missing), flat.dtype)], 0)
    rows = tf.reshape(flat, int64(hosts, *layout))

    def of_others(by_host: tf.Tensor) -> tf.Tensor:
        ranges = ((0, host), (host + 1, hosts))  # A slice is not copied.
        return tf.concat([by_host[begin:end] for begin, end in ranges if begin < end], 0)

    errors = {}
    encoded, errors["shares"] = _encode_rows(of_others(rows), wire, state.get("shares"))
    # The collective takes a row for each host, also for this one.
    encoded = tf.concat([encoded[:host], tf.zeros_like(encoded[:1]), encoded[host:]], 0)
    arrived = _decode_rows(of_others(peers.all_to_all(encoded)), wire, flat.dtype, layout)
    total = tf.raw_ops.AddN(inputs=[rows[host], *tf.unstack(arrived, hosts - 1)])
    encoded, errors["sums"] = _encode_rows(total[tf.newaxis], wire, state.get("sums"))
    sums = _decode_rows(peers.all_gather(encoded), wire, flat.dtype, layout)
    result = tf.reshape(sums, int64(-1))
    if missing:
        result = tf.slice(result, int64(0), int64(size))
    return result, {name: errors[name] for name in state}


def _encode_rows(
    rows: tf.Tensor, wire: str, error: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Encodes shares `[rows, blocks, values]` as rows of float16 that end in scales; and errors."""
    carried = rows if error is None else rows + error
    needs_scale = dtypes.needs_scale(wire, rows.dtype.name)
    scales = [_block_scales(carried, wire)] if needs_scale else []
    sent = encode(carried, wire, *scales)
    if error is not None:
        error = rounding_error(carried, decode(sent, rows.dtype, *scales), error)
    parts = [_as_halves(part, rows.shape[0]) for part in [sent, *scales]]
    return parts[0] if len(parts) == 1 else tf.concat(parts, 1), error


def _decode_rows(sent: tf.Tensor, wire: str, dtype: tf.DType, layout: tuple[int, int]) -> tf.Tensor:
    """Returns shares `[rows, blocks, values]` of rows of `_encode_rows`."""
    blocks, block = layout
    cast_to = tf.as_dtype(wire)
    if not dtypes.needs_scale(wire, dtype.name):
        return decode(_from_halves(sent, cast_to, blocks, block), dtype)
    bits, scales = tf.split(sent, int64(blocks * block * cast_to.size // 2, -1), 1)
    encoded = _from_halves(bits, cast_to, blocks, block)
    return decode(encoded, dtype, _from_halves(scales, dtype, blocks, 1))


def _as_halves(tensor: tf.Tensor, rows: int) -> tf.Tensor:
    """Returns the bits of a tensor's rows as rows of float16."""
    if tensor.dtype.size == 1:
        tensor = tf.reshape(tensor, int64(-1, 2))
    return tf.reshape(tf.bitcast(tensor, tf.float16), int64(rows, -1))


def _from_halves(halves: tf.Tensor, dtype: tf.DType, blocks: int, block: int) -> tf.Tensor:
    """Returns the tensor `[rows, blocks, block]` of a dtype that `_as_halves` has returned."""
    if dtype.size > 2:
        halves = tf.reshape(halves, int64(-1, dtype.size // 2))
    return tf.reshape(tf.bitcast(halves, dtype), int64(-1, blocks, block))


def _block_scales(rows: tf.Tensor, wire: str) -> tf.Tensor:
    """Returns the scale of each block `[row, block]` of shares, as `[row, block, 1]`."""
    # For int8 it brings the largest magnitude to 127. It is NaN where a number is not finite, for
    # which int8 has no code: then all numbers of the block arrive as NaN.
    if wire != "int8":
        magnitudes = tf.where(tf.math.is_finite(rows), tf.abs(rows), tf.zeros_like(rows))
        return scale_for(tf.reduce_max(magnitudes, -1, keepdims=True), wire)
    # Each pass over the numbers costs time, and these three write nothing.
    largest = tf.maximum(
        tf.reduce_max(rows, -1, keepdims=True), -tf.reduce_min(rows, -1, keepdims=True)
    )
    # Finite if all numbers are: they are too small to overflow. Not every `reduce_max` passes NaN.
    small = tf.fill(int64(rows.shape[-1]), tf.constant(2.0**-10, rows.dtype))
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


def scale_for(largest: tf.Tensor, wire: str, num_terms: int = 1) -> tf.Tensor:
    """Returns the power of two that brings a magnitude just below the wire dtype's largest."""
    # Nothing overflows, few numbers are too small, and a power of two rounds nothing. `num_terms`
    # numbers of these magnitudes can then be added in the wire's dtype.
    dtype = largest.dtype
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


def encode(tensor: tf.Tensor, wire: str, scale: tf.Tensor | None = None) -> tf.Tensor:
    """Casts a tensor to the wire's dtype."""
    scaled = tensor if scale is None else tensor * scale
    # A cast to an integer would cut the digits behind the point off.
    return tf.cast(tf.round(scaled) if wire == "int8" else scaled, wire)


def decode(sent: tf.Tensor, dtype: tf.DType, scale: tf.Tensor | None = None) -> tf.Tensor:
    """Casts a copy of an encoded tensor back to its own dtype; nothing is rounded."""
    wide = tf.cast(sent, dtype)
    return wide if scale is None else wide / scale


def rounding_error(carried: tf.Tensor, arrived: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """Returns the difference of values and what arrives, to add to the values of the next step."""
    # Infinity and NaN are not used where they arrive, so the old error is kept.
    return tf.where(tf.math.is_finite(arrived), carried - arrived, before)


def orthonormal(matrix: tf.Tensor) -> tf.Tensor:
    """Returns orthonormal columns that span a tall matrix's columns, and any for columns of 0."""
    # Scaled, so that no square overflows.
    least = 2.0 ** (1 - dtypes.LARGEST_EXPONENT[matrix.dtype.name])
    return tf.linalg.qr(matrix / tf.maximum(tf.reduce_max(tf.abs(matrix)), least))[0]


def finite_or(tensor: tf.Tensor, otherwise: tf.Tensor) -> tf.Tensor:
    """Returns a tensor if all its elements are finite, else the other one."""
    return tf.where(tf.math.is_finite(tf.reduce_sum(tf.abs(tensor))), tensor, otherwise)


def laid_out(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns tensors laid end to end, as one vector."""
    flat = [each if each.shape.rank == 1 else tf.reshape(each, int64(-1)) for each in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


def cut(flat: tf.Tensor, shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
    """Cuts a vector into tensors of some shapes, which are laid end to end in it."""
    parts = tf.split(flat, int64(*map(math.prod, shapes)), num=len(shapes))
    return [tf.reshape(part, int64(*shape)) for part, shape in zip(parts, shapes, strict=True)]


def int64(*numbers: Any) -> tf.Tensor:
    """Returns sizes or a shape as an op takes them."""
    # TensorFlow 2.21 mixes up 32-bit ones: of eager ops that several threads run on a virtual CPU
    # device, one may get the sizes that were meant for another.
    return tf.constant(numbers, tf.int64)
