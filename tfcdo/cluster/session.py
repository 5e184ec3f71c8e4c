"""Sessions: the state that a process shares with the other hosts while its strategy lives."""

from __future__ import annotations

import atexit
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfcdo.cluster import agreement, blackbox, config, watch
from tfcdo.cluster.agreement import Agreement, Store
from tfcdo.cluster.errors import LateHostError
from tfcdo.cluster.protocol import LATE, digest

# A key comes back after this many uses of its kind, long after the last one has ended. TensorFlow
# never forgets a key, so this is also the number that it keeps for each collective.
_ROUNDS = 64
# Keys are below this; the rest of 31 bits is for collectives of which each size has its own.
NUM_KEYS = 2**24


class Session:
    """A host's connection to the others: keys for collectives, and an eye on their progress."""

    def __init__(
        self,
        cluster: config.Cluster,
        store: Store,
        abort: watch.Abort,
        timeout: float,
        membership: str = "",
    ) -> None:
        self.cluster = cluster
        self.store = store
        self.timeout = timeout
        self._agreement = Agreement(store, cluster, timeout, membership)
        self.watch = watch.Watch(cluster, store, self._agreement, abort, timeout)
        self._lock = threading.Lock()
        self._rounds: dict[str, Iterator[int]] = {}
        self._turns: dict[str, Iterator[int]] = {}
        self._texts: dict[str, str] = {}

    def agree(self, description: Mapping[str, Any]) -> None:
        """Waits until all hosts have come to the same; see `Agreement.number`."""
        self._agreement.number(description, 0)

    def text_of_chief(self, description: Mapping[str, Any], make: Callable[[], str]) -> str:
        """Returns a text that only the chief makes, once all hosts have come to it."""
        name = f"text/{digest(description)}"
        if self.cluster.is_chief:
            with self._lock:
                if name not in self._texts:
                    # Before the hosts agree, so that no other one has to wait for it.
                    text = make()
                    self.store.set(name, text)
                    self._texts[name] = text
        self.agree(description)
        agreed = self._texts.get(name) or self.store.get(name, self.timeout)
        if agreed is None:
            raise LateHostError(f"{LATE}: {self.cluster.name(0)} does not answer")
        self._texts[name] = agreed
        return agreed

    def differing(self, kind: str, text: str) -> list[int]:
        """Tells the others a text; returns those that have told another one by now."""
        # Nobody waits here. The last host to come sees the texts of all.
        with self._lock:
            turn = next(self._turns.setdefault(kind, itertools.count()))
        name = f"told/{kind}/{turn}"
        self.store.set(f"{name}/{self.cluster.index}", text)
        told = {host: self.store.get(f"{name}/{host}", 0.01) for host in self.cluster.others}
        return [host for host, other in told.items() if other not in (None, text)]

    def next_keys(self, description: Mapping[str, Any], count: int) -> list[int]:
        """Returns keys for the next use of one kind of collectives, the same on all hosts."""
        number = self._agreement.number(description, count)
        if (number + count) * _ROUNDS > NUM_KEYS:
            raise RuntimeError(
                f"a program has at most {NUM_KEYS // _ROUNDS:,} different collectives between "
                "hosts; this one reduces values of ever new shapes: pad them to a few"
            )
        with self._lock:
            rounds = self._rounds.setdefault(digest(description), itertools.cycle(range(_ROUNDS)))
            turn = next(rounds)
        return [(number + index) * _ROUNDS + turn for index in range(count)]

    def leave(self) -> None:
        """Tells the other hosts that this program ends."""
        error = getattr(sys, "last_value", None)  # Python has printed it and ends.
        if error is not None:
            self.watch.write_box(agreement.describe_error(error))
        self._agreement.leave(error)


# TensorFlow joins one cluster in the life of a process, and its servers do not end before that.
_current: Session | None = None


def current() -> Session | None:
    """Returns the session of this process, if it has joined a cluster."""
    return _current


def join(
    cluster: config.Cluster,
    make_store: Callable[[], Store],
    abort: watch.Abort,
    timeout: float,
    membership: str = "",
) -> Session:
    """Returns the session of this process, made by the first strategy, whose cluster is for all."""
    global _current
    if _current is None:
        _current = Session(cluster, make_store(), abort, timeout, membership)
        atexit.register(_current.leave)
        blackbox.listen()
    if _current.cluster != cluster:
        raise ValueError(
            f"all strategies of a process must be of one cluster; got {cluster} after "
            f"{_current.cluster}"
        )
    return _current
