"""An eye on the collectives of this process: says who is waited for, ends waits that are too long.

TensorFlow's own time-out of a collective keeps a thread asleep for each one that has been started,
for as long as the time-out is; and its error names neither the collective nor the host.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable

from absl import logging

from tfcdo.cluster import agreement, blackbox, config, delays, progress, protocol

# Ends all collectives of this process: takes whether it was a matter of time, and why.
Abort = Callable[[bool, str], None]

_INTERVAL = 1.0  # Seconds between two looks.
# From then on, this looks whether another host has given up. TensorFlow, which does not say why,
# counts a host as gone 10 s after its last heartbeat.
_NEWS_AFTER = 4.0
_SUSPECT_AFTER = 10.0  # From then on, other hosts can read where this one waits.
_FORGET_AFTER = 60.0  # Until then, the waits in a kind that is no longer used are compared.
_STATUS_TIMEOUT = 0.05


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
        self._comparison: delays.Comparison | None = delays.Comparison(cluster, store, clock)
        self._lock = threading.Lock()
        self._watched: dict[str, progress.Kind] = {}
        self._published: str | None = None
        self._wait = protocol.Wait(timeout, _NEWS_AFTER)
        self._has_written = False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, description: agreement.Description, marks: progress.EventCounter) -> None:
        """Starts to watch a kind of collectives, unless it does already."""
        name = protocol.digest(description)
        with self._lock:
            self._watched.setdefault(name, progress.Kind(name, description, marks))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tfcdo watch", daemon=True)
                self._thread.start()
                atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the watch."""
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def host_delays(self) -> tuple[delays.HostDelay, ...]:
        """Compares the waits of all hosts in the last steps."""
        if self._comparison is None:
            return ()
        return self._comparison.delays(delays.measure(self._used(self._clock())))

    def write_box(self, reason: str) -> None:
        """Writes the last collectives to a file; an error that follows from it writes no other."""
        if not self._has_written:
            self._has_written = True
            blackbox.write(blackbox.record(self._cluster, self._kinds(), reason))

    def _run(self) -> None:
        try:
            while not self._end.wait(_INTERVAL):
                if blackbox.asked():
                    blackbox.write(blackbox.record(self._cluster, self._kinds(), "SIGUSR1"))
                if self.look():
                    return
        except Exception as error:  # A watch that fails must not take the training with it.
            if not self._end.is_set():
                logging.info("tfcdo: collectives are no longer watched: %s", error)
                self.write_box(f"the watch ended: {error}")

    def _kinds(self) -> list[progress.Kind]:
        with self._lock:
            return list(self._watched.values())

    def _used(self, now: float) -> list[progress.Kind]:
        return [k for k in self._kinds() if k.count and now - k.since < _FORGET_AFTER]

    def _compare(self, now: float) -> None:
        if self._comparison is None:
            return
        try:
            self._comparison.look(self._used(now))
        except Exception as error:  # The watch is more important.
            logging.info("tfcdo: delays of hosts are no longer compared: %s", error)
            self._comparison = None

    def look(self) -> bool:
        """Looks once; returns whether the collectives have been ended, so that all is over."""
        now = self._clock()
        waiting = self._longest_waiting(now)
        waited = 0.0 if waiting is None else now - waiting.since
        if waiting is None or waited < _NEWS_AFTER:
            self._wait = protocol.Wait(self._timeout, _NEWS_AFTER)
            self._publish(None)
            self._compare(now)
            return False
        if waited >= _SUSPECT_AFTER:
            self._publish(json.dumps([waiting.name, waiting.count]))
        verdict, text = self._wait.look(
            waited,
            self._agreement.failure,
            self._agreement.find_mismatch,
            lambda: self._line(waiting, waited),
        )
        if verdict == "say":
            logging.warning("tfcdo: %s", text)
        elif verdict != "wait":
            assert text is not None
            is_late = verdict == "fail" and text.startswith(protocol.LATE)
            self._give_up(is_late, f"{text}; {agreement.SAME_CALLS}" if is_late else text)
            return True
        elif waited < _SUSPECT_AFTER:
            self._publish(None)
            self._compare(now)
        return False

    def _longest_waiting(self, now: float) -> progress.Kind | None:
        kinds = self._kinds()
        for kind in kinds:
            count = kind.marks.count()
            if count != kind.count:
                kind.count, kind.since = count, now
        waiting = (kind for kind in kinds if kind.waits)
        return min(waiting, key=lambda kind: kind.since, default=None)

    def _give_up(self, late: bool, reason: str) -> None:
        self._agreement.fail(reason)
        self.write_box(reason)
        self._abort(late, reason)

    def _publish(self, status: str | None) -> None:
        """Lets the other hosts read where this one waits."""
        if status == self._published:
            return
        key = f"waiting/{self._cluster.index}"
        if self._published is not None:
            self._store.delete(key)
        if status is not None:
            self._store.set(key, status)
        self._published = status

    def _line(self, waiting: progress.Kind, waited: float) -> str:
        me = self._cluster.name(self._cluster.index)
        late = ", ".join(self._waited_for(waiting)) or "all hosts at once: is the network down?"
        return f"{waiting.place(waiting.count)} has waited {waited:.0f} s on {me} for {late}"

    def _waited_for(self, waiting: progress.Kind) -> list[str]:
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
            place = theirs.place(count) if theirs else "another collective"
            late.append(f"{self._cluster.name(host)}, which waits in {place}")
        return late
