"""Measures reducing rows of a table, as an embedding's gradient has, and updating the table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.bench import implementations, measure, steps, tracking
from tfcdo.bench.devices import ChosenDevices

SGD, MOMENTUM = "SGD", "momentum"
# Steps that reduce nothing: no implementation can be faster. It is both their name and their kind.
ALONE = "updating alone"
# A power of two, by which small integers are multiplied exactly.
_LEARNING_RATE = 0.5
_LARGEST_VALUE = 4


@dataclasses.dataclass(frozen=True)
class TableRows:
    """Rows of a table that every device has a gradient for.

    Attributes:
      num_rows: number of rows of each device, all different.
      repeat: share of these rows that all devices have; the others are one device's only.
      table_rows: number of rows of the table.
      width: number of float32 numbers in a row.
    """

    num_rows: int
    repeat: float
    table_rows: int = 1_000_000
    width: int = 64

    def draw_indices(self, num_devices: int) -> list[np.ndarray]:
        """Draws the indices of each device's rows, in no order."""
        shared = round(self.num_rows * self.repeat)
        own = self.num_rows - shared
        needed = shared + num_devices * own
        if needed > self.table_rows:
            raise implementations.UnusableArgumentsError(
                f"the table has {self.table_rows:,} rows, of which {num_devices} devices with "
                f"{self.num_rows:,} rows each need {needed:,}"
            )
        generator = np.random.default_rng(0)
        drawn = generator.permutation(self.table_rows)[:needed]
        return [
            generator.permutation(
                np.concatenate([drawn[:shared], drawn[shared + rank * own :][:own]])
            )
            for rank in range(num_devices)
        ]


@dataclasses.dataclass(frozen=True)
class RowsMeasurement:
    """Measurement of one implementation with one kind of update.

    Attributes:
      name: the implementation's, or `ALONE` for steps whose rows are reduced already.
      kind: `"tfcdo"`, `"tf"` or `ALONE`.
      update: `SGD` or `MOMENTUM`.
      seconds: median time of a step: reading the rows, reducing them, updating all tables.
      spread: distance between the quartiles of the same times, in seconds.
      cpu_seconds: median CPU time of all threads of the process.
      wrong: number of elements of the updated rows that differ from numpy's.
    """

    num_rows: int
    repeat: float
    num_devices: int
    name: str
    kind: str
    update: str
    seconds: float
    spread: float
    cpu_seconds: float
    wrong: int


@dataclasses.dataclass(frozen=True)
class _Data:
    """Rows that all implementations reduce, and the tables that they update, by device."""

    workload: TableRows
    devices: ChosenDevices
    values: tuple[tf.Variable, ...]
    indices: tuple[tf.Variable, ...]
    tables: tuple[tf.Variable, ...]
    momenta: tuple[tf.Variable, ...]
    touched: np.ndarray
    sums: np.ndarray

    def read(self) -> Any:
        """Reads the rows, each device's there."""
        parts = []
        for device, values, indices in zip(self.devices.names, self.values, self.indices):
            with tf.device(device):
                shape = tf.constant([self.workload.table_rows, self.workload.width], tf.int64)
                parts.append(tf.IndexedSlices(values.read_value(), indices.read_value(), shape))
        return tf_internals.per_replica(parts)

    def place_sums(self) -> Callable[[], list[tf.IndexedSlices]]:
        """Puts the sums of the rows on each device; returns a function that reads them there."""
        placed = []
        for device in self.devices.names:
            with tf.device(device):
                placed.append((tf.Variable(self.sums), tf.Variable(self.touched)))

        def read() -> list[tf.IndexedSlices]:
            parts = []
            for device, (sums, touched) in zip(self.devices.names, placed, strict=True):
                with tf.device(device):
                    parts.append(tf.IndexedSlices(sums.read_value(), touched.read_value()))
            return parts

        return read

    def num_wrong(self, step: Callable[[], Any]) -> int:
        """Updates tables of zeros once, and counts the elements that differ from numpy's."""
        zeros = tf.IndexedSlices(np.zeros_like(self.sums), self.touched)
        for variable in (*self.tables, *self.momenta):
            variable.scatter_update(zeros)
        step()
        expected = -_LEARNING_RATE * self.sums
        return sum(
            int(np.count_nonzero(tf.gather(table, self.touched).numpy() != expected))
            for table in self.tables
        )


def run(
    workload: TableRows,
    devices: ChosenDevices,
    compared: Sequence[implementations.Implementation],
    settings: measure.Settings,
    track: tracking.Track = tracking.silently,
) -> list[RowsMeasurement]:
    """Measures each implementation with each kind of update, taking turns on the same tables."""
    data = _place(workload, devices)
    found: dict[tuple[str, str], steps.Step] = {}
    wrong: dict[tuple[str, str], int] = {}
    for implementation in track(compared, description="building and checking"):
        for update in (SGD, MOMENTUM):
            key = (implementation.name, update)
            found[key] = implementation.build_with(functools.partial(_build, data, update))
            wrong[key] = data.num_wrong(found[key])
    read_sums = data.place_sums()
    for update in (SGD, MOMENTUM):
        found[ALONE, update] = _make_step(data, update, read_sums)
        wrong[ALONE, update] = data.num_wrong(found[ALONE, update])
    names = {f"{name} {update}": step for (name, update), step in found.items()}
    times = measure.interleave(names, settings, track)
    results = []
    kinds = {one.name: one.package for one in compared} | {ALONE: ALONE}
    for name, kind in kinds.items():
        for update in (SGD, MOMENTUM):
            timed = times[f"{name} {update}"]
            lower, median, upper = np.percentile(timed.wall, [25, 50, 75])
            results.append(
                RowsMeasurement(
                    workload.num_rows,
                    workload.repeat,
                    len(devices.names),
                    name,
                    kind,
                    update,
                    float(median),
                    float(upper - lower),
                    float(np.median(timed.cpu)),
                    wrong[name, update],
                )
            )
    return results


def fastest(results: Sequence[RowsMeasurement], kind: str, update: str) -> RowsMeasurement | None:
    """Returns the fastest measurement of a kind with an update, among those that are right."""
    right = [one for one in results if (one.kind, one.update) == (kind, update) and not one.wrong]
    return min(right, key=lambda one: one.seconds, default=None)


def _place(workload: TableRows, devices: ChosenDevices) -> _Data:
    shape = (workload.table_rows, workload.width)
    all_indices = workload.draw_indices(len(devices.names))
    touched = np.unique(np.concatenate(all_indices))
    sums = np.zeros((len(touched), workload.width), np.float32)
    variables = []
    for rank, (device, indices) in enumerate(zip(devices.names, all_indices, strict=True)):
        drawn = np.random.default_rng(rank + 1).integers(
            -_LARGEST_VALUE, _LARGEST_VALUE + 1, (workload.num_rows, workload.width)
        )
        sums[np.searchsorted(touched, indices)] += drawn
        with tf.device(device):
            variables.append(
                (
                    tf.Variable(drawn.astype(np.float32)),
                    tf.Variable(indices),
                    tf.Variable(tf.zeros(shape)),
                    tf.Variable(tf.zeros(shape)),
                )
            )
    values, positions, tables, momenta = zip(*variables, strict=True)
    return _Data(workload, devices, values, positions, tables, momenta, touched, sums)


def _build(data: _Data, update: str, implementation: implementations.Implementation) -> steps.Step:
    reduce = implementation.reducer(data.devices.names)
    # Each device has to add rows of the same index in TensorFlow's result, as TensorFlow's
    # optimizers do (tf.compat.v1.train.Optimizer), except for SGD. tfcdo's has each row once.
    needs_adding = update == MOMENTUM and implementation.package != implementations.OURS

    def reduced() -> list[tf.IndexedSlices]:
        parts = reduce([data.read()])[0].values
        if not all(isinstance(part, tf.IndexedSlices) for part in parts):
            raise implementations.UnusableArgumentsError(
                f"{implementation.name} gives dense tensors, where rows are updated"
            )
        return list(parts)

    return _make_step(data, update, reduced, needs_adding)


def _make_step(
    data: _Data,
    update: str,
    make_sums: Callable[[], list[tf.IndexedSlices]],
    needs_adding: bool = False,
) -> steps.Step:
    """Makes a step that updates each device's table with what is made of rows for it."""

    @tf.function(autograph=False)
    def step() -> None:
        for device, part, table, momentum in zip(
            data.devices.names, make_sums(), data.tables, data.momenta, strict=True
        ):
            with tf.device(device):
                values, indices = _added(part) if needs_adding else (part.values, part.indices)
                if update == SGD:
                    tf.raw_ops.ResourceScatterSub(
                        resource=table.handle, indices=indices, updates=values * _LEARNING_RATE
                    )
                    continue
                tf.raw_ops.ResourceSparseApplyMomentum(
                    var=table.handle,
                    accum=momentum.handle,
                    lr=_LEARNING_RATE,
                    grad=values,
                    indices=indices,
                    momentum=0.9,
                )

    return steps.synchronous(step.get_concrete_function(), data.devices)


def _added(part: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    indices, positions = tf.unique(part.indices)
    return tf.math.unsorted_segment_sum(part.values, positions, tf.size(indices)), indices
