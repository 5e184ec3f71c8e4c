"""Times steps side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from tfcdo.bench import floor, implementations, steps, workloads
from tfcdo.bench.devices import ChosenDevices

BASELINE, FLOOR = "baseline", "floor"
_BASELINE_OF_FLOOR = "baseline of the floor"

# Seconds. A shorter sample would measure the clock and the switch from one graph to the next.
_SHORTEST_SAMPLE = 0.005

_Item = TypeVar("_Item")


class Track(Protocol):
    """Goes through a sequence and shows the progress, as `rich.progress.track` does."""

    def __call__(self, sequence: Sequence[_Item], *, description: str) -> Iterable[_Item]:
        """Yields the items of a sequence."""
        ...


def silently(sequence: Sequence[_Item], *, description: str) -> Iterable[_Item]:
    """Yields the items of a sequence and shows nothing."""
    del description
    return sequence


@dataclasses.dataclass(frozen=True)
class Settings:
    """Number of samples that count and of those before them, and whether ops run eagerly."""

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
      kind: `"tfcdo"`, `"tf"`, `FLOOR` or `BASELINE`.
      seconds: median time of a call minus the baseline's in the same round; the baseline's own.
      spread: distance between the quartiles of the same times, in seconds.
      cpu_seconds: as `seconds`, of the CPU time of all threads.
      wrong: number of elements that differ from numpy's; None if nothing was summed.
      first_call: seconds of tracing and of the first call; None if nothing is traced.
      nodes: number of ops that are added to the baseline's graph; None likewise.
      peak_memory: bytes in use at most, beyond the input; None if not known.
      sent_size: bytes of each device's values as they are sent; None for `size`.
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
    sent_size: int | None = None

    @property
    def is_noise(self) -> bool:
        """Returns whether the time is not larger than its own spread."""
        return self.seconds <= self.spread

    @property
    def algbw(self) -> float:
        """Returns the bytes per second that the caller sees; NaN if the time is noise."""
        return math.nan if self.is_noise else self.size / self.seconds

    @property
    def busbw(self) -> float:
        """Returns the bytes per second over each link of a ring that takes the same time."""
        sent = 1.0 if self.sent_size is None else self.sent_size / self.size
        return self.algbw * sent * 2 * (self.num_devices - 1) / self.num_devices


class Times(NamedTuple):
    """Seconds of a step on the clock, and of CPU time of all threads; of one sample, or several."""

    wall: Any
    cpu: Any


def run(
    workload: workloads.Workload,
    devices: ChosenDevices,
    compared: Sequence[implementations.Implementation],
    settings: Settings,
    track: Track = silently,
) -> list[Measurement]:
    """Measures implementations, the floors and the baseline."""
    build = steps.build_eager if settings.eager else steps.build_graph
    # The baseline comes first: the first step also pays for what TensorFlow does only once.
    data = steps.place_values(workload, devices)
    built = {BASELINE: build(data, None)}
    kinds: dict[str, str] = {}
    for one in track(compared, description="building and checking"):
        kinds[one.name] = one.package
        with one.blaming_arguments():
            built[one.name] = build(data, one.reducer(devices.names))
    floor_data = floor.place_values(workload, devices)
    built[_BASELINE_OF_FLOOR] = steps.build_graph(floor_data, None)
    for name, reduce in floor.single_passes(devices.names[0]).items():
        kinds[name] = FLOOR
        built[name] = steps.build_graph(floor_data, reduce)
    kinds[BASELINE] = BASELINE

    times = interleave({name: one.step for name, one in built.items()}, settings, track)
    sent_sizes = {one.name: 2 * workload.count for one in compared if one.wire}
    found = []
    for name, kind in kinds.items():
        wall, cpu = times[name]
        nodes = built[name].num_nodes
        if kind != BASELINE:
            baseline = _BASELINE_OF_FLOOR if kind == FLOOR else BASELINE
            wall, cpu = wall - times[baseline].wall, cpu - times[baseline].cpu
            nodes = None if nodes is None else nodes - (built[baseline].num_nodes or 0)
        lower, median, upper = np.quantile(wall, (0.25, 0.5, 0.75)).tolist()
        found.append(
            Measurement(
                workload=workload.name,
                size=workload.size,
                count=workload.count,
                dtype=workload.dtype,
                num_devices=len(devices.names),
                name=name,
                kind=kind,
                seconds=median,
                spread=upper - lower,
                cpu_seconds=float(np.median(cpu)),
                wrong=None if kind == BASELINE else built[name].num_wrong,
                first_call=built[name].first_call,
                nodes=nodes,
                peak_memory=peak_of(built[name].step, devices),
                sent_size=sent_sizes.get(name),
            )
        )
    return found


def interleave(
    steps_by_name: Mapping[str, steps.Step], settings: Settings, track: Track = silently
) -> dict[str, Times]:
    """Times steps A B C A B C ..., so that a change of the machine's load affects all of them."""
    samples: dict[str, list[Times]] = {name: [] for name in steps_by_name}
    num_calls = dict.fromkeys(steps_by_name, 1)
    with _no_garbage_collection():
        for number in track(range(settings.warmup + settings.iterations), description="rounds"):
            for name, step in steps_by_name.items():
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


def peak_of(step: steps.Step, devices: ChosenDevices) -> int | None:
    """Runs a step; returns the most bytes in use beyond those before, None if nobody counts them.

    TensorFlow's allocator for processors does not count tensors of less than 256 KiB.
    """
    # The virtual devices of one processor share its allocator.
    counted = devices.names[:1] if devices.on_cpu else devices.names
    memory = tf.config.experimental
    try:
        for device in counted:
            memory.reset_memory_stats(device)
        before = [memory.get_memory_info(device)["current"] for device in counted]
        step()
        after = [memory.get_memory_info(device)["peak"] for device in counted]
    except ValueError:
        return None
    return int(sum(after) - sum(before))


def by_workload(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """Splits measurements, sorted by workload, into one list for each workload."""
    groups = itertools.groupby(measurements, lambda one: (one.workload, one.size))
    return [list(group) for _, group in groups]


def fastest(measurements: Sequence[Measurement], kind: str) -> Measurement | None:
    """Returns the fastest measurement of one kind among those without wrong results."""
    correct = [one for one in measurements if one.kind == kind and not one.wrong]
    return min(correct, key=lambda one: one.seconds, default=None)


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
