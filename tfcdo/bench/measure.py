"""Measures implementations on one workload, with their floor and their baseline."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfcdo.bench import floor, implementations, results, steps, workloads
from tfcdo.bench.devices import ChosenDevices
from tfcdo.bench.results import BASELINE, FLOOR

_BASELINE_OF_FLOOR = "baseline of the floor"

# Seconds. A shorter sample would measure the clock and the switch from one graph to the next.
_SHORTEST_SAMPLE = 0.005


class Sampler:
    """Times a step on the clock and of all threads, with as many calls as fill a sample."""

    def __init__(self, step: steps.Step) -> None:
        self._step = step
        self._fastest = math.inf

    def __call__(self) -> tuple[float, float]:
        """Returns the seconds of a call on the clock, and of CPU time."""
        num_calls = max(1, math.ceil(_SHORTEST_SAMPLE / self._fastest))
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(num_calls):
            self._step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self._fastest = min(self._fastest, wall / num_calls)
        return wall / num_calls, cpu / num_calls


def run(
    workload: workloads.Workload,
    devices: ChosenDevices,
    compared: Sequence[implementations.Implementation],
    iterations: int,
    warmup: int,
    track: results.Track = results.silently,
) -> list[results.Measurement]:
    """Measures implementations, the floors and the baseline."""
    # The baseline comes first: the first step also pays for what TensorFlow does only once.
    data = steps.place_values(workload, devices)
    built = {BASELINE: steps.build(data, None)}
    kinds: dict[str, str] = {}
    for one in track(compared, description="building and checking"):
        kinds[one.name] = one.package
        built[one.name] = steps.build(data, one.reducer(devices.names))
    floor_data = floor.place_values(workload, devices)
    built[_BASELINE_OF_FLOOR] = steps.build(floor_data, None)
    for name, reduce in floor.single_passes(devices.names[0]).items():
        kinds[name] = FLOOR
        built[name] = steps.build(floor_data, reduce)
    kinds[BASELINE] = BASELINE

    samplers = {name: Sampler(one.step) for name, one in built.items()}
    gc.collect()
    # Else the garbage collector may look at all objects of the graphs in the middle of a sample.
    gc.freeze()
    try:
        taken = results.take_turns(samplers, iterations, warmup, track)
    finally:
        gc.unfreeze()  # The graphs of this workload must not stay for the next.
    times = {name: np.array(samples).T for name, samples in taken.items()}
    sent_sizes = {one.name: 2 * workload.count for one in compared if one.wire}
    found = []
    for name, kind in kinds.items():
        (wall, cpu), nodes = times[name], built[name].num_nodes
        if kind != BASELINE:
            baseline = _BASELINE_OF_FLOOR if kind == FLOOR else BASELINE
            (wall, cpu), nodes = times[name] - times[baseline], nodes - built[baseline].num_nodes
        found.append(
            results.Measurement(
                name,
                kind,
                len(devices.names),
                *results.median_and_spread(wall),
                workload=workload.name,
                size=workload.size,
                count=workload.count,
                dtype=workload.dtype,
                wrong=None if kind == BASELINE else built[name].num_wrong,
                cpu_seconds=float(np.median(cpu)),
                first_call=built[name].first_call,
                nodes=nodes,
                peak_memory=peak_of(built[name].step, devices),
                sent_size=sent_sizes.get(name),
            )
        )
    return found


def peak_of(step: steps.Step, devices: ChosenDevices) -> int | None:
    """Runs a step; returns the most bytes beyond those in use before, None if nobody counts."""
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
