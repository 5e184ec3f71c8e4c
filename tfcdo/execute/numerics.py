"""Numerics: additions, casts, sizes, shapes and cuts of tensors, on the devices that hold them.

Custom gradients are registered once, for all graphs: `tf.custom_gradient` registers a new one in
each graph, which keeps the graph alive for as long as the process runs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.exchange import dtypes, rounding

_WIDER = {tf.as_dtype(dtype): tf.as_dtype(wide) for dtype, wide in dtypes.SUM_DTYPE.items()}
# The dtypes that collectives take others as: their bits, where the dtype is not wider, or a cast.
# `CollectiveReduceV2` adds: sums of integers are correct modulo their size in wider ones too, and a
# complex number is two real ones.
_SUMMED_AS = {
    **_WIDER,
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
    tf.complex64: tf.float32,
    tf.complex128: tf.float64,
}
# The others only copy.
_COPIED_AS = {
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.bfloat16: tf.float16,
    tf.int16: tf.float16,
    tf.uint16: tf.float16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
    tf.complex128: tf.float64,
}


def on_each(
    devices: Sequence[str], function: Callable[..., Any], *arguments: Sequence[Any]
) -> list[Any]:
    """Calls a function on each device, with the arguments of that device."""
    results = []
    for device, *own in zip(devices, *arguments, strict=True):
        with tf.device(device):
            results.append(function(*own))
    return results


def upcast_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype that sums of values of a dtype are formed in."""
    return _WIDER.get(dtype, dtype)


def upcast(value: tf.Tensor) -> tf.Tensor:
    """Casts a value to the dtype that sums are formed in: 16-bit floats to 32 bits."""
    # No call where nothing is cast: with thousands of values, calls take noticeable time.
    return tf.cast(value, _WIDER[value.dtype]) if value.dtype in _WIDER else value


def add(values: Sequence[tf.Tensor], name: str) -> tf.Tensor:
    """Adds tensors of one shape, or partial sums of them, on the current device; see `upcast`."""
    if len(values) == 1:
        return values[0]
    # All are tensors already, so the conversions and checks of tf.add_n are not needed.
    return tf.raw_ops.AddN(inputs=[upcast(value) for value in values], name=name)


def finish(total: tf.Tensor, divide: int | None, dtype: tf.DType) -> tf.Tensor:
    """Divides a sum, if it is for a mean, and rounds it to the dtype of the values."""
    if divide is not None:
        total = total / tf.cast(divide, total.dtype)
    return tf.cast(total, dtype) if dtype in _WIDER else total


def like(tensors: Sequence[tf.Tensor], flat: tf.Tensor) -> list[tf.Tensor]:
    """Cuts a vector into tensors of these shapes."""
    parts = [flat]
    if len(tensors) > 1:
        sizes = tf.convert_to_tensor([size(tensor) for tensor in tensors], tf.int64)
        parts = tf.split(flat, sizes, num=len(tensors))
    return [
        part if tensor.shape.rank == 1 else tf.reshape(part, shape(tensor))
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def size(tensor: tf.Tensor) -> Any:
    """Returns the number of a tensor's elements: an int where it is known."""
    known = tensor.shape.num_elements()
    return tf.size(tensor, tf.int64) if known is None else known


def shape(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's shape as an op takes it: a constant where it is known."""
    known = tensor.shape.is_fully_defined()
    return rounding.int64(*tensor.shape.as_list()) if known else tf.shape(tensor, tf.int64)


def axis_first(rank: tf.Tensor, axis: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the permutation of axes that puts one first, and the one that puts it back."""
    axis = tf.cast(axis, tf.int32) % rank
    before, after = tf.range(axis), tf.range(axis + 1, rank)
    return tf.concat([[axis], before, after], 0), tf.concat([before + 1, [0], after], 0)


def as_summed(tensor: tf.Tensor) -> tf.Tensor:
    """Turns a tensor into a dtype that `CollectiveReduceV2` adds, exactly."""
    return _as_sent(tensor, _SUMMED_AS.get(tensor.dtype, tensor.dtype))


def dtype_copied(name: str) -> tf.DType:
    """Returns the dtype that `as_copied` turns tensors of a dtype into."""
    return _COPIED_AS.get(tf.as_dtype(name), tf.as_dtype(name))


def as_copied(tensor: tf.Tensor) -> tf.Tensor:
    """Turns a tensor into a dtype that TensorFlow's other collective ops copy, exactly."""
    return _as_sent(tensor, dtype_copied(tensor.dtype.name))


def _as_sent(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    # An empty NumPy array has no memory, and then TensorFlow's collectives end the process.
    if tensor.shape.num_elements() == 0:
        tensor = tf.zeros(tensor.shape, tensor.dtype)
    return tf.bitcast(tensor, dtype) if _is_bits(dtype, tensor.dtype) else tf.cast(tensor, dtype)


def from_collective(received: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Turns a result of a collective back into a dtype: the values' dtype, or their sums'."""
    as_bits = _is_bits(received.dtype, dtype)
    return tf.bitcast(received, dtype) if as_bits else tf.cast(received, dtype)


def _is_bits(sent: tf.DType, dtype: tf.DType) -> bool:
    return bool(sent != dtype and sent.size <= dtype.size)


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
