"""Gathering along copy trees, for what is concatenated rather than added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo.execute import copy_trees
from tfcdo.execute.exchange import Exchange
from tfcdo.plan.copy_tree import CopyTree

# The tensors of all replicas that have reached a device so far: (rank, tensors) pairs.
_Collected = list[tuple[int, list[tf.Tensor]]]


def all_gather(
    tree: CopyTree,
    tensors: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    axis: Any,
    exchange: Exchange | None = None,
) -> list[list[tf.Tensor]]:
    """Concatenates the devices' tensors, in the order of the devices, on all devices.

    Args:
      tree: the copy tree; tensors are collected up to its root, the results are copied down, all
        together along each edge.
      tensors: `tensors[d]` are those of device `d`, as many on each; the shapes of one on several
        devices may differ along `axis`.
      devices: the device names.
      axis: the axis to concatenate along, an int or a 0-D tensor of ints.
      exchange: adds what other hosts have; None for one host.

    Returns:
      The concatenations, `[device][tensor]`.
    """
    collected = collect(tree, tensors, devices)
    with tf.device(devices[tree.root]):
        gathered = [tf.concat(parts, axis) for parts in zip(*collected, strict=True)]
    if exchange is not None:
        gathered = exchange.concat(gathered, axis, devices[tree.root])
    return copy_trees.broadcast_down(tree, gathered, devices)


def collect(
    tree: CopyTree, tensors: Sequence[Sequence[tf.Tensor]], devices: Sequence[str]
) -> list[list[tf.Tensor]]:
    """Brings every device's tensors to the root of a tree.

    Args:
      tree: the copy tree.
      tensors: `tensors[d]` are those of device `d`, as many on each.
      devices: the device names.

    Returns:
      The same, on the root or, those of the root's children, ready to be sent there.
    """
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
