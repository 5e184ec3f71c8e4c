"""Custom gradients that are registered once, for all graphs.

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
from tfcdo.execute.numerics import on_each


def _through_one_op(name: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors of a graph, as an op has them whose gradient is registered under a name."""
    graph = tf.compat.v1.get_default_graph()
    with graph.gradient_override_map({"IdentityN": name}):
        return list(tf.raw_ops.IdentityN(input=tensors))


class Gradient:
    """The gradient of one tensor, by a function that is registered once, for all graphs."""

    def __init__(self, name: str, function: Callable[..., tf.Tensor]) -> None:
        # Maps the result's gradient, and all inputs but the result, to the tensor's gradient.
        self._name, self._function = name, function
        with contextlib.suppress(KeyError):  # It is registered already if a module is reloaded.
            tf.RegisterGradient(name)(self._of_op)

    def of(self, result: tf.Tensor, tensor: tf.Tensor, *others: tf.Tensor) -> tf.Tensor:
        """Returns the value of `result`, whose gradient reaches `tensor` by the function."""
        if tf.executing_eagerly():
            passed = tf.identity(result)
        else:
            passed, *_ = _through_one_op(self._name, [result, tensor, *others])
        tf_internals.record_operation(
            self._name,
            [passed],
            [tensor],
            lambda upstream: [self._function(upstream, tensor, *others)],
        )
        return passed

    def _of_op(self, op: tf.Operation, upstream: tf.Tensor, *_: Any) -> list[tf.Tensor | None]:
        _, tensor, *others = op.inputs
        return [None, self._function(upstream, tensor, *others), *[None] * len(others)]


# Hands the gradient that comes to a result on to a tensor.
with_gradient_of = Gradient("TfcdoGradientOf", lambda upstream, _: upstream).of


class JointGradient:
    """The gradient of several tensors together, as a function of all that come to them."""

    _numbers = itertools.count()

    def __init__(self, function: Callable[..., Sequence[tf.Tensor]]) -> None:
        # Maps the results' gradients to the tensors'. It stays registered, so it holds no graph.
        self._function = function
        self._name = f"TfcdoJointGradient{next(self._numbers)}"
        tf.RegisterGradient(self._name)(self._of_op)

    def of(
        self, results: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor], devices: Sequence[str]
    ) -> list[tf.Tensor]:
        """Returns results, one on each device, whose gradients reach the tensors together."""
        # A gradient of all tensors together needs an op that all pass through, and TensorFlow's is
        # on one device. So the tensors go there, not the results: a gradient sees that op, but it
        # is pruned before the step runs, as nothing uses its values.
        if tf.executing_eagerly():
            passed = [tf.identity(tensor) for tensor in tensors]
        else:
            passed = _through_one_op(self._name, tensors)
        tf_internals.record_operation(self._name, passed, list(tensors), self._of_results)
        return on_each(devices, with_gradient_of, results, passed)

    def _of_results(self, *upstream: Any) -> Sequence[tf.Tensor]:
        return self._function(*[tf.convert_to_tensor(one) for one in upstream])

    def _of_op(self, op: tf.Operation, *upstream: Any) -> Sequence[tf.Tensor]:
        # TensorFlow puts all ops of a gradient where the op is that they are of.
        del op
        graph = tf.compat.v1.get_default_graph()
        with graph.colocate_with(None, ignore_existing=True):
            return self._of_results(*upstream)
