"""A launcher that runs its machine's worker when the first host's launcher says so."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfcdo.launch import guard, output, worker
from tfcdo.launch.connection import Connection

_RETRY_SECONDS = 0.5
_DRAIN_SECONDS = 5.0
# Only these variables are taken from the first host.
_TAKEN = ("TF_CONFIG", "TFCDO_")


@dataclasses.dataclass
class Member:
    """Takes part in another launcher's job."""

    command: Sequence[str]
    spec: worker.WorkerSpec  # With this host's variables; the first host sends more.
    address: tuple[str, int]  # Of the first host's launcher.
    token: str
    join_seconds: float  # How long to look for it.
    grace_seconds: float  # How long its worker may take to end, see `worker.seconds_to_leave`.

    def __post_init__(self) -> None:
        self._events: worker.Events = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._process: worker.Process | None = None
        # The signal that ends this launcher, and until when its worker may take.
        self._ended_by = 0
        self._deadline: float | None = None

    def run(self) -> int:
        """Returns the job's status, or 128 and the number of the signal that ended it here."""
        guard.adopt_orphans()
        with worker.handled_signals(self._events):
            try:
                status = None
                while status is None:
                    status = self._join() if self._connection is None else self._step()
                return status
            finally:
                self._end_worker()
                if self._connection is not None:
                    self._connection.close()

    def _join(self) -> int | None:
        """Connects to the first host; returns a status if that must not go on."""
        host, port = self.address
        deadline = time.monotonic() + self.join_seconds
        while True:
            try:
                peer = socket.create_connection(self.address, timeout=_RETRY_SECONDS)
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    output.report(
                        f"the first host's launcher cannot be reached at {host}:{port} for "
                        f"{self.join_seconds:g} s: {error}"
                    )
                    return 1
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=_RETRY_SECONDS)
                if event in worker.ENDING_SIGNALS:
                    return 128 + event
        self._connection = Connection(peer)
        threading.Thread(target=self._read, args=(self._connection,), daemon=True).start()
        self._connection.send(slot=self.spec.slot, token=self.token)
        return None

    def _read(self, connection: Connection) -> None:
        for message in connection.messages():
            self._events.put(message)
        self._events.put(None)

    def _step(self) -> int | None:
        """Handles one event; returns the status with which to end, or None."""
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return 128 + self._ended_by
        assert self._connection is not None
        if isinstance(event, worker.Exit):
            if event.process is not self._process:
                return None  # It was killed when the connection broke.
            self._end_worker()
            self._connection.send(exit=event.status)
            return 128 + self._ended_by if self._ended_by else None
        if isinstance(event, signal.Signals):
            return self._handle_signal(event)
        if isinstance(event, OSError):
            raise event
        return self._handle_message(event)

    def _handle_signal(self, number: signal.Signals) -> int | None:
        if self._process is not None:
            self._process.send(number)
        if number in worker.PASSED_SIGNALS:
            return None
        if self._process is None or self._ended_by:
            return 128 + number
        output.report(f"got {number.name}: passing it on to the worker")
        assert self._connection is not None
        self._connection.send(leaving=True)
        self._ended_by = number
        self._deadline = time.monotonic() + worker.seconds_to_leave(self.grace_seconds)
        return None

    def _handle_message(self, message: Mapping[str, Any] | None) -> int | None:
        process = self._process
        if message is None:
            return self._lose_connection()
        if "refused" in message:
            output.report(
                f"the first host's launcher does not let this one join: {message['refused']}"
            )
            return 1
        if "end" in message:
            return int(message["end"])
        if "start" in message and not self._ended_by:
            taken = {k: str(v) for k, v in message["start"].items() if k.startswith(_TAKEN)}
            spec = dataclasses.replace(self.spec, environment={**self.spec.environment, **taken})
            self._process = worker.Process(spec, self.command, self._events)
        elif process is not None and "signal" in message:
            process.send(int(message["signal"]))
        elif process is not None and message.get("tell") in (worker.FAILED, worker.RESIZE):
            process.tell(message["tell"])
        return None

    def _lose_connection(self) -> int | None:
        """Ends the worker and looks for the first host again."""
        output.report("the first host's launcher is gone; waiting for it")
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        self._end_worker()
        return 128 + self._ended_by if self._ended_by else None

    def _end_worker(self) -> None:
        """Ends the worker, if there is one, and all that it has started."""
        process, self._process = self._process, None
        if process is not None:
            process.send(signal.SIGKILL)
        guard.end_descendants()
        if process is not None:
            process.drain(_DRAIN_SECONDS)
