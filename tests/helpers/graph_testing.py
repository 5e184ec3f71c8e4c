"""The copies of a graph, to compare with plans."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import tensorflow as tf


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
