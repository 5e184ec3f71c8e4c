"""Tensors on the devices of a copy tree: copies along its edges, sums, casts, and gradients.

Trees are reduced up from the leaves, collected, and copied down from the root. In a graph, each op
is named after the edge that brings its input, so that a profiler's trace can be read:
`reduce/2to0` adds on device 0 the part that device 2 sent, `reduce/1and2to0` the parts of both, and
`broadcast/0to2` is the copy back. With several tensors, a number is appended from the second tensor
on.

Between devices, float32 and float64 may be rounded to 16 bits where they are copied; sums are
formed in their own dtype. docs/wire-numerics.md derives the error.

Custom gradients are registered once, for all graphs: `tf.custom_gradient` registers a new one in
each graph, which keeps the graph alive for as long as the process runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.exchange import dtypes, rounding
from tfcdo.execute.feedback import Residuals
from tfcdo.plan.copy_tree import CopyTree

_lock = threading.Lock()
_WIDER = {tf.as_dtype(dtype): tf.as_dtype(wide) for dtype, wide in dtypes.SUM_DTYPE.items()}


def on_each(
    devices: Sequence[str], function: Callable[..., Any], *arguments: Sequence[Any]
) -> list[Any]:
    """Calls a function on each device, with the arguments of that device."""
    results = []
    for device, *own in zip(devices, *arguments, strict=True):
        with tf.device(device):
            results.append(function(*own))
    return results


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


def upcast_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype that sums of values of a dtype are formed in."""
    return _WIDER.get(dtype, dtype)


def upcast(value: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """Casts a value to the dtype that sums are formed in: 16-bit floats to 32 bits."""
    # No call where nothing is cast: with thousands of values, calls take noticeable time.
    return tf.cast(value, _WIDER[value.dtype], name) if value.dtype in _WIDER else value


def add(values: Sequence[tf.Tensor], name: str) -> tf.Tensor:
    """Adds tensors of one shape, or partial sums of them, on the current device; see `upcast`."""
    if len(values) == 1:
        return values[0]
    cast = f"{name}/Cast"
    # All are tensors already, so the conversions and checks of tf.add_n are not needed.
    return tf.raw_ops.AddN(inputs=[upcast(value, cast) for value in values], name=name)


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
        make, name = self.residuals.variable, f"pack{self.pack}_tensor"
        return [
            make(node, f"{name}{index}", functools.partial(tf.zeros, tensor.shape, tensor.dtype))
            for index, tensor in enumerate(tensors)
        ]


def bare_variable(name: str, device: str, dtype: tf.DType, shape: Sequence[int] = ()) -> tf.Tensor:
    """Returns the handle of a variable that is made once, of zeros; a strategy would mirror one."""
    with _lock:  # All threads must get the same tensor.
        return _make_variable(name, device, dtype, tuple(shape))


@functools.cache
def _make_variable(name: str, device: str, dtype: tf.DType, shape: tuple[int, ...]) -> tf.Tensor:
    with tf.init_scope(), tf.device(device):
        handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=f"tfcdo_{name}")
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros(shape, dtype))
        return handle
