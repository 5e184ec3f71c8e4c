"""The interpreter of copy trees: adds up from the leaves, copies down from the root.

In a graph, each op is named after the edge that brings its input, so that a profiler's trace can be
read: `reduce/2to0` adds on device 0 what device 2 sent, `reduce/1and2to0` what both sent, and
`broadcast/0to2` is the copy back. Of several tensors, those after the first have a number appended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfcdo.execute import numerics
from tfcdo.execute.travel import AS_THEY_ARE
from tfcdo.execute.travel import Travel
from tfcdo.plan.copy_tree import CopyTree

T = TypeVar("T")
AcrossHosts = Callable[[Sequence[tf.Tensor], str], list[tf.Tensor]]


def reduce_pack(
    tree: CopyTree,
    tensors_by_device: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    final_op: numerics.FinalOp,
    across_hosts: AcrossHosts | None = None,
    travel: Travel[Any] = AS_THEY_ARE,
) -> list[list[tf.Tensor]]:
    """All-reduces one pack along its copy tree.

    Where copies are cast, what arrives is added in the tensors' own dtype, and all devices, the
    root too, get the result as it arrives.

    Args:
      tree: the copy tree.
      tensors_by_device: `tensors_by_device[d]` are the fused tensors of device `d`.
      devices: the device names.
      final_op: applied to each sum on the root of the tree.
      across_hosts: adds to the sums on the root, given its name, those of other hosts; None for one
        host.
      travel: how tensors are copied between devices.

    Returns:
      The results, indexed like `tensors_by_device`. All devices hold the same bits, because
      every element is summed and finished on one device and then copied.
    """
    totals = reduce_up(
        tree,
        tensors_by_device,
        devices,
        lambda parts, name: [numerics.add(operands, name) for operands in zip(*parts)],
        travel,
    )
    if across_hosts is not None:
        with tf.name_scope("across_hosts"):
            totals = across_hosts(totals, devices[tree.root])
    with tf.device(devices[tree.root]):
        results = [
            final_op(total, tensor.dtype)
            for total, tensor in zip(totals, tensors_by_device[tree.root])
        ]
        sent = travel.send(results, tree.root)
    arrived = []
    for rank, copies in enumerate(broadcast_down(tree, sent, devices)):
        # Named like the copy: TensorFlow may leave that out, and then this receives.
        name = "root" if rank == tree.root else f"broadcast/{tree.parents[rank]}to{rank}"
        with tf.device(devices[rank]), tf.name_scope(name):
            arrived.append(travel.receive(copies))
    return arrived


def reduce_up(
    tree: CopyTree,
    values_by_device: Sequence[T],
    devices: Sequence[str],
    combine: Callable[[Sequence[T], str], T],
    travel: Travel[T] = AS_THEY_ARE,
) -> T:
    """Combines the devices' values from the leaves of a tree to its root.

    Args:
      tree: the copy tree.
      values_by_device: one value per device, of any kind that `combine` takes.
      devices: the device names.
      combine: called under `tf.device` on each device that has children, with its own value and
        those of its children, in the order of the devices: on a star, that of the replicas; and
        with the name of the edges that these come along.
      travel: how values are copied between devices.

    Returns:
      The combined value, on the root.
    """
    partial = list(values_by_device)
    for device in tree.bottom_up:
        with tf.device(devices[device]):
            children = sorted(tree.children[device])
            if children:
                for child in children:
                    with tf.name_scope(f"receive/{child}to{device}"):
                        partial[child] = travel.receive(partial[child])
                inputs = [partial[rank] for rank in sorted([device, *children])]
                name = f"reduce/{'and'.join(map(str, children))}to{device}"
                partial[device] = combine(inputs, name)
            if device != tree.root:
                partial[device] = travel.send(partial[device], device)
    return partial[tree.root]


def broadcast_down(
    tree: CopyTree, tensors: Sequence[tf.Tensor], devices: Sequence[str]
) -> list[list[tf.Tensor]]:
    """Copies tensors from the root of a tree to all devices, along its edges.

    Args:
      tree: the copy tree.
      tensors: the tensors on the root.
      devices: the device names.

    Returns:
      The copies, `[device][tensor]`.
    """
    tensors_by_device: list[list[tf.Tensor]] = [list(tensors)] * tree.num_devices
    for child, parent in tree.edges:
        name = f"broadcast/{parent}to{child}"
        tensors_by_device[child] = copy(tensors_by_device[parent], devices[child], name)
    return tensors_by_device


def copy(tensors: Sequence[tf.Tensor], device: str, name: str | None = None) -> list[tf.Tensor]:
    """Copies tensors to a device, with one op of this name for all of them."""
    with tf.device(device):
        if len(tensors) == 1:
            return [tf.raw_ops.Identity(input=tensors[0], name=name)]
        return list(tf.raw_ops.IdentityN(input=list(tensors), name=name)) if tensors else []
