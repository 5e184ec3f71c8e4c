"""Notices a step that does not end, as one whose devices wait for each other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_POLL_SECONDS = 0.05


class Watchdog:
    """Calls a function if something that is watched takes too long.

    Args:
      seconds: how long each thing may take; None for as long as it likes.
      on_timeout: is given the name of what takes too long, in a thread of its own: what is watched
        goes on, and can only be ended with its process.

    Example:
      >>> with Watchdog(60.0, print).running() as watchdog, watchdog.watching("a step"):
      ...     pass
    """

    def __init__(self, seconds: float | None, on_timeout: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._on_timeout = on_timeout
        # The name and the end of what is watched, set and read as one object.
        self._watched: tuple[str, float] | None = None
        self._stopped = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[Watchdog]:
        """Runs the thread that looks, as long as the block runs; none if there is no limit."""
        if self._seconds is None:
            yield self
            return
        thread = threading.Thread(target=self._look, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            thread.join()

    @contextlib.contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Watches the block."""
        if self._seconds is not None:
            self._watched = (name, time.monotonic() + self._seconds)
        try:
            yield
        finally:
            self._watched = None

    def _look(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            watched = self._watched
            if watched is not None and time.monotonic() > watched[1]:
                self._on_timeout(watched[0])
                return


def never(name: str) -> None:
    """Does nothing: a watchdog without a limit has nobody to tell."""
    del name


# Watches nothing.
ASLEEP = Watchdog(None, never)
