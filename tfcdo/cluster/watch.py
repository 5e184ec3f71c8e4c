"""Watchdog for the collectives of this process: names late hosts, and ends waits that are too long.

TensorFlow's own time-out of a collective keeps a thread asleep for each one that has been started,
for as long as the time-out is; and its error names neither the collective nor the host.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
from absl import logging

from tfcdo.cluster import config, progress, protocol

# Ends all collectives of this process: takes whether it was a matter of time, and why.
Abort = Callable[[bool, str], None]
# Judges a wait of so many seconds, named by a function; returns why it ends: `Session.judge`.
Judge = Callable[[protocol.Wait, float, Callable[[], str]], str | None]

_INTERVAL = 1.0  # Seconds between two looks.
# From then on, this looks whether another host has given up. TensorFlow, which does not say why,
# counts a host as gone 10 s after its last heartbeat.
_NEWS_AFTER = 4.0
_SUSPECT_AFTER = 10.0  # From then on, other hosts can read where this one waits.
_FORGET_AFTER = 60.0  # Until then, the waits in a kind that is no longer used are compared.
_STEPS = 20  # The last steps that are compared, and the fewest.
_FEWEST_STEPS = 10
# A host is late in a step if it enters by so much later than most others, and this part of a step.
_LATE_SECONDS = 0.01
_LATE_SHARE = 0.1
_MOSTLY = 0.9  # A host is slow if it is late in this part of the steps.


class Watch:
    """Watches the collectives of this process from a thread of its own."""

    def __init__(
        self,
        cluster: config.Cluster,
        store: protocol.Store,
        judge: Judge,
        abort: Abort,
        timeout: float,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._judge = judge
        self._abort = abort
        self._timeout = timeout
        self._lock = threading.Lock()
        self._watched: dict[str, progress.Kind] = {}
        self._status, self._has_published = Status(), False
        self._next_line = -np.inf  # When the chief may name slow hosts again.
        self._wait = protocol.Wait(timeout)
        self._has_written = False
        self.has_failed = False  # Whether an error has ended what this host was doing.
        self._end = threading.Event()
        self.thread = threading.Thread(target=self._run, name="tfcdo watch", daemon=True)

    def add(self, description: protocol.Description, marks: progress.EventCounter) -> None:
        """Starts to watch a kind of collectives, unless it does already."""
        name = protocol.digest(description)
        what, plan = protocol.brief(description), description.get("plan", "")
        about = progress.KindOfCollectives(what, plan, description["collectives"])
        with self._lock:
            self._watched.setdefault(name, progress.Kind(name, about, marks))

    def stop(self) -> None:
        """Ends the watch."""
        self._end.set()
        self.thread.join(timeout=5.0)

    def go_on(self) -> None:
        """Notes that a host that has caught an error, and goes on, waits in no collective."""
        # Not before: until then the black box tells in which one the error came.
        for kind in self._kinds() if self.has_failed else ():
            kind.marks.settle()
        self.has_failed = False

    def host_delays(self) -> tuple[HostDelay, ...]:
        """Compares the waits of all hosts in the last steps; empty if one has told none."""
        hosts = {host: self._status_of(host).waits for host in self._cluster.others}
        hosts[self._cluster.index] = measure(self._used(time.monotonic()))
        return compare([hosts[host] for host in sorted(hosts)])

    def write_box(self, reason: str) -> None:
        """Writes the last collectives to a file; an error that follows from it writes no other."""
        if not self._has_written:
            self._has_written = True
            progress.write_box(self._cluster, self._kinds(), reason)

    def _run(self) -> None:
        try:
            while not self._end.wait(_INTERVAL):
                if progress.is_asked():
                    progress.write_box(self._cluster, self._kinds(), "SIGUSR1")
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
        return [kind for kind in self._kinds() if now - kind.since < _FORGET_AFTER]

    def look(self) -> bool:
        """Looks once; returns whether the collectives have been ended, so that all is over."""
        now = time.monotonic()
        waiting = self._longest_waiting(now)
        waited = 0.0 if waiting is None else now - waiting.since
        if waiting is not None and waited >= _SUSPECT_AFTER:
            self._publish(Status((waiting.name, waiting.count), self._status.waits))
        else:
            self._compare(now)
        if waiting is None or waited < _NEWS_AFTER:
            self._wait = protocol.Wait(self._timeout)
            return False
        reason = self._judge(self._wait, waited, lambda: self._line(waiting, waited))
        if reason is not None:
            self.write_box(reason)
            self._abort(reason.startswith(protocol.LATE), reason)
        return reason is not None

    def _longest_waiting(self, now: float) -> progress.Kind | None:
        kinds = self._kinds()
        for kind in kinds:
            count = kind.marks.count()
            if count != kind.count:
                kind.count, kind.since = count, now
        waiting = (kind for kind in kinds if kind.count % 2)
        return min(waiting, key=lambda kind: kind.since, default=None)

    def _compare(self, now: float) -> None:
        """Lets the others read this host's waits; the chief logs slow hosts, once a minute."""
        waits = measure(self._used(now))
        is_new = waits != self._status.waits
        self._publish(Status(None, waits))
        if not (waits and is_new and self._cluster.is_chief and now >= self._next_line):
            return
        for delay in self.host_delays():
            if delay.is_slow:
                self._next_line = now + protocol.LOG_AFTER
                logging.warning(
                    "tfcdo: %s enters %.0f ms after the others in %d of %d steps: %.0f %% of a "
                    "step of %.0f ms; look at its input data, its load and its devices",
                    *(self._cluster.name(delay.host), delay.seconds * 1e3, delay.late_steps),
                    *(delay.steps, delay.share * 100, delay.step_seconds * 1e3),
                )

    def _publish(self, status: Status) -> None:
        """Lets the other hosts read this one's status."""
        if status == self._status and self._has_published:
            return
        key = f"status/{self._cluster.index}"
        if self._has_published:
            self._store.delete(key)
        # Also an empty one, as a look at a missing key takes all its time, for each host.
        self._store.set(key, msgspec.json.encode(status).decode())
        self._status, self._has_published = status, True

    def _status_of(self, host: int) -> Status:
        text = self._store.get(f"status/{host}", protocol.LOOK_SECONDS)
        return Status() if text is None else msgspec.json.decode(text, type=Status)

    def _line(self, waiting: progress.Kind, waited: float) -> str:
        me = self._cluster.name(self._cluster.index)
        late = ", ".join(self._waited_for(waiting)) or "all hosts at once: is the network down?"
        place = waiting.about.place(waiting.count // 2)
        return f"{place} has waited {waited:.0f} s on {me} for {late}"

    def _waited_for(self, waiting: progress.Kind) -> list[str]:
        """Names the hosts that have not entered a collective, and where they wait."""
        late = []
        for host in self._cluster.others:
            status = self._status_of(host)
            if status.waiting is None:
                late.append(f"{self._cluster.name(host)}, which is busy or stopped")
                continue
            name, count = status.waiting
            with self._lock:
                theirs = self._watched.get(name)
            if theirs is waiting and count >= waiting.count:
                continue  # It waits in the same collective, or is ahead.
            place = theirs.about.place(count // 2) if theirs else "another collective"
            late.append(f"{self._cluster.name(host)}, which waits in {place}")
        return late


# Slow hosts: which host the others wait for, step after step. Hosts' clocks differ, so no times of
# two hosts are compared, but how long each of them waits. All leave a collective together, so the
# host that enters it last waits least.


@dataclasses.dataclass(frozen=True)
class HostDelay:
    """How far one host is behind most others, as `MultiWorkerMirroredStrategy.host_delays` says.

    Attributes:
      host: its number, from 0, the chief.
      seconds: how much later than most others it enters the collectives of a step; the median over
        the steps, 0 for a host that is not late.
      late_steps: in how many of the steps it is late, by at least 10 ms and 10 % of a step.
      steps: how many steps were compared, the last ones: 10 to 20.
      step_seconds: duration of a step.

    Example:
      >>> HostDelay(host=2, seconds=0.18, late_steps=20, steps=20, step_seconds=0.36).share
      0.5
    """

    host: int
    seconds: float
    late_steps: int
    steps: int
    step_seconds: float

    @property
    def share(self) -> float:
        """Returns the part of a step that the other hosts wait for this one."""
        return self.seconds / self.step_seconds

    @property
    def is_slow(self) -> bool:
        """Tells whether the host is late in at least 90 % of the steps."""
        return self.late_steps >= _MOSTLY * self.steps


class Waits(msgspec.Struct, frozen=True):
    """How long a host waited in each of the last steps, from one use of a kind to the next one."""

    last: int  # Number of the last use.
    seconds: list[float]
    step_seconds: float


WaitsOfKinds = dict[str, Waits]


class Status(msgspec.Struct, frozen=True):
    """What the other hosts can read: the kind and the event that a host waits in, and its waits."""

    waiting: tuple[str, int] | None = None
    waits: WaitsOfKinds = {}


def measure(kinds: Iterable[progress.Kind]) -> WaitsOfKinds:
    """Measures how long this host waited, in all kinds of collectives together."""
    # A step may use several kinds, or one several times, and hosts wait in the first one only. So
    # all waits between two uses of a kind are added up.
    last = {kind.name: (kind, kind.last()) for kind in kinds if kind.count}
    if not last:
        return {}
    left = np.concatenate([one.left for _, one in last.values()])
    waits = left - np.concatenate([one.entered for _, one in last.values()])
    order = np.argsort(left)[: np.count_nonzero(~np.isnan(left))]
    left, total = left[order], np.cumsum(waits[order])
    # Before that, collectives are missing.
    known_from = max((one.left[0] for _, one in last.values() if one.numbers[0]), default=-np.inf)
    result = {}
    for name, (kind, one) in last.items():
        uses, pack = np.divmod(one.numbers, kind.about.collectives)
        ends = (pack == kind.about.collectives - 1) & (one.left > known_from)
        uses, times = uses[ends][-_STEPS - 1 :], one.left[ends][-_STEPS - 1 :]
        if len(times) <= _FEWEST_STEPS:
            continue
        waited = np.diff(total[np.searchsorted(left, times, side="right") - 1])
        step = (times[-1] - times[0]) / len(waited)
        result[name] = Waits(int(uses[-1]), waited.round(6).tolist(), max(1e-6, step.item()))
    return result


def compare(hosts: Sequence[WaitsOfKinds]) -> tuple[HostDelay, ...]:
    """Compares how long hosts waited in the same steps; empty if they have no 10 in common."""
    found = []
    for name in set(hosts[0]).intersection(*hosts[1:]):
        waits = [host[name] for host in hosts]
        last = min(one.last for one in waits)
        ends = [len(one.seconds) - (one.last - last) for one in waits]
        steps = min(ends)
        if steps < _FEWEST_STEPS:
            continue
        seconds = np.array([one.seconds[end - steps : end] for one, end in zip(waits, ends)])
        step = float(np.median([one.step_seconds for one in waits]))
        # Most hosts, not the first one, which may be faster than all others.
        behind = np.maximum(0.0, np.sort(seconds, axis=0)[len(hosts) // 2] - seconds)
        late = np.count_nonzero(behind >= max(_LATE_SECONDS, _LATE_SHARE * step), axis=1)
        found.append(
            tuple(
                HostDelay(host, float(np.median(behind[host])), int(late[host]), steps, step)
                for host in range(len(hosts))
            )
        )
    # A step uses some kinds several times: only in one of them, others wait for a slow host.
    found.sort(key=lambda delays: (-any(d.is_slow for d in delays), delays[0].step_seconds))
    return found[0] if found else ()
