"""Progress of the collectives of this process: how often and when each kind is entered and left.

The last ones are written to a file, the black box, for `tfcdo doctor --blackbox`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterable
from typing import Annotated, NamedTuple, Protocol

import msgspec
import numpy as np
from absl import logging

from tfcdo import cache_folder
from tfcdo.cluster import config

# Collectives of each kind whose times are kept, and uses of it if it has many packs.
KEPT = 1000
_KEPT_USES = 32


class EventCounter(Protocol):
    """Counts the events of one kind: entering a collective, leaving it, entering the next one."""

    def count(self) -> int:
        """Returns the number of events: odd while a collective waits."""

    def settle(self) -> None:
        """Counts a collective as left if an error ended the function that had entered it."""

    def times(self) -> np.ndarray:
        """Returns when the last `events_kept` were, in seconds on this host's own clock."""


class Collectives(NamedTuple):
    """The last collectives of a kind, oldest first: number, and seconds; NaN if not left."""

    numbers: np.ndarray
    entered: np.ndarray
    left: np.ndarray


def events_kept(collectives: int) -> int:
    """Returns of how many events a host keeps the times, if one use has so many collectives."""
    return max(_KEPT_USES, -(-KEPT // max(1, collectives))) * collectives * 2


@dataclasses.dataclass
class Kind:
    """A kind of collectives, its events at the last look, and when their number last changed."""

    name: str
    about: KindOfCollectives
    marks: EventCounter
    count: int = 0
    since: float = 0.0

    def last(self) -> Collectives:
        """Returns the last collectives of this process."""
        count = self.marks.count()
        times = self.marks.times().reshape(-1, 2)
        begun = (count + 1) // 2
        numbers = np.arange(max(0, begun - len(times)), begun)
        entered, left = times[numbers % len(times)].T
        return Collectives(numbers, entered, np.where(numbers < count // 2, left, np.nan))


class KindOfCollectives(msgspec.Struct, frozen=True):
    """A kind of collectives: its words for a message, its plan's fingerprint, its packs."""

    what: str
    plan: str
    collectives: int

    def place(self, number: int) -> str:
        """Names a collective: its pack, how often its kind was used by then, and the kind."""
        use, pack = divmod(number, self.collectives)
        return f"pack {pack + 1} of {self.collectives}, time {use + 1}, of the {self.what}"


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One collective: its kind, its number in it, and when it was entered and left, in seconds."""

    kind: str
    number: Annotated[int, msgspec.Meta(ge=0)]
    entered: float
    left: float | None


class Box(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last collectives of one host, oldest first."""

    host: int  # Its number in `hosts`.
    hosts: list[str]
    reason: str
    written: float  # In seconds, on this host's clock, as the entries' times.
    kinds: dict[str, KindOfCollectives]
    entries: list[Entry]


def write_box(cluster: config.Cluster, kinds: Iterable[Kind], reason: str) -> None:
    """Writes this host's last collectives to the cache folder, and logs the path, or the error."""
    entries, known = [], {}
    for kind in kinds:
        known[kind.name] = kind.about
        for number, entered, left in zip(*(column.tolist() for column in kind.last())):
            entries.append(Entry(kind.name, number, entered, None if np.isnan(left) else left))
    entries = sorted(entries, key=lambda entry: entry.entered)[-KEPT:]
    hosts = [cluster.name(host) for host in range(len(cluster.tasks))]
    box = Box(cluster.index, hosts, reason, time.time(), known, entries)
    try:
        path = cache_folder.cache_folder() / "blackbox" / f"host{box.host}-{os.getpid()}.json"
        cache_folder.write_whole(path, msgspec.json.encode(box))
    except (OSError, RuntimeError) as error:
        logging.warning("tfcdo: the black box could not be written: %s", error)
        return
    logging.warning(
        "tfcdo: the last %d collectives are in %s; `tfcdo doctor --blackbox FILE...` with the "
        "files of all hosts says which host stopped where",
        *(len(entries), path),
    )


def read_box(path: pathlib.Path) -> Box:
    """Reads a file that `write_box` wrote; raises a `ValueError` if it is another one."""
    try:
        box = msgspec.json.decode(path.read_bytes(), type=Box)
        kinds = {name for name, kind in box.kinds.items() if kind.collectives > 0}
        if box.host not in range(len(box.hosts)) or not kinds >= {e.kind for e in box.entries}:
            raise ValueError("it names a host, or a kind of collectives, that it does not list")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a black box of tfcdo: {error}") from error
    return box


# Python runs a handler only between two steps of the main thread, which may wait inside TensorFlow,
# but writes the signal's number to one file of the process at once.
_asked: int | None = None  # Where the numbers are read.


def listen() -> None:
    """Lets SIGUSR1 ask for the black box, even while the main thread waits inside TensorFlow."""
    global _asked
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        _asked, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        other = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other)

        def note(number: int, frame: object) -> None:
            if other != -1:  # Another library has the file.
                with contextlib.suppress(BlockingIOError):
                    os.write(writer, bytes([number]))

        signal.signal(signal.SIGUSR1, note)
    elif _asked is None:
        logging.info("tfcdo: SIGUSR1 has a handler already, so it does not write the black box")


def is_asked() -> bool:
    """Returns whether SIGUSR1 has arrived since this was last called."""
    with contextlib.suppress(BlockingIOError):
        return _asked is not None and signal.SIGUSR1 in os.read(_asked, 1 << 16)
    return False
