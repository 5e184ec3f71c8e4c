"""Runs the rules of `tfcdo.cluster.protocol` on made-up hosts, launchers, messages and faults.

    python tests/helpers/simulator.py [--schedules 1000000] [--seed 0]

A schedule is drawn from its seed, which replays it: the number of hosts, who launches them, the
delay of each message, and up to three faults, each after some number of events, also while the job
recovers from another one. Messages of one connection stay in order; those of others do not.

What is made up stands for: processes, sockets, TensorFlow's servers, its key-value store, which
ends with the chief, and its collectives, a shared folder, each machine's memory, and guards. It
allows more than TensorFlow does: any process at a host's address may connect to the chief.
"""

# Longer than 400 lines: made-up processes and the invariants they must keep are one subject.

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import random
import sys
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

from tfcdo.cluster import protocol

Run = Generator[Any, Any, Any]

MEET_SECONDS = 600.0
_START_SECONDS = 120.0  # TensorFlow's servers.
_COLLECTIVE_SECONDS = 600.0
_HEARTBEAT_SECONDS = 10.0
_GRACE, _LEAVE = 10.0, 30.0
_MAX_RESTARTS = 8
# Nobody may wait for longer for a process that has ended.
_SLOWEST_NEWS = 35.0
LIMIT_SECONDS = 15_000.0
RULES = types.SimpleNamespace(**vars(protocol))
FAULTS = (
    "kill",
    "kill",
    "kill both",
    "lose machine",
    "away",
    "stop",
    "notice",
    "notice",
    "cut",
    "damage",
    "replace",
    "full",
    "end",
)
# What may be wrong with one host from the start.
BUGS = ("setting", "program", "ends", "stuck", "deaf", "busy", "busy")
_NAMES = tuple(f"host {host}" for host in range(4))
_STEP = {"what": "step"}
_GATHER = {"what": "gather"}


class BrokenError(AssertionError):
    """A schedule broke an invariant."""


class _Exit(Exception):  # noqa: N818 - a process ends, which is no error
    def __init__(self, status: int) -> None:
        self.status = status


class _GoneError(Exception):
    """Another host, or the chief's store, is gone: TensorFlow's errors."""


class _Task:
    __slots__ = ("process", "run", "turn")

    def __init__(self, process: _Process, run: Run) -> None:
        self.process, self.run, self.turn = process, run, 0


@dataclasses.dataclass(frozen=True)
class State:
    """The weights: how many batches they have seen, and which runs have trained them."""

    batches: int = 0
    runs: tuple[str, ...] = ()


class _Folder:
    """A folder of backups: each operation on it happens at once."""

    def __init__(self) -> None:
        self.owner = ""
        self.writing: set[str] = set()
        self.files: dict[tuple[int, int], tuple[str, State, bool]] = {}  # By name: run, whole.

    def newest(self) -> tuple[protocol.Position, State] | None:
        for name in sorted(self.files, reverse=True):
            run, state, is_whole = self.files[name]
            if is_whole:
                return (*name, run), state
        return None

    def keep(self, last: tuple[int, int] | None = None) -> None:
        """Removes what a new run cannot read, or all but the two newest."""
        names = sorted(self.files, reverse=True)
        for name in names[2:] if last is None else names:
            if last is None or name > last:
                del self.files[name]


class _Connection:
    __slots__ = ("answer", "ends", "is_broken", "signal")

    def __init__(self, ends: tuple[_Process, _Process]) -> None:
        self.ends = ends
        self.answer: tuple[str, str] | None = None
        self.is_broken = False
        self.signal: list[Any] = []


class _Cluster:
    """TensorFlow's servers: the chief's store, and collectives among those that have connected."""

    def __init__(self, chief: _Process) -> None:
        self.chief = chief
        self.members: dict[int, _Process] = {}
        self.is_started = self.is_broken = False
        self.values: dict[str, str] = {}
        self.signals: dict[str, list[Any]] = {}
        self.slots: dict[Any, dict[int, Any]] = {}
        self.done: set[Any] = set()

    def signal(self, key: Any) -> list[Any]:
        return self.signals.setdefault(key, [])


class _Process:
    """One process: a worker, or a launcher."""

    def __init__(self, world: World, host: int, job: int) -> None:
        self.world, self.host, self.job = world, host, job
        self.is_dead = self.is_stopped = self.is_told = self.is_signalled = False
        self.is_fitting = self.is_listening = self.has_left = self.is_full = False
        self.is_victim = self.is_touched = False  # By a fault, but for a notice.
        self.status = 0
        self.ended_at = 0.0
        self.frozen: list[Any] = []
        self.connections: list[_Connection] = []
        self.cluster: _Cluster | None = None
        self.inbox: list[Any] = []
        self.signal: list[Any] = []
        self.wakeup: list[Any] = []
        self.state = State()
        self.writing = False
        self.phase = "starts"
        self.launcher: _Launcher

    # Processes.

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.world.note_state()

    def main(self) -> Run:
        """A worker, from its start to its end."""
        world, rules = self.world, self.world.rules
        try:
            yield world.delay(2.0) + (20.0 if self.host == world.late else 0.0)
            self.enter("meets")
            yield from (self.lead() if self.host == 0 else self.follow())
            self.enter("starts servers")
            yield from self.start_servers()
            world.memberships.setdefault(self.membership, []).append(self)
            self.kinds = rules.Kinds(self.host, world.hosts, self.membership)
            yield from self.fit()
            yield from self.leave(None)
            raise _Exit(0)
        except _GoneError as error:
            yield from self.leave(error)
            raise _Exit(1) from error

    def fit(self) -> Run:
        world, rules = self.world, self.world.rules
        self.enter("restores")
        self.leaving = rules.Leaving(self.host, world.hosts)
        self.is_fitting = True
        world.start(self, self.listen())
        yield from self.restore()
        first = self.state.batches
        saved = 0  # What was restored may be in one machine's memory only.
        for call in range(1, world.steps - first + 1):
            yield world.delay(0.2)
            if not (yield from self.may_begin(call)):
                yield from self.leave_with_backup(saved)
            self.enter("step")
            if world.bug == ("ends", self.host) and call == 2:
                return
            if world.bug == ("stuck", self.host) and call == 2:
                yield 2e6
            yield world.delay(world.step_seconds)
            yield from self.collective(_STEP, self.state)
            self.state = State(self.state.batches + 1, (*self.state.runs, self.membership))
            if world.snapshots or self.state.batches % 2 == 0:
                to_disk = self.state.batches % 2 == 0
                yield from self.save(to_disk)
                saved = self.state.batches if to_disk else saved
            if self.state.batches < world.steps and (yield from self.must_leave(call)):
                yield from self.leave_with_backup(saved)
        # The training is complete: what begins after it does not wait for this host.
        yield from self.set_once(f"begun/{self.host}", str(self.leaving.notice()))
        yield from self.finish_writing()
        self.is_fitting = False
        self.enter("is complete")
        world.note_complete(self)

    # The meeting, over connections.

    def lead(self) -> Run:
        world = self.world
        self.membership = f"run {world.number()}"
        meeting = world.rules.Meeting(
            _NAMES[: world.hosts], {}, self.membership, world.now + MEET_SECONDS
        )
        self.is_listening = True
        self.latest: dict[int, _Connection] = {}
        self.lost: set[_Connection] = set()
        world.fire(world.listening)
        while (answer := meeting.decide(world.now)) is None:
            if not self.inbox:
                yield self.signal, MEET_SECONDS
                continue
            event, *content = self.inbox.pop(0)
            if event == "arrives":
                self.latest[content[0]] = content[2]
                before = meeting.arrive(*content, world.now)
                if before is not None:
                    world.cut(before)
            else:
                self.lost.add(content[0])
                meeting.lose(*content)
        world.check_meeting(self, answer, meeting.arrived)
        yield world.delay(0.3)
        for connection in meeting.arrived.values():
            if not connection.is_broken:
                content = (answer, self.membership)
                world.after(world.delay(0.2), self.take_answer, connection, content)
        self.is_listening = False
        if answer:
            raise _Exit(1)

    def take_answer(self, connection: _Connection, answer: tuple[str, str]) -> None:
        if not connection.is_broken:
            connection.answer = answer
            self.world.fire(connection.signal)

    def follow(self) -> Run:
        world, rules = self.world, self.world.rules
        deadline = world.now + MEET_SECONDS
        while rules.may_keep_asking(world.now, deadline, False):
            yield world.delay(0.2)
            chief = world.current(0, self.job)
            if chief is None or not chief.is_listening:
                yield world.listening, min(20.0, max(0.2, deadline - world.now))
                continue
            connection = _Connection((self, chief))
            for end in connection.ends:
                end.connections.append(connection)
            world.after(world.delay(0.2), self.come, connection)
            while connection.answer is None and not connection.is_broken:
                if not rules.may_keep_asking(world.now, deadline, True):
                    raise _Exit(1)
                yield connection.signal, max(0.01, deadline + rules.PATIENCE - world.now)
            if connection.answer is not None:
                problem, self.membership = connection.answer
                if problem:
                    raise _Exit(1)
                return
        raise _Exit(1)

    def come(self, connection: _Connection) -> None:
        chief = connection.ends[1]
        if connection.is_broken or chief.is_dead:
            return
        settings = {"version": 2} if self.world.bug == ("setting", self.host) else {}
        chief.inbox.append(("arrives", self.host, settings, connection))
        self.world.fire(chief.signal)

    # TensorFlow's servers, store and collectives.

    def start_servers(self) -> Run:
        world = self.world
        deadline = world.now + _START_SECONDS
        if self.host == 0:
            world.clusters[self.job] = _Cluster(self)
            world.fire(world.serving)
        while world.now < deadline:
            cluster = world.clusters.get(self.job)
            if cluster is None or cluster.chief.is_dead or cluster.is_started:
                yield world.serving, min(20.0, max(0.1, deadline - world.now))
                continue
            cluster.members[self.host] = self
            self.cluster = cluster
            if len(cluster.members) == world.hosts:
                cluster.is_started = True
                world.fire(cluster.signal("started"))
            elif not cluster.is_started:
                yield cluster.signal("started"), max(0.1, deadline - world.now)
            if cluster.is_broken:
                raise _GoneError
            if cluster.is_started:
                return
        raise _Exit(1)

    @property
    def store(self) -> _Cluster:
        assert self.cluster is not None
        if self.cluster.chief.is_dead or self.cluster.is_broken:
            raise _GoneError
        return self.cluster

    def get(self, key: str, timeout: float) -> Run:
        store = self.store
        yield self.world.delay(0.05)
        if key not in store.values and timeout > 0.1:
            yield store.signal(key), timeout
        return self.store.values.get(key)

    def set_once(self, key: str, value: str) -> Run:
        yield self.world.delay(0.05)
        store = self.store
        if store.chief.is_stopped:
            yield _HEARTBEAT_SECONDS
            if self.store.chief.is_stopped:
                raise _GoneError
        if key not in store.values:
            store.values[key] = value
            self.world.fire(store.signal(key))

    def collective(self, kind: dict[str, Any], value: Any) -> Run:
        """Sums, or gathers, once all hosts have come to it."""
        world, cluster = self.world, self.store
        number = yield from self.number(kind)
        turn = self.turns[kind["what"]] = self.turns.get(kind["what"], -1) + 1
        key = number, turn
        slot = cluster.slots.setdefault(key, {})
        slot[self.host] = kind["what"], value, self.membership
        if len(slot) == world.hosts:
            world.check_collective(kind, slot)
            cluster.done.add(key)
            world.fire(cluster.signal(key))
            yield world.delay(0.1)
        else:
            yield from self.wait(lambda: key in cluster.done, cluster.signal(key), 4.0)
        return [slot[host][1] for host in range(world.hosts)]

    def wait(self, ready: Callable[[], bool], signal: list[Any], news_after: float) -> Run:
        """Waits for other hosts, as `Agreement` and `Watch` do."""
        world = self.world
        start = world.now
        wait = world.rules.Wait(_COLLECTIVE_SECONDS, news_after)
        while not ready():
            waited = world.now - start
            yield signal, 5.0 if waited < 15.0 else 20.0
            if ready():
                return
            store = self.store
            world.check_wait(self, start)
            failure = store.values.get("failed")
            verdict, reason = wait.look(
                world.now - start, lambda failure=failure: failure, self.mismatch, str
            )
            if verdict == "fail":
                yield from self.set_once("failed", reason or "")
            if verdict in ("fail", "stop"):
                raise _GoneError

    def mismatch(self) -> str | None:
        for host in self.kinds.others if self.host == 0 else (0,):
            self.hear(host)
            if self.kinds.stray(host) is not None:
                return f"host {host} differs"
        return None

    def hear(self, host: int) -> None:
        place = len(self.kinds.heard[host])
        while (text := self.store.values.get(f"announced/{host}/{place}")) is not None:
            self.kinds.hear(host, json.loads(text))
            place += 1

    def number(self, kind: dict[str, Any]) -> Run:
        """Agrees on the number of a kind, as `Agreement` does."""
        if kind is _STEP and self.world.bug == ("program", self.host):
            kind = {"what": "another step"}
        if kind["what"] in self.numbers:
            return self.numbers[kind["what"]]
        name = self.kinds.name(kind)
        place = self.kinds.come_to(kind)
        if place is not None:
            text = json.dumps(self.kinds.own[name])
            yield from self.set_once(f"announced/{self.host}/{place}", text)
        key = f"agreed/{name}"
        if self.host == 0:
            while (late := self.kinds.late(name)) is not None:
                self.hear(late)
                if self.kinds.late(name) != late:
                    continue
                place = len(self.kinds.heard[late])
                announced = f"announced/{late}/{place}"
                yield from self.wait(
                    lambda announced=announced: announced in self.store.values,  # type: ignore[misc]
                    self.store.signal(announced),
                    0.0,
                )
            number = self.kinds.give_number(name, 1)
            values = self.store.values
            keys = (f"announced/{h}/{len(self.numbers)}" for h in range(self.world.hosts))
            if not all(key in values for key in keys):
                raise BrokenError("a collective has a number before all have come to it")
            yield from self.set_once(key, str(number))
        else:
            yield from self.wait(lambda: key in self.store.values, self.store.signal(key), 0.0)
            number = int(self.store.values[key])
        self.kinds.numbers[name] = self.numbers[kind["what"]] = number
        return number

    def leave(self, error: Exception | None) -> Run:
        """Tells the other hosts that this program ends, as `Agreement.leave` does."""
        self.phase = "leaves"
        try:
            yield from self.set_once(f"left/{self.host}", "")
            if error is None:
                yield from self.set_once("failed", f"host {self.host} has come to its end")
                for host in range(1, self.world.hosts) if self.host == 0 else ():
                    yield from self.get(f"left/{host}", 8.0)
        except _GoneError:
            pass
        self.has_left = error is None

    # Backups.

    def restore(self) -> Run:
        world, rules = self.world, self.world.rules
        self.turns: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        self.run = self.membership
        if self.host == 0:
            yield from self.operate(rules.take_folder(), world.disk, (0, 0))
            world.owner = self.run
        yield from self.collective(_GATHER, None)  # The chief has taken the folder.
        yield world.delay(0.1)
        found = [backup for backup in (world.disk.newest(), self.memory.newest()) if backup]
        own = max(found, key=lambda backup: backup[0], default=None)
        positions = yield from self.collective(_GATHER, own and own[0])
        choice = rules.choose(positions)
        world.check_choice(self, choice, positions)
        if choice is None:
            return
        if choice.is_sent:
            states = yield from self.collective(_GATHER, own and own[1])
            self.state = states[choice.source]
        else:
            assert own is not None
            self.state = own[1]
        self.memory.keep(choice.position[:2])
        if self.host == 0:
            world.disk.keep(choice.position[:2])

    @property
    def memory(self) -> _Folder:
        return self.world.memories[self.host]

    def save(self, to_disk: bool) -> Run:
        yield from self.finish_writing()
        folders = [self.world.disk] if to_disk and self.host == 0 else []
        folders += [self.memory] if self.world.snapshots else []
        if folders:
            self.writing = True
            self.world.start(self, self.write(folders, self.state))

    def write(self, folders: list[_Folder], state: State) -> Run:
        name = (0, state.batches)
        for folder in folders:
            if folder is not self.world.disk:
                folder.files[name] = self.run, state, True
            elif not (yield from self.operate(self.world.rules.add_backup(self.run), folder, name)):
                self.is_touched = True
                raise _Exit(1)  # Another job has the folder.
            folder.keep()
        self.writing = False
        self.world.fire(self.wakeup)

    def operate(self, operations: protocol.Operations, disk: _Folder, name: tuple[int, int]) -> Run:
        """Does what the rules of a folder say, with time between any two operations."""
        world = self.world
        result: Any = None
        while True:
            try:
                operation = operations.send(result)
            except StopIteration as end:
                return end.value
            yield world.delay(world.slowness if operation == "fill" else world.disk_delay)
            result = None
            if operation == "enter name":
                disk.owner = self.run
            elif operation == "remove unfinished":
                disk.writing.clear()
            elif operation == "create":
                disk.writing.add(self.run)
            elif operation == "read name":
                result = disk.owner
            elif operation == "remove own":
                disk.writing.discard(self.run)
            elif operation == "fill" and self.is_full:
                disk.writing.discard(self.run)
                raise _Exit(1)
            elif operation == "publish":
                result = self.run in disk.writing
                if result:
                    world.check_owner(self)
                    disk.writing.discard(self.run)
                    disk.files[name] = self.run, self.world.saved(self, name), True

    def finish_writing(self) -> Run:
        while self.writing:
            yield self.wakeup, 1000.0

    # Leaving, as `keras.preemption` does.

    def may_begin(self, call: int) -> Run:
        return (yield from self.ask(self.leaving.may_begin, call))

    def must_leave(self, calls: int) -> Run:
        return (yield from self.ask(self.leaving.must_leave, calls))

    def ask(self, question: Callable[[int], bool | None], calls: int) -> Run:
        if self.is_signalled:
            self.leaving.hold()
        while (answer := question(calls)) is None:
            if self.leaving.is_off:
                raise _Exit(143)
            yield self.wakeup, 1000.0
        return answer

    def listen(self) -> Run:
        world = self.world
        try:
            while (yield from self.get("notice", 60.0)) is None:
                if not self.is_fitting:
                    return
            begun = self.leaving.notice()
            if world.bug == ("busy", self.host):
                yield 10.0 + world.delay(50.0)
            yield from self.set_once(f"begun/{self.host}", str(begun))
            start = world.now
            while (proposal := self.leaving.proposal(world.now - start)) is None:
                host = self.leaving.unheard[0]
                text = yield from self.get(f"begun/{host}", 5.0)
                if text is not None:
                    self.leaving.hear(host, int(text))
                world.check_wait(self, start, host)
            yield from self.set_once("decision", proposal)
            decision = yield from self.get("decision", 1.0)
            self.leaving.decide(decision)
            world.check_decision(self, decision)
        except _GoneError:
            self.leaving.decide(None)
        finally:
            world.fire(self.wakeup)

    def leave_with_backup(self, saved: int) -> Run:
        world = self.world
        self.enter("leaves with a backup")
        if saved != self.state.batches:
            yield from self.save(True)
        yield from self.finish_writing()
        yield from self.set_once(f"written/{self.host}", "")
        while not world.rules.may_end(f"written/{h}" in self.store.values for h in (0,)):
            yield from self.get("written/0", 5.0)
        world.check_left(self)
        yield from self.leave(None)
        raise _Exit(protocol.RESTART_STATUS)

    def take_signal(self, number: int) -> None:
        """Gets a signal from its launcher, or from the machine."""
        world = self.world
        if self.is_dead:
            return
        if number == protocol.TELL_OF_FAILURE:
            self.is_told = True
        elif number == 18:
            world.resume_process(self)
        elif number == 9:
            world.end(self, 137)
        elif self.is_stopped:
            self.frozen_signal = number
        elif world.bug == ("deaf", self.host):
            pass
        elif self.is_told or not self.is_fitting:
            world.after(world.delay(1.0), world.end, self, 128 + number)
        elif not self.is_signalled:
            self.is_signalled = True
            world.start(self, self.announce())

    def announce(self) -> Run:
        yield self.world.delay(1.0)
        try:
            if self.cluster is not None:
                yield from self.set_once("notice", "")
        except _GoneError:
            pass


class _Launcher(_Process):
    """Starts workers of one machine, or of all, and starts them again."""

    def __init__(self, world: World, workers: list[int], job: int) -> None:
        super().__init__(world, -1, job)
        self.workers = workers
        self.is_done = False
        self.result: protocol.Result | None = None
        self.processes: list[_Process] = []

    def main(self) -> Run:
        world, rules = self.world, self.world.rules
        failures = 0
        while True:
            begin = world.now
            self.inbox.clear()
            self.killed: list[int] = []
            self.processes = [world.start_worker(host, self) for host in self.workers]
            supervision = rules.Supervision(len(self.workers), _GRACE, _LEAVE)
            while supervision.running:
                if not self.inbox:
                    rest = supervision.deadline
                    rest = LIMIT_SECONDS if rest is None else max(0.0, rest - world.now)
                    yield self.signal, rest
                if self.inbox:
                    event, *content = self.inbox.pop(0)
                    call = supervision.end if event == "end" else supervision.ask
                    actions = call(*content, world.now)
                else:
                    actions = supervision.tick(world.now)
                for action in actions:
                    if isinstance(action, protocol.Send):
                        self.processes[action.worker].take_signal(action.number)
            self.result = result = supervision.result()
            world.check_result(self, result)
            if not result.status or result.signal:
                break
            if not (result.has_left and world.now - begin >= 5.0):
                failures += 1
                if failures > (_MAX_RESTARTS if world.bug is None else 1):
                    break
            yield world.delay(0.5)
        self.is_done = True
        world.open -= 1
        raise _Exit(result.status)


class World:
    """One schedule."""

    def __init__(self, seed: int, rules: Any = RULES, states: set[Any] | None = None) -> None:
        self.rules = rules
        self.seed = seed
        self.random = random.Random(seed)
        draw = self.random.random
        self._draw = draw
        self.now = 0.0
        self.events = 0
        self._sequence = self._number = 0
        self._heap: list[Any] = []
        self.states: set[Any] = set() if states is None else states
        self.hosts = 2 + int(draw() * 2.3)
        self.is_one_machine = draw() < 0.5
        self.steps = 3 + int(draw() * 3)
        self.snapshots = draw() < 0.4
        self.late = 1 + int(draw() * (self.hosts - 1)) if draw() < 0.3 else None
        self.step_seconds = (0.1, 1.0, 4.0)[int(draw() * 3)]
        self.disk_delay = 3.0 if draw() < 0.2 else 0.05
        self.slowness = 60.0 if draw() < 0.2 else 0.5
        drawn = int(draw() * 30)
        self.bug = None
        if drawn < len(BUGS) and (BUGS[drawn] not in ("stuck", "deaf") or self.is_one_machine):
            self.bug = BUGS[drawn], 1 + int(draw() * (self.hosts - 1))
        self.memberships: dict[str, list[_Process]] = {}
        count = int(draw() * 3.99)
        # Moments of the faults: most in a first run, some while the job recovers.
        moments = sorted(int(draw() * (60 if draw() < 0.3 else 300)) for _ in range(count))
        self._faults = [(moment, FAULTS[int(draw() * len(FAULTS))]) for moment in moments]
        self.disk = _Folder()
        self.memories = [_Folder() for _ in range(self.hosts)]
        self.owner = ""
        self.away: dict[int, tuple[_Folder, int]] = {}
        self.clusters: dict[int, _Cluster] = {}
        self.workers: dict[tuple[int, int], _Process] = {}
        self.launchers: list[_Launcher] = []
        self.listening: list[Any] = []
        self.serving: list[Any] = []
        self.log: list[str] = []
        self.job = 0

    # Events.

    def delay(self, most: float) -> float:
        """Draws a delay: mostly short, sometimes as long as it can be, or longer."""
        drawn = self._draw()
        return most * drawn if drawn < 0.97 else most * 4.0

    def number(self) -> int:
        self._number += 1
        return self._number

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + seconds, self._sequence, call, arguments))

    def start(self, process: _Process, run: Run) -> None:
        task = _Task(process, run)
        self.after(0.0, self._resume, task, 0, None)

    def fire(self, signal: list[Any]) -> None:
        if signal:
            waiting, signal[:] = signal[:], []
            for task, turn in waiting:
                if task.turn == turn:
                    self.after(self._draw() * 0.05, self._resume, task, turn, True)

    def _resume(self, task: _Task, turn: int, value: Any) -> None:
        process = task.process
        if task.turn != turn or process.is_dead:
            return
        if process.is_stopped:
            process.frozen.append((task, turn, value))
            return
        task.turn = turn = turn + 1
        try:
            effect = task.run.send(value)
        except StopIteration:
            return
        except _Exit as end:
            self.end(process, end.status)
            return
        if type(effect) is tuple:
            signal, timeout = effect
            signal.append((task, turn))
            effect = timeout
        self._sequence += 1
        heapq.heappush(
            self._heap, (self.now + effect, self._sequence, self._resume, (task, turn, False))
        )

    def run(self) -> None:
        """Runs the schedule; raises a `BrokenError` if an invariant does not hold."""
        self.start_job()
        heap, pop = self._heap, heapq.heappop
        faults = self._faults
        while heap:
            self.now, _, call, arguments = pop(heap)
            if self.now > self.limit:
                self.check_no_hang()
                return
            self.events += 1
            if faults and self.events >= faults[0][0]:
                self.inject(faults.pop(0)[1])
            call(*arguments)
            if not self.open:
                break
        self.check_end()

    # Processes and faults.

    def start_job(self) -> None:
        self.job += 1
        self.limit = self.now + LIMIT_SECONDS
        groups = [list(range(self.hosts))]
        if not self.is_one_machine:
            groups = [[host] for host in range(self.hosts)]
        self.open = len(groups)
        self.launchers = [_Launcher(self, group, self.job) for group in groups]
        for launcher in self.launchers:
            self.start(launcher, launcher.main())

    def start_worker(self, host: int, launcher: _Launcher) -> _Process:
        process = _Process(self, host, launcher.job)
        if host in self.away and self._number >= self.away[host][1]:
            self.memories[host] = self.away.pop(host)[0]
        process.launcher = launcher
        process.index = launcher.workers.index(host)  # type: ignore[attr-defined]
        self.workers[host, launcher.job] = process
        self.start(process, process.main())
        return process

    def current(self, host: int, job: int) -> _Process | None:
        process = self.workers.get((host, job))
        return None if process is None or process.is_dead else process

    def end(self, process: _Process, status: int) -> None:
        """Ends a process; its launcher and the other hosts learn of it in any order."""
        if process.is_dead:
            return
        process.is_dead = True
        process.status, process.ended_at = status, self.now
        process.phase = "has ended"
        self.note_state()
        for connection in process.connections:
            self.cut(connection)
        cluster = process.cluster
        if cluster is not None and (not process.has_left or process is cluster.chief):
            soon = self._draw() < 0.7
            self.after(self._draw() * (0.5 if soon else _HEARTBEAT_SECONDS), self.break_up, cluster)
        if isinstance(process, _Launcher):
            return
        launcher = process.launcher
        # A killed process has closed its sockets before it can be waited for.
        at = self.now + (self.delay(0.1) if status == 137 else 0.0)
        self.after(at - self.now + self.delay(0.05), self._reap, launcher, process, at)

    def _reap(self, launcher: _Launcher, process: _Process, at: float) -> None:
        if launcher.is_dead or process not in launcher.processes:
            return
        ended = protocol.End(process.index, process.status, at)  # type: ignore[attr-defined]
        launcher.inbox.append(("end", ended))
        self.fire(launcher.signal)

    def break_up(self, cluster: _Cluster) -> None:
        if cluster.is_broken:
            return
        cluster.is_broken = True
        for key in list(cluster.signals):
            self.fire(cluster.signals[key])

    def cut(self, connection: _Connection) -> None:
        if connection.is_broken:
            return
        connection.is_broken = True
        # Of a machine that is gone nothing comes, until a time-out.
        is_silent = self._draw() < 0.3
        self.after(self.delay(30.0 if is_silent else 0.2), self._lose, connection)

    def _lose(self, connection: _Connection) -> None:
        self.fire(connection.signal)
        chief = connection.ends[1]
        chief.inbox.append(("loses", connection))
        self.fire(chief.signal)

    def stop_process(self, process: _Process) -> None:
        process.is_stopped = True
        cluster = process.cluster
        if cluster is not None:
            self.after(_HEARTBEAT_SECONDS, self._miss, process, cluster)

    def _miss(self, process: _Process, cluster: _Cluster) -> None:
        if process.is_stopped and not process.is_dead:
            self.break_up(cluster)

    def resume_process(self, process: _Process) -> None:
        if process.is_stopped:
            process.is_stopped = False
            number = process.__dict__.pop("frozen_signal", None)
            if number is not None:
                process.take_signal(number)
            for task, turn, value in process.frozen:
                self.after(self._draw() * 0.01, self._resume, task, turn, value)
            process.frozen.clear()

    def inject(self, kind: str) -> None:
        """Makes a fault."""
        alive = [p for (_, job), p in self.workers.items() if job == self.job and not p.is_dead]
        if not alive:
            return
        process = alive[int(self._draw() * len(alive))]
        if not (kind == "damage" or (kind == "notice" and process.is_fitting)):
            everyone = kind in ("kill both", "replace", "end")
            for touched in alive if everyone else [process]:
                touched.is_touched = True
        self.log.append(f"{self.now:.2f} {kind} host {process.host} ({process.phase})")
        if kind in ("kill", "kill both", "lose machine", "away"):
            killed = alive[:2] if kind == "kill both" else [process]
            for victim in killed:
                victim.is_victim = True
                self.end(victim, 137)
            if kind == "lose machine":
                self.memories[process.host].files.clear()
            if kind == "away":  # The victim's until the run after the next one, others for good.
                self.away[process.host] = self.memories[process.host], self._number + 1
                self.memories = [_Folder() for _ in range(self.hosts)]
        elif kind == "stop":
            self.stop_process(process)
            self.after(self.delay(40.0), self.resume_process, process)
        elif kind == "notice":
            process.take_signal(15)
        elif kind == "cut":
            for connection in process.connections:
                self.cut(connection)
        elif kind == "damage" and self.disk.files:
            name = max(self.disk.files)
            run, state, _ = self.disk.files[name]
            self.disk.files[name] = run, state, False
        elif kind == "full":
            process.is_full = True
        elif kind == "end":
            for launcher in self.launchers:
                launcher.inbox.append(("ask", 15))
                self.fire(launcher.signal)
        elif kind == "replace":
            # The machines cannot be reached any more, and the job is started elsewhere.
            for launcher in self.launchers:
                launcher.is_dead = True
            for old in alive:
                for connection in old.connections:
                    self.cut(connection)
                if old.cluster is not None:
                    news = self._draw() * _HEARTBEAT_SECONDS
                    self.after(news, self.break_up, old.cluster)
            self.memories = [_Folder() for _ in range(self.hosts)]
            self.start_job()

    # Invariants.

    def note_state(self) -> None:
        self.states.add(tuple(p.phase for p in self.workers.values() if p.job == self.job))

    def saved(self, process: _Process, name: tuple[int, int]) -> State:
        return State(name[1], process.state.runs[: name[1]])

    def check_collective(self, kind: dict[str, Any], slot: dict[int, Any]) -> None:
        entries = list(slot.values())
        if len({membership for _, _, membership in entries}) > 1:
            raise BrokenError("two memberships run a collective together")
        if len({what for what, _, _ in entries}) > 1:
            raise BrokenError("different collectives have one number")
        if kind is _STEP:
            if self.bug and self.bug[0] in ("setting", "program"):
                raise BrokenError("hosts that differ run a step together")
            states = {value for _, value, _ in entries}
            if len(states) > 1:
                raise BrokenError(f"a batch is lost or counted twice: {states}")

    def check_choice(self, process: _Process, choice: Any, positions: list[Any]) -> None:
        common = [p for p in positions if p is not None]
        if choice is None:
            if common:
                raise BrokenError("a backup is there, and none is chosen")
            return
        if choice.position[:2] < max(common)[:2]:
            raise BrokenError("the chosen backup is older than the newest")
        if positions[choice.source] != choice.position:
            raise BrokenError("the chosen backup's source does not have it")
        if positions[process.host] != choice.position and not choice.is_sent:
            raise BrokenError("a member lacks the chosen backup")

    def check_owner(self, process: _Process) -> None:
        if self.disk.owner != process.run:
            if self.disk.writing and self.owner == process.run:
                return  # The new owner has entered its name, and is about to remove files.
            raise BrokenError("a backup of a run that has lost its folder becomes visible")

    def check_left(self, process: _Process) -> None:
        batches = process.state.batches
        found = self.disk.files.get((0, batches))
        if batches and found is None and self.disk.owner == process.run:
            raise BrokenError("a host leaves after a backup that is not there")

    def check_result(self, launcher: _Launcher, result: protocol.Result) -> None:
        if result.has_left:
            if not any(p.status == protocol.RESTART_STATUS for p in launcher.processes):
                raise BrokenError("nobody has asked for the restart")
            for process in launcher.processes:
                cluster = process.cluster
                if cluster and cluster.chief.is_dead and cluster.chief.status == 137:
                    done = self.disk.files.get((0, process.state.batches))
                    if (
                        process.state.batches
                        and done is None
                        and self.disk.owner == cluster.chief.run
                    ):
                        raise BrokenError("killed while it wrote, and said to be after a backup")
            return
        if result.blamed is None:
            return
        killed = [p for p in launcher.processes if p.is_victim]
        if killed and launcher.processes[result.blamed] not in killed:
            raise BrokenError("a survivor is blamed")

    def note_complete(self, process: _Process) -> None:
        if process.state.batches != self.steps:
            raise BrokenError("a batch is lost at the end")

    def check_meeting(self, chief: _Process, answer: str, arrived: dict[int, Any]) -> None:
        if answer:
            return
        if set(arrived) != set(range(1, self.hosts)):
            raise BrokenError("a meeting ends without a host")
        if any(chief.latest[h] is not c or c in chief.lost for h, c in arrived.items()):
            raise BrokenError("a meeting ends with a process that is known to have gone")

    def check_wait(self, process: _Process, start: float, host: int | None = None) -> None:
        """Nobody waits for long for a process that has ended, or runs another program."""
        assert process.cluster is not None
        waited = self.now - start
        if waited < _SLOWEST_NEWS:
            return
        for member in process.cluster.members.values():
            if not (member.is_dead and host in (None, member.host)):
                continue
            if self.now - max(start, member.ended_at) > _SLOWEST_NEWS:
                raise BrokenError("a host waits for one that has left")
        if host is not None and waited > 2 * protocol.ANSWER_SECONDS:
            raise BrokenError("a host waits for one that does not answer")
        if self.bug and self.bug[0] == "program" and waited > 2 * _SLOWEST_NEWS:
            raise BrokenError("a host waits for one that runs another program")
        if waited > _COLLECTIVE_SECONDS + 30.0:
            raise BrokenError("a host waits for longer than the time-out")

    def check_decision(self, process: _Process, decision: str | None) -> None:
        leaving = process.leaving
        own = protocol.NO_STEP if leaving.is_off else str(leaving.decision)
        if decision is not None and own != decision:
            raise BrokenError("hosts come to different decisions")

    def check_no_hang(self) -> None:
        raise BrokenError(f"hangs: {[(p.host, p.phase) for p in self.workers.values()]}")

    def check_end(self) -> None:
        for launcher in self.launchers:
            if not (launcher.is_done or launcher.is_dead):
                self.check_no_hang()
        for processes in self.memberships.values():
            if len(processes) < self.hosts or any(p.is_touched for p in processes):
                continue
            if self.bug and self.bug[0] != "busy":
                continue
            statuses = {process.status for process in processes if process.is_dead}
            if len(statuses) > 1 and statuses & {0, protocol.RESTART_STATUS}:
                raise BrokenError(f"hosts end in different decisions: {statuses}")
        if self.job > 1:
            return  # The job that was replaced may take its folder back.
        results = {launcher.result.status for launcher in self.launchers if launcher.result}
        if "full" in str(self.log) or " end " in str(self.log) or self.bug:
            return
        if 0 not in results and results:
            raise BrokenError(f"the job does not come to its end: {results}")


def schedules(first: int, count: int, rules: Any = RULES) -> Iterator[World]:
    """Runs schedules; raises a `BrokenError` that names the seed."""
    states: set[Any] = set()
    for seed in range(first, first + count):
        world = World(seed, rules, states)
        try:
            world.run()
        except BrokenError as error:
            faults = "; ".join(world.log) or "no fault"
            raise BrokenError(f"seed {seed}: {error} ({world.hosts} hosts; {faults})") from None
        yield world


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    events = 0
    for number, world in enumerate(schedules(arguments.seed, arguments.schedules), 1):
        events += world.events
        if number % 10_000 == 0 or number == arguments.schedules:
            print(
                f"{number:,} schedules, {events:,} events, {len(world.states):,} states of hosts: "
                "all invariants hold",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
