"""Runs the workers of a job: all end when one fails, and may be started again."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import time
from collections.abc import Callable, Sequence

from tfcdo import environment
from tfcdo.launch import guard, output, pool, worker

# How long the output of a worker that has ended may take to be printed: before the launcher speaks
# itself, and before it ends, where a pager may be waiting for a key.
_DRAIN_SECONDS = 1.0
_LAST_DRAIN_SECONDS = 60.0
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


def run(job: Job) -> int:
    """Runs a job in the main thread; returns 0, the first failure's status or 128 and a signal."""
    guard.adopt_orphans()
    events: worker.Events = queue.SimpleQueue()
    listening = job.pool.listening(events) if job.pool else contextlib.nullcontext()
    with worker.handled_signals(events), listening:
        status = _run_until_it_ends(job, events)
        if job.pool is not None:
            job.pool.end(status)
        return status


def _run_until_it_ends(job: Job, events: worker.Events) -> int:
    """Runs the workers again and again; with a pool, those that there are."""
    restarts = failures = 0
    status: int | None = None
    while True:
        if job.pool is not None:
            end = job.pool.wait(events, status)
            if end is not None:
                return end
        start = time.monotonic()
        outcome = _run_once(job, restarts, events)
        status = outcome.status
        restarts += 1
        if not status or outcome.ended_by_signal:
            return status
        if outcome.asked and time.monotonic() - start >= _SHORTEST_RUN_SECONDS:
            output.report("starting all workers again, as asked after a backup")
        elif job.pool is not None:
            if outcome.first is not None:
                job.pool.fail(outcome.first)
        elif failures == job.max_restarts:
            return status
        else:
            failures += 1
            output.report(f"starting all workers again (restart {failures} of {job.max_restarts})")


def _run_once(job: Job, restart: int, events: worker.Events) -> _Supervision:
    """Runs all workers once; returns how they have ended."""
    processes: list[pool.AnyProcess] = []
    with job.workers() as specs:
        try:
            for spec in specs:
                variables = {**spec.environment, environment.RESTART_COUNT: str(restart)}
                spec = dataclasses.replace(spec, environment=variables)
                remote = job.pool and job.pool.start_elsewhere(spec)
                processes.append(remote or worker.Process(spec, job.command, events))
            supervision = _Supervision(job, processes, events)
            supervision.run()
            return supervision
        finally:
            for process in processes:
                process.send(signal.SIGKILL)
            # Those whose guard somebody has killed, and what they have started.
            guard.end_descendants()
            for process in processes:
                process.drain(_LAST_DRAIN_SECONDS)


class _Supervision:
    """Waits for the workers of one run, and ends them when one has failed or a signal came."""

    def __init__(
        self, job: Job, processes: Sequence[pool.AnyProcess], events: worker.Events
    ) -> None:
        self.status = 0  # As `run` returns it.
        self.ended_by_signal = False
        self.asked = False  # Whether a worker asked to be started again, after a backup.
        self.first: int | None = None  # The slot of the first worker that failed or asked.
        self._job = job
        self._running = set(processes)
        self._events = events
        self._started = frozenset(process.spec.slot for process in processes)
        self._growing = False
        # Whether the workers were asked to end, and until when they may take.
        self._ending = False
        self._deadline: float | None = None

    def run(self) -> None:
        """Returns when all workers have ended."""
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
            elif isinstance(event, signal.Signals):
                self._handle_signal(event)
            elif isinstance(event, OSError):
                raise event

    def _seconds_to_wait(self) -> float | None:
        if self._deadline is None:
            return None if self._job.pool is None else _POLL_SECONDS
        return max(0.0, self._deadline - time.monotonic())

    def _grow(self) -> None:
        """Has all workers leave at a backup once there is one more; they are started with it."""
        if self._job.pool is None or self._growing or not self._job.pool.can_grow(self._started):
            return
        self._growing = True
        output.report("there is one more worker: asking all to make a backup and leave")
        for process in self._running:
            process.tell(worker.RESIZE)

    def _handle_exit(self, event: worker.Exit) -> None:
        if event.process not in self._running:
            return  # The launcher of another machine that was replaced by a new one.
        self._running.discard(event.process)
        event.process.drain(_DRAIN_SECONDS)
        # One that ends after it was asked to has not failed.
        if not event.status or self._ending:
            return
        status = event.status
        if not (self._growing and status == environment.RESTART_STATUS):
            self.first = event.process.spec.slot if self.first is None else self.first
        name = event.process.spec.name
        others = "the others" if self._running else ""
        if status == environment.RESTART_STATUS:
            if not self.asked:
                waiting = f"; waiting for {others} to do so" if others else ""
                output.report(f"{name} has made a backup and asks to be started again{waiting}")
                # They leave after the same step, by themselves.
                self._deadline = time.monotonic() + worker.seconds_to_leave(self._job.grace_seconds)
            self.status, self.asked = status, True
            return
        if not self.asked:
            self.status = status
        ending = f"; ending {others}" if others else ""
        output.report(f"{name} failed: {_describe(status)}{ending}")
        # Tells those who back up on a SIGTERM that there is nobody to wait for.
        for process in self._running:
            process.tell(worker.FAILED)
        self._ask_to_end(signal.SIGTERM)

    def _handle_signal(self, number: signal.Signals) -> None:
        if number in worker.PASSED_SIGNALS:
            for process in self._running:
                process.send(number)
        elif self.ended_by_signal:
            # Somebody who asks twice does not want to wait.
            self._kill()
        else:
            self.ended_by_signal = True
            self.status = 128 + number
            output.report(f"got {number.name}: passing it on to the workers")
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
            output.report(f"killing {names}")
        self._ending = True
        for process in self._running:
            process.send(signal.SIGKILL)
        # Nothing is left to be done but to wait for them.
        self._deadline = None


def _describe(status: int) -> str:
    try:
        return f"exit status {status} ({signal.Signals(status - 128).name})"
    except ValueError:
        return f"exit status {status}"
