"""Agreeing, before hosts exchange anything, that all of them are about to do the same.

Hosts that run one program start the same collectives in the same order. Each kind of collective is
described by all that its hosts must have in common, and the first time that a host comes to a kind,
it announces the description and waits until all others have announced the same. The chief then
gives the kind a number, from which the keys of its collectives are made. So a collective never
meets one of another kind, and hosts whose programs differ learn where.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from absl import logging

from tfcdo.cluster import config, protocol
from tfcdo.cluster.errors import DisagreementError, LateHostError

Description = Mapping[str, Any]

LOG_AFTER = 60.0  # Seconds until the log says who is waited for.
# Two hosts that have been waiting for this long, each for something that the other has not come to,
# run different programs. Not at once, because several threads of one program may start collectives,
# and their order is not the same on all hosts.
_GRACE = 10.0
_POLL = 0.5
# By how much the other hosts are more patient than the chief, which knows who is late.
_PATIENCE = 5.0
LATE = "timed out"  # How each reason of this kind begins.
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


def digest(description: Description) -> str:
    """Returns a short name for a description: equal for equal ones, on every host."""
    text = json.dumps(description, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Agreement:
    """This host's part in agreeing on kinds of collectives; waits `timeout` seconds for a host."""

    def __init__(self, store: Store, cluster: config.Cluster, timeout: float) -> None:
        self._store = store
        self._cluster = cluster
        self._timeout = timeout
        self._lock = threading.Lock()  # Guards the next three; never held while waiting.
        self._own: dict[str, Description] = {}
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self._reading = threading.Lock()  # One thread at a time reads the others' announcements.
        self._announced: dict[int, dict[str, Description]] = {h: {} for h in cluster.others}

    def number(self, description: Description, size: int) -> int:
        """Returns the first of `size` numbers of a kind: the same on all hosts, no other kind's."""
        # The first call waits for the other hosts.
        name = digest(description)
        with self._lock:
            if name in self._numbers:
                return self._numbers[name]
            place = None if name in self._own else len(self._own)
            self._own.setdefault(name, description)
        if place is not None:
            self._store.set(f"announced/{self._cluster.index}/{place}", json.dumps(description))
        number = self._lead(name, description, size) if self._cluster.is_chief else None
        if number is None:
            number = self._follow(name, description)
        with self._lock:
            self._numbers[name] = number
        return number

    def find_mismatch(self) -> str | None:
        """Says how programs differ if a host has come to a collective that is unknown here."""
        with self._lock:
            own = dict(self._own)
            waiting = [d for name, d in own.items() if name not in self._numbers]
        # The chief hears all; any other host only the chief, which speaks up if a third differs.
        for host in self._cluster.others if self._cluster.is_chief else (0,):
            strange = [d for name, d in self._heard(host, 0.01).items() if name not in own]
            if strange:
                me, they = self._cluster.name(self._cluster.index), self._cluster.name(host)
                mine = waiting[-1] if waiting else None
                if mine is None:
                    return f"{they} has come to the {brief(strange[0])}, and {me} has not"
                # Not "here" and "there": each host reads the same text.
                names = f"host {self._cluster.index}", f"host {host}"
                if mine.get("what") != strange[0].get("what"):
                    details = f"{names[0]} comes to the {brief(mine)}, "
                    details += f"{names[1]} to the {brief(strange[0])}"
                else:
                    details = protocol.differences(mine, names[0], strange[0], names[1])
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

    def _lead(self, name: str, description: Description, size: int) -> int:
        for host in self._cluster.others:
            self._wait(
                functools.partial(self._has_announced, host, name),
                description,
                functools.partial(self._cluster.name, host),
                self._timeout,
            )
        with self._lock:
            if name in self._numbers:  # Another thread came to the same collective.
                return self._numbers[name]
            number = self._next_number
            self._next_number += size
            self._numbers[name] = number
        self._store.set(f"agreed/{name}", str(number))
        return number

    def _has_announced(self, host: int, name: str) -> bool | None:
        return True if name in self._heard(host, _POLL) else None

    def _follow(self, name: str, description: Description) -> int:
        def late() -> str:
            chief = self._cluster.name(0)
            return f"a host that {chief} waits for" if name in self._heard(0, 0.01) else chief

        agreed = self._wait(
            lambda: self._store.get(f"agreed/{name}", _POLL),
            description,
            late,
            self._timeout + _PATIENCE,
        )
        return int(agreed)

    def _wait(
        self,
        ready: Callable[[], Any],
        description: Description,
        late: Callable[[], str],
        timeout: float,
    ) -> Any:
        """Waits until `ready` returns something, or raises why it will not, or who is `late`."""
        start = time.monotonic()
        next_line = LOG_AFTER
        while True:
            found = ready()
            if found is not None:
                return found
            waited = time.monotonic() - start
            reason = self.failure()
            if reason is not None:
                raise (LateHostError if reason.startswith(LATE) else DisagreementError)(reason)
            if waited >= _GRACE:
                reason = self.find_mismatch()
                if reason is not None:
                    self.fail(reason)
                    raise DisagreementError(reason)
            if waited < min(timeout, next_line):
                continue
            message = (
                f"has waited {waited:.0f} s for {late()} to come to its first {brief(description)}"
            )
            me = self._cluster.name(self._cluster.index)
            if waited >= timeout:
                reason = f"{LATE}: {me} {message}; {SAME_CALLS}"
                self.fail(reason)
                raise LateHostError(reason)
            logging.warning("tfcdo: %s %s", me, message)
            next_line += LOG_AFTER

    def _heard(self, host: int, timeout: float) -> Mapping[str, Description]:
        """Reads a host's announcements since the last call; returns all that there are."""
        with self._reading:
            heard = self._announced[host]
            while True:
                text = self._store.get(f"announced/{host}/{len(heard)}", timeout)
                if text is None:
                    return dict(heard)
                description = json.loads(text)
                heard[digest(description)] = description
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
