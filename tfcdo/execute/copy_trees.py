"""The interpreter of copy trees: adds up from the leaves, copies down from the root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

from tfcdo.execute import numerics
from tfcdo.plan.copy_tree import CopyTree

T = TypeVar("T")


def reduce_pack(
    tree: CopyTree,
    held: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    finish: numerics.FinalOp,
) -> list[list[tf.Tensor]]:
    """All-reduces one pack along its copy tree.

    Args:
      tree: the copy tree.
      held: `held[d]` are the tensors, one a bundle, that device `d` puts in.
      devices: the device names.
      finish: applied to each sum on the root of the tree.

    Returns:
      The results, indexed like `held`. All devices hold the same bits, because every element is
      summed and finished on one device and then copied.
    """
    totals = reduce_up(
        tree, held, devices, lambda parts: [numerics.add(bundle) for bundle in zip(*parts)]
    )
    with tf.device(devices[tree.root]):
        results = [finish(total, own.dtype) for total, own in zip(totals, held[tree.root])]
    return broadcast_down(tree, results, devices)


def reduce_up(
    tree: CopyTree,
    held: Sequence[T],
    devices: Sequence[str],
    combine: Callable[[Sequence[T]], T],
) -> T:
    """Combines what the devices hold, from the leaves of a tree to its root.

    Args:
      tree: the copy tree.
      held: what each device holds.
      devices: the device names.
      combine: called under `tf.device` on each device that has children, with what it holds and
        what its children sent, in the order of the devices: on a star, that of the replicas.

    Returns:
      What the root ends up with.
    """
    partial = list(held)
    for device in tree.bottom_up:
        if tree.children[device]:
            with tf.device(devices[device]):
                meeting = sorted([device, *tree.children[device]])
                partial[device] = combine([partial[rank] for rank in meeting])
    return partial[tree.root]


def broadcast_down(
    tree: CopyTree, tensors: Sequence[tf.Tensor], devices: Sequence[str]
) -> list[list[tf.Tensor]]:
    """Copies tensors from the root of a tree to all devices, along its edges.

    Args:
      tree: the copy tree.
      tensors: what the root holds.
      devices: the device names.

    Returns:
      The tensors as each device holds them.
    """
    held: list[list[tf.Tensor]] = [list(tensors)] * tree.num_devices
    for child, parent in tree.edges:
        held[child] = copy(held[parent], devices[child])
    return held


def copy(tensors: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
    """Copies tensors to a device, with one op for all of them."""
    with tf.device(device):
        if len(tensors) == 1:
            return [tf.identity(tensors[0])]
        return list(tf.raw_ops.IdentityN(input=list(tensors))) if tensors else []
