"""A worker's process, its launcher's events and the launcher's signals."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from tfcdo import environment
from tfcdo.launch import guard, output

# Signals that end the job, and those that are only passed on.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# A worker is told by files: that another one has failed, and that their number changes.
FAILED = "failed"
RESIZE = "resize"
# How long a worker that leaves may take to back up, at least.
_LEAVE_SECONDS = 30.0
# Lines without an error that TensorFlow prints before it has read TF_CPP_MIN_LOG_LEVEL.
_EARLY_LINE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) "
    rb"|[IW]0000 00:00:[\d.]+ +\d+ \S+:\d+\] "
)


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """One worker, as it is to be started."""

    name: str  # Such as "worker 0".
    prefix: bytes  # Printed before each line of its output.
    error_prefix: bytes
    environment: Mapping[str, str]  # Variables added to the launcher's own.
    slot: int = 0  # Which of the greatest number of workers; stays when there are fewer.


def seconds_to_leave(grace_seconds: float) -> float:
    """Returns how long workers may take that leave after a backup: a step and the backup."""
    return max(_LEAVE_SECONDS, grace_seconds)


@dataclasses.dataclass(frozen=True)
class Exit:
    """A worker has ended: a `Process`, or one on another machine."""

    process: Any
    status: int  # As a shell has it.


# A worker's end, a signal to the launcher, the error of an output that takes no more, and the
# message of another launcher, which is None when that one is gone.
Events = queue.SimpleQueue[Exit | signal.Signals | OSError | Mapping[str, Any] | None]


class Process:
    """A worker that runs, behind its guard."""

    def __init__(
        self,
        spec: WorkerSpec,
        command: Sequence[str],
        events: Events,
    ) -> None:
        self.spec = spec
        self._events = events
        self._folder = tempfile.TemporaryDirectory(prefix="tfcdo-launch-")
        self._guard = subprocess.Popen(
            [sys.executable, guard.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                **spec.environment,
                environment.FAILURE_FILE: self._file(FAILED),
                environment.RESIZE_FILE: self._file(RESIZE),
                # Lines come as they are printed, not 8 KB of them at a time.
                "PYTHONUNBUFFERED": "1",
            },
            bufsize=0,
            # Ctrl-C in the terminal reaches the launcher only, which passes it on once.
            start_new_session=True,
        )
        assert self._guard.stdout
        assert self._guard.stderr
        streams = (
            (self._guard.stdout, spec.prefix, sys.stdout.buffer),
            (self._guard.stderr, spec.error_prefix, sys.stderr.buffer),
        )
        self._readers = [
            threading.Thread(target=self._read, args=stream, daemon=True) for stream in streams
        ]
        for thread in (*self._readers, threading.Thread(target=self._wait, daemon=True)):
            thread.start()

    def send(self, number: int) -> None:
        """Sends a signal to the worker's process group; SIGKILL ends all that it has started."""
        assert self._guard.stdin
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(bytes([number]))

    def tell(self, name: str) -> None:
        """Tells the worker `FAILED` or `RESIZE`."""
        with contextlib.suppress(FileNotFoundError):  # It has ended.
            pathlib.Path(self._file(name)).touch()

    def drain(self, seconds: float) -> None:
        """Waits, for at most so long, until the output of a worker that has ended is printed."""
        deadline = time.monotonic() + seconds
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def _file(self, name: str) -> str:
        return str(pathlib.Path(self._folder.name, name))

    def _wait(self) -> None:
        status = self._guard.wait()
        self._folder.cleanup()
        # The guard itself may have been killed.
        self._events.put(Exit(self, status if status >= 0 else 128 - status))

    def _read(self, stream: IO[bytes], prefix: bytes, printed: IO[bytes]) -> None:
        is_quiet = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") >= "2"
        for line in output.lines(iter(lambda: os.read(stream.fileno(), 65_536), b"")):
            if is_quiet and _EARLY_LINE.match(line):
                continue
            try:
                # One call: whole lines of several threads.
                printed.write(prefix + line + b"\n")
                printed.flush()
            except OSError as error:
                self._events.put(error)


@contextlib.contextmanager
def handled_signals(events: Events) -> Iterator[None]:
    """Puts signals into the queue of events; a SimpleQueue may be put to while it is read."""
    before = {
        number: signal.signal(number, lambda number, frame: events.put(signal.Signals(number)))
        for number in (*ENDING_SIGNALS, *PASSED_SIGNALS)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
