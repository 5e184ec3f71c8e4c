"""Slow hosts: which host the others wait for, step after step.

Hosts' clocks differ, so no times of two hosts are compared, but how long each of them waits. All
leave a collective together, so the host that enters it last waits least.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
from absl import logging

from tfcdo.cluster import agreement, config, progress

_STEPS = 20  # The last steps that are compared, and the fewest.
_FEWEST_STEPS = 10
# A host is late in a step if it enters by so much later than most others, and this part of a step.
_LATE_SECONDS = 0.01
_LATE_SHARE = 0.1
_MOSTLY = 0.9  # A host is slow if it is late in this part of the steps.
_LINE_EVERY = 60.0
_GET_TIMEOUT = 0.05


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
    if not len(left):
        return {}
    # Before that, collectives are missing.
    known_from = max((one.left[0] for _, one in last.values() if one.numbers[0]), default=-np.inf)
    result = {}
    for name, (kind, one) in last.items():
        uses, pack = np.divmod(one.numbers, kind.description["collectives"])
        ends = (pack == kind.description["collectives"] - 1) & (one.left > known_from)
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
        steps = min(len(one.seconds) - (one.last - last) for one in waits)
        if steps < _FEWEST_STEPS:
            continue
        ends = [len(one.seconds) - (one.last - last) for one in waits]
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


class Comparison:
    """Publishes how long this host waits, and has the chief say which hosts are slow."""

    def __init__(
        self, cluster: config.Cluster, store: agreement.Store, clock: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._clock = clock
        self._published = ""
        self._next_line = -np.inf

    def look(self, kinds: Iterable[progress.Kind]) -> None:
        """Publishes this host's waits; the chief logs slow hosts, at most once a minute."""
        own = measure(kinds)
        text = msgspec.json.encode(own).decode()
        if text == self._published or not own:
            return
        key = f"waits/{self._cluster.index}"
        if self._published:
            self._store.delete(key)
        self._store.set(key, text)
        self._published = text
        if not self._cluster.is_chief or self._clock() < self._next_line:
            return
        slow = [delay for delay in self.delays(own) if delay.is_slow]
        for delay in slow:
            logging.warning(
                "tfcdo: %s enters %.0f ms after the others in %d of %d steps: %.0f %% of a step of "
                "%.0f ms; look at its input data, its load and its devices",
                *(self._cluster.name(delay.host), delay.seconds * 1e3, delay.late_steps),
                *(delay.steps, delay.share * 100, delay.step_seconds * 1e3),
            )
        if slow:
            self._next_line = self._clock() + _LINE_EVERY

    def delays(self, own: WaitsOfKinds) -> tuple[HostDelay, ...]:
        """Compares this host's waits with the others'; empty if one has not published any."""
        hosts = []
        for host in range(len(self._cluster.tasks)):
            if host == self._cluster.index:
                hosts.append(own)
                continue
            text = self._store.get(f"waits/{host}", _GET_TIMEOUT)
            if text is None:
                return ()
            hosts.append(msgspec.json.decode(text, type=WaitsOfKinds))
        return compare(hosts)
