"""All-reduces between hosts in 16 bits: each host adds up a share of the values in full precision.

A ring that adds in 16 bits would round each partial sum. Here only what travels is rounded: every
host sends each other one its share of the values, in 16 bits; each adds what it gets, widened; and
the sums go back to all, in 16 bits again. The bytes are those of a ring in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfcdo.execute import numerics
from tfcdo.execute import packs
from tfcdo.execute import wire

# Below this a pack of values travels as it is: the second collective would cost more than half of
# its bytes save, and counts and other scalars keep all their digits.
MIN_BYTES = 4096

# Exchanges rows of one dtype that TensorFlow's collective ops copy, with a row for each host.
Collective = Callable[[tf.Tensor], tf.Tensor]


def all_reduce(
    flat: tf.Tensor,
    wire_dtype: tf.DType,
    num_hosts: int,
    all_to_all: Collective,
    gather: Collective,
) -> tf.Tensor:
    """Adds up what all hosts hold, on the current device.

    Each value is rounded once on its host and the sum of all once more; sums are formed in the
    values' own dtype. NaN and infinity stay what they are.

    Args:
      flat: a tensor of float32 or float64 with one axis, of one size on all hosts.
      wire_dtype: bfloat16 or float16, in which the values travel.
      num_hosts: the number of hosts.
      all_to_all: sends row `h` to host `h`, and returns the rows that arrive, in their order.
      gather: concatenates the one row that each host gives.

    Returns:
      The sums, of `flat`'s dtype and size: the same bits on every host, as also the host that forms
      a sum takes it as it travels.
    """
    size = tf.size(flat, tf.int64) if flat.shape[0] is None else packs.int64(flat.shape)[0]
    share = tf.maximum((size + num_hosts - 1) // num_hosts, 1)
    divides = flat.shape[0] and flat.shape[0] % num_hosts == 0
    padded = flat if divides else tf.pad(flat, [[0, share * num_hosts - size]])
    shares = tf.reshape(padded, tf.stack([num_hosts, share]))
    arrived = _decoded(all_to_all(_encoded(shares, wire_dtype)), wire_dtype, flat.dtype)
    total = numerics.add(tf.unstack(arrived, num_hosts))[tf.newaxis]
    sums = _decoded(gather(_encoded(total, wire_dtype)), wire_dtype, flat.dtype)
    result = tf.reshape(sums, [-1])[:size]
    result.set_shape(flat.shape)
    return result


def _encoded(rows: tf.Tensor, wire_dtype: tf.DType) -> tf.Tensor:
    """Casts rows to 16 bits, with the bits of their scale, if there is one, at the end of each."""
    scale = wire.scale_for([rows], wire_dtype)
    # TensorFlow's collective ops take no bfloat16.
    bits = tf.bitcast(wire.encode(rows, wire_dtype, scale), tf.float16)
    if scale is None:
        return bits
    ends = tf.broadcast_to(tf.bitcast(scale, tf.float16), [tf.shape(rows)[0], rows.dtype.size // 2])
    return tf.concat([bits, ends], axis=1)


def _decoded(rows: tf.Tensor, wire_dtype: tf.DType, dtype: tf.DType) -> tf.Tensor:
    """Returns rows that `_encoded` has made, each perhaps on another host, in a dtype again."""
    if not wire.needs_scale(wire_dtype, dtype):
        return wire.decode(tf.bitcast(rows, wire_dtype), dtype)
    length = dtype.size // 2
    scale = tf.bitcast(rows[:, -length:], dtype)[:, tf.newaxis]
    return wire.decode(tf.bitcast(rows[:, :-length], wire_dtype), dtype, scale)
