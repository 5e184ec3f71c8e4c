"""Running a batch plan: pack the values, reduce each pack, unpack the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from tfcdo.plan import packing

# Reduces one pack: given `[d][b]`, the tensor of bundle `b` on device `d`, returns the same of the
# results.
ReducePack = Callable[[packing.PackPlan, Sequence[Sequence[tf.Tensor]]], list[list[tf.Tensor]]]


def all_reduce(
    plan: packing.BatchPlan,
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
    packed = [
        pack(plan, per_device, device) for per_device, device in zip(values, devices, strict=True)
    ]
    reduced = [
        reduce_pack(pack_plan, [per_device[index] for per_device in packed])
        for index, pack_plan in enumerate(plan.packs)
    ]
    return [
        unpack(plan, [by_device[rank] for by_device in reduced], values[rank], device)
        for rank, device in enumerate(devices)
    ]


def pack(
    plan: packing.BatchPlan, values: Sequence[tf.Tensor], device: str
) -> list[list[tf.Tensor]]:
    """Gathers one device's values into the tensors that travel.

    Args:
      plan: says which pieces of which values are in which bundle of which pack.
      values: the device's values.
      device: the device's name.

    Returns:
      `[p][b]`: the tensor of bundle `b` of pack `p`. A whole value that travels alone is that value
      as it is; anything else is flat.
    """
    with tf.device(device):
        parts: dict[packing.ValueSlice, tf.Tensor] = {}
        for value, pieces in zip(values, plan.pieces_of, strict=True):
            parts.update(zip(pieces, _cut(value, pieces)))
        return [
            [
                _bundle(bundle, [parts[piece] for piece in bundle.pieces])
                for bundle in pack_plan.bundles
            ]
            for pack_plan in plan.packs
        ]


def unpack(
    plan: packing.BatchPlan,
    packs: Sequence[Sequence[tf.Tensor]],
    values: Sequence[tf.Tensor],
    device: str,
) -> list[tf.Tensor]:
    """Takes the results out of the tensors that travelled.

    Args:
      plan: the plan that the tensors were packed with.
      packs: `[p][b]`: the result for bundle `b` of pack `p` on this device.
      values: the device's values, for their shapes.
      device: the device's name.

    Returns:
      One result per value, of the value's shape.
    """
    with tf.device(device):
        parts: dict[packing.ValueSlice, tf.Tensor] = {}
        for pack_plan, tensors in zip(plan.packs, packs, strict=True):
            for bundle, tensor in zip(pack_plan.bundles, tensors, strict=True):
                parts.update(zip(bundle.pieces, _unbundle(bundle, tensor)))
        return [
            _join([parts[piece] for piece in pieces], value.shape)
            for value, pieces in zip(values, plan.pieces_of, strict=True)
        ]


def _cut(value: tf.Tensor, pieces: Sequence[packing.ValueSlice]) -> list[tf.Tensor]:
    if len(pieces) == 1:
        return [value]
    return tf.split(_flat(value), _int64(piece.size for piece in pieces))


def _bundle(bundle: packing.FusedTensor, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(parts) == 1:
        return parts[0]
    if bundle.stacked:
        return tf.stack(parts)
    return tf.concat([_flat(part) for part in parts], axis=0)


def _unbundle(bundle: packing.FusedTensor, tensor: tf.Tensor) -> list[tf.Tensor]:
    if len(bundle.pieces) == 1:
        return [tensor]
    if bundle.stacked:
        return tf.unstack(tensor, len(bundle.pieces))
    return tf.split(tensor, _int64(piece.size for piece in bundle.pieces))


def _join(parts: Sequence[tf.Tensor], shape: tf.TensorShape) -> tf.Tensor:
    joined = parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)
    # What has the shape already needs no op: flat values, and those that travelled as they are,
    # among them all whose shape nobody knows yet.
    if not shape.is_fully_defined() or joined.shape == shape:
        return joined
    return tf.reshape(joined, _int64(shape.as_list()))


def _flat(tensor: tf.Tensor) -> tf.Tensor:
    return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, _int64([-1]))


def _int64(numbers: Iterable[int]) -> tf.Tensor:
    """Sizes or a shape, as an op takes them.

    In 64 bits, because TensorFlow 2.21 mixes up 32-bit ones: of eager ops that several threads run
    on a virtual CPU device, one may get the sizes that were meant for another.
    """
    return tf.constant(list(numbers), tf.int64)
