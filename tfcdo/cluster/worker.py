"""What a worker learns from outside: variables of `tfcdo launch`, and signals.

Threads hear signals even while the main thread waits inside TensorFlow. Python runs a handler only
between two steps of the main thread, but writes the signal's number to one file at once. A process
has one such file, so all that need the file share this one.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading

# How many devices this worker trains on: the default of MultiWorkerMirroredStrategy's argument
# `devices_per_worker`.
DEVICES_PER_WORKER = "TFCDO_DEVICES_PER_WORKER"
# How often `tfcdo launch --max-restarts` has started the workers again: 0 in the first run.
RESTART_COUNT = "TFCDO_RESTART_COUNT"
# A file that exists once another worker of this run has failed: a SIGTERM then comes from
# `tfcdo launch`, which ends the run, and a backup is not possible. A worker that ends because of
# another one makes it too, so that `tfcdo launch` does not blame it.
FAILURE_FILE = "TFCDO_FAILURE_FILE"
# The secret of hosts that meet at the start; `tfcdo launch` makes one for the workers of a host.
CLUSTER_TOKEN = "TFCDO_CLUSTER_TOKEN"


def devices_per_worker() -> int | None:
    """Returns the number of devices that the launcher gave this worker; None if it gave none."""
    text = os.environ.get(DEVICES_PER_WORKER, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(
            f"the environment variable {DEVICES_PER_WORKER} must be a positive number of devices; "
            f"got {text!r}"
        )
    return int(text)


def cluster_token() -> str:
    """Returns the token that this job's hosts must know; empty without one."""
    return os.environ.get(CLUSTER_TOKEN, "").strip()


def another_has_failed() -> bool:
    """Returns whether `tfcdo launch` ends this run because a worker has failed."""
    path = os.environ.get(FAILURE_FILE, "")
    return bool(path) and os.path.exists(path)  # noqa: PTH110 - called by a signal's handler


def tell_that_another_has_failed() -> None:
    """Tells `tfcdo launch` that this worker ends because of another one."""
    path = os.environ.get(FAILURE_FILE, "")
    if path:
        with contextlib.suppress(OSError):  # The launcher is gone.
            pathlib.Path(path).touch()


_lock = threading.Lock()
_pipe: tuple[int, int] | None = None
_hears_at_once = False
_arrived: set[int] = set()


def listen() -> None:
    """Begins to hear signals that have a handler."""
    # Call it in the main thread; later calls change nothing.
    global _pipe, _hears_at_once
    if _pipe is None:
        _pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        other = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
        _hears_at_once = other == -1
        if not _hears_at_once:
            signal.set_wakeup_fd(other)  # Another library has the file.


def note_signal(number: int, frame: object) -> None:
    """Handles a signal, also for a process in which another library has the file."""
    if _pipe is not None and not _hears_at_once:
        with contextlib.suppress(BlockingIOError):
            os.write(_pipe[1], bytes([number]))


def take_signal(number: int) -> bool:
    """Returns whether a signal has arrived since this was last asked."""
    if _pipe is None:
        return False
    with _lock:
        with contextlib.suppress(BlockingIOError):
            _arrived.update(os.read(_pipe[0], 1 << 16))
        arrived = number in _arrived
        _arrived.discard(number)
        return arrived
