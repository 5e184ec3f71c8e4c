"""Starts worker processes, and calls methods of the object that each serves, over a socket."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

# Variables for Keras, whatever the user's programs have; without a file it has its own defaults.
KERAS_DEFAULTS = {"KERAS_BACKEND": "tensorflow", "KERAS_HOME": os.devnull}


class WorkerError(RuntimeError):
    """Says which worker failed, and with which error."""


class WorkerLostError(WorkerError):
    """Says that a worker has ended, with its last output."""


class WorkerTimeoutError(WorkerLostError):
    """Says that a worker did not answer in time: it may hang."""


class _Worker:
    """A worker process; its standard input is a socket, which has the calls and the answers."""

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._name = name
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (it is closed by `end`)
        self._unanswered = 0  # Calls, the last one and those given up when another worker failed.
        ours, theirs = socket.socketpair()
        self._channel = Connection(ours.detach())
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, **variables},
            )

    def send(self, method: str, arguments: Mapping[str, Any]) -> None:
        """Sends a call; if the worker has ended, `receive` raises the error."""
        self._unanswered += 1
        with contextlib.suppress(ConnectionError):
            self._channel.send((method, arguments))

    def receive(self, deadline: float) -> Any:
        """Waits for the last call's answer."""
        try:
            while self._unanswered:
                if not self._channel.poll(max(0.0, deadline - time.monotonic())):
                    raise WorkerTimeoutError(self._with_output("did not answer in time"))
                result, error = self._channel.recv()
                self._unanswered -= 1
        except (EOFError, ConnectionError):
            end = f"ended with status {self._process.wait()}"
            raise WorkerLostError(self._with_output(end)) from None
        if error:
            raise WorkerError(error)
        return result

    def end(self) -> None:
        """Ends the worker."""
        self._channel.close()
        self._process.kill()
        self._process.wait()
        self._output.close()

    def _with_output(self, end: str) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()[-8:]
        return "\n".join([f"{self._name} {end}{':' if lines else ''}", *lines])


class WorkerPool:
    """Workers that all get the same calls."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self._workers = workers

    def call(self, method: str, timeout: float, **arguments: Any) -> list[Any]:
        """Calls a method of all workers' objects at once and waits for all results."""
        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.send(method, arguments)
        return [worker.receive(deadline) for worker in self._workers]


@contextlib.contextmanager
def start_workers(
    command: Sequence[str], variables: Sequence[Mapping[str, str]]
) -> Iterator[WorkerPool]:
    """Starts workers, and ends them with the block."""
    workers = []
    with contextlib.ExitStack() as stack:
        for index, own_variables in enumerate(variables):
            workers.append(_Worker(f"worker {index}", command, own_variables))
            stack.callback(workers[-1].end)
        yield WorkerPool(workers)


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message."""
    return (str(error) or repr(error)).strip().partition("\n")[0]


def serve(make: Callable[..., Any]) -> None:
    """Serves an object until the channel ends; the command line has the object's arguments."""
    channel = Connection(os.dup(0))
    calls: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, calls), daemon=True).start()
    served = None
    while True:
        method, arguments = calls.get()
        try:
            # Not before the first call, as it may take long.
            served = served or make(*sys.argv[1:])
            answer = getattr(served, method)(**arguments), ""
        except Exception as error:
            traceback.print_exc()
            answer = None, f"{type(error).__name__}: {first_line(error)}"
        channel.send(answer)


def _receive(channel: Connection, calls: queue.SimpleQueue[tuple[str, dict[str, Any]]]) -> None:
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            calls.put(channel.recv())
    # The process that started this one has ended, which the main thread may not learn for long.
    os._exit(0)
