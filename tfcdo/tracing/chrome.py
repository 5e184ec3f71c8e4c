"""Writes a recording as a Chrome trace, which chrome://tracing and ui.perfetto.dev show."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from tfcdo.tracing.recording import Recording

_MICROSECOND = 1e-6
# The "processes" of the trace: groups of lanes.
_OPS, _EDGES, _PLANNED = 1, 2, 3
_GROUPS = {
    _OPS: "all ops, by thread",
    _EDGES: "tfcdo: what ran, by edge",
    _PLANNED: "tfcdo: what was planned (simulated), by edge",
}


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
            name, start, end = (
                f"{scope}/pack{run.pack}/{run.kind}",
                begin + run.start,
                begin + run.end,
            )
            yield _PLANNED, run.lane, name, start, end, {"pack": run.pack}
