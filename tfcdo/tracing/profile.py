"""Reads a profile of TensorFlow's, and finds tfcdo's all-reduces by the names of their ops."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tfcdo import tf_internals
from tfcdo.execute.interpreter import Planned

# The profiler's name for an op that runs: the node's name and the op's type.
_OP = re.compile(r"([^\s:]+):(\w+)")
# An op that waits for another device, as a receive does, is two events: "Start" and "Done".
_ASYNC = "ExecutorState::ProcessAsync::"
_PICOSECOND = 1e-12
_NANOSECOND = 1e-9
# The planes of the host's threads and of the GPUs; the others are about the profile itself.
_PLANES = ("/host:CPU", "/device:")
REDUCE, BROADCAST, GATHER, ADD = "reduce", "broadcast", "gather", "add"

# The scope of an all-reduce, inside any scopes and functions.
_SCOPE = re.compile(r"(?:^|/)(tfcdo(?:_\d+)?)/")
_EDGE = re.compile(
    r"(?:^|/)(?P<scope>tfcdo(?:_\d+)?)/(?:pack|rows)(?P<pack>\d+)/"
    r"(?P<phase>reduce|receive|across_hosts|broadcast|gather)/"
    r"(?P<sources>\d+(?:and\d+)*)to(?P<target>\d+)(?:_\d+)?(?:/.*)?$"
)
# TensorFlow's suffix for the name of an op whose result it sends to another device; where it is
# received, the number is the next one.
_SENT = re.compile(r"(.*/_)(\d+)")


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that took time on a thread of the host or on a stream of a GPU."""

    name: str  # The node's name, for an op.
    op: str  # The op's type, such as "AddN"; empty if it is not an op.
    start: float  # In seconds since the profile began.
    end: float
    line: str  # The thread or stream.
    # For a copy to another device: the op that receives, and both devices' full names.
    receiver: str = ""
    from_device: str = ""
    to_device: str = ""


@dataclasses.dataclass(frozen=True)
class EdgeRun:
    """A copy of a pack along an edge, or the addition where it ends."""

    scope: str  # The all-reduce's, such as "tfcdo_2".
    pack: int  # The pack's index; of rows, the value's.
    kind: str  # `REDUCE`, `BROADCAST` or `GATHER` for a copy; `ADD` for adding what was sent.
    sources: tuple[int, ...]  # The sending device; for an addition, all children.
    target: int
    start: float  # In seconds: of a copy, when one device has sent and the other asks.
    end: float
    planned: Planned | None = dataclasses.field(default=None, compare=False)  # None if it adds.

    @property
    def way(self) -> str:
        """Returns the devices of the edge; for an addition, the devices of its operands."""
        return f"{', '.join(map(str, self.sources))}→{self.target}"

    @property
    def lane(self) -> str:
        """Returns the name of the edge, or of the device that adds."""
        return f"{self.target} adds" if self.kind == ADD else self.way


def belongs_to_tfcdo(event: Event) -> bool:
    """Returns whether an event is an op of an all-reduce, packing and unpacking included."""
    return bool(event.op and _SCOPE.search(event.name))


def find(
    events: Sequence[Event], planned: Sequence[Planned], steps: Sequence[tuple[float, float]] = ()
) -> list[EdgeRun]:
    """Finds copies and additions; in different steps a scope may have different plans."""
    runs = [*_additions(events), *_copies(events, planned, steps)]
    return sorted(runs, key=lambda run: (run.start, run.end))


def _additions(events: Sequence[Event]) -> Iterator[EdgeRun]:
    for event in events:
        found = _EDGE.search(event.name) if event.op == "AddN" else None
        if found and found["phase"] == "reduce":
            sources = tuple(map(int, found["sources"].split("and")))
            yield EdgeRun(
                found["scope"], int(found["pack"]), ADD, sources, int(found["target"]),
                event.start, event.end,
            )  # fmt: skip


def _copies(
    events: Sequence[Event], planned: Sequence[Planned], steps: Sequence[tuple[float, float]]
) -> Iterator[EdgeRun]:
    receives = _receives_by_name(events)
    starts = [start for start, _ in steps]
    sends: dict[tuple[int, str], list[_Send]] = collections.defaultdict(list)
    for event in events:
        send = _send_of(event)
        if send:
            step = bisect.bisect_right(starts, event.start)
            sends[step, send.name["scope"]].append(send)
    for (_, scope), ones in sends.items():
        chosen = _plan_of(scope, ones, planned)
        devices, trees = (chosen.devices, _trees(chosen)) if chosen else ((), [])
        for send in ones:
            sent_from, sent_to = send.event.from_device, send.event.to_device
            if sent_from in devices and sent_to in devices:
                source, target = devices.index(sent_from), devices.index(sent_to)
                start, end = _interval(send.event, receives)
                pack = int(send.name["pack"])
                parents = trees[pack] if pack < len(trees) and send.kind == BROADCAST else ()
                if parents and parents[target] != source:
                    continue  # A user's own op reads the sum of another device.
                yield EdgeRun(scope, pack, send.kind, (source,), target, start, end, chosen)


@dataclasses.dataclass(frozen=True)
class _Send:
    """A copy of a pack to another device; `numbered` is the target of the edge's name."""

    event: Event
    name: re.Match[str]
    kind: str
    numbered: str


def _send_of(event: Event) -> _Send | None:
    # On CPUs a copy is part of the op that sends. Between GPUs it is an event of a stream, with the
    # name of the op that came second: only then can it begin.
    if event.op not in ("_Send", "_Recv") or not event.from_device:
        return None
    to_edge = _EDGE.search(event.receiver)
    if to_edge and to_edge["phase"] == "across_hosts":
        return None  # A collective's key, or the sign that it has begun or ended.
    if to_edge:
        # Where copies are cast, received values are cast back before they are added.
        kind = REDUCE if to_edge["phase"] == "receive" else to_edge["phase"]
        return _Send(event, to_edge, kind, event.to_device)
    # A copy down may be left out by TensorFlow: who uses the sum then receives it.
    sent = _SENT.fullmatch(event.name)
    from_edge = _EDGE.search(sent[1].removesuffix("/_")) if sent else None
    return _Send(event, from_edge, BROADCAST, event.from_device) if from_edge else None


def _plan_of(scope: str, sends: Sequence[_Send], planned: Sequence[Planned]) -> Planned | None:
    """Returns the plan that agrees with most names of ops; the newest of several."""

    def agreeing(one: Planned) -> int:
        trees, count = _trees(one), 0
        for send in sends:
            pack, target = int(send.name["pack"]), int(send.name["target"])
            count += one.devices[target : target + 1] == (send.numbered,)
            if send.kind == REDUCE and pack < len(trees):
                sources = map(int, send.name["sources"].split("and"))
                count += all(trees[pack][source : source + 1] == (target,) for source in sources)
        return count

    known = (one for one in planned if one.scope.rpartition("/")[2] == scope)
    return max(known, key=agreeing, default=None)


def _trees(planned: Planned) -> list[tuple[int | None, ...]]:
    return [pack.tree.parents if pack.tree else () for pack in planned.plan.packs]


def _receives_by_name(events: Sequence[Event]) -> dict[str, list[Event]]:
    receives = collections.defaultdict(list)
    for event in events:
        if event.op == "_Recv" and not event.from_device:
            receives[event.name].append(event)
    return {name: sorted(ones, key=lambda one: one.end) for name, ones in receives.items()}


def _interval(send: Event, receives: dict[str, list[Event]]) -> tuple[float, float]:
    """Returns the time from when both ends are ready until the tensor has arrived."""
    sent = _SENT.fullmatch(send.name)
    name = f"{sent[1]}{int(sent[2]) + 1}" if sent and send.op == "_Send" else send.name
    ones = receives.get(name, [])
    first = bisect.bisect_left(ones, send.start, key=lambda one: one.end)
    if first == len(ones):
        return send.start, send.end
    return max(send.start, ones[first].start), ones[first].end


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
