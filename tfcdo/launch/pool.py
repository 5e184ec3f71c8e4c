"""The workers that a job can have now: some fail too often, others come from other machines."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfcdo.launch import output, worker
from tfcdo.launch.connection import Connection

_POLL_SECONDS = 0.2
_HELLO_SECONDS = 10.0
_KILLED = 128 + signal.SIGKILL


@dataclasses.dataclass
class Pool:
    """Says which workers take part in the next run."""

    minimum: int
    maximum: int  # A worker's slot is a number below it.
    max_restarts: int  # Of a worker, before the job goes on without it.
    join_seconds: float  # How long to wait for all at the start, and later for `minimum`.
    rejoin_seconds: float  # When a worker that failed too often is tried again.
    meet: int | None = None  # The port for other machines; None: all workers are on this one.
    token: str = ""  # A secret that other launchers must know.
    ready: Sequence[int] = ()  # The slots of the next run's workers, as `wait` has found them.

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = [0] * self.maximum
        self._lost: dict[int, float] = {}  # When each failed for the last time.
        self._members: dict[int, _Member] = {}

    @contextlib.contextmanager
    def listening(self, events: worker.Events) -> Iterator[None]:
        """Lets launchers of other machines join while the block runs."""
        if self.meet is None:
            yield
            return
        with socket.create_server(("", self.meet)) as server:
            threading.Thread(target=self._accept, args=(server, events), daemon=True).start()
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)
                for member in list(self._members.values()):
                    member.connection.close()

    def wait(self, events: worker.Events, last: int | None) -> int | None:
        """Waits for all workers, after a run for `minimum`; returns a status if the job ends."""
        wanted = self.maximum if last is None else self.minimum
        within = 0.0 if self.meet is None else self.join_seconds
        deadline = time.monotonic() + within
        if len(self._available()) < wanted and within:
            output.report(f"waiting {within:g} s for {wanted} workers")
        while len(self._available()) < wanted and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                event = events.get(timeout=_POLL_SECONDS)
                if event in worker.ENDING_SIGNALS:
                    return 128 + event
        self.ready = self._available()
        if len(self.ready) < self.minimum:
            after = f" after {within:g} s" if within else ""
            output.report(
                f"the job needs at least {self.minimum} workers, and there are "
                f"{len(self.ready)}{after}: ending"
            )
            return last or 1
        if len(self.ready) < self.maximum:
            output.report(f"starting with {len(self.ready)} of {self.maximum} workers")
        return None

    def fail(self, slot: int) -> None:
        """Counts a failure of a worker, after which the workers are started again."""
        with self._lock:
            self._failures[slot] += 1
            failures = self._failures[slot]
            if failures > self.max_restarts:
                self._lost[slot] = time.monotonic()
        if slot not in self._available():
            output.report(f"going on without worker {slot}")
        else:
            output.report(f"starting the workers again (restart {failures} of {self.max_restarts})")

    def can_grow(self, running: frozenset[int]) -> bool:
        """Returns whether a worker could take part that does not run."""
        with self._lock:
            for slot, lost in list(self._lost.items()):
                if time.monotonic() - lost >= self.rejoin_seconds:
                    del self._lost[slot]
                    self._failures[slot] = 0
        return not running.issuperset(self._available())

    def start_elsewhere(self, spec: worker.WorkerSpec) -> AnyProcess | None:
        """Starts a worker on its machine; None if that is this one."""
        if self.meet is None or spec.slot == 0:
            return None
        with self._lock:
            member = self._members[spec.slot]
        member.start(spec)
        return member

    def end(self, status: int) -> None:
        """Tells the other launchers that the job has ended."""
        for member in list(self._members.values()):
            member.connection.send(end=status)

    def _available(self) -> list[int]:
        with self._lock:
            here = range(self.maximum if self.meet is None else 1)
            there = [slot for slot, member in self._members.items() if member.is_there]
            return sorted(slot for slot in {*here, *there} if slot not in self._lost)

    def _accept(self, server: socket.socket, events: worker.Events) -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:  # The job has ended.
                return
            # One that says nothing does not keep the others out.
            threading.Thread(target=self._serve, args=(peer, events), daemon=True).start()

    def _serve(self, peer: socket.socket, events: worker.Events) -> None:
        connection = Connection(peer)
        silent = threading.Timer(_HELLO_SECONDS, connection.close)
        silent.start()
        messages = connection.messages()
        hello = next(messages, {})
        silent.cancel()
        error = self._refusal(hello)
        if error:
            connection.send(refused=error)
            connection.close()
            return
        member = _Member(connection, events)
        with self._lock:
            before = self._members.get(hello["slot"])
            self._members[hello["slot"]] = member
            self._lost.pop(hello["slot"], None)
            self._failures[hello["slot"]] = 0
        if before is not None:
            before.connection.close()
        member.serve(messages)

    def _refusal(self, hello: Mapping[str, Any]) -> str:
        """Returns why another launcher may not join; empty if it may."""
        if not hmac.compare_digest(str(hello.get("token", "")).encode(), self.token.encode()):
            return "its TFCDO_CLUSTER_TOKEN is not the first host's"
        slot = hello.get("slot")
        if not isinstance(slot, int) or not 0 < slot < self.maximum:
            return f"its --index must be 1 to {self.maximum - 1}; got {slot!r}"
        return ""


class _Member:
    """The launcher of another machine, which runs one worker at most; its output stays there."""

    def __init__(self, connection: Connection, events: worker.Events) -> None:
        self.connection = connection
        self.is_there = True
        self.spec: worker.WorkerSpec
        self._events = events
        self._lock = threading.Lock()
        self._runs = False

    def start(self, spec: worker.WorkerSpec) -> None:
        with self._lock:
            self.spec = spec
            self._runs = True
            there = self.is_there
        if there:
            self.connection.send(start=dict(spec.environment))
        else:
            self._end(_KILLED)

    def send(self, number: int) -> None:
        self.connection.send(signal=number)

    def tell(self, name: str) -> None:
        self.connection.send(tell=name)

    def drain(self, seconds: float) -> None:
        """Does nothing: the other launcher prints."""

    def serve(self, messages: Iterator[dict[str, Any]]) -> None:
        """Reads all that the launcher sends."""
        for message in messages:
            if "exit" in message:
                self._end(int(message["exit"]))
            if "leaving" in message:
                self.is_there = False
        with self._lock:
            self.is_there = False
        self.connection.close()
        self._end(_KILLED)

    def _end(self, status: int) -> None:
        with self._lock:
            ran, self._runs = self._runs, False
        if ran:
            self._events.put(worker.Exit(self, status))


AnyProcess = worker.Process | _Member
