"""A host's session: its agreement with the other hosts, before they exchange data.

Hosts that run one program start the same collectives in the same order. Each kind of collective is
described by all that its hosts must have in common, and the first time that a host comes to a kind,
it announces the description and waits until all others have announced the same. The chief then
gives the kind a number, from which the keys of its collectives are made. So a collective never
meets one of another kind, and hosts whose programs differ learn where.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from tfcdo.cluster import config, progress, protocol, watch, worker
from tfcdo.cluster.protocol import Description, DisagreementError, LateHostError, Store, digest

_POLL = 0.5
# A key comes back after this many uses of its kind, long after the last one has ended. TensorFlow
# never forgets a key, so this is also the number that it keeps for each collective.
_ROUNDS = 64
# Keys are below this; the rest of 31 bits is for collectives with a key per size.
NUM_KEYS = 2**24


class Session:
    """This host's part in the cluster: keys for collectives, and a watch of their progress."""

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
        self.watch = watch.Watch(cluster, store, self.judge, abort, timeout)
        self._kinds = protocol.Kinds(cluster.index, len(cluster.tasks), membership)
        self._lock = threading.Lock()  # Guards what follows; never held while waiting.
        self._reading = threading.Lock()  # One thread at a time reads the others' announcements.
        self._running: tuple[str, Any] = ("", None)  # A call of `fit` and the like; its thread.
        self._texts: dict[str, str] = {}  # That the chief has made, by kind.
        self._told: str | None = None  # Why this host has given up, if no other one had before.
        # Uses of each kind, of keys and of texts that are told.
        self._uses: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)

    def agree(self, description: Description) -> None:
        """Waits until all hosts have announced the same description."""
        self.number(description, 0)

    @contextlib.contextmanager
    def calling(self, call: Description) -> Iterator[None]:
        """Waits until all hosts have come to the same call of a function, such as the second."""
        name, me = call["what"], threading.current_thread()
        with self._lock:
            outer, thread = running = self._running
            is_alone = thread in (None, me)  # A callback of `fit` may call `evaluate`.
            if is_alone:
                self._running = name, me
                # A host that has caught an error would meet the others in an earlier call.
                turn = next(self._uses[f"calls/{name}"]) + 1
        if not is_alone:  # On each host two threads start collectives in an order of their own.
            host = self.cluster.name(self.cluster.index)
            reason = (
                "one thread at a time may call fit, evaluate and predict on several hosts, or one "
                f"model's gradients are added to another's; on {host}, {me.name} calls {name} "
                f"while {thread.name} is in {outer}"
            )
            self.fail(reason)
            raise RuntimeError(reason)
        try:
            self.agree(call)
            self.agree({"what": f"call {turn} of {name}"})
            yield
        finally:
            self._running = running

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
            self.store.set(f"announced/{self.cluster.index}/{place}", json.dumps(announced))
        key = f"agreed/{name}"
        if not self.cluster.is_chief:
            ready = functools.partial(self.store.get, key, _POLL)
            chief = functools.partial(self._late_chief, name)
            number, text = json.loads(self._wait(ready, description, chief))
            with self._lock:
                self._texts[name] = text
                return self._kinds.numbers.setdefault(name, number)
        while (host := self._kinds.late(name)) is not None:
            has_come = functools.partial(self._has_announced, host, name, _POLL)
            who = functools.partial(self.cluster.name, host)
            self._wait(has_come, description, who)
        with self._lock:
            is_new = name not in self._kinds.numbers  # Else another thread came to the same.
            number = self._kinds.give_number(name, size)
        if is_new:
            self.store.set(key, json.dumps([number, self._texts.get(name, "")]))
        return number

    def text_of_chief(self, description: Description, make: Callable[[], str]) -> str:
        """Returns a text that only the chief makes, once all hosts ask for it."""
        name = self._kinds.name(description)
        with self._lock:
            if self.cluster.is_chief and name not in self._texts:
                # Before the hosts agree, so that the other hosts need not wait for it.
                self._texts[name] = make()
        self.agree(description)
        return self._texts[name]

    def differing(self, kind: str, text: str) -> dict[int, str]:
        """Tells the others a text; returns the other texts that some have told by now."""
        # Nobody waits here. The last host to come sees the texts of all.
        with self._lock:
            turn = next(self._uses[kind])
        name = f"told/{kind}/{turn}"
        self.store.set(f"{name}/{self.cluster.index}", text)
        told = {host: self.store.get(f"{name}/{host}", 0.1) for host in self.cluster.others}
        return {h: other for h, other in told.items() if other is not None and other != text}

    def seed(self, kind: str) -> int:
        """Returns a seed for the next use of a kind: alike on all hosts, another in each start."""
        with self._lock:
            turn = next(self._uses[kind])
        return int(self._kinds.name({"what": f"seed {turn} of {kind}"}), 16) % 2**31

    def next_keys(self, description: Description, count: int) -> list[int]:
        """Returns keys for the next use of one kind of collectives, the same on all hosts."""
        number = self.number(description, count)
        if (number + count) * _ROUNDS > NUM_KEYS:
            raise RuntimeError(
                f"a program has at most {NUM_KEYS // _ROUNDS:,} different collectives between "
                "hosts; this one reduces values of ever new shapes: pad them to a few"
            )
        with self._lock:
            turn = next(self._uses[digest(description)]) % _ROUNDS
        return [(number + index) * _ROUNDS + turn for index in range(count)]

    def find_mismatch(self) -> str | None:
        """Says how programs differ if a host has come to a collective that is unknown here."""
        # The chief hears all; any other host only the chief, which speaks up if a third differs.
        hosts = self.cluster.others if self.cluster.is_chief else (0,)
        for host in hosts:
            self._hear(host, protocol.LOOK_SECONDS / len(hosts))
            with self._lock:
                stray = self._kinds.stray(host)
            if stray is not None:
                mine, strange = stray
                me, they = self.cluster.name(self.cluster.index), self.cluster.name(host)
                if mine is None:
                    return f"{they} has come to the {protocol.brief(strange)}, and {me} has not"
                # Not "here" and "there": each host reads the same text.
                names = f"host {self.cluster.index}", f"host {host}"
                if mine.get("what") != strange.get("what"):
                    details = f"{names[0]} comes to the {protocol.brief(mine)}, "
                    details += f"{names[1]} to the {protocol.brief(strange)}"
                else:
                    details = protocol.differences(mine, names[0], strange, names[1])
                return f"the programs of {me} and {they} differ: {details}"
        return None

    def judge(self, wait: protocol.Wait, waited: float, line: Callable[[], str]) -> str | None:
        """Judges a wait; returns why it ends, which all hosts can read then."""
        say = functools.partial(logging.warning, "tfcdo: %s")
        return wait.look(waited, self.failure, self.find_mismatch, line, say, self.fail)

    def failure(self) -> str | None:
        """Returns why another host has given up, or None."""
        return self.store.get("failed", protocol.LOOK_SECONDS)

    def fail(self, reason: str) -> None:
        """Tells the other hosts that this one gives up, and why, unless another was first."""
        try:
            self.store.set("failed", reason)
            self._told = reason
        except Exception as error:  # Another host was first, or the chief is gone: no action.
            logging.info("tfcdo: could not tell the other hosts: %s", error)

    def leave(self, error: BaseException | None) -> None:
        """Tells the other hosts that this host's program ends, and why; the chief leaves last."""
        me = self.cluster.name(self.cluster.index)
        if error is None:
            reason = f"{me} has come to the end of its program before others: {protocol.SAME_CALLS}"
        else:
            reason = f"{me} has ended with {protocol.describe_error(error)}"
        deadline = time.monotonic() + protocol.LAST_SECONDS
        # TensorFlow itself tells all hosts of one that is gone.
        follows = type(error).__name__ == "UnavailableError"
        try:
            self.store.set(f"left/{self.cluster.index}", "")
            known = self.failure()
            if known is not None and error is not None and known not in str(error):
                logging.error("tfcdo: %s", known)
            if known is None and not follows:
                self.fail(reason)
            follows |= self._told is None  # Another was first, also if a busy chief says so late.
            if known is not None or follows:
                return
            for host in self.cluster.others if self.cluster.is_chief else ():
                while self.store.get(f"left/{host}", _POLL) is None:
                    if time.monotonic() > deadline:
                        return
        except Exception as problem:  # The chief or another host is gone: no host to tell.
            logging.info("tfcdo: could not wait for the other hosts: %s", problem)
            follows |= not self.cluster.is_chief
        finally:
            if follows:
                worker.tell_that_another_has_failed()

    def _has_announced(self, host: int, name: str, timeout: float) -> bool | None:
        self._hear(host, timeout, name)
        return True if name in self._kinds.heard[host] else None

    def _late_chief(self, name: str) -> str:
        chief = self.cluster.name(0)
        has_come = self._has_announced(0, name, protocol.LOOK_SECONDS)
        return f"a host that {chief} waits for" if has_come else chief

    def _wait(
        self, ready: Callable[[], Any], description: Description, late: Callable[[], str]
    ) -> Any:
        """Waits until `ready` returns a value; else raises the reason, or names `late`."""
        start = time.monotonic()
        patience = 0.0 if self.cluster.is_chief else protocol.PATIENCE
        wait = protocol.Wait(self.timeout + patience)
        me = self.cluster.name(self.cluster.index)

        def line() -> str:
            come = f"{late()} to come to its first {protocol.brief(description)}"
            return f"{me} has waited {time.monotonic() - start:.0f} s for {come}"

        while (found := ready()) is None:
            reason = self.judge(wait, time.monotonic() - start, line)
            if reason is not None:
                is_late = reason.startswith(protocol.LATE)
                raise (LateHostError if is_late else DisagreementError)(reason)
            # Only now: a host that has ended may have said why. Only the chief, whose own server
            # answers, asks for tasks: TensorFlow waits for that answer with Python's lock held.
            jobs = (task.job for task in self.cluster.tasks if self.cluster.is_chief)
            self.store.check_hosts(collections.Counter(jobs))
        return found

    def _hear(self, host: int, timeout: float, until: str = "") -> None:
        """Reads a host's announcements since the last call, perhaps only until that of a kind."""
        with self._reading:
            heard = self._kinds.heard[host]
            while until not in heard:
                text = self.store.get(f"announced/{host}/{len(heard)}", timeout)
                if text is None:
                    return
                with self._lock:
                    self._kinds.hear(host, json.loads(text))


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
    membership: str,
) -> Session:
    """Returns the session of this process, made by the first strategy, whose cluster is for all."""
    global _current
    if _current is None:
        _current = Session(cluster, make_store(), abort, timeout, membership)
        atexit.register(_leave)
        progress.listen()
        _current.watch.thread.start()
    if _current.cluster != cluster:
        raise ValueError(
            f"all strategies of a process must be of one cluster; got {cluster} after "
            f"{_current.cluster}"
        )
    return _current


def _leave() -> None:
    assert _current is not None
    _current.watch.stop()
    error = getattr(sys, "last_value", None)  # Python has printed it and ends.
    if error is not None:
        _current.watch.write_box(protocol.describe_error(error))
    _current.leave(error)
