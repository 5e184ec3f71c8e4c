"""Sums a profile up: the share of a step that all-reduces take, how much is exposed, and where."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from tfcdo.tracing import edges
from tfcdo.tracing.edges import EdgeRun
from tfcdo.tracing.profile import Event
from tfcdo.units import format_seconds

Interval = tuple[float, float]

# A call of a tf.function from Python, and a run of a session of TensorFlow 1.
_CALLS = ("EagerLocalExecute: __inference_", "SessionRun")
# These run where a tensor changes devices; all other ops are computation.
_TRANSFERS = ("_Send", "_Recv", "_HostSend", "_HostRecv")


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
            f"{self.num_steps} step{'' if self.num_steps == 1 else 's'} of "
            f"{format_seconds(self.step)}: all-reduce {format_seconds(self.all_reduce)} "
            f"({self.all_reduce / self.step:.0%}), of which {format_seconds(self.exposed)} "
            f"({self.exposed / self.step:.0%}) exposed"
        )
        if self.slowest is None:
            return text
        return f"{text}; slowest edge {self.slowest}, {format_seconds(self.slowest_seconds)} a step"


def steps_of(events: Sequence[Event]) -> list[Interval]:
    """Finds the calls in which all-reduces ran."""
    ours = [event for event in events if edges.belongs_to_tfcdo(event)]
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
        if edges.belongs_to_tfcdo(event):
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
            seconds[f"{run.scope}/pack{run.pack} {run.kind} {run.way}"] += run.seconds
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
