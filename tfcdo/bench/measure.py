"""Timing steps side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfcdo.bench import floor
from tfcdo.bench import implementations
from tfcdo.bench import memory
from tfcdo.bench import steps
from tfcdo.bench import workloads
from tfcdo.bench.devices import Devices

# Told after each piece of work what comes next.
Progress = Callable[[str], None]

BASELINE, FLOOR, PACKING = "baseline", "floor", "packing"
_REPACK = "pack and unpack"
_BASELINE_OF_FLOOR = "baseline of the floor"

# A sample of less would measure the clock and the switch from one graph to the next.
_SHORTEST_SAMPLE = 0.005


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

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
    """What one implementation did to one workload.

    Attributes:
      workload: its name.
      size: bytes that each device holds.
      count: elements that each device holds.
      dtype: the name of their dtype.
      num_devices: over how many devices they were summed.
      name: the implementation's.
      kind: `"tfcdo"`, `"tf"`, `FLOOR`, `PACKING` (see `floor.repack`) or `BASELINE`.
      seconds: the time of one all-reduce in seconds: the median over the rounds of what it took
        more than the baseline in the same round. Of the baseline, what it took.
      spread: the distance between the quartiles of the same, in seconds.
      cpu_seconds: the same median of the time that all threads of the process computed, which other
        processes do not lengthen by taking turns with it.
      wrong: how many elements were not what numpy found; None if there was nothing to check.
      first_call: seconds for tracing the graph and running it once; None if nothing is traced.
      nodes: how many ops it adds to the baseline's graph; None likewise.
      peak_memory: bytes in use at most while it runs, beyond its input; None if that is not known.
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

    @property
    def algbw(self) -> float:
        """Bytes per second that the caller sees; NaN where the time is lost in the baseline's."""
        return self.size / self.seconds if self.seconds > 0 else math.nan

    @property
    def busbw(self) -> float:
        """Bytes per second over the busiest link if the ring algorithm needed that time."""
        return self.algbw * 2 * (self.num_devices - 1) / self.num_devices


class Times(NamedTuple):
    """Seconds of a step, on the clock and of all threads together; of one sample, or of several."""

    wall: Any
    cpu: Any


def num_pieces(settings: Settings, num_implementations: int) -> int:
    """How often `run` tells its progress: once for each graph that is built, and each round."""
    return num_implementations + 2 + settings.iterations + settings.warmup


def run(
    workload: workloads.Workload,
    devices: Devices,
    compared: Sequence[implementations.Implementation],
    settings: Settings,
    progress: Progress = lambda _: None,
) -> list[Measurement]:
    """Measures implementations, the floor, packing and the baseline in turn.

    Args:
      workload: what is all-reduced.
      devices: over which devices.
      compared: the implementations.
      settings: how to measure.
      progress: told what is done next.

    Returns:
      One measurement each: the implementations' in the order given, the floors', that of packing if
      several values are small and of one shape, the baseline's.

    Raises:
      implementations.UnusableArgumentsError: if one cannot run with its arguments.
    """
    build = steps.build_eager if settings.eager else steps.build_graph
    # What is subtracted comes first: whatever is built first also pays for what TensorFlow does
    # only once.
    data = steps.place(workload, devices)
    progress("building the graph to subtract")
    built = {BASELINE: build(data, None)}
    for one in compared:
        progress(f"building and checking {one.name}")
        built[one.name] = one.make(lambda made: build(data, made.reducer(devices.names)))
    progress("building the floor")
    at_one_place = floor.place(workload, devices)
    floors = floor.passes(devices.names[0])
    built[_BASELINE_OF_FLOOR] = steps.build_graph(at_one_place, None)
    for name, reduce in floors.items():
        built[name] = steps.build_graph(at_one_place, reduce)
    kinds = {one.name: one.package for one in compared} | dict.fromkeys(floors, FLOOR)
    if data.has_small:
        kinds[_REPACK] = PACKING
        built[_REPACK] = build(data, floor.repack(data))

    times = interleave({name: one.step for name, one in built.items()}, settings, progress)
    peaks = {name: memory.peak_of(one.step, devices) for name, one in built.items()}
    return [
        *(
            _measurement((workload, devices), name, kind, times, built, peaks)
            for name, kind in kinds.items()
        ),
        _measurement((workload, devices), BASELINE, BASELINE, times, built, peaks),
    ]


def interleave(
    compared: Mapping[str, steps.Step], settings: Settings, progress: Progress = lambda _: None
) -> dict[str, Times]:
    """Times steps A B C A B C ..., so that a change of the machine's load hits all of them.

    Args:
      compared: the steps by name.
      settings: how many rounds.
      progress: told of each round.

    Returns:
      For each step one sample per round: the mean of the calls in a row that it took to fill
      `_SHORTEST_SAMPLE`.
    """
    samples: dict[str, list[Times]] = {name: [] for name in compared}
    calls = dict.fromkeys(compared, 1)
    rounds = settings.warmup + settings.iterations
    with _no_garbage_collection():
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for name, step in compared.items():
                samples[name].append(_sample(step, calls[name]))
                if number < settings.warmup:
                    fastest = min(sample.wall for sample in samples[name])
                    calls[name] = max(1, math.ceil(_SHORTEST_SAMPLE / fastest))
    return {name: Times(*np.array(all_of[settings.warmup :]).T) for name, all_of in samples.items()}


def _sample(step: steps.Step, calls: int) -> Times:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        step()
    return Times((time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls)


def _measurement(
    what: tuple[workloads.Workload, Devices],
    name: str,
    kind: str,
    times: Mapping[str, Times],
    built: Mapping[str, steps.Built],
    peaks: Mapping[str, int | None],
) -> Measurement:
    workload, devices = what
    base = {BASELINE: None, FLOOR: _BASELINE_OF_FLOOR}.get(kind, BASELINE)
    wall, cpu = times[name]
    if base:
        wall, cpu = wall - times[base].wall, cpu - times[base].cpu
    nodes, base_nodes = built[name].nodes, built[base].nodes if base else 0
    lower, median, upper = np.quantile(wall, (0.25, 0.5, 0.75))
    return Measurement(
        workload=workload.name,
        size=workload.size,
        count=workload.count,
        dtype=workload.dtype,
        num_devices=len(devices.names),
        name=name,
        kind=kind,
        seconds=float(median),
        spread=float(upper - lower),
        cpu_seconds=float(np.median(cpu)),
        wrong=None if kind in (PACKING, BASELINE) else built[name].wrong,
        first_call=built[name].first_call,
        nodes=None if nodes is None or base_nodes is None else nodes - base_nodes,
        peak_memory=peaks[name],
    )


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keeps Python from looking through the graphs' many objects in the middle of a sample."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
