"""Times steps side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfcdo.bench import floor
from tfcdo.bench import implementations
from tfcdo.bench import memory
from tfcdo.bench import steps
from tfcdo.bench import tracking
from tfcdo.bench import watchdog
from tfcdo.bench import workloads
from tfcdo.bench.devices import Devices

BASELINE, FLOOR, PACKING = "baseline", "floor", "packing"
_REPACK = "pack and unpack"
_BASELINE_OF_FLOOR = "baseline of the floor"

# Seconds. A shorter sample would measure the clock and the switch from one graph to the next.
_SHORTEST_SAMPLE = 0.005


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    Attributes:
      iterations: how many samples of each step count.
      warmup: how many are taken before and thrown away.
      eager: whether to run op by op instead of in a graph.
    """

    iterations: int = 20
    warmup: int = 5
    eager: bool = False


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Measurement of one implementation on one workload.

    Attributes:
      workload: its name.
      size: bytes that each device holds.
      count: elements that each device holds.
      dtype: the name of their dtype.
      num_devices: over how many devices they were summed.
      name: the implementation's.
      kind: `"tfcdo"`, `"tf"`, `FLOOR`, `PACKING` (see `floor.repack`) or `BASELINE`.
      seconds: the median time per round minus the baseline's in the same round; for the baseline
        itself, its own time.
      spread: the distance between the quartiles of the same times, in seconds.
      p99: the 99th percentile of the same times, in seconds: what one of a hundred samples is
        slower than, with fewer samples the slowest.
      cpu_seconds: the same median of the CPU time of all threads of the process, which other
        processes do not lengthen by taking turns with it.
      wrong: how many elements were not what numpy found; None if there was nothing to check.
      first_call: seconds for tracing the graph and running it once; None if nothing is traced.
      nodes: how many ops it adds to the baseline's graph; None likewise.
      peak_memory: bytes in use at most while it runs, beyond its input; None if that is not known.
      sent_size: bytes that each device's values have as they travel; None for `size`.
    """

    workload: str
    size: int
    count: int
    dtype: str
    num_devices: int
    name: str
    kind: str
    seconds: float
    spread: float
    cpu_seconds: float
    wrong: int | None = None
    first_call: float | None = None
    nodes: int | None = None
    peak_memory: int | None = None
    p99: float | None = None

    sent_size: int | None = None

    @property
    def algbw(self) -> float:
        """Returns the bytes per second that the caller sees; NaN if the time is not above 0."""
        return self.size / self.seconds if self.seconds > 0 else math.nan

    @property
    def busbw(self) -> float:
        """Returns the bytes per second over each link of a ring that takes the same time."""
        sent = 1.0 if self.sent_size is None else self.sent_size / self.size
        return self.algbw * sent * 2 * (self.num_devices - 1) / self.num_devices


class Times(NamedTuple):
    """Seconds of a step on the clock, and of CPU time of all threads; of one sample, or several."""

    wall: Any
    cpu: Any


@dataclasses.dataclass(frozen=True)
class _TimedRun:
    """All that is known about one step at the end of a run."""

    step: steps.TimedStep
    times: Times
    peak_memory: int | None

    def minus(self, baseline: _TimedRun) -> _TimedRun:
        """Returns this run without the times and the nodes of a baseline."""
        nodes, baseline_nodes = self.step.num_nodes, baseline.step.num_nodes
        added = None if nodes is None or baseline_nodes is None else nodes - baseline_nodes
        return dataclasses.replace(
            self,
            step=dataclasses.replace(self.step, num_nodes=added),
            times=Times(self.times.wall - baseline.times.wall, self.times.cpu - baseline.times.cpu),
        )


def run(
    workload: workloads.Workload,
    devices: Devices,
    compared: Sequence[implementations.Implementation],
    settings: Settings,
    track: tracking.Track = tracking.silently,
    watch: watchdog.Watchdog = watchdog.ASLEEP,
) -> list[Measurement]:
    """Measures implementations, the floor, packing and the baseline in turn.

    Args:
      workload: what is all-reduced.
      devices: over which devices.
      compared: the implementations.
      settings: how to measure.
      track: shows the progress.
      watch: watches each implementation while it is built and checked, and in each round.

    Returns:
      One measurement each: the implementations' in the order given, the floors', that of packing if
      several values are small and of one shape, the baseline's.

    Raises:
      implementations.UnusableArgumentsError: if one cannot run with its arguments.
    """
    build = steps.build_eager if settings.eager else steps.build_graph
    # The baseline comes first: whatever is built first also pays for what TensorFlow does only
    # once.
    data = steps.place_values(workload, devices)
    timed_steps = {BASELINE: build(data, None)}
    kinds: dict[str, str] = {}
    for implementation in track(compared, description="building and checking"):
        kinds[implementation.name] = implementation.package
        with watch.watching(implementation.name):
            timed_steps[implementation.name] = implementation.build_with(
                lambda built: build(data, built.reducer(devices.names))
            )
    floor_data = floor.place_values(workload, devices)
    timed_steps[_BASELINE_OF_FLOOR] = steps.build_graph(floor_data, None)
    for name, reduce in floor.single_passes(devices.names[0]).items():
        kinds[name] = FLOOR
        timed_steps[name] = steps.build_graph(floor_data, reduce)
    if data.has_coalesced:
        kinds[_REPACK] = PACKING
        timed_steps[_REPACK] = build(data, floor.repack(data))

    steps_by_name = {name: one.step for name, one in timed_steps.items()}
    times = interleave(steps_by_name, settings, track, watch)
    runs = {
        name: _TimedRun(timed_step, times[name], memory.peak_of(timed_step.step, devices))
        for name, timed_step in timed_steps.items()
    }
    found = []
    for name, kind in kinds.items():
        baseline = runs[_BASELINE_OF_FLOOR if kind == FLOOR else BASELINE]
        found.append(
            _measurement(workload, len(devices.names), name, kind, runs[name].minus(baseline))
        )
    cast = {one.name for one in compared if one.wire}
    found = [
        dataclasses.replace(one, sent_size=2 * workload.count) if one.name in cast else one
        for one in found
    ]
    return [
        *found,
        _measurement(workload, len(devices.names), BASELINE, BASELINE, runs[BASELINE]),
    ]


def interleave(
    steps_by_name: Mapping[str, steps.Step],
    settings: Settings,
    track: tracking.Track = tracking.silently,
    watch: watchdog.Watchdog = watchdog.ASLEEP,
) -> dict[str, Times]:
    """Times steps A B C A B C ..., so that a change of the machine's load affects all of them.

    Args:
      steps_by_name: the steps.
      settings: how many rounds.
      track: shows the progress.
      watch: watches each sample.

    Returns:
      For each step one sample per round: the mean of as many calls in a row as it takes to fill
      `_SHORTEST_SAMPLE`.
    """
    samples: dict[str, list[Times]] = {name: [] for name in steps_by_name}
    num_calls = dict.fromkeys(steps_by_name, 1)
    with _no_garbage_collection():
        for number in track(range(settings.warmup + settings.iterations), description="rounds"):
            for name, step in steps_by_name.items():
                with watch.watching(name):
                    samples[name].append(_sample(step, num_calls[name]))
                if number < settings.warmup:
                    fastest = min(sample.wall for sample in samples[name])
                    num_calls[name] = max(1, math.ceil(_SHORTEST_SAMPLE / fastest))
    return {
        name: Times(*np.array(collected[settings.warmup :]).T)
        for name, collected in samples.items()
    }


def _sample(step: steps.Step, num_calls: int) -> Times:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_calls):
        step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Times(wall / num_calls, cpu / num_calls)


def _measurement(
    workload: workloads.Workload, num_devices: int, name: str, kind: str, timed_run: _TimedRun
) -> Measurement:
    lower, median, upper = np.quantile(timed_run.times.wall, (0.25, 0.5, 0.75))
    p99 = np.quantile(timed_run.times.wall, 0.99, method="higher")
    return Measurement(
        workload=workload.name,
        size=workload.size,
        count=workload.count,
        dtype=workload.dtype,
        num_devices=num_devices,
        name=name,
        kind=kind,
        seconds=float(median),
        spread=float(upper - lower),
        cpu_seconds=float(np.median(timed_run.times.cpu)),
        wrong=None if kind in (PACKING, BASELINE) else timed_run.step.num_wrong,
        first_call=timed_run.step.first_call,
        nodes=timed_run.step.num_nodes,
        peak_memory=timed_run.peak_memory,
        p99=float(p99),
    )


def by_workload(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """Splits measurements, of one workload after the other, into those of one workload each."""
    groups = itertools.groupby(measurements, lambda one: (one.workload, one.size))
    return [list(group) for _, group in groups]


def fastest(measurements: Sequence[Measurement], kind: str) -> Measurement | None:
    """Returns the fastest measurement of one kind among those without wrong results.

    Args:
      measurements: of one workload.
      kind: as in `Measurement.kind`.

    Returns:
      The measurement, or None if there is none.
    """
    right = [one for one in measurements if one.kind == kind and not one.wrong]
    return min(right, key=lambda one: one.seconds, default=None)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keeps the garbage collector out of the samples: a graph has many objects."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
