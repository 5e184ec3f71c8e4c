"""An eye on the collectives of this process: says who is waited for, ends what waits too long.

TensorFlow's own time-out of a collective keeps a thread asleep for each one that has been started,
for as long as the time-out is; and its error names neither the collective nor the host.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import threading
import time
from collections.abc import Callable

from absl import logging

from tfcdo.cluster import agreement, config

# Ends all collectives of this process: takes whether it was a matter of time, and why.
Abort = Callable[[bool, str], None]

_INTERVAL = 2.0  # Seconds between two looks.
# From then on, this looks whether another host has given up. TensorFlow, which does not say why,
# counts a host as gone 10 s after its last heartbeat.
_NEWS_AFTER = 4.0
_SUSPECT_AFTER = 10.0  # From then on, other hosts can read what this one waits in.
_STATUS_TIMEOUT = 0.05


@dataclasses.dataclass
class _Watched:
    """A kind of collectives, and when its counter, odd while one waits, last moved."""

    description: agreement.Description
    read: Callable[[], int]
    count: int = 0
    since: float = 0.0

    @property
    def waits(self) -> bool:
        return self.count % 2 == 1

    @property
    def status(self) -> str:
        return json.dumps([agreement.digest(self.description), self.count])

    def __str__(self) -> str:
        collectives = self.description["collectives"]
        step, event = divmod(self.count, 2 * collectives)
        return (
            f"pack {event // 2 + 1} of {collectives}, time {step + 1}, of the "
            f"{agreement.brief(self.description)}"
        )


class Watch:
    """Watches the collectives of this process from a thread of its own."""

    def __init__(
        self,
        cluster: config.Cluster,
        store: agreement.Store,
        agreement_: agreement.Agreement,
        abort: Abort,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._agreement = agreement_
        self._abort = abort
        self._timeout = timeout
        self._clock = clock
        self._lock = threading.Lock()
        self._watched: dict[str, _Watched] = {}
        self._published: str | None = None
        self._next_line = agreement.LOG_AFTER
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, description: agreement.Description, read: Callable[[], int]) -> None:
        """Starts to watch a kind of collectives, whose counter of events `read` reads."""
        with self._lock:
            self._watched[agreement.digest(description)] = _Watched(description, read)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tfcdo watch", daemon=True)
                self._thread.start()
                atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the watch."""
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            while not self._end.wait(_INTERVAL):
                if self.look():
                    return
        except Exception as error:  # A watch that fails must not take the training with it.
            if not self._end.is_set():
                logging.info("tfcdo: collectives are no longer watched: %s", error)

    def look(self) -> bool:
        """Looks once; returns whether the collectives have been ended, so that all is over."""
        now = self._clock()
        waiting = self._longest_waiting(now)
        waited = 0.0 if waiting is None else now - waiting.since
        reason = self._agreement.failure() if waited >= _NEWS_AFTER else None
        if reason is None and (waiting is None or waited < _SUSPECT_AFTER):
            self._publish(None)
            self._next_line = agreement.LOG_AFTER
            return False
        assert waiting is not None
        self._publish(waiting.status)
        reason = reason or self._agreement.find_mismatch()
        if reason is not None:
            self._give_up(False, reason)
            return True
        if waited >= self._timeout:
            line = self._line(waiting, waited)
            self._give_up(True, f"{agreement.LATE}: {line}; {agreement.SAME_CALLS}")
            return True
        if waited >= self._next_line:
            self._next_line += agreement.LOG_AFTER
            logging.warning("tfcdo: %s", self._line(waiting, waited))
        return False

    def _longest_waiting(self, now: float) -> _Watched | None:
        with self._lock:
            watched = list(self._watched.values())
        for kind in watched:
            count = kind.read()
            if count != kind.count:
                kind.count, kind.since = count, now
        waiting = (kind for kind in watched if kind.waits)
        return min(waiting, key=lambda kind: kind.since, default=None)

    def _give_up(self, late: bool, reason: str) -> None:
        self._agreement.fail(reason)
        self._abort(late, reason)

    def _publish(self, status: str | None) -> None:
        """Lets the other hosts read what this one waits in."""
        if status == self._published:
            return
        key = f"waiting/{self._cluster.index}"
        if self._published is not None:
            self._store.delete(key)
        if status is not None:
            self._store.set(key, status)
        self._published = status

    def _line(self, waiting: _Watched, waited: float) -> str:
        me = self._cluster.name(self._cluster.index)
        late = ", ".join(self._waited_for(waiting)) or "all hosts at once: is the network down?"
        return f"{waiting} has waited {waited:.0f} s on {me} for {late}"

    def _waited_for(self, waiting: _Watched) -> list[str]:
        """Names the hosts that have not come to a collective, and where they are."""
        late = []
        for host in self._cluster.others:
            status = self._store.get(f"waiting/{host}", _STATUS_TIMEOUT)
            if status is None:
                late.append(f"{self._cluster.name(host)}, which is busy or stopped")
                continue
            name, count = json.loads(status)
            with self._lock:
                theirs = self._watched.get(name)
            if theirs is waiting and count >= waiting.count:
                continue  # It waits as well, or is ahead.
            place = dataclasses.replace(theirs, count=count) if theirs else "another collective"
            late.append(f"{self._cluster.name(host)}, which waits in {place}")
        return late
