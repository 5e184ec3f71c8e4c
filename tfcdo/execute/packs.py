"""Running a batch plan: pack the values, reduce each pack, unpack the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo.execute import planned
from tfcdo.plan import batch_plan

# Reduces one pack: given its number and `[d][b]`, the fused tensor `b` on device `d`, returns the
# same of the results.
ReducePack = Callable[[int, Sequence[Sequence[tf.Tensor]]], list[list[tf.Tensor]]]


def all_reduce(
    plan: batch_plan.BatchPlan,
    values: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    reduce_pack: ReducePack,
) -> list[list[tf.Tensor]]:
    """All-reduces a batch of values as a plan says.

    Args:
      plan: the packs, over `len(devices)` devices.
      values: `values[d][v]` is value `v` as device `d` holds it.
      devices: the device names.
      reduce_pack: how one pack is reduced.

    Returns:
      The results, indexed like `values`.
    """
    planned.remember(plan, values[0], devices)
    with tf.name_scope("fuse"):
        packed = [
            pack(plan, per_device, device)
            for per_device, device in zip(values, devices, strict=True)
        ]
    reduced = []
    for index in range(len(plan.packs)):
        with tf.name_scope(f"pack{index}"):
            reduced.append(reduce_pack(index, [per_device[index] for per_device in packed]))
    with tf.name_scope("unfuse"):
        return [
            unpack(plan, [by_device[rank] for by_device in reduced], values[rank], device)
            for rank, device in enumerate(devices)
        ]


def pack(
    plan: batch_plan.BatchPlan, values: Sequence[tf.Tensor], device: str
) -> list[list[tf.Tensor]]:
    """Gathers one device's values into the tensors that travel.

    Args:
      plan: says which slices of which values are in which fused tensor of which pack.
      values: the device's values.
      device: the device's name.

    Returns:
      `[p][b]`: the fused tensor `b` of pack `p`. A whole value that travels alone is that value
      as it is; anything else is flat.
    """
    with tf.device(device):
        parts: dict[batch_plan.ValueSlice, tf.Tensor] = {}
        for value, slices in zip(values, plan.slices_of, strict=True):
            parts.update(zip(slices, _cut(value, slices)))
        return [
            [
                _fuse(fused, [parts[part] for part in fused.slices])
                for fused in pack_plan.fused_tensors
            ]
            for pack_plan in plan.packs
        ]


def unpack(
    plan: batch_plan.BatchPlan,
    packs: Sequence[Sequence[tf.Tensor]],
    values: Sequence[tf.Tensor],
    device: str,
) -> list[tf.Tensor]:
    """Takes the results out of the tensors that travelled.

    Args:
      plan: the plan that the tensors were packed with.
      packs: `[p][b]`: the result for fused tensor `b` of pack `p` on this device.
      values: the device's values, for their shapes.
      device: the device's name.

    Returns:
      One result per value, of the value's shape.
    """
    with tf.device(device):
        parts: dict[batch_plan.ValueSlice, tf.Tensor] = {}
        for pack_plan, tensors in zip(plan.packs, packs, strict=True):
            for fused, tensor in zip(pack_plan.fused_tensors, tensors, strict=True):
                parts.update(zip(fused.slices, _unfuse(fused, tensor)))
        return [
            _join([parts[part] for part in slices], value.shape)
            for value, slices in zip(values, plan.slices_of, strict=True)
        ]


def _cut(value: tf.Tensor, slices: Sequence[batch_plan.ValueSlice]) -> list[tf.Tensor]:
    if len(slices) == 1:
        return [value]
    return list(tf.split(flatten(value), int64(part.size for part in slices)))


def _fuse(fused: batch_plan.FusedTensor, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(parts) == 1:
        return parts[0]
    if fused.stacked:
        return tf.stack(parts)
    return tf.concat([flatten(part) for part in parts], axis=0)


def _unfuse(fused: batch_plan.FusedTensor, tensor: tf.Tensor) -> list[tf.Tensor]:
    if len(fused.slices) == 1:
        return [tensor]
    if fused.stacked:
        return list(tf.unstack(tensor, len(fused.slices)))
    return list(tf.split(tensor, int64(part.size for part in fused.slices)))


def _join(parts: Sequence[tf.Tensor], shape: tf.TensorShape) -> tf.Tensor:
    joined = parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)
    # What has the shape already needs no op: flat values, and those that travelled as they are,
    # among them all whose shape nobody knows yet.
    if not shape.is_fully_defined() or joined.shape == shape:
        return joined
    return tf.reshape(joined, int64(shape.as_list()))


def flatten(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with one axis, as it is if it has one already."""
    return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, int64([-1]))


def size(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the number of a tensor's elements: a constant where it is known."""
    known = tensor.shape.num_elements()
    return tf.size(tensor, tf.int64) if known is None else tf.constant(known, tf.int64)


def shape(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's shape as an op takes it: a constant where it is known."""
    known = tensor.shape.is_fully_defined()
    return int64(tensor.shape.as_list()) if known else tf.shape(tensor, tf.int64)


def cut_like(flat: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Cuts a tensor with one axis into parts of the shapes of others that it holds end to end."""
    parts = tf.split(flat, tf.stack([size(tensor) for tensor in tensors]), num=len(tensors))
    return [tf.reshape(part, shape(tensor)) for part, tensor in zip(parts, tensors, strict=True)]


def int64(numbers: Iterable[int]) -> tf.Tensor:
    """Returns sizes or a shape as an op takes them.

    In 64 bits, because TensorFlow 2.21 mixes up 32-bit ones: of eager ops that several threads run
    on a virtual CPU device, one may get the sizes that were meant for another.
    """
    return tf.constant(list(numbers), tf.int64)


def axis_first(rank: tf.Tensor, axis: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the permutation of axes that puts one first, and the one that puts it back."""
    axis = tf.cast(axis, tf.int32) % rank
    before, after = tf.range(axis), tf.range(axis + 1, rank)
    return tf.concat([[axis], before, after], 0), tf.concat([before + 1, [0], after], 0)
