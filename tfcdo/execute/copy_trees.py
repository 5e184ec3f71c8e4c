"""Walking copy trees: reduce up from the leaves, collect, copy down from the root.

In a graph, each op is named after the edge that brings its input, so that a profiler's trace can be
read: `reduce/2to0` adds on device 0 the part that device 2 sent, `reduce/1and2to0` the parts of
both, and `broadcast/0to2` is the copy back. With several tensors, a number is appended from the
second tensor on.

Between devices, float32 and float64 may be rounded to 16 bits where they are copied; sums are
formed in their own dtype. docs/wire-numerics.md derives the error.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo.exchange import rounding
from tfcdo.execute.feedback import Residuals
from tfcdo.execute.numerics import with_gradient_of
from tfcdo.plan.copy_tree import CopyTree


def reduce_up(
    tree: CopyTree,
    held: Sequence[Any],  # The tensors of each node, None for none.
    devices: Sequence[str],
    # Gets tensors in the order of their nodes, and a name for the op.
    combine: Callable[[Sequence[Any], str], Any],
    codec: PackCodec | None = None,  # Encodes the copies.
) -> list[Any]:
    """Combines the nodes' tensors from the leaves of a tree to its root, where the results are."""
    partial = list(held)
    for node in tree.bottom_up:
        with tf.device(devices[node]):
            children = [child for child in tree.children[node] if partial[child] is not None]
            if codec is not None:
                for child in children:
                    with tf.name_scope(f"receive/{child}to{node}"):
                        partial[child] = codec.decode(partial[child])
            if children or node == tree.root:
                parts = [partial[n] for n in sorted([node, *children]) if partial[n] is not None]
                name = f"reduce/{'and'.join(map(str, children))}to{node}"
                partial[node] = [combine(meeting, name) for meeting in zip(*parts, strict=True)]
            if codec and node != tree.root and partial[node] is not None:
                partial[node] = codec.encode(partial[node], node)
    return list(partial[tree.root])


def collect(
    tree: CopyTree, held: Sequence[Sequence[tf.Tensor] | None], devices: Sequence[str]
) -> list[list[tf.Tensor]]:
    """Brings every node's tensors to the root of a tree, in the order of the nodes."""
    here: list[list[tuple[int, list[tf.Tensor]]]] = [
        [] if own is None else [(node, list(own))] for node, own in enumerate(held)
    ]
    for node in tree.bottom_up:
        parent = tree.parents[node]
        if parent is not None and here[node]:
            # The copy makes a node between the leaf and the root a stop on the way; without it
            # TensorFlow would send from the leaf to the root directly.
            tensors = [tensor for _, own in here[node] for tensor in own]
            copies = iter(copy(tensors, devices[parent], f"gather/{node}to{parent}"))
            here[parent] += [(origin, [next(copies) for _ in own]) for origin, own in here[node]]
    return [own for _, own in sorted(here[tree.root], key=lambda item: item[0])]


def broadcast_down(
    tree: CopyTree,
    tensors: Sequence[tf.Tensor],
    devices: Sequence[str],
    to: Sequence[int] | None = None,  # Only these nodes, and those on the way, get a copy.
) -> list[list[tf.Tensor] | None]:
    """Copies tensors from the root along the tree's edges; returns the copies by node, or None."""
    wanted = set(range(tree.num_devices) if to is None else to)
    for child, parent in reversed(tree.edges):
        wanted |= {parent} if child in wanted else set()
    copies: list[list[tf.Tensor] | None] = [None] * tree.num_devices
    copies[tree.root] = list(tensors)
    for child, parent in tree.edges:
        if child in wanted:
            sent = copies[parent]
            assert sent is not None
            copies[child] = copy(sent, devices[child], f"broadcast/{parent}to{child}")
    return copies


def copy(tensors: Sequence[tf.Tensor], device: str, name: str | None = None) -> list[tf.Tensor]:
    """Copies tensors to a device, with one op of this name for all of them."""
    with tf.device(device):
        if len(tensors) == 1:
            return [tf.raw_ops.Identity(input=tensors[0], name=name)]
        return list(tf.raw_ops.IdentityN(input=list(tensors), name=name)) if tensors else []


@dataclasses.dataclass(frozen=True)
class PackCodec:
    """The codec of one pack, with the rounding errors that its devices keep."""

    wire: str  # The dtype that is sent.
    dtype: tf.DType  # The dtype of the values.
    scaled: bool  # Whether values are scaled before they are cast.
    residuals: Residuals | None  # None without error feedback.
    pack: int  # Its number.

    def encode(self, tensors: Sequence[tf.Tensor], node: int) -> list[tf.Tensor]:
        """Encodes tensors on the current device, a node's; a scale, if any, comes last."""
        carried, scale = self.carry(tensors, node), []
        if self.scaled:
            scale = [rounding.scale_for(rounding.largest_magnitude(carried), self.wire)]
        return [*self.round(carried, node, *scale), *scale]

    def decode(self, sent: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Makes the tensors again, on the current device, of a copy of the result of `encode`."""
        # The gradient of a cast would be cast to the wire's dtype, and several of them added in it.
        encoded, scale = (sent[:-1], sent[-1]) if self.scaled else (sent, None)
        return [with_gradient_of(rounding.decode(b, self.dtype, scale), b) for b in encoded]

    def carry(self, tensors: Sequence[tf.Tensor], node: int) -> list[tf.Tensor]:
        """Adds the rounding errors of the step before, on the current device."""
        if self.residuals is None:
            return list(tensors)
        errors = self._errors(tensors, node)
        return [tensor + error.read_value() for tensor, error in zip(tensors, errors, strict=True)]

    def round(self, tensors: Sequence[tf.Tensor], node: int, *scale: tf.Tensor) -> list[tf.Tensor]:
        """Casts tensors to the wire's dtype, on the current device, and keeps the errors."""
        sent = [with_gradient_of(rounding.encode(t, self.wire, *scale), t) for t in tensors]
        if self.residuals is not None:
            errors, arrived = self._errors(tensors, node), self.decode([*sent, *scale])
            for error, tensor, rounded in zip(errors, tensors, arrived, strict=True):
                error.assign(rounding.rounding_error(tensor, rounded, error.read_value()))
        return sent

    def _errors(self, tensors: Sequence[tf.Tensor], node: int) -> list[tf.Variable]:
        assert self.residuals is not None
        return [
            self.residuals.variable(
                node,
                f"pack{self.pack}_tensor{index}",
                functools.partial(tf.zeros, tensor.shape, tensor.dtype),
            )
            for index, tensor in enumerate(tensors)
        ]
