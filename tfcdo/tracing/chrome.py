"""Writes a recording as a Chrome trace, which chrome://tracing and ui.perfetto.dev show."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from tfcdo.tracing.recording import Recording, lane_of_task

_MICROSECOND = 1e-6
# The "processes" of the trace: groups of lanes.
_OPS, _EDGES, _PLANNED = 1, 2, 3
_GROUPS = {
    _OPS: "all ops, by thread",
    _EDGES: "tfcdo: what ran, by edge",
    _PLANNED: "tfcdo: what was planned (simulated), by edge",
}


def write(recording: Recording, path: pathlib.Path) -> None:
    """Writes the trace.

    It has three groups of lanes: all ops, a lane a thread; the ops that bring packs along edges, a
    lane an edge; and what was planned for each all-reduce of a typical step, beginning with it.
    """
    lanes = _Lanes()
    events = [*_ops(recording, lanes), *_edges(recording, lanes), *_planned(recording, lanes)]
    content = {
        "traceEvents": [*lanes.names(), *events],
        "displayTimeUnit": "ms",
        "otherData": {"summary": str(recording.summary)},
    }
    path.write_text(json.dumps(content), encoding="utf-8")


class _Lanes:
    """Numbers the lanes of each group in the order in which they are first used."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}

    def event(
        self, group: int, lane: str, name: str, start: float, end: float, **arguments: Any
    ) -> dict[str, Any]:
        """Makes an event of the Chrome trace."""
        number = self._numbers.setdefault((group, lane), len(self._numbers) + 1)
        return {
            "ph": "X",
            "pid": group,
            "tid": number,
            "name": name,
            "ts": start / _MICROSECOND,
            "dur": (end - start) / _MICROSECOND,
            "args": arguments,
        }

    def names(self) -> Iterator[dict[str, Any]]:
        """Makes the entries that name groups and lanes."""
        for group, name in _GROUPS.items():
            yield {"ph": "M", "pid": group, "name": "process_name", "args": {"name": name}}
        for (group, lane), number in self._numbers.items():
            of_lane = {"ph": "M", "pid": group, "tid": number}
            yield {**of_lane, "name": "thread_name", "args": {"name": lane}}


def _ops(recording: Recording, lanes: _Lanes) -> Iterator[dict[str, Any]]:
    for event in recording.events:
        if event.op:
            yield lanes.event(_OPS, event.line, event.name, event.start, event.end, op=event.op)


def _edges(recording: Recording, lanes: _Lanes) -> Iterator[dict[str, Any]]:
    for run in recording.runs:
        yield lanes.event(
            _EDGES,
            run.lane,
            f"{run.scope}/pack{run.pack}/{run.kind}",
            run.start,
            run.end,
            pack=run.pack,
            sources=run.sources,
            target=run.target,
        )


def _planned(recording: Recording, lanes: _Lanes) -> Iterator[dict[str, Any]]:
    for scope, runs in recording.runs_of_step().items():
        begin = min(run.start for run in runs)
        for task in recording.planned_tasks(runs):
            yield lanes.event(
                _PLANNED,
                lane_of_task(task),
                f"{scope}/pack{task.pack}/{task.kind}",
                begin + task.start,
                begin + task.end,
                pack=task.pack,
            )
