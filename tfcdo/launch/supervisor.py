"""Runs the workers of a job: all end when one fails, and may be started again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from tfcdo import environment
from tfcdo.launch import guard, output

# Signals that end the job, and those that are only passed on.
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# How long the output of a worker that has ended may take to be printed: before the launcher speaks
# itself, and before it ends, where a pager may be waiting for a key.
_DRAIN_SECONDS = 1.0
_LAST_DRAIN_SECONDS = 60.0
# How long the others may take once a worker has asked for a restart: all leave after one step.
_LEAVE_SECONDS = 30.0
# A worker that asks for it earlier has not trained, and would be started again without end.
_SHORTEST_RUN_SECONDS = 5.0


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


@dataclasses.dataclass(frozen=True)
class _Exit:
    """A worker has ended."""

    process: _Process
    status: int


@dataclasses.dataclass(frozen=True)
class _Signal:
    """The launcher was sent a signal."""

    number: int


@dataclasses.dataclass(frozen=True)
class _OutputError:
    """The launcher's own output takes no more."""

    error: OSError


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """How a run has ended.

    Attributes:
      status: as `run` returns it.
      final: whether a signal ended the job.
      asked: whether a worker asked to be started again, after a backup.
    """

    status: int
    final: bool
    asked: bool


_Events = queue.SimpleQueue[_Exit | _Signal | _OutputError]


class _Process:
    """A worker that runs, behind its guard."""

    def __init__(
        self,
        spec: WorkerSpec,
        command: Sequence[str],
        printers: tuple[output.LinePrinter, output.LinePrinter],
        events: _Events,
    ) -> None:
        self.spec = spec
        self._events = events
        self._guard = subprocess.Popen(
            [sys.executable, guard.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **spec.environment},
            # Ctrl-C in the terminal reaches the launcher only, which passes it on once.
            start_new_session=True,
        )
        assert self._guard.stdout
        assert self._guard.stderr
        streams = (
            (self._guard.stdout, spec.prefix, printers[0]),
            (self._guard.stderr, spec.error_prefix, printers[1]),
        )
        self._readers = [
            threading.Thread(target=self._read, args=stream, daemon=True) for stream in streams
        ]
        for thread in (*self._readers, threading.Thread(target=self._wait, daemon=True)):
            thread.start()

    def send(self, number: int) -> None:
        """Sends a signal to the worker's process group."""
        assert self._guard.stdin
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._guard.stdin.write(bytes([number]))
            self._guard.stdin.flush()

    def kill(self) -> None:
        """Kills the worker and all that it has started."""
        assert self._guard.stdin
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()

    def drain(self, seconds: float) -> None:
        """Waits, for at most so long, until the output of a worker that has ended is printed."""
        deadline = time.monotonic() + seconds
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def _wait(self) -> None:
        self._events.put(_Exit(self, self._guard.wait()))

    def _read(self, stream: IO[bytes], prefix: bytes, printer: output.LinePrinter) -> None:
        splitter = output.LineSplitter()
        while chunk := os.read(stream.fileno(), 65_536):
            self._print(splitter.feed(chunk), prefix, printer)
        self._print(splitter.flush(), prefix, printer)

    def _print(self, lines: Iterator[bytes], prefix: bytes, printer: output.LinePrinter) -> None:
        try:
            for line in lines:
                printer.print(prefix + line)
        except OSError as error:
            self._events.put(_OutputError(error))


def run(job: Job, report: Callable[[str], None]) -> int:
    """Runs a job in the main thread to its end, and leaves no process that it started.

    Args:
      job: the command and its workers; all end when one fails (SIGTERM, then SIGKILL).
      report: takes each sentence that the user should read.

    Returns:
      0 if all workers ended well; else the status of the first that failed; or 128 and the number
      of the signal that ended the job.

    Raises:
      OSError: if nobody takes the output any more.
    """
    guard.adopt_orphans()
    events: _Events = queue.SimpleQueue()
    failures = restarts = 0
    with _handled(events):
        while True:
            start = time.monotonic()
            with job.workers() as specs:
                outcome = _run_once(job, specs, restarts, events, report)
            if not outcome.status or outcome.final:
                return outcome.status
            restarts += 1
            if outcome.asked and time.monotonic() - start >= _SHORTEST_RUN_SECONDS:
                report("starting all workers again, as asked after a backup")
                continue
            failures += 1
            if failures > job.max_restarts:
                return outcome.status
            report(f"starting all workers again (restart {failures} of {job.max_restarts})")


def _run_once(
    job: Job,
    specs: Sequence[WorkerSpec],
    restart: int,
    events: _Events,
    report: Callable[[str], None],
) -> _Outcome:
    """Runs all workers once."""
    printers = (output.LinePrinter(sys.stdout.buffer), output.LinePrinter(sys.stderr.buffer))
    processes: list[_Process] = []
    folder = tempfile.TemporaryDirectory(prefix="tfcdo-launch-")
    failure_file = pathlib.Path(folder.name, "failed")
    try:
        for spec in specs:
            variables = {
                **spec.environment,
                environment.RESTART_COUNT: str(restart),
                environment.FAILURE_FILE: str(failure_file),
                # Lines come as they are printed, not 8 KB of them at a time.
                "PYTHONUNBUFFERED": "1",
            }
            spec = dataclasses.replace(spec, environment=variables)
            processes.append(_Process(spec, job.command, printers, events))
        return _Supervision(job, processes, events, report, failure_file).run()
    finally:
        for process in processes:
            process.kill()
        # Those whose guard somebody has killed, and what they have started.
        guard.end_descendants()
        for process in processes:
            process.drain(_LAST_DRAIN_SECONDS)
        folder.cleanup()


class _Supervision:
    """Waits for the workers of one run, and ends them when one has failed or a signal came."""

    def __init__(
        self,
        job: Job,
        processes: Sequence[_Process],
        events: _Events,
        report: Callable[[str], None],
        failure_file: pathlib.Path,
    ) -> None:
        self._job = job
        self._running = set(processes)
        self._events = events
        self._report = report
        self._failure_file = failure_file
        self._status = 0
        self._asked = False
        self._ended_by_signal = False
        # Whether the workers were asked to end, and until when they may take.
        self._ending = False
        self._deadline: float | None = None

    def run(self) -> _Outcome:
        """Returns how the run has ended."""
        while self._running:
            try:
                event = self._events.get(timeout=self._seconds_left())
            except queue.Empty:
                self._kill()
                continue
            if isinstance(event, _Exit):
                self._handle_exit(event)
            elif isinstance(event, _Signal):
                self._handle_signal(event.number)
            else:
                raise event.error
        return _Outcome(self._status, self._ended_by_signal, self._asked)

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _handle_exit(self, event: _Exit) -> None:
        self._running.discard(event.process)
        event.process.drain(_DRAIN_SECONDS)
        # One that ends after it was asked to has not failed.
        if not event.status or self._ending:
            return
        status = _as_shell_status(event.status)
        name = event.process.spec.name
        others = "the others" if self._running else ""
        if status == environment.RESTART_STATUS:
            if not self._asked:
                waiting = f"; waiting for {others} to do so" if others else ""
                self._report(f"{name} has made a backup and asks to be started again{waiting}")
                # They leave after the same step, by themselves.
                self._deadline = time.monotonic() + max(_LEAVE_SECONDS, self._job.grace_seconds)
            self._status, self._asked = status, True
            return
        if not self._asked:
            self._status = status
        ending = f"; ending {others}" if others else ""
        self._report(f"{name} failed: {_describe(status)}{ending}")
        # Tells those who back up on a SIGTERM that there is nobody to wait for.
        self._failure_file.touch()
        self._ask_to_end(signal.SIGTERM)

    def _handle_signal(self, number: int) -> None:
        if number in _PASSED_SIGNALS:
            for process in self._running:
                process.send(number)
        elif self._ended_by_signal:
            # Somebody who asks twice does not want to wait.
            self._kill()
        else:
            self._ended_by_signal = True
            self._status = 128 + number
            self._report(f"got {signal.Signals(number).name}: passing it on to the workers")
            self._ask_to_end(number)

    def _ask_to_end(self, number: int) -> None:
        self._ending = True
        self._deadline = time.monotonic() + self._job.grace_seconds
        for process in self._running:
            process.send(number)
            # A stopped process does not act on signals.
            process.send(signal.SIGCONT)

    def _kill(self) -> None:
        if self._running:
            names = ", ".join(sorted(process.spec.name for process in self._running))
            self._report(f"killing {names}")
        self._ending = True
        for process in self._running:
            process.kill()
        # Nothing is left to be done but to wait for them.
        self._deadline = None


@contextlib.contextmanager
def _handled(events: _Events) -> Iterator[None]:
    """Puts signals into the queue of events; a SimpleQueue may be put to while it is read."""
    before = {
        number: signal.signal(number, lambda number, frame: events.put(_Signal(number)))
        for number in (*_ENDING_SIGNALS, *_PASSED_SIGNALS)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _as_shell_status(status: int) -> int:
    """Returns a guard's status as a shell has it: the guard itself may have been killed."""
    return status if status >= 0 else 128 - status


def _describe(status: int) -> str:
    try:
        return f"exit status {status} ({signal.Signals(status - 128).name})"
    except ValueError:
        return f"exit status {status}"
