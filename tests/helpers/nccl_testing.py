"""Shared by tests of `NcclAllReduce`: it is always made with `require_nccl=True`.

So no test can pass by way of the copy trees.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from testing_utils import SUM

import tfcdo

K = 4  # How many devices, where their number is not what is tested.


def nccl(num_packs: int = 1) -> tfcdo.NcclAllReduce:
    return tfcdo.NcclAllReduce(num_packs, require_nccl=True)


def all_reduce(
    ops: tf.distribute.CrossDeviceOps, *values: Sequence[Any], reduce_op: Any = SUM
) -> list[tuple[tf.Tensor, ...]]:
    """All-reduces values, each a list of one tensor per device, in one batch."""
    replicated = [tu.per_replica(own) for own in values]
    results = ops.batch_reduce(reduce_op, [(value, value) for value in replicated])
    return [tuple(result.values) for result in results]


def one(*tensors: tf.Tensor, ops: tf.distribute.CrossDeviceOps | None = None) -> list[tf.Tensor]:
    """All-reduces one value."""
    return list(all_reduce(ops or nccl(), tensors)[0])


def ranks(scale: float = 1.0, count: int = K) -> list[tf.Tensor]:
    """One tensor per device: `scale` times 1, 2, 3... Their sum is 10 times the scale, for 4."""
    return [tf.constant([scale * (rank + 1)]) for rank in range(count)]


def function(body: Callable[..., Any], **kwargs: Any) -> Any:
    return tf.function(body, autograph=False, **kwargs)


def packs_of(graph: Any) -> dict[bytes, list[Any]]:
    """The NCCL ops of a graph and of all functions it calls, by their shared name."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    packs = collections.defaultdict(list)
    for node in nodes:
        if node.op == "NcclAllReduce":
            packs[node.attr["shared_name"].s].append(node)
    return packs


def delayed(tensor: tf.Tensor, seconds: float) -> tf.Tensor:
    """The same tensor, but only after a while."""

    def wait(array: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return array

    result = tf.numpy_function(wait, [tensor], tensor.dtype)
    result.set_shape(tensor.shape)
    return result
