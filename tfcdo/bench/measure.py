"""Makes the all-reduces that are compared, times them on one workload, and checks their results."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import timeit
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo import tf_internals
from tfcdo.bench import results, worker_pool, workloads
from tfcdo.bench.devices import ChosenDevices
from tfcdo.bench.results import BASELINE, OURS, TENSORFLOW
from tfcdo.exchange import dtypes
from tfcdo.execute.device_ops import on_each
from tfcdo.plan.decide import Options

# `[d][v]`: value `v` as device `d` holds it.
ValuesByDevice = list[list[tf.Tensor]]

# Reading one variable takes longer than all-reducing one small value, so the reads would hide the
# all-reduce. Values of one shape up to this many bytes share a variable.
_MAX_COALESCED_BYTES = 2**16
# Seconds. A shorter sample would measure the clock and the switch from one graph to the next.
_SHORTEST_SAMPLE = 0.005

# A strategy's default has no public class.
_STRATEGY_DEFAULT = "tf.CollectiveAllReduce"
_KNOWN = (
    "tfcdo.AutoAllReduce",
    "tfcdo.HierarchicalCopyAllReduce",
    "tfcdo.NcclAllReduce",
    "tfcdo.ReductionToOneDevice",
    "tf.HierarchicalCopyAllReduce(num_packs=0)",
    "tf.HierarchicalCopyAllReduce(num_packs=1)",
    "tf.HierarchicalCopyAllReduce(num_packs=8)",
    "tf.ReductionToOneDevice",
    "tf.NcclAllReduce",
    _STRATEGY_DEFAULT,
)
_WANTED = "write all, tfcdo, tf, or Python such as tfcdo.AutoAllReduce() or tf.NcclAllReduce()"
# The names that a user's Python may use: tf.X is short for tf.distribute.X.
_NAMES = {
    "tfcdo": tfcdo,
    "tf": types.SimpleNamespace(**vars(tf.distribute), distribute=tf.distribute),
}


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation of all-reduce."""

    name: str  # As in Python, such as `tf.HierarchicalCopyAllReduce(num_packs=8)`.
    ops: tf.distribute.CrossDeviceOps | None  # None: a strategy's default.

    @property
    def package(self) -> str:
        """Returns `OURS` or `TENSORFLOW`."""
        return OURS if self.name.startswith(f"{OURS}.") else TENSORFLOW

    def wire(self, dtype: str) -> str | None:
        """Returns the dtype in which values of a dtype are cast to be sent; None for their own."""
        wire = self._options.wire if self._options else None
        return wire.dtype if wire and dtype in dtypes.CAST else None

    @property
    def _options(self) -> Options | None:
        """Returns the options of one of tfcdo's classes."""
        return getattr(self.ops, "_options", None)

    def all_reduce(self, devices: Sequence[str], values: ValuesByDevice) -> ValuesByDevice:
        """Sums a batch of values over these devices."""
        batch_reduce = self.ops.batch_reduce if self.ops is not None else _default(tuple(devices))
        own = map(tf_internals.per_replica, zip(*values, strict=True))
        reduced = batch_reduce(tf.distribute.ReduceOp.SUM, [(value, value) for value in own])
        components = map(tf_internals.components, reduced)
        return [list(device_results) for device_results in zip(*components, strict=True)]

    def reason_not_to_run(self, devices: Sequence[str], dtype: str) -> str | None:
        """Returns the reason why this implementation cannot run."""
        ours = self._options is not None and self._options.nccl == "always"
        if not ours and not isinstance(self.ops, tf.distribute.NcclAllReduce):
            return None
        status = tfcdo.nccl_status(devices, self.wire(dtype) or dtype)
        return None if status.can_run else str(status)

    def check_arguments(self, devices: Sequence[str]) -> None:
        """Sums a number on each device; `ValueError` if one's own class only proves wrong there."""
        if self.name in _KNOWN:
            return
        numbers = on_each(devices, lambda: tf.ones([]))
        try:
            self.all_reduce(devices, [[number] for number in numbers])
        except Exception as error:
            raise ValueError(f"{self.name}: {worker_pool.first_line(error)}") from error


# One for all workloads: a second strategy over the same devices would number its collective ops
# like the first one's, which TensorFlow takes for the same ops.
@functools.cache
def _default(devices: tuple[str, ...]) -> Callable[..., Sequence[Any]]:
    with tf.init_scope():
        strategy = tf.distribute.MirroredStrategy(list(devices))
    reduce: Callable[..., Sequence[Any]] = strategy.extended.batch_reduce_to
    return reduce


def parse(name: str) -> list[Implementation]:
    """Makes the implementations that a name stands for: a package, or Python for one."""
    if name in (OURS, TENSORFLOW, "all"):
        return [one for known in _KNOWN for one in parse(known) if name in (one.package, "all")]
    if name == _STRATEGY_DEFAULT:
        return [Implementation(name, None)]
    try:
        ops = eval(name, dict(_NAMES))
        ops = ops() if isinstance(ops, type) else ops
    except Exception as error:
        reason = f"{type(error).__name__}: {worker_pool.first_line(error)}"
        raise ValueError(f"{name}: {reason}; {_WANTED}") from error
    if not isinstance(ops, tf.distribute.CrossDeviceOps):
        raise ValueError(f"{name} makes no cross-device ops; {_WANTED}")
    return [Implementation(name, ops)]


class Data:
    """Values that all implementations of a run reduce: other small integers on each device."""

    def __init__(self, workload: workloads.Workload, devices: ChosenDevices) -> None:
        self.workload, self.devices = workload, devices
        groups: dict[Any, list[int]] = {}
        for index, shape in enumerate(workload.shapes):
            size = math.prod(shape) * dtypes.itemsize(workload.dtype)
            groups.setdefault(shape if size <= _MAX_COALESCED_BYTES else index, []).append(index)
        # For each variable, the indices of the values that share it on each device.
        self.coalesced = list(groups.values())
        # `[d][i]`: the values `coalesced[i]` of device `d`, several along a new first axis.
        self.variables: list[list[tf.Variable]] = []
        # numpy's, which every dtype holds exactly.
        self.sums = [np.zeros(shape, np.int16) for shape in workload.shapes]
        self.always_true = []  # One on each device.
        for rank, device in enumerate(devices.names):
            arrays = workloads.draw_values(workload, seed=rank)
            for total, array in zip(self.sums, arrays, strict=True):
                total += array
            with tf.device(device):
                self.variables.append([self._variable(arrays, one) for one in self.coalesced])
                self.always_true.append(tf.Variable(True))

    def _variable(self, arrays: Sequence[np.ndarray], indices: Sequence[int]) -> tf.Variable:
        chosen = [arrays[index] for index in indices]
        stacked = np.stack(chosen) if len(chosen) > 1 else chosen[0]
        return tf.Variable(stacked.astype(tf.as_dtype(self.workload.dtype).as_numpy_dtype))

    def read(self) -> ValuesByDevice:
        """Reads the variables, each on its device."""
        values_by_device = []
        for device, variables in zip(self.devices.names, self.variables, strict=True):
            values: dict[int, tf.Tensor] = {}
            with tf.device(device):
                for indices, variable in zip(self.coalesced, variables, strict=True):
                    read = variable.read_value()
                    parts = tf.unstack(read) if len(indices) > 1 else [read]
                    values.update(zip(indices, parts, strict=True))
            values_by_device.append([values[index] for index in range(len(values))])
        return values_by_device

    def num_wrong(self, reduced: ValuesByDevice) -> int:
        """Counts the elements, over all devices, that differ from numpy's sums."""
        wrong = 0
        for device_results in reduced:
            for result, expected in zip(device_results, self.sums, strict=True):
                actual = result.numpy()
                if actual.shape == expected.shape:
                    wrong += int(np.count_nonzero(actual != expected.astype(actual.dtype)))
                else:
                    wrong += expected.size
        return wrong


@dataclasses.dataclass
class TimedStep:
    """A step that can be timed, and the facts that were found while it was built."""

    step: Callable[[], Any]
    first_call: float  # Seconds, tracing included.
    num_wrong: int | None  # Elements; None without an all-reduce.
    fastest: float = math.inf  # Seconds of a call.

    def sample(self) -> float:
        """Returns the seconds of a call, the average of as many as fill a sample."""
        num_calls = max(1, math.ceil(_SHORTEST_SAMPLE / self.fastest))
        # It keeps the garbage collector, which may look at all objects of the graphs, out of it.
        seconds = timeit.timeit(self.step, number=num_calls) / num_calls
        self.fastest = min(self.fastest, seconds)
        return seconds


def build(data: Data, compared: Implementation | None) -> TimedStep:
    """Builds a graph that reads the values from variables, all-reduces, and uses every result."""
    start = time.perf_counter()
    function = _function(data, compared, returns=not data.devices.on_cpu).get_concrete_function()

    def step() -> None:
        function()
        data.devices.wait()

    step()
    first_call = time.perf_counter() - start
    # Traced once more, so that nothing that is timed calls Python.
    wrong = data.num_wrong(_function(data, compared, returns=True)()) if compared else None
    return TimedStep(step, first_call, wrong)


def _function(data: Data, compared: Implementation | None, returns: bool) -> Any:
    """Makes a function that all-reduces, and returns the results or only uses them."""

    @tf.function(autograph=False)
    def step() -> ValuesByDevice | None:
        values = data.read()
        if compared:
            values = compared.all_reduce(data.devices.names, values)
        if returns:
            return values
        # `Assert` takes any number of tensors, neither reads nor copies them while its condition
        # holds, and is never optimized away. Its condition is no constant: TensorFlow folds those.
        for device, always_true, sums in zip(data.devices.names, data.always_true, values):
            with tf.device(device):
                tf.raw_ops.Assert(condition=always_true.read_value(), data=sums, summarize=1)
        return None

    return step


def run(
    workload: workloads.Workload,
    devices: ChosenDevices,
    compared: Sequence[Implementation],
    iterations: int,
    warmup: int,
    track: results.Track,
) -> list[results.Measurement]:
    """Measures implementations, and last the baseline: the same graph without an all-reduce."""
    # The baseline is built first: the first step also pays for what TensorFlow does only once.
    data = Data(workload, devices)
    built = {BASELINE: build(data, None)}
    for one in track(compared, description="building and checking"):
        built[one.name] = build(data, one)
    samples = {name: step.sample for name, step in built.items()}
    taken = results.take_turns(samples, iterations, warmup, track)
    baseline = np.array(taken[BASELINE])
    named = {one.name: one for one in compared}
    found = []
    for name, one in (*named.items(), (BASELINE, None)):
        wire = one.wire(workload.dtype) if one else None
        found.append(
            results.Measurement(
                name,
                one.package if one else BASELINE,
                len(devices.names),
                *results.median_and_spread(taken[name] - baseline if one else baseline),
                workload=workload.name,
                size=workload.size,
                count=workload.count,
                dtype=workload.dtype,
                wrong=built[name].num_wrong,
                first_call=built[name].first_call,
                sent_size=workload.count * dtypes.itemsize(wire) if wire else None,
            )
        )
    return found
