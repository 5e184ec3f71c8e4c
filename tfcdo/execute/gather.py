"""Gathering along copy trees, for what is concatenated rather than added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo.execute import copy_trees
from tfcdo.execute import numerics
from tfcdo.execute.exchange import Exchange
from tfcdo.plan.copy_tree import CopyTree

# The tensors of all replicas that have reached a device so far: (rank, tensors) pairs.
_Collected = list[tuple[int, list[tf.Tensor]]]


def all_gather(
    tree: CopyTree,
    values: Sequence[tf.Tensor],
    devices: Sequence[str],
    axis: Any,
    exchange: Exchange | None = None,
) -> list[tf.Tensor]:
    """Concatenates the devices' tensors, in the order of the devices, on all devices.

    Args:
      tree: the copy tree; tensors are collected up to its root, the result is copied down.
      values: one tensor per device; their shapes may differ along `axis`.
      devices: the device names.
      axis: the axis to concatenate along, an int or a 0-D tensor of ints.
      exchange: adds what other hosts have; None for one host.

    Returns:
      The concatenation, on each device.
    """
    collected = _collect(tree, [[value] for value in values], devices)
    with tf.device(devices[tree.root]):
        gathered = tf.concat([value for (value,) in collected], axis)
    if exchange is not None:
        gathered = exchange.concat(gathered, axis, devices[tree.root])
    return [value for (value,) in copy_trees.broadcast_down(tree, [gathered], devices)]


def all_reduce_slices(
    tree: CopyTree,
    slices: Sequence[tf.IndexedSlices],
    devices: Sequence[str],
    final_op: numerics.FinalOp,
    exchange: Exchange | None = None,
) -> list[tf.IndexedSlices]:
    """All-reduces `tf.IndexedSlices`: the rows of all devices together are the sum.

    Rows of equal index are not added up, as whoever applies the slices does that: only rows travel,
    never the table that they are rows of.

    Args:
      tree: the copy tree.
      slices: one per device; the number of rows may differ.
      devices: the device names.
      final_op: applied to the rows on the root.
      exchange: adds what other hosts have; None for one host.

    Returns:
      Equal rows and indices on each device, in the order of the devices, of a table whose shape is
      the one that the device itself gave.
    """
    collected = _collect(tree, [[part.values, part.indices] for part in slices], devices)
    with tf.device(devices[tree.root]):
        joined = concat_slices(
            [tf.IndexedSlices(values, indices) for values, indices in collected], final_op
        )
    if exchange is not None:
        joined = exchange.join_slices(joined, devices[tree.root])
    copies = copy_trees.broadcast_down(tree, [joined.values, joined.indices], devices)
    return [
        tf.IndexedSlices(values, indices, part.dense_shape)
        for (values, indices), part in zip(copies, slices)
    ]


def concat_slices(
    slices: Sequence[tf.IndexedSlices], final_op: numerics.FinalOp
) -> tf.IndexedSlices:
    """Joins the rows of several slices on the current device.

    Args:
      slices: slices of one table.
      final_op: applied to the rows.

    Returns:
      The slices whose dense form is the finished sum of the dense forms.
    """
    values = tf.concat([part.values for part in slices], axis=0)
    wide = len({part.indices.dtype for part in slices}) > 1  # int32 and int64 do not concatenate.
    indices = tf.concat(
        [tf.cast(part.indices, tf.int64) if wide else part.indices for part in slices], axis=0
    )
    return tf.IndexedSlices(final_op(values, values.dtype), indices, slices[0].dense_shape)


def _collect(
    tree: CopyTree, tensors: Sequence[Sequence[tf.Tensor]], devices: Sequence[str]
) -> list[list[tf.Tensor]]:
    """Brings every device's tensors to the root of a tree, in the order of the devices."""
    width = len(tensors[0])
    by_device: list[_Collected] = [
        [(rank, list(per_device))] for rank, per_device in enumerate(tensors)
    ]
    for device in tree.bottom_up:
        parent = tree.parents[device]
        if parent is not None:
            # The copy makes a device between the leaf and the root a stop on the way; without it
            # TensorFlow would send from the leaf to the root directly.
            flat = copy_trees.copy(
                [t for _, collected in by_device[device] for t in collected],
                devices[parent],
                f"gather/{device}to{parent}",
            )
            by_device[parent] += [
                (rank, flat[i * width : (i + 1) * width])
                for i, (rank, _) in enumerate(by_device[device])
            ]
    return [collected for _, collected in sorted(by_device[tree.root], key=lambda item: item[0])]
