"""All-reduces between hosts in 16 or 8 bits: each host adds up a share of the values.

A ring that adds in 16 bits would round each partial sum. Here only the copies are rounded: every
host sends each other one its share of the values, encoded; each adds its share, in the values' own
dtype; and the sums go back to all, encoded again. The bytes are half of a ring's, or a quarter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfcdo.execute import numerics
from tfcdo.execute.codec import PackCodec

# Exchanges rows of one dtype that TensorFlow's collective ops copy, with a row for each host.
Collective = Callable[[tf.Tensor], tf.Tensor]


def all_reduce(
    tensor: tf.Tensor,
    codec: PackCodec,
    node: int,
    num_hosts: int,
    all_to_all: Collective,
    gather: Collective,
) -> tf.Tensor:
    """Adds up the tensors of all hosts, of one shape, on the current device: a node.

    Each value is rounded once on its host and the sum of all once more. All hosts, also the one
    that forms a sum, take it as it is sent, so they get bitwise the same. `all_to_all` sends row
    `h` to host `h` and returns the rows that arrive; `gather` concatenates the hosts' rows.
    """
    # An int if it is known. Without values zeros are sent, as a collective needs data.
    known = tensor.shape.num_elements()
    size = tf.size(tensor, tf.int64) if known is None else known
    some = max(size, 1) if known is not None else tf.maximum(size, tf.constant(1, tf.int64))
    blocks, block = codec.codec.share_layout(some, num_hosts)

    def copied(rows: tf.Tensor, cast: str, collective: Collective) -> tf.Tensor:
        own = dataclasses.replace(codec, cast=cast)
        return own.decode_rows(collective(own.encode_rows(rows, node)), blocks, block)

    flat, missing = numerics.flatten(tensor), num_hosts * blocks * block - size
    if known is None or missing:
        flat = tf.concat([flat, tf.zeros(numerics.stack([missing]), flat.dtype)], 0)
    rows = tf.reshape(flat, numerics.stack([num_hosts, blocks, block]))
    arrived = copied(rows, "_shares", all_to_all)
    total = numerics.add(tf.unstack(arrived, num_hosts))
    sums = numerics.flatten(copied(total[tf.newaxis], "_sums", gather))
    if known is None or missing:
        sums = tf.slice(sums, numerics.stack([0]), numerics.stack([size]))
    return tf.reshape(sums, numerics.shape(tensor))
