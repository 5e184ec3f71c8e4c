"""Signals that threads hear even while the main thread waits inside TensorFlow.

Python runs a handler only between two steps of the main thread, but writes the signal's number to
one file at once. A process has one such file, so all that need it share this one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

_lock = threading.Lock()
_pipe: tuple[int, int] | None = None
_hears_at_once = False
_arrived: set[int] = set()


def listen() -> bool:
    """Begins to hear signals that have a handler; returns False if another library has the file."""
    # Call it in the main thread; later calls change nothing.
    global _pipe, _hears_at_once
    if _pipe is None:
        _pipe = os.pipe()
        for end in _pipe:
            os.set_blocking(end, False)
        other = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
        _hears_at_once = other == -1
        if not _hears_at_once:
            signal.set_wakeup_fd(other)
    return _hears_at_once


def note(number: int) -> None:
    """Is called by handlers, for a process in which another library has the file."""
    if _pipe is not None and not _hears_at_once:
        with contextlib.suppress(BlockingIOError):
            os.write(_pipe[1], bytes([number]))


def take(number: int) -> bool:
    """Returns whether a signal has arrived since this was last asked."""
    if _pipe is None:
        return False
    with _lock:
        with contextlib.suppress(BlockingIOError):
            _arrived.update(os.read(_pipe[0], 1 << 16))
        arrived = number in _arrived
        _arrived.discard(number)
        return arrived
