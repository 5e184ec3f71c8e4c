"""Gradients that belong to no graph, as collectives need them.

`tf.custom_gradient` registers a new gradient in each graph, which keeps the graph alive for as long
as the process runs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals

with contextlib.suppress(KeyError):  # It is registered already if this module is reloaded.
    tf.RegisterGradient("TfcdoGradientOf")(lambda op, upstream, _: (None, upstream))


def with_gradient_of(result: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the value of `result`, which hands the gradient that comes to it on to `tensor`."""
    if tf.executing_eagerly():
        passed = tf.identity(result)
    else:
        graph = tf.compat.v1.get_default_graph()
        with graph.gradient_override_map({"IdentityN": "TfcdoGradientOf"}):
            passed, _ = tf.raw_ops.IdentityN(input=[result, tensor])
    tf_internals.record_operation(
        "TfcdoGradientOf", [passed], [tensor], lambda upstream: [upstream]
    )
    return passed


class JointGradient:
    """The gradient of several tensors together, as a function of all that come to them."""

    _numbers = itertools.count()

    def __init__(self, function: Callable[..., Sequence[tf.Tensor]]) -> None:
        # From the results' gradients to the tensors'. It is registered, so it must hold no graph.
        self._function = function
        self._name = f"TfcdoJointGradient{next(self._numbers)}"
        tf.RegisterGradient(self._name)(self._of_op)

    def of(
        self, results: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor], devices: Sequence[str]
    ) -> list[tf.Tensor]:
        """Returns results, one on each device, whose gradients go on to the tensors together."""
        # A gradient of all tensors together needs an op that all pass through, and TensorFlow's is
        # on one device. So the tensors go there, not the results: a gradient sees that op, but it
        # is pruned before the step runs, as nothing uses its values.
        if tf.executing_eagerly():
            passed = [tf.identity(tensor) for tensor in tensors]
        else:
            graph = tf.compat.v1.get_default_graph()
            with graph.gradient_override_map({"IdentityN": self._name}):
                passed = list(tf.raw_ops.IdentityN(input=tensors))
        tf_internals.record_operation(self._name, passed, list(tensors), self._of_results)
        found = []
        for result, tensor, device in zip(results, passed, devices, strict=True):
            with tf.device(device):
                found.append(with_gradient_of(result, tensor))
        return found

    def _of_results(self, *upstream: Any) -> Sequence[tf.Tensor]:
        return self._function(*[tf.convert_to_tensor(one) for one in upstream])

    def _of_op(self, op: tf.Operation, *upstream: Any) -> Sequence[tf.Tensor]:
        # TensorFlow puts all ops of a gradient where the op is that they are of.
        del op
        graph = tf.compat.v1.get_default_graph()
        with graph.colocate_with(None, ignore_existing=True):
            return self._of_results(*upstream)
