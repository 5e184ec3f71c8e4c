"""Reports progress, and a step that does not end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

_Item = TypeVar("_Item")


class Track(Protocol):
    """Goes through a sequence and shows the progress, as `rich.progress.track` does."""

    def __call__(self, sequence: Sequence[_Item], *, description: str) -> Iterable[_Item]:
        """Yields the items of a sequence."""
        ...


def silently(sequence: Sequence[_Item], *, description: str) -> Iterable[_Item]:
    """Yields the items of a sequence and shows nothing."""
    del description
    return sequence


class Watchdog:
    """Calls a function, in a thread, with the name of each block that takes longer than `seconds`.

    The block goes on: only the end of its process ends a step whose devices wait for each other.
    """

    def __init__(self, seconds: float | None, on_timeout: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._on_timeout = on_timeout

    @contextlib.contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Watches the block."""
        if self._seconds is None:
            yield
            return
        timer = threading.Timer(self._seconds, self._on_timeout, [name])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


ASLEEP = Watchdog(None, lambda name: None)
