"""Plans of one pack, and the copies and collectives of a graph, to compare with plans."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo.plan.copy_tree import CopyTree, binomial, chain, star, two_level
from tfcdo.plan.plan import FusedTensor, Pack, Plan, Slice, ValueSpec

# Trees of every kind and several sizes.
TREES = (star(1), star(3, 2), chain(3, 1), binomial(8, 3), two_level(8, 5))


def one_pack(
    tree: CopyTree,
    *values: ValueSpec,
    kind: Any = "sum",
    replicas: int | None = None,
    **settings: Any,
) -> Plan:
    """A plan with one pack of whole values, each a tensor of its own."""
    tensors = tuple(
        FusedTensor((Slice(index, 0, value.size),)) for index, value in enumerate(values)
    )
    dtype = "" if kind == "concat" else values[0].dtype
    pack = Pack(kind, tensors, dtype, tree, **settings)
    nodes = tuple(f"CPU:{node}" for node in range(tree.num_devices))
    return Plan(nodes, replicas or len(nodes), 1, values, (pack,))


def copied_bytes(graph: tf.Graph, devices: Sequence[str]) -> dict[tuple[int, int], int]:
    """Counts the bytes that a graph copies between devices: each tensor once for each target.

    The keys of collectives, which the CPU unpacks for all devices, do not count.
    """
    copies = {
        (tensor.ref(), devices.index(tensor.op.device), devices.index(op.device))
        for op in graph.get_operations()
        for tensor in op.inputs
        if tensor.op.device in devices and op.device in devices and tensor.op.device != op.device
        if tensor.op.type != "Unpack"
    }
    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    for tensor, source, target in copies:
        known = tensor.deref()
        counts[source, target] += (known.shape.num_elements() or 0) * known.dtype.size
    return dict(counts)


def edges_both_ways(tree: CopyTree) -> set[tuple[int, int]]:
    """The edges of a tree, up and down."""
    return {ends for edge in tree.edges for ends in (edge, edge[::-1])}
