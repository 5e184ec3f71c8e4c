"""All-reduces between hosts in 16 or 8 bits: each host adds up a share of the values.

A ring that adds in 16 bits would round each partial sum. Here only the copies are rounded: every
host sends each other one its share of the values, encoded; each adds its share, in the values' own
dtype; and the sums go back to all, encoded again. The bytes are half of a ring's, or a quarter.
A host's own share is not sent, so it is not rounded. All hosts, also the one that forms a sum, take
it as it is sent, so they get bitwise the same.
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
    host: int,
    num_hosts: int,
    all_to_all: Collective,  # Sends row `h` to host `h`; returns the rows that arrive.
    gather: Collective,  # Concatenates the hosts' rows.
) -> tf.Tensor:
    """Adds up the tensors of all hosts, of one shape, on the current device, a node."""
    # An int if it is known. Without values zeros are sent, as a collective needs data.
    known = tensor.shape.num_elements()
    size = tf.size(tensor, tf.int64) if known is None else known
    some = max(size, 1) if known is not None else tf.maximum(size, tf.constant(1, tf.int64))
    blocks, block = codec.codec.share_layout(some, num_hosts)

    flat, missing = numerics.flatten(tensor), num_hosts * blocks * block - size
    if known is None or missing:
        flat = tf.concat([flat, tf.zeros(numerics.stack([missing]), flat.dtype)], 0)
    rows = tf.reshape(flat, numerics.stack([num_hosts, blocks, block]))

    def of_others(by_host: tf.Tensor) -> tf.Tensor:
        ranges = ((0, host), (host + 1, num_hosts))  # A slice is not copied.
        return tf.concat([by_host[begin:end] for begin, end in ranges if begin < end], 0)

    shares, sums = (dataclasses.replace(codec, cast=cast) for cast in ("_shares", "_sums"))
    encoded = shares.encode_rows(of_others(rows), node)
    # The collective takes a row for each host, also for this one.
    encoded = tf.concat([encoded[:host], tf.zeros_like(encoded[:1]), encoded[host:]], 0)
    arrived = shares.decode_rows(of_others(all_to_all(encoded)), blocks, block)
    total = numerics.add([rows[host], *tf.unstack(arrived, num_hosts - 1)])
    gathered = gather(sums.encode_rows(total[tf.newaxis], node))
    flat = numerics.flatten(sums.decode_rows(gathered, blocks, block))
    if known is None or missing:
        flat = tf.slice(flat, numerics.stack([0]), numerics.stack([size]))
    return tf.reshape(flat, numerics.shape(tensor))
