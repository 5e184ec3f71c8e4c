"""Rows: `tf.IndexedSlices` added up by index at the root of a copy tree.

Only rows travel, never the table that they are rows of, and rows of equal index are added once,
before they are copied down: what applies the result gets each row once, sorted by index. Where a
replica's rows have more bytes than the table, as those of a small table in a large batch, each
device forms the table's sum instead, the tables are added like dense values, and the root takes the
rows that were touched out of it: the result is the same, but for the order of the additions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import log
from tfcdo.execute import copy_trees
from tfcdo.execute import gather
from tfcdo.execute import numerics
from tfcdo.execute.exchange import Exchange
from tfcdo.execute.reduction import Reduction
from tfcdo.plan.copy_tree import CopyTree


def all_reduce(
    tree: CopyTree,
    slices: Sequence[Sequence[tf.IndexedSlices]],
    devices: Sequence[str],
    final_op: numerics.FinalOp,
    with_tables: bool = True,
    exchange: Exchange | None = None,
) -> list[list[tf.IndexedSlices]]:
    """All-reduces values that are `tf.IndexedSlices`, together along one copy tree.

    Args:
      tree: the copy tree.
      slices: `slices[v][d]` is value `v` as device `d` holds it; the number of rows may differ.
      devices: the device names.
      final_op: applied to the sums on the root.
      with_tables: whether tables travel where they have fewer bytes than the rows.
      exchange: adds what other hosts have; None for one host.

    Returns:
      The sums, indexed like `slices`: rows sorted by index, each index once; `dense_shape` is the
      one that the device itself gave.
    """
    root = devices[tree.root]
    totals = _reduce_up(tree, slices, devices, with_tables)
    if exchange is not None:
        totals = across_hosts(totals, exchange, root)
    with tf.device(root):
        results = [
            finished(total, final_op, parts[0].dtype)
            for total, parts in zip(totals, slices, strict=True)
        ]
    copies = copy_trees.broadcast_down(tree, _tensors(results), devices)
    by_device = map(_slices, copies, zip(*slices, strict=True))
    return [list(parts) for parts in zip(*by_device, strict=True)]


def add(parts: Sequence[tf.IndexedSlices], device: str) -> tf.IndexedSlices:
    """Adds slices of one table by index.

    Rows of equal index are added in the order of the slices and of their rows, 16-bit floats in 32
    bits. Indices are not compared with the table's size: those outside of it stay rows, for whoever
    applies them to refuse or to ignore, as TensorFlow has it.

    Args:
      parts: the slices.
      device: the device to add on.

    Returns:
      The sum: rows sorted by index, each index once; 16-bit floats in 32 bits.
    """
    with tf.device(device):
        dtype = index_dtype(parts)
        indices = tf.concat([tf.cast(part.indices, dtype) for part in parts], 0)
        order = tf.argsort(indices, stable=True)
        in_order = tf.gather(indices, order)
        # Not `!=`, which compares Python's objects in graphs of TensorFlow 1.
        differs = tf.cast(tf.not_equal(in_order[1:], in_order[:-1]), tf.int32)
        number = tf.cumsum(tf.concat([tf.zeros_like(in_order[:1], tf.int32), differs], 0))
        # That of the rows can begin while the indices are sorted.
        rows = tf.gather(tf.concat([numerics.widened(part.values) for part in parts], 0), order)
        return tf.IndexedSlices(
            tf.math.segment_sum(rows, number),
            tf.math.segment_max(in_order, number),
            parts[0].dense_shape,
        )


def finished(
    total: tf.IndexedSlices, final_op: numerics.FinalOp, dtype: tf.DType
) -> tf.IndexedSlices:
    """Applies the final op to the rows of a sum, on the current device.

    Args:
      total: the sum.
      final_op: divides and rounds.
      dtype: the dtype of the values that were added.
    """
    return tf.IndexedSlices(final_op(total.values, dtype), total.indices, total.dense_shape)


def _tensors(slices: Iterable[tf.IndexedSlices]) -> list[tf.Tensor]:
    """Returns the rows and the indices of slices, in turn, to travel together."""
    return [tensor for one in slices for tensor in (one.values, one.indices)]


def _slices(
    tensors: Sequence[tf.Tensor], like: Sequence[tf.IndexedSlices]
) -> list[tf.IndexedSlices]:
    """Makes slices, of the tables of others, of what `_tensors` has returned."""
    return [
        tf.IndexedSlices(values, indices, one.dense_shape)
        for values, indices, one in zip(tensors[::2], tensors[1::2], like, strict=True)
    ]


def across_hosts(
    totals: Sequence[tf.IndexedSlices], exchange: Exchange, device: str
) -> list[tf.IndexedSlices]:
    """Adds the rows of all hosts, of several tables together.

    Args:
      totals: this host's sums.
      exchange: the collectives for these values.
      device: the device that they are on, and that they are added on.

    Returns:
      The sums over all hosts, as `add` returns them: the same bits on all hosts.
    """
    with tf.device(device):
        sent = _tensors(_with_indices_as(total, tf.int64) for total in totals)
    received = _slices(exchange.all_gather(sent, device), totals)
    with tf.device(device):
        return [
            _with_indices_as(add([joined], device), total.indices.dtype)
            for joined, total in zip(received, totals, strict=True)
        ]


def _with_indices_as(part: tf.IndexedSlices, dtype: tf.DType) -> tf.IndexedSlices:
    return tf.IndexedSlices(part.values, tf.cast(part.indices, dtype), part.dense_shape)


def to_table(part: tf.IndexedSlices, device: str) -> tf.Tensor:
    """Returns the table that slices stand for, 16-bit floats in 32 bits.

    Args:
      part: slices with a `dense_shape`. Rows of negative index are left out, and an index that is
        too large is an error on a CPU, as in `tf.convert_to_tensor`.
      device: the device to form it on; `""` if that is not known.
    """
    with tf.device(device or None):
        values = numerics.widened(part.values)
        count = tf.cast(part.dense_shape, tf.int64)[0]
        return tf.math.unsorted_segment_sum(values, part.indices, count)


def as_tables(reduction: Reduction) -> Reduction:
    """Returns a reduction of slices as one of the tables that they stand for.

    Args:
      reduction: what to reduce; dense values, and slices without `dense_shape`, stay as they are.
    """
    if not reduction.is_sparse:
        return reduction
    if reduction.values[0].dense_shape is None:
        log.warn_once(
            "sparse_as_dense=True is asked for, but tf.IndexedSlices without dense_shape cannot "
            "become dense, so that their rows travel: give them the shape of their table"
        )
        return reduction
    tables = [
        numerics.cast(to_table(value, device), value.dtype, device)
        for value, device in zip(reduction.values, reduction.devices, strict=True)
    ]
    return dataclasses.replace(reduction, values=tuple(tables))


def index_dtype(parts: Sequence[tf.IndexedSlices]) -> tf.DType:
    """Returns the dtype of the indices of a sum: that of its parts, or int64 if they differ."""
    found = {part.indices.dtype for part in parts}
    return found.pop() if len(found) == 1 else tf.int64


def _reduce_up(
    tree: CopyTree,
    slices: Sequence[Sequence[tf.IndexedSlices]],
    devices: Sequence[str],
    with_tables: bool,
) -> list[tf.IndexedSlices]:
    """Adds each value on the root; what is known to travel as rows does so together."""
    choices = [with_tables and table_is_smaller(parts, devices) for parts in slices]
    as_rows = [parts for parts, choice in zip(slices, choices, strict=True) if choice is False]
    sums = iter(_add_rows(tree, as_rows, devices))
    return [
        next(sums) if choice is False else _reduce_one_up(tree, parts, devices, choice)
        for parts, choice in zip(slices, choices, strict=True)
    ]


def _reduce_one_up(
    tree: CopyTree, parts: Sequence[tf.IndexedSlices], devices: Sequence[str], choice: Any
) -> tf.IndexedSlices:
    """Adds one value on the root, as a table if `choice` is, or turns out, true."""
    if choice is True:
        return _add_tables(tree, parts, devices)
    tensors = tf.cond(
        choice,
        lambda: _tensors([_add_tables(tree, parts, devices)]),
        lambda: _tensors(_add_rows(tree, [parts], devices)),
    )
    [total] = _slices(tensors, [parts[tree.root]])
    return total


def _add_rows(
    tree: CopyTree, slices: Sequence[Sequence[tf.IndexedSlices]], devices: Sequence[str]
) -> list[tf.IndexedSlices]:
    """Brings all values' rows to the root and adds them there."""
    if not slices:
        return []
    own = [_tensors(there) for there in zip(*slices, strict=True)]
    first = [parts[0] for parts in slices]
    collected = [_slices(there, first) for there in gather.collect(tree, own, devices)]
    return [add(parts, devices[tree.root]) for parts in zip(*collected, strict=True)]


def _add_tables(
    tree: CopyTree, parts: Sequence[tf.IndexedSlices], devices: Sequence[str]
) -> tf.IndexedSlices:
    """Adds tables up the tree, and takes the rows that any device has touched out of the sum."""
    tables = []
    for part, device in zip(parts, devices, strict=True):
        with tf.device(device):
            ones = tf.IndexedSlices(
                tf.ones_like(part.indices, tf.int32), part.indices, part.dense_shape
            )
        tables.append((to_table(part, device), to_table(ones, device)))
    total, touched = copy_trees.reduce_up(tree, tables, devices, _add_pairs)
    with tf.device(devices[tree.root]):
        there = tf.reshape(tf.where(touched > 0), [-1])
        return tf.IndexedSlices(
            tf.gather(total, there),
            tf.cast(there, index_dtype(parts)),
            parts[tree.root].dense_shape,
        )


def _add_pairs(pairs: Sequence[tuple[tf.Tensor, tf.Tensor]], name: str) -> Any:
    return tuple(numerics.add(operands, name) for operands in zip(*pairs, strict=True))


def table_is_smaller(parts: Sequence[tf.IndexedSlices], devices: Sequence[str]) -> Any:
    """Tells whether the replicas' rows have more bytes than as many tables.

    Args:
      parts: one value, as each device holds it.
      devices: the device names.

    Returns:
      A bool, if all sizes are known; else a 0-D tensor. False for slices without `dense_shape`.
    """
    shape, itemsize = parts[0].dense_shape, numerics.dtype_of_sum(parts[0].dtype).size
    if shape is None:
        return False
    rows: Any = 0
    for part, device in zip(parts, devices, strict=True):
        with tf.device(device):  # Or the tensors themselves would travel, to be asked their size.
            rows += _size(part.values) * itemsize + _size(part.indices) * part.indices.dtype.size
    known = tf.get_static_value(shape)
    with tf.device(devices[0]):
        elements = (
            tf.reduce_prod(tf.cast(shape, tf.int64)) if known is None else math.prod(known.tolist())
        )
        return rows > elements * itemsize * len(parts)


def _size(tensor: tf.Tensor) -> Any:
    known = tensor.shape.num_elements()
    return tf.size(tensor, tf.int64) if known is None else known
