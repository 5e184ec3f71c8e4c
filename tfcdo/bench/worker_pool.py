"""Starts worker processes, and calls methods of the object that each serves, by lines of JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

# Number of lines shown of a failed worker's output.
_SHOWN_LINES = 8
_END_SECONDS = 10.0


class WorkerError(RuntimeError):
    """Says which worker failed, and with which error."""


class WorkerLostError(WorkerError):
    """Says that a worker has ended, with its last output."""


class WorkerTimeoutError(WorkerLostError):
    """Says that a worker did not answer in time: it may hang."""


class _Worker:
    """A worker process, whose answers a thread reads."""

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it is closed by `end`)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **variables},
        )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, line: str) -> None:
        """Sends a line; a worker that has ended is found out when its answer is awaited."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def receive(self, seconds: float) -> Any:
        """Waits for an answer."""
        try:
            answer = self._answers.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise WorkerTimeoutError(
                f"{self.name} did not answer in time{self._last_lines()}"
            ) from None
        if answer is None:
            status = self.process.wait()
            raise WorkerLostError(f"{self.name} ended with status {status}{self._last_lines()}")
        found = json.loads(answer)
        if "error" in found:
            raise WorkerError(found["error"])
        return found["result"]

    def close_input(self) -> None:
        """Asks the worker to end."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self) -> None:
        """Waits for a worker that was asked to end, and kills it if it does not."""
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._errors.close()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _last_lines(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:]
        return ":\n" + "\n".join(lines) if lines else ""


class WorkerPool:
    """Workers that all get the same calls."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self._workers = workers

    def call(self, method: str, timeout: float, **arguments: Any) -> list[Any]:
        """Calls a method of all workers' objects at once and waits for all results."""
        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.send(json.dumps([method, arguments]) + "\n")
        return [worker.receive(deadline - time.monotonic()) for worker in self._workers]


@contextlib.contextmanager
def start_workers(
    command: Sequence[str], variables: Sequence[Mapping[str, str]]
) -> Iterator[WorkerPool]:
    """Starts workers, and ends them with the block."""
    workers: list[_Worker] = []
    try:
        for index, own_variables in enumerate(variables):
            workers.append(_Worker(f"worker {index}", command, own_variables))
        yield WorkerPool(workers)
    finally:
        # A worker whose input ends does so even in the middle of a request.
        for worker in workers:
            worker.close_input()
        for worker in workers:
            worker.end()


def serve(make: Callable[..., Any]) -> None:
    """Serves an object until standard input ends; the command line has its arguments."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin, calls), daemon=True).start()
    served = None
    while True:
        method, arguments = json.loads(calls.get())
        try:
            # Not before the first call, as it may take long.
            served = served or make(*sys.argv[1:])
            answer = {"result": getattr(served, method)(**arguments)}
        except Exception as error:
            traceback.print_exc()
            message = (str(error) or repr(error)).strip().partition("\n")[0]
            answer = {"error": f"{type(error).__name__}: {message}"}
        print(json.dumps(answer, default=dataclasses.asdict), file=answers, flush=True)


def _receive(stream: IO[str], calls: queue.SimpleQueue[str]) -> None:
    for line in stream:
        calls.put(line)
    # The main thread may wait for another host, and would not learn that nobody waits for it.
    os._exit(0)
