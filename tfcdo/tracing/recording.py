"""Records all-reduces by TensorFlow's profiler, sums them up, and writes them as a Chrome trace."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import checks
from tfcdo.execute.interpreter import Planned, recently_planned
from tfcdo.log import format_count, format_seconds
from tfcdo.plan import simulator
from tfcdo.topology.detection import detect
from tfcdo.topology.topology import Topology
from tfcdo.tracing import profile
from tfcdo.tracing.profile import EdgeRun, Event

Interval = tuple[float, float]

# A call of a tf.function from Python, and a run of a session of TensorFlow 1.
_CALLS = ("EagerLocalExecute: __inference_", "SessionRun")
# These run where a tensor changes devices; all other ops are computation.
_TRANSFERS = ("_Send", "_Recv", "_HostSend", "_HostRecv")
_MICROSECOND = 1e-6
# The "processes" of the trace: groups of lanes.
_OPS, _EDGES, _PLANNED = 1, 2, 3
_GROUPS = {
    _OPS: "all ops, by thread",
    _EDGES: "tfcdo: what ran, by edge",
    _PLANNED: "tfcdo: what was planned (simulated), by edge",
}


@dataclasses.dataclass(frozen=True)
class Summary:
    """Says how all-reduces and the rest of a step share its time.

    Attributes:
      num_steps: how many steps with an all-reduce were seen.
      step: the median time of one, in seconds.
      all_reduce: the median time of a step in which at least one op of an all-reduce runs.
      exposed: the same, but only while no other op runs.
      slowest: the edge that took longest, of all steps together; None if none was found.
      slowest_seconds: its time per step.
    """

    num_steps: int
    step: float = 0.0
    all_reduce: float = 0.0
    exposed: float = 0.0
    slowest: str | None = None
    slowest_seconds: float = 0.0

    def __str__(self) -> str:
        if not self.num_steps:
            return (
                "no all-reduce of tfcdo ran in a graph while this was recorded (eager ops have no "
                "names to know them by)"
            )
        text = (
            f"{format_count(self.num_steps, 'step')} of "
            f"{format_seconds(self.step)}: all-reduce {format_seconds(self.all_reduce)} "
            f"({self.all_reduce / self.step:.0%}), of which {format_seconds(self.exposed)} "
            f"({self.exposed / self.step:.0%}) exposed"
        )
        if self.slowest is None:
            return text
        return f"{text}; slowest edge {self.slowest}, {format_seconds(self.slowest_seconds)} a step"


def steps_of(events: Sequence[Event]) -> list[Interval]:
    """Finds the calls in which all-reduces ran."""
    ours = [event for event in events if profile.belongs_to_tfcdo(event)]
    calls = _outermost((one.start, one.end) for one in events if one.name.startswith(_CALLS))
    steps = [
        (start, end)
        for start, end in calls
        if any(start <= event.start and event.end <= end for event in ours)
    ]
    if steps or not ours:
        return steps
    return [(min(event.start for event in ours), max(event.end for event in ours))]


def summarize(events: Sequence[Event], runs: Sequence[EdgeRun]) -> Summary:
    """Sums a profile up."""
    steps = steps_of(events)
    if not steps:
        return Summary(0)
    # An op that receives also waits; the copies among the runs are without that.
    ours, others = [(run.start, run.end) for run in runs], []
    for event in events:
        if event.op in _TRANSFERS:
            continue
        if profile.belongs_to_tfcdo(event):
            ours.append((event.start, event.end))
        elif event.op:
            others.append((event.start, event.end))
    ours, others = union(ours), union(others)
    busy, exposed = [], []
    for step in steps:
        own = intersection(ours, [step])
        busy.append(length(own))
        exposed.append(busy[-1] - length(intersection(own, others)))
    seconds: dict[str, float] = collections.defaultdict(float)
    for run in runs:
        if any(start <= run.start <= end for start, end in steps):
            seconds[f"{run.scope}/pack{run.pack} {run.kind} {run.way}"] += run.end - run.start
    slowest = max(seconds, key=seconds.__getitem__, default=None)
    return Summary(
        len(steps),
        statistics.median(end - start for start, end in steps),
        statistics.median(busy),
        statistics.median(exposed),
        slowest,
        seconds[slowest] / len(steps) if slowest else 0.0,
    )


def _outermost(intervals: Iterable[Interval]) -> list[Interval]:
    """Leaves out the intervals that lie in another one."""
    kept: list[Interval] = []
    for start, end in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
        if not kept or end > kept[-1][1]:
            kept.append((start, end))
    return kept


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Joins the intervals that overlap."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Returns the intersection of two lists of intervals, each as `union` returns it."""
    common, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            common.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: Iterable[Interval]) -> float:
    """Adds up the lengths of intervals."""
    return sum(end - start for start, end in intervals)


@dataclasses.dataclass(frozen=True)
class Recording:
    """Events of the profiler, and the plans that were executed."""

    events: tuple[Event, ...]  # In the order of their start.
    planned: Sequence[Planned] = ()  # The newest first.
    topology: Topology | None = None  # On which plans are simulated; None: detect it.

    @functools.cached_property
    def runs(self) -> list[EdgeRun]:
        """Returns the copies along edges, and the additions."""
        return profile.find(self.events, self.planned, steps_of(self.events))

    @functools.cached_property
    def summary(self) -> Summary:
        """Returns the share of all-reduces in a step, the exposed share, and the slowest edge."""
        return summarize(self.events, self.runs)

    def runs_of_step(self) -> dict[str, list[EdgeRun]]:
        """Returns the edges of the step of median length, by the scope of their all-reduce."""
        steps = sorted(steps_of(self.events), key=lambda step: step[1] - step[0])
        found: dict[str, list[EdgeRun]] = {}
        for start, end in steps[len(steps) // 2 :][:1]:
            for run in self.runs:
                if start <= run.start <= end:
                    found.setdefault(run.scope, []).append(run)
        return found

    def planned_runs(self, runs: Sequence[EdgeRun]) -> list[EdgeRun]:
        """Simulates the plan of the all-reduce that some edges are of, from 0 on."""
        planned = next((run.planned for run in runs if run.planned), None)
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
        # A `fit` that fails calls no callback at its end, and nothing else could be profiled then.
        self._forgotten = weakref.finalize(self, tf.profiler.experimental.stop, save=False)

    def stop(self) -> Recording:
        """Stops the profiler and reads its files."""
        if self._folder is None:
            raise RuntimeError("start the profiler before it is stopped")
        folder, self._folder = self._folder, None
        self._forgotten.detach()
        with folder as path:
            tf.profiler.experimental.stop()
            return Recording(profile.read(pathlib.Path(path)), recently_planned(), self._topology)


def write(recording: Recording, path: pathlib.Path) -> None:
    """Writes all ops, a lane a thread; the edges, a lane each; and the plan of a typical step."""
    numbers: dict[tuple[int, str], int] = {}  # Lanes in the order in which they are first used.
    events = [
        {
            "ph": "X",
            "pid": group,
            "tid": numbers.setdefault((group, lane), len(numbers) + 1),
            "name": name,
            "ts": start / _MICROSECOND,
            "dur": (end - start) / _MICROSECOND,
            "args": arguments,
        }
        for group, lane, name, start, end, arguments in _bars(recording)
    ]
    names = [
        {"ph": "M", "pid": group, "name": "process_name", "args": {"name": name}}
        for group, name in _GROUPS.items()
    ] + [
        {"ph": "M", "pid": group, "tid": number, "name": "thread_name", "args": {"name": lane}}
        for (group, lane), number in numbers.items()
    ]
    content = {
        "traceEvents": [*names, *events],
        "displayTimeUnit": "ms",
        "otherData": {"summary": str(recording.summary)},
    }
    path.write_text(json.dumps(content), encoding="utf-8")


def _bars(recording: Recording) -> Iterator[tuple[int, str, str, float, float, dict[str, Any]]]:
    """Yields the group, lane, name, start, end and arguments of each bar."""
    for event in recording.events:
        if event.op:
            yield _OPS, event.line, event.name, event.start, event.end, {"op": event.op}
    for run in recording.runs:
        arguments = {"pack": run.pack, "sources": run.sources, "target": run.target}
        name = f"{run.scope}/pack{run.pack}/{run.kind}"
        yield _EDGES, run.lane, name, run.start, run.end, arguments
    for scope, runs in recording.runs_of_step().items():
        begin = min(run.start for run in runs)
        for run in recording.planned_runs(runs):
            name = f"{scope}/pack{run.pack}/{run.kind}"
            start, end = begin + run.start, begin + run.end
            yield _PLANNED, run.lane, name, start, end, {"pack": run.pack}


class Trace:
    """Result of `trace`: the recording, once the block has ended."""

    recording: Recording | None = None

    @property
    def summary(self) -> Summary:
        """Returns the share of all-reduces in a step, the exposed share, and the slowest edge.

        Raises:
          RuntimeError: before the block has ended.
        """
        if self.recording is None:
            raise RuntimeError("a trace is there when its block has ended")
        return self.recording.summary


@contextlib.contextmanager
def trace(path: str | os.PathLike[str], *, topology: Topology | None = None) -> Iterator[Trace]:
    """Writes the all-reduces of a block, edge by edge, as a Chrome trace.

    Record few steps, after one or two that trace graphs and fill caches. Ops that run eagerly have
    no names, so only all-reduces in a `tf.function`, as in Keras's `fit`, are found.

    Args:
      path: the file to write, which chrome://tracing and ui.perfetto.dev show; it ends in .json.
      topology: the machine that the plan is simulated on; None: detect automatically.

    Yields:
      An object whose `summary` is there, and can be printed, when the block has ended.

    Raises:
      ValueError: if the file's name ends otherwise.
      TypeError: if `path` is not a path, or `topology` not a topology.
      FileNotFoundError: if the file's folder does not exist, or the file is a folder.
      tf.errors.AlreadyExistsError: if this process is being profiled already.

    Example:
      >>> import tempfile, tensorflow as tf
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with trace(folder + "/out.json") as traced:
      ...         total = tf.function(lambda: tf.add(1, 2))()
      >>> traced.summary.num_steps
      0
    """
    written = checks.check_path("path", path, ".json").absolute()  # The block may change folders.
    if written.is_dir() or not written.parent.is_dir():
        raise FileNotFoundError(
            f"path must be a file in a folder that exists; got {os.fspath(path)!r}"
        )
    if topology is not None and not isinstance(topology, Topology):
        raise TypeError(f"topology must be a tfcdo.topology.Topology or None; got {topology!r}")
    profiler, traced = Profiler(topology), Trace()
    profiler.start()
    try:
        yield traced
    finally:
        # The time before an error is also worth a look.
        traced.recording = profiler.stop()
        write(traced.recording, written)
