"""Runs the workers of a job: all end when one fails, and may be started again."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import time
from collections.abc import Callable, Sequence

from tfcdo import environment
from tfcdo.cluster import protocol
from tfcdo.launch import guard, worker

# How long the output of a worker that has ended may take to be printed: before the launcher speaks
# itself, and before it ends, where a pager may be waiting for a key.
_DRAIN_SECONDS = 1.0
_LAST_DRAIN_SECONDS = 60.0
# A worker that asks for it earlier has not trained, and would be started again without end.
_SHORTEST_RUN_SECONDS = 5.0
# How long workers that leave after a backup may take: the end of Python, with all backups written.
_LEAVE_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Job:
    """A command to run on several workers, and the rules for it."""

    command: Sequence[str]
    # Entered once for each run.
    workers: Callable[[], contextlib.AbstractContextManager[Sequence[worker.WorkerSpec]]]
    max_restarts: int = 0
    grace_seconds: float = 10.0  # From the request to end until workers are killed.


def run(job: Job) -> int:
    """Runs a job in the main thread; returns 0, the first failure's status or 128 and a signal."""
    guard.adopt_orphans()
    events: worker.Events = queue.SimpleQueue()
    restarts = failures = 0
    with worker.handled_signals(events):
        while True:
            start = time.monotonic()
            result = _run_once(job, restarts, events)
            if not result.status or result.signal:
                return result.status
            if result.has_left and time.monotonic() - start >= _SHORTEST_RUN_SECONDS:
                worker.report("starting all workers again, as asked after a backup")
            elif failures == job.max_restarts:
                return result.status
            else:
                failures += 1
                worker.report(
                    f"starting all workers again (restart {failures} of {job.max_restarts})"
                )
            restarts += 1


def _run_once(job: Job, restart: int, events: worker.Events) -> protocol.Result:
    """Runs all workers once; returns how they have ended."""
    processes: list[worker.Process] = []
    with job.workers() as specs:
        try:
            for number, spec in enumerate(specs):
                variables = {**spec.environment, environment.RESTART_COUNT: str(restart)}
                spec = dataclasses.replace(spec, environment=variables)
                processes.append(worker.Process(number, spec, job.command, events))
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
    job: Job,
    specs: Sequence[worker.WorkerSpec],
    processes: Sequence[worker.Process],
    events: worker.Events,
) -> protocol.Result:
    """Waits for the workers of one run, and does what the protocol asks for."""
    leave = max(_LEAVE_SECONDS, job.grace_seconds)
    supervision = protocol.Supervision(len(processes), job.grace_seconds, leave)
    while supervision.running:
        deadline = supervision.deadline
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            event = events.get(timeout=timeout)
        except queue.Empty:
            actions = supervision.tick(time.monotonic())
        else:
            if isinstance(event, OSError):
                raise event
            if isinstance(event, protocol.End):
                processes[event.worker].drain(_DRAIN_SECONDS)
                actions = supervision.end(event, time.monotonic())
            elif event in worker.PASSED_SIGNALS:
                actions = [protocol.Send(number, event) for number in supervision.running]
            else:
                actions = supervision.ask(event, time.monotonic())
        for action in actions:
            if isinstance(action, protocol.Send):
                process = processes[action.worker]
                if action.number == protocol.TELL_OF_FAILURE:
                    process.tell_of_failure()
                else:
                    process.send(action.number)
            else:
                said = ", ".join(specs[number].name for number in action.workers)
                worker.report(action.text.format(said))
    return supervision.result()
