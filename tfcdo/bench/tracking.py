"""Reports progress: what a caller passes to see how far a measurement is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

_Item = TypeVar("_Item")


class Track(Protocol):
    """Goes through a sequence and shows how far it is, as `rich.progress.track` does."""

    def __call__(self, sequence: Sequence[_Item], *, description: str) -> Iterable[_Item]:
        """Yields the items of a sequence."""
        ...


def silently(sequence: Sequence[_Item], *, description: str) -> Iterable[_Item]:
    """Yields the items of a sequence and shows nothing."""
    del description
    return sequence
