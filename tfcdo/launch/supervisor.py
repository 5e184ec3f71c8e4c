"""Runs the workers of a job: all end when one fails, and may be started again."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO

from tfcdo.cluster import protocol, worker
from tfcdo.launch import guard

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
# How long the output of a worker that has ended may take to be printed: before the launcher speaks
# itself, and before it ends, where a pager may be waiting for a key.
_DRAIN_SECONDS = 1.0
_LAST_DRAIN_SECONDS = 60.0
# A worker that asks for it earlier has not trained, and would be started again without end.
_SHORTEST_RUN_SECONDS = 5.0
# How long workers that leave after a backup may take: the end of Python, with all backups written.
_LEAVE_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """One worker, as it is to be started."""

    name: str  # Such as "worker 0".
    prefix: bytes  # Printed before each line of its output.
    error_prefix: bytes
    environment: Mapping[str, str]  # Variables added to the launcher's own.


@dataclasses.dataclass(frozen=True)
class Job:
    """A command to run on several workers, and the rules for it."""

    command: Sequence[str]
    # Entered once for each run.
    workers: Callable[[], contextlib.AbstractContextManager[Sequence[WorkerSpec]]]
    max_restarts: int = 0
    grace_seconds: float = 10.0  # From the request to end until workers are killed.


# A worker's end, a signal to the launcher, and the error of an output that takes no more.
Events = queue.SimpleQueue[protocol.End | signal.Signals | OSError]


def run(job: Job) -> int:
    """Runs a job in the main thread; returns 0, the first failure's status or 128 and a signal."""
    guard.adopt_orphans()
    events: Events = queue.SimpleQueue()
    # A SimpleQueue may be put to while it is read.
    guard.handle(lambda number, frame: events.put(signal.Signals(number)))
    restarts = failures = 0
    while True:
        start = time.monotonic()
        result = _run_once(job, restarts, events)
        if not result.status or result.signal:
            return result.status
        is_asked = result.status == protocol.RESTART_STATUS
        if is_asked and time.monotonic() - start >= _SHORTEST_RUN_SECONDS:
            report("starting all workers again, as asked after a backup")
        elif failures == job.max_restarts:
            return result.status
        else:
            failures += 1
            report(f"starting all workers again (restart {failures} of {job.max_restarts})")
        restarts += 1


def _run_once(job: Job, restart: int, events: Events) -> protocol.Result:
    """Runs all workers once; returns how they have ended."""
    processes: list[Process] = []
    with job.workers() as specs:
        try:
            for number, spec in enumerate(specs):
                processes.append(Process(number, spec, job.command, restart, events))
            return _supervise(job, specs, processes, events)
        finally:
            for process in processes:
                process.send(signal.SIGKILL)
            # Those whose guard somebody has killed, and what they have started.
            guard.end_descendants()
            for process in processes:
                process.close()
                process.drain(_LAST_DRAIN_SECONDS)


def _supervise(
    job: Job, specs: Sequence[WorkerSpec], processes: Sequence[Process], events: Events
) -> protocol.Result:
    """Waits for the workers of one run, and does what the protocol asks for."""
    leave = max(_LEAVE_SECONDS, job.grace_seconds)
    names = [spec.name for spec in specs]
    supervision = protocol.Supervision(names, job.grace_seconds, leave)
    while supervision.running:
        deadline = supervision.deadline
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            event = events.get(timeout=timeout)
        except queue.Empty:
            actions = supervision.tick(time.monotonic())
        else:
            if isinstance(event, OSError):
                if not supervision.result().signal:
                    raise event
                continue  # Who reads the output, such as `tee`, has been asked to end, too.
            if isinstance(event, protocol.End):
                processes[event.worker].drain(_DRAIN_SECONDS)
                actions = supervision.end(event, time.monotonic())
            elif event in guard.PASSED_SIGNALS:
                actions = [protocol.Send(number, event) for number in supervision.running]
            else:
                actions = supervision.ask(event, time.monotonic())
        for action in actions:
            if isinstance(action, protocol.Send):
                processes[action.worker].send(action.number)
            else:
                report(action)
    return supervision.result()


class Process:
    """A worker that runs, behind its guard."""

    def __init__(
        self, number: int, spec: WorkerSpec, command: Sequence[str], restart: int, events: Events
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
                worker.RESTART_COUNT: str(restart),
                worker.FAILURE_FILE: str(self._failure_file),
                # Lines come as they are printed, not 8 KB of them at a time.
                "PYTHONUNBUFFERED": "1",
            },
            bufsize=0,
            # Ctrl-C in the terminal reaches the launcher only, which passes it on once.
            start_new_session=True,
        )
        assert self._guard.stdout and self._guard.stderr
        streams = (
            (self._guard.stdout, spec.prefix, sys.stdout.buffer),
            (self._guard.stderr, spec.error_prefix, sys.stderr.buffer),
        )
        self._readers = [
            threading.Thread(target=self._read, args=stream, daemon=True) for stream in streams
        ]
        self._waiters = [threading.Thread(target=t, daemon=True) for t in (self._wait, self._reap)]
        for thread in (*self._readers, *self._waiters):
            thread.start()

    def send(self, number: int) -> None:
        """Sends a signal, or word of a failure; SIGKILL ends all that the worker has started."""
        assert self._guard.stdin
        with contextlib.suppress(BrokenPipeError, FileNotFoundError):  # It has ended.
            if number == protocol.TELL_OF_FAILURE:
                self._failure_file.touch()
            else:
                self._guard.stdin.write(bytes([number]))
                self._guard.send_signal(signal.SIGCONT)  # It may have been stopped with its worker.

    def drain(self, seconds: float) -> None:
        """Waits, for at most so long, until the output of a worker that has ended is printed."""
        deadline = time.monotonic() + seconds
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Waits for the guard, which ends when nothing is left that its worker has started."""
        for waiter in self._waiters:
            waiter.join()
        self._end.close()
        assert self._guard.stdin
        self._guard.stdin.close()
        self._folder.cleanup()

    def _wait(self) -> None:
        """Hears how and when the worker has ended, from its guard, or that the guard has."""
        status, moment, *_ = self._end.read(200).split()
        follows = self._failure_file.exists()
        self._events.put(protocol.End(self._number, int(status), float(moment), follows))

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
                # What is left in the buffer, and what comes, would fail again, also at the exit.
                with pathlib.Path(os.devnull).open("wb") as nowhere:
                    os.dup2(nowhere.fileno(), printed.fileno())
                self._events.put(error)
        stream.close()


def report(message: str) -> None:
    """Tells the user a sentence."""
    with contextlib.suppress(OSError):  # The terminal has been closed.
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
