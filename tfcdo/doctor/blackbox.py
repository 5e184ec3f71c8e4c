"""Black boxes of several hosts, compared: which host stopped where."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Sequence

from tfcdo.cluster import progress


def read(paths: Sequence[pathlib.Path]) -> list[progress.Box]:
    """Reads the files of one job's hosts, in their order; `ValueError` if they are not."""
    boxes: dict[int, tuple[pathlib.Path, progress.Box]] = {}
    for path in paths:
        box = progress.read_box(path)
        other, first = next(iter(boxes.values()), (path, box))
        if box.hosts != first.hosts:
            raise ValueError(
                f"the files must be of one job; {path} has the hosts {box.hosts}, and {other} "
                f"{first.hosts}"
            )
        if box.host in boxes:
            raise ValueError(f"{boxes[box.host][0]} and {path} are both of host {box.host}")
        boxes[box.host] = path, box
    return [boxes[host][1] for host in sorted(boxes)]


def compare(boxes: Sequence[progress.Box]) -> list[str]:
    """Says where each host was, and which hosts the others waited for: lines to be read."""
    by_host = {box.host: box for box in boxes}
    lines = []
    for host, name in enumerate(boxes[0].hosts):
        where = _where(by_host[host]) if host in by_host else "no file: it was killed, or not given"
        lines.append(f"{name}: {where}")
    waits: dict[tuple[str, int], dict[int, str]] = collections.defaultdict(dict)
    last: dict[tuple[int, str], int] = {}  # The last collective of a kind that a host has entered.
    for box in boxes:
        for entry in box.entries:
            last[box.host, entry.kind] = max(last.get((box.host, entry.kind), -1), entry.number)
            if entry.left is None:
                waits[entry.kind, entry.number][box.host] = _label(box, entry)
    if not waits:
        return [*lines, "No host waits for another one in a collective."]
    for (kind, number), inside in waits.items():
        late = [host for host in range(len(boxes[0].hosts)) if last.get((host, kind), -1) < number]
        if late:
            verdict = f"{_names(late)} stopped before it"
        else:
            verdict = "all hosts are in it or have left it: look at the network between them"
        lines.append(f"{_names([*inside])} waited in {[*inside.values()][-1]}: {verdict}.")
    return lines


def _where(box: progress.Box) -> str:
    """Says where a host was when it wrote its black box, and why it did."""
    why = f" (written because of: {box.reason})"
    waits = [entry for entry in box.entries if entry.left is None]
    if waits:
        places = " and ".join(
            f"{_label(box, entry)}, for {box.written - entry.entered:.1f} s" for entry in waits
        )
        return f"in {places}{why}"
    if not box.entries:
        return f"in no collective yet{why}"
    last = max(box.entries, key=lambda entry: entry.left or 0.0)
    since = box.written - (last.left or 0.0)
    return f"in no collective for {since:.1f} s, after {_label(box, last)}{why}"


def _label(box: progress.Box, entry: progress.Entry) -> str:
    kind = box.kinds[entry.kind]
    plan = f", plan {kind.plan[:8]}" if kind.plan else ""
    return kind.place(entry.number) + plan


def _names(hosts: Sequence[int]) -> str:
    numbers = " and ".join(map(str, hosts))
    return f"{'Host' if len(hosts) == 1 else 'Hosts'} {numbers}"
