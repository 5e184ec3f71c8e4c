"""A worker's process, its output in lines, and the events of its launcher."""

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO

from tfcdo import environment
from tfcdo.cluster import protocol
from tfcdo.launch import guard

# Signals that end the job, and those that are only passed on.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# Lines without an error that TensorFlow prints before it has read TF_CPP_MIN_LOG_LEVEL.
_EARLY_LINE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) "
    rb"|[IW]0000 00:00:[\d.]+ +\d+ \S+:\d+\] "
)
# A carriage return alone ends a line too: progress bars redraw theirs with it. One at the end of
# what has arrived may be half of "\r\n".
_LINE_END = re.compile(rb"\r?\n|\r(?!\n|\Z)")
# A line that is longer is printed in parts, so that memory is bounded.
_MAX_LINE_BYTES = 65_536


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """One worker, as it is to be started."""

    name: str  # Such as "worker 0".
    prefix: bytes  # Printed before each line of its output.
    error_prefix: bytes
    environment: Mapping[str, str]  # Variables added to the launcher's own.


# A worker's end, a signal to the launcher, and the error of an output that takes no more.
Events = queue.SimpleQueue[protocol.End | signal.Signals | OSError]


class Process:
    """A worker that runs, behind its guard."""

    def __init__(
        self, number: int, spec: WorkerSpec, command: Sequence[str], events: Events
    ) -> None:
        self._number = number
        self._events = events
        self._folder = tempfile.TemporaryDirectory(prefix="tfcdo-launch-")
        self._failure_file = pathlib.Path(self._folder.name, "failed")
        path = pathlib.Path(self._folder.name, "end")
        os.mkfifo(path)
        self._end = path.open("r+b", buffering=0)
        self._guard = subprocess.Popen(
            [sys.executable, guard.__file__, str(path), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                **spec.environment,
                environment.FAILURE_FILE: str(self._failure_file),
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
        waiters = [threading.Thread(target=t, daemon=True) for t in (self._wait, self._reap)]
        for thread in (*self._readers, *waiters):
            thread.start()

    def send(self, number: int) -> None:
        """Sends a signal to the worker's process group; SIGKILL ends all that it has started."""
        assert self._guard.stdin
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(bytes([number]))

    def tell_of_failure(self) -> None:
        """Tells the worker that another one has failed."""
        with contextlib.suppress(FileNotFoundError):  # It has ended.
            self._failure_file.touch()

    def drain(self, seconds: float) -> None:
        """Waits, for at most so long, until the output of a worker that has ended is printed."""
        deadline = time.monotonic() + seconds
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Waits for the guard, which ends when nothing is left that its worker has started."""
        self._guard.wait()
        self._folder.cleanup()

    def _wait(self) -> None:
        """Hears how and when the worker has ended, from its guard, or that the guard has."""
        status, moment, *_ = self._end.read(200).split()
        self._events.put(protocol.End(self._number, int(status), float(moment)))

    def _reap(self) -> None:
        status = self._guard.wait()
        # The guard itself may have been killed, and has then written nothing.
        status = status if status >= 0 else 128 - status
        self._end.write(f"{status} {time.monotonic()}\n".encode())

    def _read(self, stream: IO[bytes], prefix: bytes, printed: IO[bytes]) -> None:
        is_quiet = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") >= "2"
        for line in split_lines(iter(lambda: os.read(stream.fileno(), 65_536), b"")):
            if is_quiet and _EARLY_LINE.match(line):
                continue
            try:
                # One call: whole lines of several threads.
                printed.write(prefix + line + b"\n")
                printed.flush()
            except OSError as error:
                self._events.put(error)


def report(message: str) -> None:
    """Tells the user a sentence."""
    sys.stderr.write(f"tfcdo: {message}\n")
    sys.stderr.flush()


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines of a stream of bytes, without their ends."""
    rest = b""
    for chunk in chunks:
        *complete, rest = _LINE_END.split(rest + chunk)
        yield from complete
        if len(rest) > _MAX_LINE_BYTES:
            yield rest.removesuffix(b"\r")
            rest = b""
    if rest:
        yield rest.removesuffix(b"\r")


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
