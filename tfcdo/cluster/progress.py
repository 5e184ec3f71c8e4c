"""Progress of the collectives of this process: how often and when each kind is entered and left."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import numpy as np

from tfcdo.cluster import agreement

# Collectives of each kind whose times are kept, and uses of it if it has many packs.
KEPT = 1000
_KEPT_USES = 32


class EventCounter(Protocol):
    """Counts the events of one kind: entering a collective, leaving it, entering the next one."""

    def count(self) -> int:
        """Returns the number of events: odd while a collective waits."""

    def times(self) -> np.ndarray:
        """Returns when the last events were, as `shape_of_times`, on this host's own clock."""


class Collectives(NamedTuple):
    """The last collectives of a kind, oldest first: number, and seconds; NaN if not left."""

    numbers: np.ndarray
    entered: np.ndarray
    left: np.ndarray


def shape_of_times(collectives: int) -> tuple[int, int, int]:
    """Returns `[uses, collectives of one use, entered and left]` whose times a host keeps."""
    return max(_KEPT_USES, -(-KEPT // max(1, collectives))), collectives, 2


@dataclasses.dataclass
class Kind:
    """A kind of collectives, its events at the last look, and when their number last changed."""

    name: str
    description: agreement.Description
    marks: EventCounter
    count: int = 0
    since: float = 0.0

    @property
    def waits(self) -> bool:
        """Tells whether this host is in a collective."""
        return self.count % 2 == 1

    def place(self, count: int) -> str:
        """Names the collective that a host is in, which has counted this many events."""
        return place(self.description["collectives"], count // 2, agreement.brief(self.description))

    def last(self) -> Collectives:
        """Returns the last collectives of this process."""
        count = self.marks.count()
        times = self.marks.times().reshape(-1, 2)
        begun = (count + 1) // 2
        numbers = np.arange(max(0, begun - len(times)), begun)
        entered, left = times[numbers % max(1, len(times))].T
        return Collectives(numbers, entered, np.where(numbers < count // 2, left, np.nan))


def place(collectives: int, number: int, kind: str) -> str:
    """Names a collective: its pack, how often its kind was used by then, and the kind."""
    use, pack = divmod(number, collectives)
    return f"pack {pack + 1} of {collectives}, time {use + 1}, of the {kind}"
