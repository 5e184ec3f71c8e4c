"""Runs TensorFlow's profiler and keeps its records of all-reduces."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Sequence

import tensorflow as tf

from tfcdo.execute.interpreter import Planned, recently_planned
from tfcdo.plan import simulator
from tfcdo.topology.detection import detect
from tfcdo.topology.topology import Topology
from tfcdo.tracing import edges, profile
from tfcdo.tracing import summary as summaries
from tfcdo.tracing.edges import EdgeRun
from tfcdo.tracing.profile import Event


@dataclasses.dataclass(frozen=True)
class Recording:
    """What the profiler and the executor have recorded."""

    events: tuple[Event, ...]  # In the order of their start.
    planned: Sequence[Planned] = ()  # The newest first.
    topology: Topology | None = None  # On which plans are simulated; None: detect it.

    @functools.cached_property
    def runs(self) -> list[EdgeRun]:
        """Returns the copies along edges, and the additions."""
        return edges.find(self.events, self.planned, summaries.steps_of(self.events))

    @functools.cached_property
    def summary(self) -> summaries.Summary:
        """Returns the share of all-reduces in a step, the exposed share, and the slowest edge."""
        return summaries.summarize(self.events, self.runs)

    @functools.cached_property
    def typical_step(self) -> summaries.Interval | None:
        """Returns the step of median length; None if there is none."""
        steps = sorted(summaries.steps_of(self.events), key=lambda step: step[1] - step[0])
        return steps[len(steps) // 2] if steps else None

    def runs_of_step(self) -> dict[str, list[EdgeRun]]:
        """Returns the edges of the typical step, grouped by the scope of their all-reduce."""
        if self.typical_step is None:
            return {}
        start, end = self.typical_step
        found: dict[str, list[EdgeRun]] = {}
        for run in self.runs:
            if start <= run.start <= end:
                found.setdefault(run.scope, []).append(run)
        return found

    def planned_runs(self, runs: Sequence[EdgeRun]) -> list[EdgeRun]:
        """Simulates the plan of the all-reduce that some edges are of, from 0 on."""
        planned = edges.plan_of(runs, self.planned)
        if planned is None or not planned.plan.has_known_times:
            return []
        machine = self.topology or detect(planned.devices)
        tasks = simulator.simulate(planned.plan, machine).tasks
        return [
            EdgeRun(runs[0].scope, t.pack, t.kind, (t.source,), t.target, t.start, t.end)
            for t in tasks
        ]


class Profiler:
    """TensorFlow's profiler, between `start` and `stop`."""

    def __init__(self, topology: Topology | None = None) -> None:
        self._topology = topology
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Starts the profiler."""
        folder = tempfile.TemporaryDirectory(prefix="tfcdo-trace-")
        try:
            # The names of ops, and no calls of Python, of which there are very many.
            options = tf.profiler.experimental.ProfilerOptions(
                host_tracer_level=2, python_tracer_level=0, device_tracer_level=1
            )
            tf.profiler.experimental.start(folder.name, options)
        except BaseException:
            folder.cleanup()
            raise
        self._folder = folder

    def stop(self) -> Recording:
        """Stops the profiler and reads its files."""
        if self._folder is None:
            raise RuntimeError("start the profiler before it is stopped")
        folder, self._folder = self._folder, None
        with folder as path:
            tf.profiler.experimental.stop()
            return Recording(profile.read(pathlib.Path(path)), recently_planned(), self._topology)
