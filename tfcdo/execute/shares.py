"""All-reduces between hosts in 16 bits: each host adds up a share of the values in full precision.

A ring that adds in 16 bits would round each partial sum. Here only the copies are rounded: every
host sends each other one its share of the values, in 16 bits; each adds its share, upcast; and the
sums go back to all, in 16 bits again. The bytes are half of a ring's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfcdo.execute import codec as codecs
from tfcdo.execute import numerics
from tfcdo.execute import tensors as shapes
from tfcdo.plan.plan import SHARE_ALIGNMENT, Codec

# Exchanges rows of one dtype that TensorFlow's collective ops copy, with a row for each host.
Collective = Callable[[tf.Tensor], tf.Tensor]


def all_reduce(
    tensors: Sequence[tf.Tensor],
    codec: Codec,
    num_hosts: int,
    all_to_all: Collective,
    gather: Collective,
) -> list[tf.Tensor]:
    """Adds up the tensors of all hosts, on the current device.

    Each value is rounded once on its host and the sum of all once more; sums are formed in the
    values' own dtype. NaN and infinity stay as they are. All hosts, also the one that forms a sum,
    take it as it is sent, so they get bitwise the same.

    Args:
      tensors: the tensors of a pack, all float32 or all float64; of the same shapes on all hosts.
      codec: how they are encoded.
      num_hosts: the number of hosts.
      all_to_all: sends row `h` to host `h`, and returns the rows that arrive, in their order.
      gather: concatenates the one row that each host gives.
    """
    assert codec.dtype is not None
    dtype, scale = tensors[0].dtype, codecs.scale_for(tensors, codec)
    padding = _padding(tensors, codec.dtype, num_hosts)
    # Cast before they are laid end to end, and back after they are cut: half as much is copied.
    parts = [shapes.flatten(codecs.encode(tensor, codec.dtype, scale)) for tensor in tensors]
    parts += padding
    flat = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
    rows = tf.reshape(flat, shapes.int64([num_hosts, -1]))
    arrived = _received(all_to_all(_sent(rows, scale)), codec, dtype)
    total = numerics.add([tf.cast(row, dtype) for row in tf.unstack(arrived, num_hosts)])
    scale = codecs.scale_for([total], codec)
    share = codecs.encode(total, codec.dtype, scale)[tf.newaxis]
    sums = shapes.flatten(_received(gather(_sent(share, scale)), codec, dtype))
    parts = shapes.cut_like(sums, [*tensors, *padding])
    return [tf.cast(part, dtype) for part in parts[: len(tensors)]]


def _padding(tensors: Sequence[tf.Tensor], wire_dtype: str, num_hosts: int) -> list[tf.Tensor]:
    """Returns the zeros that make shares equal and aligned: one tensor of them, or none."""
    unit = num_hosts * SHARE_ALIGNMENT
    known = [tensor.shape.num_elements() for tensor in tensors]
    if None not in known:
        missing = -sum(known) % unit
        return [tf.zeros([missing], wire_dtype)] if missing else []
    size = tf.reduce_sum(tf.stack([shapes.size(tensor) for tensor in tensors]))
    # Without values one unit of zeros is sent, as a collective needs data.
    return [tf.zeros([tf.where(size > 0, -size % unit, unit)], wire_dtype)]


def _sent(rows: tf.Tensor, scale: tf.Tensor | None) -> tf.Tensor:
    """Returns encoded rows as they are sent, with the bits of a scale at their ends."""
    # TensorFlow's collective ops take no bfloat16.
    bits = tf.bitcast(rows, tf.float16)
    if scale is None:
        return bits
    end = tf.bitcast(scale, tf.float16)
    ends = tf.broadcast_to(end, shapes.int64([rows.shape[0], scale.dtype.size // 2]))
    return tf.concat([bits, ends], axis=1)


def _received(rows: tf.Tensor, codec: Codec, dtype: tf.DType) -> tf.Tensor:
    """Returns the numbers of rows that `_sent` has made: in the wire's dtype if it needs no scale.

    A tensor may lie in several rows, which have scales of their own, so these are decoded here.
    """
    if not codec.scale:
        return tf.bitcast(rows, codec.dtype)
    length = dtype.size // 2
    scale = tf.bitcast(rows[:, -length:], dtype)[:, tf.newaxis]
    return codecs.decode(tf.bitcast(rows[:, :-length], codec.dtype), dtype, scale)
