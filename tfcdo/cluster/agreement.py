"""Agreeing, before hosts exchange anything, that all of them are about to do the same.

Hosts that run one program start the same collectives in the same order. Each kind of collective is
described by all that its hosts must have in common, and the first time that a host comes to a kind,
it announces the description and waits until all others have announced the same. The chief then
gives the kind a number, from which the keys of its collectives are made. So a collective never
meets one of another kind, and hosts whose programs differ learn where.
"""

from __future__ import annotations

import collections
import functools
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from absl import logging

from tfcdo.cluster import config, protocol
from tfcdo.cluster.errors import DisagreementError, LateHostError
from tfcdo.cluster.protocol import LATE, Description

_POLL = 0.5
SAME_CALLS = (
    "all hosts must make the same calls, such as fit, evaluate, predict and save, on the same "
    "number of batches"
)
# How long the chief, which keeps the store, stays at its end for others to read why it ends.
_LAST_SECONDS = 8.0
_MAX_REASON = 500  # Characters of an error's message that others are told.


class Store(Protocol):
    """A key-value store that all hosts share; a key is written once."""

    def set(self, key: str, value: str) -> None:
        """Writes a new key."""

    def get(self, key: str, timeout: float) -> str | None:
        """Waits up to `timeout` seconds for a key; returns its value, or None."""

    def delete(self, key: str) -> None:
        """Removes a key, so that it can be written again."""

    def check_hosts(self, jobs: Mapping[str, int]) -> None:
        """Raises an error if one of so many tasks of each job has ended; for the chief."""


class Agreement:
    """This host's part in agreeing on kinds of collectives; waits `timeout` seconds for a host."""

    def __init__(
        self, store: Store, cluster: config.Cluster, timeout: float, membership: str = ""
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._timeout = timeout
        self._kinds = protocol.Kinds(cluster.index, len(cluster.tasks), membership)
        self._lock = threading.Lock()  # Guards the kinds; never held while waiting.
        self._reading = threading.Lock()  # One thread at a time reads the others' announcements.

    def number(self, description: Description, size: int) -> int:
        """Returns the first of `size` numbers of a kind: the same on all hosts, no other kind's."""
        # The first call waits for the other hosts.
        name = self._kinds.name(description)
        with self._lock:
            if name in self._kinds.numbers:
                return self._kinds.numbers[name]
            place = self._kinds.come_to(description)
            announced = self._kinds.own[name]
        if place is not None:
            self._store.set(f"announced/{self._cluster.index}/{place}", json.dumps(announced))
        key = f"agreed/{name}"
        if not self._cluster.is_chief:
            ready = functools.partial(self._store.get, key, _POLL)
            chief = functools.partial(self._late_chief, name)
            number = int(self._wait(ready, description, chief, self._timeout + protocol.PATIENCE))
            with self._lock:
                return self._kinds.numbers.setdefault(name, number)
        while (host := self._kinds.late(name)) is not None:
            has_come = functools.partial(self._has_announced, host, name)
            who = functools.partial(self._cluster.name, host)
            self._wait(has_come, description, who, self._timeout)
        with self._lock:
            is_new = name not in self._kinds.numbers  # Else another thread came to the same.
            number = self._kinds.give_number(name, size)
        if is_new:
            self._store.set(key, str(number))
        return number

    def find_mismatch(self) -> str | None:
        """Says how programs differ if a host has come to a collective that is unknown here."""
        # The chief hears all; any other host only the chief, which speaks up if a third differs.
        for host in self._cluster.others if self._cluster.is_chief else (0,):
            self._hear(host, 0.01)
            with self._lock:
                stray = self._kinds.stray(host)
            if stray is not None:
                mine, strange = stray
                me, they = self._cluster.name(self._cluster.index), self._cluster.name(host)
                if mine is None:
                    return f"{they} has come to the {brief(strange)}, and {me} has not"
                # Not "here" and "there": each host reads the same text.
                names = f"host {self._cluster.index}", f"host {host}"
                if mine.get("what") != strange.get("what"):
                    details = f"{names[0]} comes to the {brief(mine)}, "
                    details += f"{names[1]} to the {brief(strange)}"
                else:
                    details = protocol.differences(mine, names[0], strange, names[1])
                return f"the programs of {me} and {they} differ: {details}"
        return None

    def failure(self) -> str | None:
        """Returns why another host has given up, or None."""
        return self._store.get("failed", 0.01)

    def fail(self, reason: str) -> None:
        """Tells the other hosts that this one gives up, and why."""
        if self.failure() is None:
            try:
                self._store.set("failed", reason)
            except Exception as error:  # Another host was first, or the chief is gone: as good.
                logging.info("tfcdo: could not tell the other hosts: %s", error)

    def leave(self, error: BaseException | None) -> None:
        """Tells the other hosts that this host's program ends, and why; the chief leaves last."""
        me = self._cluster.name(self._cluster.index)
        if error is None:
            reason = f"{me} has come to the end of its program before others: {SAME_CALLS}"
        else:
            reason = f"{me} has ended with {describe_error(error)}"
        deadline = time.monotonic() + _LAST_SECONDS
        try:
            self._store.set(f"left/{self._cluster.index}", "")
            # TensorFlow itself tells all hosts of one that is gone.
            if type(error).__name__ == "UnavailableError" or self.failure() is not None:
                return
            self.fail(reason)
            for host in self._cluster.others if self._cluster.is_chief else ():
                while self._store.get(f"left/{host}", _POLL) is None:
                    if time.monotonic() > deadline:
                        return
        except Exception as problem:  # The chief or another host is gone: there is nobody to tell.
            logging.info("tfcdo: could not wait for the other hosts: %s", problem)

    def _has_announced(self, host: int, name: str) -> bool | None:
        self._hear(host, _POLL)
        return True if name in self._kinds.heard[host] else None

    def _late_chief(self, name: str) -> str:
        self._hear(0, 0.01)
        chief = self._cluster.name(0)
        has_come = name in self._kinds.heard[0]
        return f"a host that {chief} waits for" if has_come else chief

    def _wait(
        self,
        ready: Callable[[], Any],
        description: Description,
        late: Callable[[], str],
        timeout: float,
    ) -> Any:
        """Waits until `ready` returns something, or raises why it will not, or who is `late`."""
        start = time.monotonic()
        wait = protocol.Wait(timeout)
        me = self._cluster.name(self._cluster.index)
        while (found := ready()) is None:
            waited = time.monotonic() - start
            if self._cluster.is_chief:  # Others hear of the chief's end.
                self._store.check_hosts(collections.Counter(t.job for t in self._cluster.tasks))

            def line(waited: float = waited) -> str:
                come = f"{late()} to come to its first {brief(description)}"
                return f"{me} has waited {waited:.0f} s for {come}"

            verdict, text = wait.look(waited, self.failure, self.find_mismatch, line)
            if verdict == "say":
                logging.warning("tfcdo: %s", text)
            elif verdict != "wait":
                assert text is not None
                is_late = text.startswith(LATE)
                if verdict == "fail":
                    text = f"{text}; {SAME_CALLS}" if is_late else text
                    self.fail(text)
                raise (LateHostError if is_late else DisagreementError)(text)
        return found

    def _hear(self, host: int, timeout: float) -> None:
        """Reads a host's announcements since the last call."""
        with self._reading:
            while True:
                place = len(self._kinds.heard[host])
                text = self._store.get(f"announced/{host}/{place}", timeout)
                if text is None:
                    return
                with self._lock:
                    self._kinds.hear(host, json.loads(text))
                timeout = 0.01


def describe_error(error: BaseException) -> str:
    """Names an error in a message: its type and the beginning of its own message."""
    return f"{type(error).__name__}: {str(error)[:_MAX_REASON]}"


def brief(description: Description) -> str:
    """Names a description in a message: its purpose, and a collective's first values."""
    if "values" not in description:
        return str(description.get("what", "collective"))
    values = description["values"]
    more = ", ..." if len(values) > 3 else ""
    count = f"{len(values)} value{'' if len(values) == 1 else 's'}"
    return f"{description.get('what', 'collective')} of {count} ({', '.join(values[:3])}{more})"
