"""Starts worker processes and sends them requests, each a line of JSON that all of them get."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from tfcdo.launch import cluster

# Number of lines shown of a failed worker's output.
_SHOWN_LINES = 8
_END_SECONDS = 10.0

Handler = Callable[[Mapping[str, Any]], Any]


class WorkerError(RuntimeError):
    """Says which worker failed or did not answer, and what it wrote last."""


class WorkerTimeoutError(WorkerError):
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

    def send(self, request: Mapping[str, Any]) -> None:
        """Sends a request; a worker that has ended is found out when its answer is awaited."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
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
            raise WorkerError(f"{self.name} ended with status {status}{self._last_lines()}")
        return json.loads(answer)

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
    """Workers that all get the same requests."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self._workers = workers

    def request(self, content: Mapping[str, Any], timeout: float) -> list[Any]:
        """Sends a request to all workers at once and waits for all answers."""
        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.send(content)
        return [worker.receive(deadline - time.monotonic()) for worker in self._workers]


def variables_of(addresses: Sequence[str]) -> list[dict[str, str]]:
    """Returns the environment variables of workers that train together on processors."""
    return [
        {
            "TF_CONFIG": cluster.tf_config(addresses, index),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
        }
        for index in range(len(addresses))
    ]


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


def serve(handler: Handler) -> None:
    """Answers requests in a worker until its standard input ends.

    What the handler prints goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin, requests), daemon=True).start()
    while True:
        answer = handler(json.loads(requests.get()))
        print(json.dumps(answer), file=answers, flush=True)


def _receive(stream: IO[str], requests: queue.SimpleQueue[str]) -> None:
    for line in stream:
        requests.put(line)
    # The main thread may wait for another host, and would not learn that nobody waits for it.
    os._exit(0)
