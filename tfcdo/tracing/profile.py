"""Reads the events of a profile that TensorFlow's profiler has written."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tfcdo import tf_internals

# The profiler's name for an op that runs: the node's name and the op's type.
_OP = re.compile(r"([^\s:]+):(\w+)")
# An op that waits for another device, as a receive does, is two events: "Start" and "Done".
_ASYNC = "ExecutorState::ProcessAsync::"
_PICOSECOND = 1e-12
_NANOSECOND = 1e-9
# The planes of the host's threads and of the GPUs; the others are about the profile itself.
_PLANES = ("/host:CPU", "/device:")


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that took time on a thread of the host or on a stream of a GPU."""

    name: str  # The node's name, for an op.
    op: str  # The op's type, such as "AddN"; empty if it is not an op.
    start: float  # In seconds since the profile began.
    end: float
    line: str  # The thread or stream.
    # For an op that sends to another device: the op that receives, and both devices' full names.
    receiver: str = ""
    from_device: str = ""
    to_device: str = ""


def read(folder: pathlib.Path) -> tuple[Event, ...]:
    """Reads the newest profile in a folder."""
    found = sorted(folder.rglob("*.xplane.pb"))
    if not found:
        raise FileNotFoundError(f"TensorFlow's profiler wrote nothing below {folder}")
    space = tf_internals.read_profile(str(found[-1]))
    planes = (plane for plane in space.planes if plane.name.startswith(_PLANES))
    events = list(_joined(event for plane in planes for event in _events_of(plane)))
    begin = min((event.start for event in events), default=0.0)
    moved = [
        dataclasses.replace(event, start=event.start - begin, end=event.end - begin)
        for event in events
    ]
    return tuple(sorted(moved, key=lambda event: (event.start, event.end)))


def _events_of(plane: Any) -> Iterator[Event]:
    for line in plane.lines:
        for event in line.events:
            stats = {
                plane.stat_metadata[stat.metadata_id].name: _value(plane, stat)
                for stat in event.stats
            }
            start = line.timestamp_ns * _NANOSECOND + event.offset_ps * _PICOSECOND
            end = start + event.duration_ps * _PICOSECOND
            place = f"{plane.name} {line.name}"
            name = plane.event_metadata[event.metadata_id].name
            if name.startswith(_ASYNC):
                # Half of an op that waits for another device; `_joined` puts the halves together.
                kind = f"{stats.get('kernel_type')} {name.removeprefix(_ASYNC)}"
                yield Event(str(stats.get("name")), kind, start, end, place)
                continue
            # A kernel on a GPU has its own name and the name of its op.
            name = str(stats.get("tf_op") or name)
            found = _OP.fullmatch(name)
            # From device, its incarnation, to device, name of the edge, frame.
            key = [*str(stats.get("key", "")).split(";"), "", "", ""]
            yield Event(
                found[1] if found else name,
                found[2] if found else "",
                start,
                end,
                place,
                str(stats.get("to", "")),
                key[0],
                key[2],
            )


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """Makes one event of the beginning and the end of each op that waits for another device."""
    starts: dict[tuple[str, str], list[Event]] = collections.defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        op, _, half = event.op.partition(" ")
        if not half:
            yield event
        elif half == "Start":
            starts[event.name, op].append(event)
        elif starts[event.name, op]:
            start = starts[event.name, op].pop(0)
            yield dataclasses.replace(start, op=op, end=event.start)


def _value(plane: Any, stat: Any) -> Any:
    kind = stat.WhichOneof("value")
    if kind == "ref_value":
        return plane.stat_metadata[stat.ref_value].name
    return getattr(stat, kind) if kind else None
