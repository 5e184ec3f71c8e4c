"""Turning an implementation into a step that can be timed, and checking what it computes."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.bench import implementations
from tfcdo.bench import workloads
from tfcdo.bench.devices import Devices

# `[d][v]`: value `v` as device `d` holds it.
Held = list[list[tf.Tensor]]
Step = Callable[[], Any]

# To read one variable takes longer than to all-reduce one small value, whose time would be lost in
# that of the reads: values of one shape up to this many bytes are read together.
_SMALL = 2**16


@dataclasses.dataclass(frozen=True)
class Data:
    """The values that all implementations of a run reduce.

    Attributes:
      workload: their shapes and dtype.
      devices: where they are.
      together: the indices of the values that share a variable on each device, for each variable.
      variables: `[d][i]`: what device `d` holds of the values `together[i]`: one as it is, several
        along a new first axis.
      sums: for each value, the sum that numpy finds.
      true: a variable on each device that holds True; see `_consume`.
    """

    workload: workloads.Workload
    devices: Devices
    together: tuple[tuple[int, ...], ...]
    variables: tuple[tuple[tf.Variable, ...], ...]
    sums: tuple[np.ndarray, ...]
    true: tuple[tf.Variable, ...]

    @property
    def has_small(self) -> bool:
        """Whether any values are read together."""
        return any(len(indices) > 1 for indices in self.together)

    def read(self) -> Held:
        """Reads the variables, each on its device."""
        held = []
        for device, own in zip(self.devices.names, self.variables, strict=True):
            with tf.device(device):
                held.append(self._read(own))
        return held

    def _read(self, own: Sequence[tf.Variable]) -> list[tf.Tensor]:
        values: dict[int, tf.Tensor] = {}
        for indices, variable in zip(self.together, own, strict=True):
            read = variable.read_value()
            values.update(zip(indices, tf.unstack(read) if len(indices) > 1 else [read]))
        return [values[index] for index in range(len(values))]

    def num_wrong(self, results: Held) -> int:
        """How many elements, over all devices, are not what numpy says."""
        return sum(
            _num_wrong(result, expected)
            for own in results
            for result, expected in zip(own, self.sums, strict=True)
        )


def place(workload: workloads.Workload, devices: Devices) -> Data:
    """Makes the values: on each device other small integers, whose sums every dtype holds exactly.

    Args:
      workload: says how many, of which shapes and dtype.
      devices: where.

    Returns:
      The values, and their sums.
    """
    dtype = tf.as_dtype(workload.dtype).as_numpy_dtype
    sums = [np.zeros(shape, np.int16) for shape in workload.shapes]
    together = _together(workload)
    variables = []
    for rank, device in enumerate(devices.names):
        own = workloads.numbers(workload, seed=rank)
        for total, array in zip(sums, own, strict=True):
            total += array
        with tf.device(device):
            variables.append(
                tuple(tf.Variable(_stacked(own, indices).astype(dtype)) for indices in together)
            )
    true = []
    for device in devices.names:
        with tf.device(device):
            true.append(tf.Variable(True))
    return Data(workload, devices, together, tuple(variables), tuple(sums), tuple(true))


def _together(workload: workloads.Workload) -> tuple[tuple[int, ...], ...]:
    groups: dict[Any, list[int]] = {}
    for index, shape in enumerate(workload.shapes):
        small = math.prod(shape) * workload.itemsize <= _SMALL
        groups.setdefault(shape if small else index, []).append(index)
    return tuple(map(tuple, groups.values()))


def _stacked(arrays: Sequence[np.ndarray], indices: Sequence[int]) -> np.ndarray:
    if len(indices) == 1:
        return arrays[indices[0]]
    return np.stack([arrays[index] for index in indices])


def reduce_held(reduce: implementations.Reduce | None, held: Held) -> Held:
    """All-reduces one batch.

    Args:
      reduce: how; None leaves the values as they are.
      held: the values.

    Returns:
      The results, indexed like `held`.
    """
    if reduce is None:
        return held
    results = reduce([tf_internals.per_replica(value) for value in zip(*held, strict=True)])
    parts = [
        result.values if isinstance(result, tf_internals.DistributedValues) else (result,)
        for result in results
    ]
    return [list(own) for own in zip(*parts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Built:
    """A step, and what was found out while it was built.

    Attributes:
      step: all-reduces once and waits for the end.
      first_call: seconds for tracing it and for its first call; None if nothing is traced.
      nodes: how many ops its graph has; None likewise.
      wrong: how many elements of its results are wrong.
    """

    step: Step
    first_call: float | None
    nodes: int | None
    wrong: int


def build_graph(data: Data, reduce: implementations.Reduce | None) -> Built:
    """Builds a graph that reads the values from variables, all-reduces, and uses every result.

    Args:
      data: the values.
      reduce: how they are reduced; None for the graph that is subtracted: it only reads and uses.

    Returns:
      The step.
    """
    start = time.perf_counter()
    function = trace(data, reduce)
    step = _synchronous(function, data.devices)
    step()
    first_call = time.perf_counter() - start
    # Traced once more, so that what is timed hands nothing to Python.
    wrong = 0 if reduce is None else data.num_wrong(_returning(data, reduce)())
    return Built(step, first_call, num_nodes(function), wrong)


def trace(data: Data, reduce: implementations.Reduce | None) -> Any:
    """Makes the graph of `build_graph` without running it.

    Args:
      data: the values.
      reduce: how they are reduced, or None.

    Returns:
      The concrete function.
    """
    if not data.devices.on_cpu:
        return _returning(data, reduce).get_concrete_function()

    @tf.function(autograph=False)
    def step() -> None:
        _consume(data, reduce_held(reduce, data.read()))

    return step.get_concrete_function()


def num_nodes(function: Any) -> int:
    """How many ops the graph of a concrete function has, those of its functions included."""
    graph = function.graph.as_graph_def()
    return len(graph.node) + sum(len(inner.node_def) for inner in graph.library.function)


def _returning(data: Data, reduce: implementations.Reduce | None) -> Any:
    """The same graph, whose results are returned instead."""

    @tf.function(autograph=False)
    def step() -> Held:
        return reduce_held(reduce, data.read())

    return step


def build_eager(data: Data, reduce: implementations.Reduce | None) -> Built:
    """The same without a graph: the values are tensors, and each call runs op by op.

    Args:
      data: the values.
      reduce: how they are reduced; None does nothing.

    Returns:
      The step.
    """
    held = data.read()
    wrong = 0 if reduce is None else data.num_wrong(reduce_held(reduce, held))
    return Built(_synchronous(lambda: reduce_held(reduce, held), data.devices), None, None, wrong)


def _consume(data: Data, results: Held) -> None:
    """Uses each result on its device, at as good as no cost.

    `Assert` takes any number of tensors, neither reads nor copies them while its condition holds,
    and is never optimized away; a variable's value is nothing that TensorFlow could fold.
    """
    for device, true, own in zip(data.devices.names, data.true, results, strict=True):
        with tf.device(device):
            tf.raw_ops.Assert(condition=true.read_value(), data=own, summarize=1)


def _synchronous(call: Callable[[], Any], devices: Devices) -> Step:
    if devices.on_cpu:
        return call

    def call_and_wait() -> None:
        call()
        tf.test.experimental.sync_devices()

    return call_and_wait


def _num_wrong(result: tf.Tensor, expected: np.ndarray) -> int:
    actual = result.numpy()
    if actual.shape != expected.shape:
        return expected.size
    return int(np.count_nonzero(actual != expected.astype(actual.dtype)))
