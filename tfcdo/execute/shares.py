"""All-reduces between hosts in 16 bits: each host adds up a share of the values in full precision.

A ring that adds in 16 bits would round each partial sum. Here only what travels is rounded: every
host sends each other one its share of the values, in 16 bits; each adds what it gets, widened; and
the sums go back to all, in 16 bits again. The bytes are those of a ring in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfcdo.execute import numerics
from tfcdo.execute import packs
from tfcdo.execute import wire

# Below this a pack of values travels as it is: the second collective would cost more than half of
# its bytes save, and counts and other scalars keep all their digits.
MIN_BYTES = 4096
# Shares are a multiple of this many values, 64 bytes: TensorFlow takes a tensor apart without
# copying it where the parts are aligned. What is added to a share is less than a message's header.
_ALIGNED = 32

# Exchanges rows of one dtype that TensorFlow's collective ops copy, with a row for each host.
Collective = Callable[[tf.Tensor], tf.Tensor]


def all_reduce(
    tensors: Sequence[tf.Tensor],
    wire_dtype: tf.DType,
    num_hosts: int,
    all_to_all: Collective,
    gather: Collective,
) -> list[tf.Tensor]:
    """Adds up what all hosts hold, on the current device.

    Each value is rounded once on its host and the sum of all once more; sums are formed in the
    values' own dtype. NaN and infinity stay what they are.

    Args:
      tensors: the tensors of a pack, all float32 or all float64; of the same shapes on all hosts.
      wire_dtype: bfloat16 or float16, in which the values travel.
      num_hosts: the number of hosts.
      all_to_all: sends row `h` to host `h`, and returns the rows that arrive, in their order.
      gather: concatenates the one row that each host gives.

    Returns:
      The sums, of the tensors' dtype and shapes: the same bits on every host, as also the host that
      forms a sum takes it as it travels.
    """
    dtype, scale = tensors[0].dtype, wire.scale_for(tensors, wire_dtype)
    padding = _padding(tensors, wire_dtype, num_hosts)
    # Cast before they are laid end to end, and back after they are cut: half as much is copied.
    parts = [packs.flatten(wire.encode(tensor, wire_dtype, scale)) for tensor in tensors]
    parts += padding
    flat = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
    rows = tf.reshape(flat, packs.int64([num_hosts, -1]))
    arrived = _received(all_to_all(_sent(rows, scale)), wire_dtype, dtype)
    total = numerics.add([tf.cast(row, dtype) for row in tf.unstack(arrived, num_hosts)])
    scale = wire.scale_for([total], wire_dtype)
    share = wire.encode(total, wire_dtype, scale)[tf.newaxis]
    sums = packs.flatten(_received(gather(_sent(share, scale)), wire_dtype, dtype))
    parts = packs.cut_like(sums, [*tensors, *padding])
    return [tf.cast(part, dtype) for part in parts[: len(tensors)]]


def _padding(tensors: Sequence[tf.Tensor], wire_dtype: tf.DType, num_hosts: int) -> list[tf.Tensor]:
    """Returns the zeros that make shares equal and aligned: one tensor of them, or none."""
    unit = num_hosts * _ALIGNED
    known = [tensor.shape.num_elements() for tensor in tensors]
    if None not in known:
        missing = -sum(known) % unit
        return [tf.zeros([missing], wire_dtype)] if missing else []
    size = tf.reduce_sum(tf.stack([packs.size(tensor) for tensor in tensors]))
    # Of no values at all, something has to travel too.
    return [tf.zeros([tf.where(size > 0, -size % unit, unit)], wire_dtype)]


def _sent(rows: tf.Tensor, scale: tf.Tensor | None) -> tf.Tensor:
    """Returns encoded rows as they travel, with the bits of their scale, if any, at their ends."""
    # TensorFlow's collective ops take no bfloat16.
    bits = tf.bitcast(rows, tf.float16)
    if scale is None:
        return bits
    end = tf.bitcast(scale, tf.float16)
    ends = tf.broadcast_to(end, packs.int64([rows.shape[0], scale.dtype.size // 2]))
    return tf.concat([bits, ends], axis=1)


def _received(rows: tf.Tensor, wire_dtype: tf.DType, dtype: tf.DType) -> tf.Tensor:
    """Returns the numbers of rows that `_sent` has made: in the wire's dtype if it needs no scale.

    A tensor may lie in several rows, which have scales of their own, so these are decoded here.
    """
    if not wire.needs_scale(wire_dtype, dtype):
        return tf.bitcast(rows, wire_dtype)
    length = dtype.size // 2
    scale = tf.bitcast(rows[:, -length:], dtype)[:, tf.newaxis]
    return wire.decode(tf.bitcast(rows[:, :-length], wire_dtype), dtype, scale)
