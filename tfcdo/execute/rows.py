"""Rows: `tf.IndexedSlices` brought together at the root of a copy tree.

All replicas get the rows of all replicas one after the other, as one device makes them for the
whole batch: an optimizer may square or clip each row as it comes.

With `sum_equal_rows`, rows of the same index are added at the root, before they are copied down:
the optimizer gets each row once, sorted by index. Where a replica's rows have more bytes than the
table, as for a small table in a large batch, each device then forms the table's sum, the tables
are added like dense values, and the root takes the rows that were touched out of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.execute import device_ops
from tfcdo.execute.between import Collectives
from tfcdo.plan.copy_tree import CopyTree

# A value's part on each node; None for a node without one.
Parts = Sequence[tf.IndexedSlices | None]
Once = Callable[[tf.IndexedSlices], tf.IndexedSlices]
# Ops that make indices of which no two are equal, and those that pass these on by their first
# input; Keras's lookup, by its third one, selects between an index and one from the end.
_UNIQUE = {"Range", "Unique", "UniqueWithCounts"}
_UNIQUE |= {f"SparseSegment{how}GradV2" for how in ("Sum", "Mean", "SqrtN")}
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_PASSED_ON = ("Identity", "Reshape", "Cast", "ExpandDims", "StridedSlice", "SelectV2")


def reduce_up(
    tree: CopyTree, values: Sequence[Parts], devices: Sequence[str], sum_equal: bool
) -> list[tf.IndexedSlices]:
    """Brings each value to the root: one replica's rows after the other's, or their sums."""
    if not sum_equal:
        return [join(parts, devices[tree.root]) for parts in _collect(tree, values, devices)]
    choices = [table_is_smaller(parts, devices) for parts in values]
    as_rows = [parts for parts, choice in zip(values, choices, strict=True) if choice is False]
    sums = iter(_add_rows(tree, as_rows, devices))
    return [
        next(sums) if choice is False else _reduce_one_up(tree, parts, devices, choice)
        for parts, choice in zip(values, choices, strict=True)
    ]


def _reduce_one_up(
    tree: CopyTree, parts: Parts, devices: Sequence[str], choice: Any
) -> tf.IndexedSlices:
    """Adds one value on the root, as a table if `choice` is, or turns out, true."""
    if choice is True:
        return _add_tables(tree, parts, devices)
    result = tf.cond(
        choice,
        lambda: to_tensors([_add_tables(tree, parts, devices)]),
        lambda: to_tensors(_add_rows(tree, [parts], devices)),
    )
    [total] = from_tensors(result, [_present(parts)[0]])
    return total


def _present(parts: Parts) -> list[tf.IndexedSlices]:
    return [part for part in parts if part is not None]


def _add_rows(
    tree: CopyTree, values: Sequence[Parts], devices: Sequence[str]
) -> list[tf.IndexedSlices]:
    """Brings all values' rows to the root and adds them there."""
    return [add(parts, devices[tree.root]) for parts in _collect(tree, values, devices)]


def _collect(
    tree: CopyTree, values: Sequence[Parts], devices: Sequence[str]
) -> list[tuple[tf.IndexedSlices, ...]]:
    """Brings all values' rows to the root; returns the replicas' parts of each value, in order."""
    if not values:
        return []
    held = [None if None in own else to_tensors(own) for own in zip(*values, strict=True)]
    first = [_present(parts)[0] for parts in values]
    collected = [from_tensors(there, first) for there in device_ops.collect(tree, held, devices)]
    return list(zip(*collected, strict=True))


def join(parts: Sequence[tf.IndexedSlices], device: str) -> tf.IndexedSlices:
    """Lays slices of one table one after the other, unchanged."""
    if len(parts) == 1:
        return parts[0]
    with tf.device(device):
        dtype = _index_dtype(parts)
        return tf.IndexedSlices(
            tf.concat([part.values for part in parts], 0),
            tf.concat([tf.cast(part.indices, dtype) for part in parts], 0),
            parts[0].dense_shape,
        )


def _add_tables(tree: CopyTree, parts: Parts, devices: Sequence[str]) -> tf.IndexedSlices:
    """Adds tables up the tree, and takes the rows that any device has touched out of the sum."""
    tables: list[Any] = []
    for part, device in zip(parts, devices, strict=True):
        if part is None:
            tables.append(None)
            continue
        with tf.device(device):
            ones = tf.IndexedSlices(
                tf.ones_like(part.indices, tf.int32), part.indices, part.dense_shape
            )
            tables.append((to_table(part), to_table(ones)))
    total, touched = device_ops.reduce_up(tree, tables, devices, device_ops.add)
    with tf.device(devices[tree.root]):
        there = tf.reshape(tf.where(touched > 0), [-1])
        return tf.IndexedSlices(
            tf.gather(total, there),
            tf.cast(there, _index_dtype(_present(parts))),
            _present(parts)[0].dense_shape,
        )


def add(parts: Sequence[tf.IndexedSlices], device: str) -> tf.IndexedSlices:
    """Adds slices of one table by index; returns rows sorted by index, 16-bit floats in 32 bits."""
    # Rows of equal index are added in the order of the slices and of their rows; GPUs have an order
    # of their own. Indices outside of the table stay rows, for the optimizer to refuse or to
    # ignore, as TensorFlow has it.
    with tf.device(device):
        joined = join(parts, device)
        order = tf.argsort(joined.indices, stable=True)
        in_order = tf.gather(joined.indices, order)
        # `!=` compares objects in graphs of TensorFlow 1.
        differs = tf.not_equal(in_order[1:], in_order[:-1])
        begins = tf.concat([tf.ones_like(in_order[:1], tf.bool), differs], 0)
        number = tf.cumsum(tf.cast(begins, tf.int32)) - 1
        # Gathering the rows can begin while the indices are sorted.
        rows = tf.gather(device_ops.upcast(joined.values), order)
        return tf.IndexedSlices(
            tf.math.segment_sum(rows, number),
            tf.gather(in_order, tf.reshape(tf.where(begins), [-1])),
            joined.dense_shape,
        )


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Rows of one lookup of a table, or of all; or a dense gradient."""

    of: int  # The gradient that they are a part of.
    rows: Any
    # Makes of all replicas' rows those that one device has once; None: it has all.
    once: Once | None


def by_lookup(grads: Sequence[Any], examples: int | None, sum_equal: bool) -> list[Lookup]:
    """Divides rows by lookups of a table, if one device has some once.

    A replica has so many examples, if that is known. With `sum_equal`, a sum has each row once
    anyway. If run eagerly, all rows stay.
    """
    found: list[Lookup] = []
    for at, grad in enumerate(grads):
        parts: Sequence[Any] = tf_internals.components(grad)
        are_rows = all(isinstance(part, tf.IndexedSlices) for part in parts)
        if sum_equal or not are_rows or not all(tf.is_symbolic_tensor(p.indices) for p in parts):
            found.append(Lookup(at, grad, None))
        elif lookups := _lookups(at, parts, examples):
            found += lookups
        else:
            found.append(Lookup(at, grad, _once([part.indices for part in parts], examples)))
    return found


def _lookups(of: int, parts: Sequence[Any], examples: int | None) -> list[Lookup]:
    """Returns the rows of each lookup, which the tape has joined; none if it does not matter."""
    joined = {(part.indices.op.type, len(part.indices.op.inputs)) for part in parts}
    if len(joined) != 1 or joined.pop()[0] != "ConcatV2":
        return []
    indices = [part.indices.op.inputs[:-1] for part in parts]
    once = [_once(own, examples) for own in zip(*indices, strict=True)]
    if not any(once):
        return []
    divided = []
    for part, own in zip(parts, indices, strict=True):
        with tf.device(part.values.device):
            values = tf.split(part.values, [*map(tf.size, own)])
            divided.append([*map(tf.IndexedSlices, values, own, [part.dense_shape] * len(own))])
    of_each = map(tf_internals.per_replica, zip(*divided, strict=True))
    return [Lookup(of, *each) for each in zip(of_each, once, strict=True)]


def as_on_one_device(sums: Sequence[Any], lookups: Sequence[Lookup]) -> list[list[Any]]:
    """Adds rows that one device has once: of sparse ids, and of constants, such as positions.

    The sums are of the lookups' rows. Returns each gradient's sum on one device or on all.
    """
    found: list[list[Sequence[Any]]] = [[] for _ in {one.of for one in lookups}]
    for total, lookup in zip(sums, lookups, strict=True):
        own: Sequence[Any] = tf_internals.components(total)
        if lookup.once is not None and all(isinstance(one, tf.IndexedSlices) for one in own):
            own = device_ops.on_each([one.device for one in own], lookup.once, own)
        found[lookup.of].append(own)
    return [[join(one, one[0].device) for one in zip(*own, strict=True)] for own in found]


def _once(indices: Sequence[tf.Tensor], examples: int | None) -> Once | None:
    """Returns what makes of all replicas' rows those that one device has once; None: all."""
    count, op = indices[0].shape[0], indices[0].op
    shape = op.inputs[0].shape if op.type == "Reshape" else indices[0].shape  # As looked up.
    has_row_each = examples not in (None, 1) and bool(shape.rank) and shape[0] == examples
    first, *others = (_constants(one, has_row_each) for one in indices)
    if count and first is not None and all(one == first for one in others):
        # One device has a start token for each example, and has positions, or a batch's own, once.
        known = tf_internals.constant_value(indices[0]) if has_row_each else None
        if known is not None and not np.ptp(np.reshape(known, [shape[0], -1]), 0).any():
            return None
        return functools.partial(_add_parts, count=count)
    return add_equal if _are_unique(indices[0]) else None


def _add_parts(total: tf.IndexedSlices, count: int) -> tf.IndexedSlices:
    """Adds parts of so many rows each, which have the same indices."""
    rows = tf.reshape(device_ops.upcast(total.values), [-1, count, *total.values.shape[1:]])
    rows = tf.cast(tf.reduce_sum(rows, 0), total.dtype)
    return tf.IndexedSlices(rows, total.indices[:count], total.dense_shape)


def _constants(indices: tf.Tensor, has_row_each: bool) -> list[Any] | None:
    """Returns the constants that indices depend on; None if they depend on anything else.

    Mirrored variables count, too; if there is a row for each example, those that are read once.
    """
    found: list[Any] = []
    seen, waiting = set(), [indices]
    while waiting:
        tensor = waiting.pop()
        if tensor is None:  # An argument of a function.
            return None
        if not tf.is_symbolic_tensor(tensor):  # Made before the function, which has captured it.
            found.append(tf_internals.id_on_replicas(tensor))
        elif tensor.op in seen:
            continue
        elif tensor.op.type == "Const":
            found.append(tensor.op.get_attr("value"))
        elif tensor.op.type == "Placeholder":
            waiting.append(tf_internals.tensor_around(tensor))
        elif tensor.op.type in _READS:
            if has_row_each and tensor.shape.num_elements() != indices.shape[0]:
                return None
            waiting += tensor.op.inputs
        elif tensor.op.op_def.is_stateful or not tensor.op.inputs:
            return None
        else:
            seen.add(tensor.op)
            waiting += tensor.op.inputs
    return found


def _are_unique(indices: tf.Tensor) -> bool:
    """Returns whether indices differ, as a lookup of sparse ids, or of positions, makes them."""
    op = indices.op
    while op.type in _PASSED_ON:
        op = op.inputs[2 if op.type == "SelectV2" else 0].op
    return op.type in _UNIQUE


def add_equal(value: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds rows of equal indices, where the rows are."""
    added = add([value], value.values.device)
    return tf.IndexedSlices(tf.cast(added.values, value.dtype), added.indices, value.dense_shape)


def to_tensors(slices: Iterable[tf.IndexedSlices]) -> list[tf.Tensor]:
    """Returns the rows and the indices of slices, in turn, to be sent together."""
    return [tensor for part in slices for tensor in (part.values, part.indices)]


def from_tensors(
    tensors: Sequence[tf.Tensor], like: Sequence[tf.IndexedSlices]
) -> list[tf.IndexedSlices]:
    """Makes slices, of the tables of others, of a result of `to_tensors`."""
    return [
        tf.IndexedSlices(values, indices, part.dense_shape)
        for values, indices, part in zip(tensors[::2], tensors[1::2], like, strict=True)
    ]


def add_other_hosts(
    totals: Sequence[tf.IndexedSlices], collectives: Collectives, device: str, sum_equal: bool
) -> list[tf.IndexedSlices]:
    """Joins, or adds, the rows of all hosts, of several tables together: the same on all hosts."""
    with tf.device(device):
        sent = to_tensors(_with_indices_as(total, tf.int64) for total in totals)
    received = from_tensors(collectives.all_gather(sent, device), totals)
    with tf.device(device):
        return [
            _with_indices_as(add([joined], device) if sum_equal else joined, total.indices.dtype)
            for joined, total in zip(received, totals, strict=True)
        ]


def _with_indices_as(part: tf.IndexedSlices, dtype: tf.DType) -> tf.IndexedSlices:
    return tf.IndexedSlices(part.values, tf.cast(part.indices, dtype), part.dense_shape)


def to_table(part: tf.IndexedSlices) -> tf.Tensor:
    """Returns the table that slices with a `dense_shape` stand for, 16-bit floats in 32 bits."""
    # Rows of negative index are left out, and an index that is too large is an error on a CPU, as
    # in `tf.convert_to_tensor`.
    count = tf.cast(part.dense_shape, tf.int64)[0]
    return tf.math.unsorted_segment_sum(device_ops.upcast(part.values), part.indices, count)


def _index_dtype(parts: Sequence[tf.IndexedSlices]) -> tf.DType:
    """Returns the common dtype of the parts' indices, or int64 if they differ."""
    found = {part.indices.dtype for part in parts}
    return found.pop() if len(found) == 1 else tf.int64


def table_is_smaller(parts: Parts, devices: Sequence[str]) -> Any:
    """Tells whether all rows have more bytes than as many tables: a bool, or a 0-D tensor."""
    first = _present(parts)[0]
    shape, itemsize = first.dense_shape, device_ops.upcast_dtype(first.dtype).size
    if shape is None:  # Not known to be a table.
        return False
    rows: Any = 0
    for part, device in zip(parts, devices, strict=True):
        if part is not None:
            with tf.device(device):  # Or the tensors themselves would be sent, only for their size.
                rows += device_ops.size(part.values) * itemsize
                rows += device_ops.size(part.indices) * part.indices.dtype.size
    known = tf.get_static_value(shape)
    with tf.device(devices[0]):
        elements = (
            tf.reduce_prod(tf.cast(shape, tf.int64)) if known is None else math.prod(known.tolist())
        )
        return rows > elements * itemsize * len(_present(parts))
