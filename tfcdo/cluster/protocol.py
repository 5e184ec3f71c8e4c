"""The rules by which hosts decide together, and a launcher about its workers; nothing else.

Events go in, with the time where it matters, and decisions come out. This file has no sockets,
threads, clocks, files or TensorFlow: `rendezvous`, `session`, `watch`, `keras.preemption`,
`keras.backup_folder` and `launch.supervisor` bring events and carry decisions out. A simulator,
tests/cluster/simulator.py, runs the same rules on millions of schedules of faults.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

Description = Mapping[str, Any]

_MOST_DIFFERENCES = 3  # That a message names.


class ClusterError(RuntimeError):
    """Base of the errors between hosts: catch it to handle any of them.

    Its subclasses say how the hosts failed: `DisagreementError`, `LateHostError` and
    `RendezvousError`. The message names the host and the difference or the time-out.

    Example:
      >>> import tfcdo
      >>> issubclass(tfcdo.ClusterError, RuntimeError)
      True
    """


class DisagreementError(ClusterError):
    """The hosts do not do the same; the message names the difference."""


class LateHostError(ClusterError):
    """A host did not come to its first collective of a kind in time; the message names it.

    Later ones end with `tf.errors.DeadlineExceededError`, because TensorFlow runs them.
    """


class RendezvousError(ClusterError):
    """A host is missing, or the hosts have different settings; the message names them."""


# Meeting: before TensorFlow starts, all hosts come to the chief, and all continue or none does.

PATIENCE = 5.0  # By how much the others are more patient than the chief, which knows who is late.
_TELL_SECONDS = 10.0  # So that all learn that settings differ, also those on their way.


class Meeting:
    """The chief's part in a meeting: which hosts have come, and whether all can continue."""

    def __init__(self, names: Sequence[str], settings: Description, deadline: float) -> None:
        self._names = names
        self._settings = dict(settings)
        self._deadline = deadline
        self._problem = ""
        self.arrived: dict[int, Any] = {}  # The connection of each host that has come.

    @property
    def missing(self) -> list[int]:
        """Returns the hosts that have not come."""
        return [host for host in range(1, len(self._names)) if host not in self.arrived]

    def arrive(self, host: int, settings: Description, connection: Any, now: float) -> Any:
        """Counts a host in, perhaps again; returns the connection that is of no more use."""
        if not 0 < host < len(self._names):
            return connection
        before = self.arrived.get(host)
        self.arrived[host] = connection
        if not self._problem and dict(settings) != self._settings:
            names = self._names[0], self._names[host]
            details = differences(self._settings, names[0], settings, names[1])
            self._problem = f"the hosts are not set up alike: {details}"
            self._deadline = min(self._deadline, now + _TELL_SECONDS)
        return before

    def lose(self, connection: Any) -> None:
        """Forgets a host whose connection has ended: it has more to say only in a new one."""
        self.arrived = {h: other for h, other in self.arrived.items() if other != connection}

    def decide(self, now: float) -> str | None:
        """Returns None to wait, "" if all can continue, or why they cannot."""
        if self.missing and now <= self._deadline:
            return None
        late = f"{LATE} {self.waiting_for()}" if self.missing else ""
        return "; ".join(filter(None, (self._problem, late)))

    def waiting_for(self) -> str:
        """Names the hosts that are missing."""
        return f"waiting for {', '.join(self._names[host] for host in self.missing)} to start"


def may_keep_asking(now: float, deadline: float, greeted: bool) -> bool:
    """Returns whether a host continues to wait for the chief, which it has greeted or not."""
    return now < deadline + (PATIENCE if greeted else 0.0)


# Agreement: a collective has a number that all hosts know and no other collective has.


def digest(description: Description) -> str:
    """Returns a short name for a description: equal for equal ones, on every host."""
    return hashlib.sha256(_text(description).encode()).hexdigest()[:16]


def _text(value: Any) -> str:
    """Returns what hosts compare: NaN equals NaN, a tuple equals a list, and 1 is not 1.0."""
    return json.dumps(value, sort_keys=True)


class Store(Protocol):
    """A key-value store that all hosts share; a key is written once."""

    def set(self, key: str, value: str) -> None:
        """Writes a new key."""

    def get(self, key: str, timeout: float) -> str | None:
        """Waits up to `timeout` seconds for a key; returns its value, or None."""

    def delete(self, key: str) -> None:
        """Removes a key, so that it can be written again."""

    def check_hosts(self, jobs: Mapping[str, int]) -> None:
        """Raises an error if the chief is silent, or one of the tasks of these jobs has ended."""


class Kinds:
    """One host's knowledge of the kinds of collectives that hosts have announced."""

    def __init__(self, host: int, hosts: int, membership: str) -> None:
        # Names these processes; a restarted one is not of them.
        self._membership = membership
        self._next_number = 0
        self.own: dict[str, Description] = {}
        self.numbers: dict[str, int] = {}
        self.heard: list[dict[str, Description]] = [{} for _ in range(hosts)]
        self.others = [other for other in range(hosts) if other != host]

    def name(self, description: Description) -> str:
        """Returns a kind's name; no other membership's kind has it."""
        return digest(self._complete(description))

    def _complete(self, description: Description) -> Description:
        return {**description, "membership": self._membership}

    def come_to(self, description: Description) -> int | None:
        """Notes that this host comes to a kind; returns its place if it must be announced."""
        name = self.name(description)
        place = None if name in self.own else len(self.own)
        self.own.setdefault(name, self._complete(description))
        return place

    def hear(self, host: int, announced: Description) -> None:
        """Notes another host's announcement, an entry of that host's `own`."""
        self.heard[host][digest(announced)] = announced

    def late(self, name: str) -> int | None:
        """Returns a host that has not announced a kind, or None: then the chief may number it."""
        return next((host for host in self.others if name not in self.heard[host]), None)

    def give_number(self, name: str, size: int) -> int:
        """Returns the first of `size` numbers that the chief gives to a kind, once."""
        if name not in self.numbers:
            self.numbers[name] = self._next_number
            self._next_number += size
        return self.numbers[name]

    def stray(self, host: int) -> tuple[Description | None, Description] | None:
        """Returns the kind that this host waits in, and one of another host, unknown here."""
        strange = [d for name, d in self.heard[host].items() if name not in self.own]
        waiting = [d for name, d in self.own.items() if name not in self.numbers]
        return (waiting[-1] if waiting else None, strange[0]) if strange else None


# Progress and failure: a waiting host looks for a reason, names the late host, then gives up.

LOOK_SECONDS = 0.2  # In which the chief's store answers also from another continent.
LOG_AFTER = 60.0  # Seconds until the log says who is waited for.
# Two hosts that have been waiting for this long, each for something that the other has not come to,
# run different programs. Not at once, because several threads of one program may start collectives,
# and their order is not the same on all hosts.
GRACE = 10.0
LATE = "timed out"  # How each reason of this kind begins.


class Wait:
    """One wait for other hosts."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._next_line = LOG_AFTER

    def look(
        self,
        waited: float,
        failure: Callable[[], str | None],
        mismatch: Callable[[], str | None],
        line: Callable[[], str],
        say: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> str | None:
        """Returns why to give up, which it tells the others unless one of them has; or None."""
        reason = failure()
        if reason is not None:
            return reason
        reason = mismatch() if waited >= GRACE else None
        if reason is None and waited >= self._timeout:
            reason = f"{LATE}: {line()}; {SAME_CALLS}"
        if reason is not None:
            tell(reason)
        elif waited >= self._next_line:
            self._next_line += LOG_AFTER
            say(line())
        return reason


# Leaving: all hosts leave after the same step, with a backup, or none has one.

ANSWER_SECONDS = 20.0  # How long a host may take to say which step it has begun.
NO_STEP = "none"


class Leaving:
    """One host's part in leaving after the same step.

    After a notice each host says which call it has begun, and begins no other. A host that has
    heard all proposes the last one of them; a host that has waited too long proposes none. The
    first proposal is the decision: the store keeps one, and all read it. Hosts leave where the next
    call would begin: at the end of the last one, some may have gone on to the end of the epoch,
    where they wait for all.
    """

    def __init__(self, host: int, hosts: int) -> None:
        self._host = host
        self._begun: list[int | None] = [None] * hosts
        self._begun[host] = 0
        self._is_held = False
        # Also None if no step is common, or the others cannot be asked.
        self.decision: int | None = None

    def hold(self) -> int:
        """Begins no call until there is a decision; returns the last one that has begun here."""
        self._is_held = True
        return self._begun[self._host] or 0

    def may_begin(self, call: int) -> bool | None:
        """Returns whether the host begins a call, the first being 1; None: no decision yet."""
        if not self._is_held:
            self._begun[self._host] = call
            return True
        return None if self.decision is None else call <= self.decision

    def hear(self, host: int, begun: int) -> None:
        """Hears which call another host has begun."""
        self._begun[host] = begun

    @property
    def unheard(self) -> list[int]:
        """Returns the hosts that have not said which call they have begun."""
        return [host for host, begun in enumerate(self._begun) if begun is None]

    def proposal(self, waited: float) -> str | None:
        """Returns the proposal after waiting for the others, or None to continue waiting."""
        if not self.unheard:
            return str(max(begun for begun in self._begun if begun is not None))
        return NO_STEP if waited >= ANSWER_SECONDS else None

    def decide(self, decision: str | None) -> None:
        """Takes the decision from the store; None if the store is gone."""
        if decision is not None and decision != NO_STEP:
            self.decision = int(decision)


# Backups: all hosts restore the same one, and a folder has one writer.

# Epoch, batches done in it, and the run that wrote it: another run may have other bits.
Position = tuple[int, int, str]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The backup that all hosts restore, and the host that sends it to hosts without it."""

    position: Position
    source: int
    is_sent: bool


def choose(found: Sequence[Position | None]) -> Choice | None:
    """Chooses among the newest whole backup of each host."""
    newest = max((position for position in found if position), default=None)
    if newest is None:
        return None
    return Choice(newest, found.index(newest), any(own != newest for own in found))


# The operations on a folder; each happens at once. A writer creates its file before it
# looks who owns the folder; a new owner enters its name before it removes files. So either the
# writer sees the new name, or its file is gone when it is to become visible.

Operations = Generator[str, Any, bool]


def take_folder() -> Operations:
    """Takes a folder over: an unfinished file of an earlier owner never becomes visible."""
    yield "enter name"
    yield "remove unfinished"
    return True


def add_backup(run: str) -> Operations:
    """Adds a backup; returns whether the folder still was this run's."""
    yield "create"
    owner = yield "read name"
    if owner != run:
        yield "remove own"
        return False
    yield "fill"
    is_there = yield "publish"
    return bool(is_there)


# Supervision: a launcher's actions when its workers end.

# The exit status of a worker that has made a backup and asks to be started again (EX_TEMPFAIL).
RESTART_STATUS = 75
_KILLED = 128 + signal.SIGKILL
TELL_OF_FAILURE = 0  # Not a signal: the worker learns that another one has failed.
# Workers that end within this time may end because of each other; the first of them is to blame.
SETTLE_SECONDS = 0.3
# How long the chief, which keeps the store, stays at its end for others to read why it ends. So it
# may be to blame, and end after them.
LAST_SECONDS = 8.0
# `timeout`, and a terminal that closes, send one request to end more than once.
_REPEAT_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class End:
    """A worker has ended: its status as a shell has it, and when, on the launcher's clock."""

    worker: int
    status: int
    at: float
    follows: bool = False  # It knows that another worker has failed before it.


@dataclasses.dataclass(frozen=True)
class Send:
    """Send a worker a signal."""

    worker: int
    number: int


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run has ended."""

    status: int
    signal: int = 0  # That ended the launcher.
    blamed: int | None = None


Actions = list[Send | str]  # A text is for the user.


class Supervision:
    """One run of workers: all end when one fails; a worker may leave after a backup."""

    def __init__(self, workers: Sequence[str], grace: float, leave: float) -> None:
        self._names = workers
        self.running = set(range(len(workers)))
        self.deadline: float | None = None  # When to call `tick`.
        self._grace = grace
        self._leave = leave
        self._failures: list[End] = []
        self._signal, self._asked_at = 0, 0.0
        self._has_left = self._is_settled = False

    def end(self, event: End, now: float) -> Actions:
        """A worker has ended."""
        self.running.discard(event.worker)
        if self._signal:
            return []
        if self._is_settled:
            # An end after the request to end does not count, unless by a SIGKILL from elsewhere:
            # the launcher's own come when there is no deadline any more.
            if event.status == _KILLED and self.deadline is not None:
                self._failures.append(event)
            return []
        if event.status == RESTART_STATUS:
            if self._has_left:
                return []
            self._has_left = True
            self.deadline = now + self._leave
            others = "; waiting for the others" if self.running else ""
            name = self._names[event.worker]
            asks = f"{name} asks to be started again, after a backup{others}"
            return [*map(self._failed, self._failures), asks]
        if event.status:
            self._failures.append(event)
            if self._has_left and self.deadline is not None:  # Not killed by the launcher.
                return [self._failed(event)]
        if self._has_left or not self._failures:
            return []
        follow = all(end.follows for end in self._failures)
        deadline = now + SETTLE_SECONDS + (LAST_SECONDS if follow else 0.0)
        self.deadline = min(self.deadline or deadline, deadline)
        return [] if self.running else self._settle(now)

    def ask(self, number: int, now: float) -> Actions:
        """A signal asks the launcher to end."""
        if self._signal:  # A user who asks twice does not want to wait.
            return self._kill() if now >= self._asked_at + _REPEAT_SECONDS else []
        self._signal, self._asked_at = number, now
        name = signal.Signals(number).name
        return [f"got {name}: passing it on to the workers", *self._stop(number, now)]

    def tick(self, now: float) -> Actions:
        """Time has passed, perhaps until the deadline."""
        if self.deadline is None or now < self.deadline:
            return []
        if self._signal or self._has_left or self._is_settled:
            return self._kill()
        return self._settle(now)

    def result(self) -> Result:
        """Returns how the run has ended, once nothing is running."""
        if self._signal:
            return Result(128 + self._signal, self._signal)
        blamed = self._blamed()
        if self._has_left:
            return Result(RESTART_STATUS)
        return Result(blamed.status, blamed=blamed.worker) if blamed else Result(0)

    def _blamed(self) -> End | None:
        # No process kills itself because others fail. It may be the last that is seen to have
        # ended: its memory is freed first, and others notice that it is gone.
        return min(
            self._failures,
            key=lambda end: (end.status != _KILLED, end.follows, end.at),
            default=None,
        )

    def _settle(self, now: float) -> Actions:
        """Decides which worker has failed, and ends the others."""
        blamed = self._blamed()
        assert blamed is not None
        self._is_settled = True
        others = "; ending the others" if self.running else ""
        tell = (Send(worker, TELL_OF_FAILURE) for worker in self.running)
        return [self._failed(blamed) + others, *tell, *self._stop(signal.SIGTERM, now)]

    def _failed(self, end: End) -> str:
        name = {128 + one.value: f" ({one.name})" for one in signal.Signals}.get(end.status, "")
        why = ", because of another worker" if end.follows else ""
        return f"{self._names[end.worker]} failed: exit status {end.status}{name}{why}"

    def _stop(self, number: int, now: float) -> Actions:
        self.deadline = now + self._grace
        # A stopped process does not act on signals.
        return [Send(w, sent) for w in sorted(self.running) for sent in (number, signal.SIGCONT)]

    def _kill(self) -> Actions:
        self.deadline = None
        workers = tuple(sorted(self.running))
        names = ", ".join(self._names[worker] for worker in workers)
        return [f"killing {names}", *(Send(w, signal.SIGKILL) for w in workers)]


# Words.

SAME_CALLS = (
    "all hosts must make the same calls, such as fit, evaluate, predict and save, on the same "
    "number of batches"
)
_MAX_REASON = 500  # Characters of an error's message that others are told.


def differences(left: Description, left_name: str, right: Description, right_name: str) -> str:
    """Says where two descriptions, JSON values by name, differ; of lists and objects, at what."""
    found = [
        _difference(key, left[key], left_name, right[key], right_name)
        for key in left
        if key in right and _text(left[key]) != _text(right[key])
    ]
    if not found:  # A name that only one of them has counts if they agree in all others.
        for key in sorted(left.keys() ^ right.keys()):
            here, there = (side.get(key, "nothing") for side in (left, right))
            found.append(_difference(key, here, left_name, there, right_name))
    rest = len(found) - _MOST_DIFFERENCES
    return "; ".join(found[:_MOST_DIFFERENCES]) + (f"; and {rest} more" if rest > 0 else "")


def _difference(key: str, left: Any, left_name: str, right: Any, right_name: str) -> str:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return f"{key}: {len(left)} on {left_name}, {len(right)} on {right_name}"
        index = next(i for i, pair in enumerate(zip(left, right)) if len({*map(_text, pair)}) > 1)
        key, left, right = f"{key}, element {index} of {len(left)}", left[index], right[index]
    if isinstance(left, dict) and isinstance(right, dict):
        return f"{key}: {differences(left, left_name, right, right_name)}"
    return f"{key}: {left} on {left_name}, {right} on {right_name}"


def describe_error(error: BaseException) -> str:
    """Names an error in a message: its type and the beginning of its own message."""
    text = str(error)[:_MAX_REASON].encode(errors="backslashreplace").decode()  # Of a file's name.
    return f"{type(error).__name__}: {text}"


def brief(description: Description) -> str:
    """Names a description in a message: its purpose, and a collective's first values."""
    if "values" not in description:
        return str(description.get("what", "collective"))
    values = description["values"]
    more = ", ..." if len(values) > 3 else ""
    count = f"{len(values)} value{'' if len(values) == 1 else 's'}"
    return f"{description.get('what', 'collective')} of {count} ({', '.join(values[:3])}{more})"
