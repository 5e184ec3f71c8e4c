"""Runs the workers of a job: all end when one fails, and may be started again."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import sys
import time
from collections.abc import Callable, Sequence

from tfcdo import environment
from tfcdo.launch import guard, output, pool, worker

# How long the output of a worker that has ended may take to be printed: before the launcher speaks
# itself, and before it ends, where a pager may be waiting for a key.
_DRAIN_SECONDS = 1.0
_LAST_DRAIN_SECONDS = 60.0
# How long the others may take once a worker has asked for a restart: all leave after one step.
_LEAVE_SECONDS = 30.0
# A worker that asks for it earlier has not trained, and would be started again without end.
_SHORTEST_RUN_SECONDS = 5.0
_POLL_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Job:
    """A command to run on several workers, and the rules for it."""

    command: Sequence[str]
    # Entered once for each run.
    workers: Callable[[], contextlib.AbstractContextManager[Sequence[worker.WorkerSpec]]]
    max_restarts: int = 0
    grace_seconds: float = 10.0  # From the request to end until workers are killed.
    pool: pool.Pool | None = None  # Of workers that may become fewer and more.


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """How a run has ended.

    Attributes:
      status: as `run` returns it.
      final: whether a signal ended the job.
      asked: whether a worker asked to be started again, after a backup.
      first: the first worker that failed, or asked to be started again.
    """

    status: int
    final: bool
    asked: bool
    first: worker.WorkerSpec | None


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
    events: worker.Events = queue.SimpleQueue()
    with worker.handled_signals(events):
        if job.pool is None:
            return _run_fixed(job, events, report)
        with job.pool.listening(events):
            status = _run_elastic(job, job.pool, events, report)
            job.pool.end(status)
            return status


def _run_fixed(job: Job, events: worker.Events, report: Callable[[str], None]) -> int:
    """Runs a job whose number of workers stays."""
    failures = restarts = 0
    while True:
        start = time.monotonic()
        outcome = _run_once(job, restarts, events, report)
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


def _run_elastic(
    job: Job, workers: pool.Pool, events: worker.Events, report: Callable[[str], None]
) -> int:
    """Runs a job with the workers that there are; each change of their number is a restart."""
    status, restarts = 1, 0
    while True:
        try:
            ended_by = workers.wait(events, report, first=not restarts)
        except pool.TooFewError as error:
            report(f"{error}: ending")
            return status
        if ended_by is not None:
            return 128 + ended_by
        start = time.monotonic()
        outcome = _run_once(job, restarts, events, report)
        if not outcome.status or outcome.final:
            return outcome.status
        status = outcome.status
        restarts += 1
        if outcome.asked and time.monotonic() - start >= _SHORTEST_RUN_SECONDS:
            report("starting the workers again, as asked after a backup")
        elif outcome.first:
            workers.fail(outcome.first.slot, report)


def _run_once(
    job: Job, restart: int, events: worker.Events, report: Callable[[str], None]
) -> _Outcome:
    """Runs all workers once."""
    printers = (output.LinePrinter(sys.stdout.buffer), output.LinePrinter(sys.stderr.buffer))
    processes: list[worker.AnyProcess] = []
    with job.workers() as specs:
        try:
            for spec in specs:
                variables = {**spec.environment, environment.RESTART_COUNT: str(restart)}
                spec = dataclasses.replace(spec, environment=variables)
                remote = job.pool and job.pool.start_elsewhere(spec)
                processes.append(remote or worker.Process(spec, job.command, printers, events))
            return _Supervision(job, processes, events, report).run()
        finally:
            for process in processes:
                process.kill()
            # Those whose guard somebody has killed, and what they have started.
            guard.end_descendants()
            for process in processes:
                process.drain(_LAST_DRAIN_SECONDS)


class _Supervision:
    """Waits for the workers of one run, and ends them when one has failed or a signal came."""

    def __init__(
        self,
        job: Job,
        processes: Sequence[worker.AnyProcess],
        events: worker.Events,
        report: Callable[[str], None],
    ) -> None:
        self._job = job
        self._running = set(processes)
        self._events = events
        self._report = report
        self._started = frozenset(process.spec.slot for process in processes)
        self._first: worker.WorkerSpec | None = None
        self._growing = False
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
                event = self._events.get(timeout=self._seconds_to_wait())
            except queue.Empty:
                if self._deadline is None:
                    self._grow()
                elif time.monotonic() >= self._deadline:
                    self._kill()
                continue
            if isinstance(event, worker.Exit):
                self._handle_exit(event)
            elif isinstance(event, worker.Signal):
                self._handle_signal(event.number)
            elif isinstance(event, worker.OutputError):
                raise event.error
        return _Outcome(self._status, self._ended_by_signal, self._asked, self._first)

    def _seconds_to_wait(self) -> float | None:
        if self._deadline is None:
            return None if self._job.pool is None else _POLL_SECONDS
        return max(0.0, self._deadline - time.monotonic())

    def _grow(self) -> None:
        """Has all workers leave at a backup once there is one more; they are started with it."""
        if self._job.pool is None or self._growing or not self._job.pool.can_grow(self._started):
            return
        self._growing = True
        self._report("there is one more worker: asking all to make a backup and leave")
        for process in self._running:
            process.tell(worker.RESIZE)

    def _handle_exit(self, event: worker.Exit) -> None:
        if event.process not in self._running:
            return  # Of an earlier run, on another machine.
        self._running.discard(event.process)
        event.process.drain(_DRAIN_SECONDS)
        # One that ends after it was asked to has not failed.
        if not event.status or self._ending:
            return
        status = _as_shell_status(event.status)
        if not (self._growing and status == environment.RESTART_STATUS):
            self._first = self._first or event.process.spec
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
        for process in self._running:
            process.tell(worker.FAILED)
        self._ask_to_end(signal.SIGTERM)

    def _handle_signal(self, number: int) -> None:
        if number in worker.PASSED_SIGNALS:
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


def _as_shell_status(status: int) -> int:
    """Returns a guard's status as a shell has it: the guard itself may have been killed."""
    return status if status >= 0 else 128 - status


def _describe(status: int) -> str:
    try:
        return f"exit status {status} ({signal.Signals(status - 128).name})"
    except ValueError:
        return f"exit status {status}"
