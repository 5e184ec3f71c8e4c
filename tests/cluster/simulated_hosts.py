"""Made-up processes, sockets, servers and folders, on which `simulator` runs the cluster's rules.

More is allowed than in TensorFlow: any process at a host's address may connect to the chief.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from tfcdo.cluster import protocol

if TYPE_CHECKING:
    from simulator import Launcher, World

Run = Generator[Any, Any, Any]
State = tuple[str, ...]  # The weights: the run that has trained each batch.
MEET_SECONDS = 600.0
_START_SECONDS = 120.0  # TensorFlow's servers.
COLLECTIVE_SECONDS, HEARTBEAT_SECONDS = 600.0, 10.0
ALL = -1  # Other hosts, as senders or receivers.
STEP = {"what": "step"}
_GATHER = {"what": "gather"}


class BrokenError(AssertionError):
    """A schedule broke an invariant."""


class ProcessExit(Exception):  # noqa: N818 - a process ends, which is no error
    def __init__(self, status: int) -> None:
        self.status = status


def require(holds: object, invariant: str) -> None:
    """Raises an error that says how an invariant is broken, unless it holds."""
    if not holds:
        raise BrokenError(invariant)


class _GoneError(Exception):
    """Another host, or the chief's store, is gone: TensorFlow's errors."""


class Folder:
    """A folder of backups: each operation on it happens at once."""

    def __init__(self) -> None:
        self.owner = ""
        self.writing: set[str] = set()
        self.files: dict[tuple[int, int], tuple[str, State, bool]] = {}  # By name: run, whole.

    def newest(self, is_stale: bool) -> tuple[protocol.Position, State] | None:
        for name in sorted(self.files, reverse=True)[is_stale:]:
            run, state, is_whole = self.files[name]
            if is_whole:
                return (*name, run), state
        return None

    def lacks_backup(self, process: Process, chief: Process) -> bool:
        """Tells whether the chief has the folder, but did not write a process's last state."""
        batches = len(process.state)
        return batches > 0 and (0, batches) not in self.files and self.owner == chief.membership


@dataclasses.dataclass(eq=False)
class Connection:
    ends: tuple[Process, Process]
    answer: tuple[str, str] | None = None
    is_broken: bool = False
    signal: list[Any] = dataclasses.field(default_factory=list)


class Cluster:
    """TensorFlow's servers: the chief's store, and collectives among those that have connected."""

    def __init__(self, chief: Process) -> None:
        self.chief = chief
        self.members: dict[int, Process] = {}
        self.is_started = self.is_broken = False
        self.values: dict[str, Any] = {}
        self.signals: dict[Any, list[Any]] = collections.defaultdict(list)
        self.slots: dict[Any, dict[int, Any]] = collections.defaultdict(dict)


class Process:
    """One process: a worker, or a launcher."""

    def __init__(self, world: World, host: int, job: int) -> None:
        self.world, self.host, self.job = world, host, job
        self.is_dead = self.is_stopped = self.is_told = self.is_signalled = False
        self.is_fitting = self.is_listening = self.has_left = self.is_full = False
        self.is_decided = False  # Whether to leave, and after which step.
        self.is_cut_off = False  # TensorFlow has given the chief up.
        self.is_victim = self.is_touched = False  # By a fault, but for a notice.
        self.status = 0
        self.ended_at = self.resumed_at = 0.0
        self.frozen: list[Any] = []
        self.connections: list[Connection] = []
        self.cluster: Cluster | None = None
        self.inbox: list[Any] = []
        self.signal: list[Any] = []
        self.wakeup: list[Any] = []
        self.state: State = ()
        self.writing = False
        self.phase = "starts"
        self.launcher: Launcher
        self.index: int

    def main(self) -> Run:
        """A worker, from its start to its end."""
        world, rules = self.world, self.world.rules
        try:
            yield world.delay(2.0) + (20.0 if self.host == world.late else 0.0)
            self.phase = "meets"
            yield from (self.lead() if self.host == 0 else self.follow())
            self.phase = "starts servers"
            yield from self.start_servers()
            world.memberships.setdefault(self.membership, []).append(self)
            self.kinds = rules.Kinds(self.host, world.hosts, self.membership)
            yield from self.fit()
            yield from self.leave(None)
            raise ProcessExit(0)
        except _GoneError as error:
            yield from self.leave(error)
            raise ProcessExit(1) from error

    def fit(self) -> Run:
        world, rules = self.world, self.world.rules
        self.phase = "restores"
        self.leaving = rules.Leaving(self.host, world.hosts)
        self.is_fitting = True
        world.start(self, self.listen())
        yield from self.restore()
        saved = 0  # Only one host may see what was restored.
        for call in range(1, world.steps - len(self.state) + 1):
            yield world.delay(0.2)
            if not (yield from self.ask(self.leaving.may_begin, call)):
                yield from self.leave_with_backup(saved)
            self.phase = "step"
            if world.bug == ("ends", self.host) and call == 2:
                return
            if world.bug == ("stuck", self.host) and call == 2:
                yield 2e6
            yield world.delay(world.step_seconds)
            yield from self.collective(STEP, self.state)
            self.state = (*self.state, self.membership)
            if len(self.state) % 2 == 0:
                yield from self.save()
                saved = len(self.state)
                # The end of an epoch, whose metrics are of all hosts.
                yield from self.collective(_GATHER, None)
        # The training is complete: what begins after it does not wait for this host.
        yield from self.set_once(f"begun/{self.host}", str(self.leaving.hold()))
        yield from self.finish_writing()
        self.is_fitting = False
        self.phase = "is complete"
        require(len(self.state) == world.steps, "a batch is lost at the end")

    # The meeting, over connections.

    def lead(self) -> Run:
        world = self.world
        world.meetings += 1
        self.membership = f"run {world.meetings}"
        names = [f"host {host}" for host in range(world.hosts)]
        meeting = world.rules.Meeting(names, {}, world.now + MEET_SECONDS)
        self.is_listening = True
        latest: dict[int, Connection] = {}
        lost: set[Connection] = set()
        world.fire(world.listening)
        while (answer := meeting.decide(world.now)) is None:
            if not self.inbox:
                yield self.signal, MEET_SECONDS
                continue
            event, *content = self.inbox.pop(0)
            if event == "arrives":
                latest[content[0]] = content[2]
                before = meeting.arrive(*content, world.now)
                if before is not None:
                    world.cut(before)
            else:
                lost.add(content[0])
                meeting.lose(*content)
        if not answer:
            arrived = meeting.arrived
            require(set(arrived) == set(range(1, world.hosts)), "a meeting ends without a host")
            are_there = all(latest[h] is c and c not in lost for h, c in arrived.items())
            require(are_there, "a meeting ends with a process that is known to have gone")
        yield world.delay(0.3)
        for connection in meeting.arrived.values():
            if not connection.is_broken:
                arguments = 0, connection.ends[0].host, self.answer, connection, answer
                world.after(world.delay(0.2), world.deliver, *arguments)
        self.is_listening = False
        if answer:
            raise ProcessExit(1)

    def answer(self, connection: Connection, problem: str) -> None:
        if not connection.is_broken:
            connection.answer = problem, self.membership
            self.world.fire(connection.signal)

    def follow(self) -> Run:
        world, rules = self.world, self.world.rules
        deadline = world.now + MEET_SECONDS
        while rules.may_keep_asking(world.now, deadline, False):
            yield world.delay(0.2)
            chief = world.workers.get((0, self.job))
            if chief is None or chief.is_dead or not chief.is_listening:
                yield world.listening, min(20.0, max(0.2, deadline - world.now))
                continue
            connection = Connection((self, chief))
            for end in connection.ends:
                end.connections.append(connection)
            world.after(world.delay(0.2), world.deliver, self.host, 0, self.come, connection)
            while connection.answer is None and not connection.is_broken:
                if not rules.may_keep_asking(world.now, deadline, True):
                    raise ProcessExit(1)
                yield connection.signal, max(0.01, deadline + rules.PATIENCE - world.now)
            if connection.answer is not None:
                problem, self.membership = connection.answer
                if problem:
                    raise ProcessExit(1)
                return
        raise ProcessExit(1)

    def come(self, connection: Connection) -> None:
        chief = connection.ends[1]
        if not (connection.is_broken or chief.is_dead):
            settings = {"version": 2} if self.world.bug == ("setting", self.host) else {}
            chief.inbox.append(("arrives", self.host, settings, connection))
            self.world.fire(chief.signal)

    # TensorFlow's servers, store and collectives.

    def start_servers(self) -> Run:
        world = self.world
        deadline = world.now + _START_SECONDS
        if self.host == 0:
            world.clusters[self.job] = Cluster(self)
            world.fire(world.serving)
        while world.now < deadline:
            cluster = world.clusters.get(self.job)
            if cluster is None or cluster.chief.is_dead or cluster.is_started:
                yield world.serving, min(20.0, max(0.1, deadline - world.now))
                continue
            yield from self.cross(self.host, 0)
            cluster.members[self.host] = self
            self.cluster = cluster
            if len(cluster.members) == world.hosts:
                cluster.is_started = True
                world.fire(cluster.signals["started"])
            elif not cluster.is_started:
                yield cluster.signals["started"], max(0.1, deadline - world.now)
            yield from self.cross(0, self.host)
            if cluster.is_broken:
                raise _GoneError
            if cluster.is_started:
                return
        raise ProcessExit(1)

    @property
    def store(self) -> Cluster:
        assert self.cluster is not None
        if self.cluster.chief.is_dead or self.cluster.is_broken or self.is_cut_off:
            raise _GoneError
        return self.cluster

    def cross(self, sender: int, receiver: int) -> Run:
        """Waits while nothing passes from one host to another, or until TensorFlow gives up."""
        while (rest := self.world.blocked(sender, receiver)) > 0.0:
            yield min(rest, 5.0)
            if self.cluster is not None:
                _ = self.store

    def get(self, key: str, timeout: float) -> Run:
        """Reads a key; None from a chief that is stopped or cut off, as TensorFlow has no error."""
        assert self.cluster is not None
        chief, blocked = self.cluster.chief, self.world.blocked
        yield self.world.delay(0.05)
        until = self.world.now + timeout
        while not chief.is_dead:
            is_silent = chief.is_stopped or max(blocked(self.host, 0), blocked(0, self.host)) > 0.0
            if key in self.cluster.values and not is_silent:
                return self.cluster.values[key]
            if self.world.now >= until:
                return None
            rest = max(0.01, until - self.world.now)
            yield self.cluster.signals[key], min(rest, 5.0) if is_silent else rest
        raise _GoneError

    def set_once(self, key: str, value: Any) -> Run:
        yield self.world.delay(0.05)
        yield from self.cross(self.host, 0)
        store = self.store
        if store.chief.is_stopped:
            yield HEARTBEAT_SECONDS
            if self.store.chief.is_stopped:
                raise _GoneError
        if key not in store.values:
            store.values[key] = value
            self.world.fire(store.signals[key])
        yield from self.cross(0, self.host)

    def collective(self, kind: dict[str, Any], value: Any) -> Run:
        """Sums, or gathers, once all hosts have come to it."""
        world, cluster = self.world, self.store
        number = yield from self.number(kind)
        turn = self.turns[kind["what"]] = self.turns.get(kind["what"], -1) + 1
        key = number, turn
        yield from self.cross(self.host, ALL)
        slot = cluster.slots[key]
        slot[self.host] = kind["what"], value, self.membership
        if len(slot) == world.hosts:
            names, states, memberships = map(set, zip(*slot.values(), strict=True))
            require(len(memberships) == 1, "two memberships run a collective together")
            require(len(names) == 1, "different collectives have one number")
            if kind is STEP:
                differ = world.bug is not None and world.bug[0] in ("setting", "program")
                require(not differ, "hosts that differ run a step together")
                require(len(states) == 1, "a batch is lost or counted twice")
            world.fire(cluster.signals[key])
            yield world.delay(0.1)
        else:
            yield from self.wait(lambda: len(slot) == world.hosts, cluster.signals[key], 4.0)
        yield from self.cross(ALL, self.host)
        return [slot[host][1] for host in range(world.hosts)]

    def wait(self, ready: Callable[[], bool], signal: list[Any], news_after: float) -> Run:
        """Waits for other hosts, as `Session` and `Watch` do."""
        world = self.world
        start = world.now
        wait = world.rules.Wait(COLLECTIVE_SECONDS)
        while not ready():
            waited = world.now - start
            yield signal, 5.0 if waited < 15.0 else 20.0
            yield from self.cross(0, self.host)
            if ready():
                return
            store = self.store
            world.check_wait(self, start)
            if world.now - start < news_after:
                continue
            told: list[str] = []
            news = functools.partial(store.values.get, "failed"), self.mismatch
            reason = wait.look(world.now - start, *news, str, str, told.append)
            for own in told:
                yield from self.set_once("failed", own)
            if reason is not None:
                raise _GoneError

    def wait_for(self, key: str) -> Run:
        yield from self.wait(lambda: key in self.store.values, self.store.signals[key], 0.0)

    def mismatch(self) -> str | None:
        for host in self.kinds.others if self.host == 0 else (0,):
            self.hear(host)
            if self.kinds.stray(host) is not None:
                return f"host {host} differs"
        return None

    def hear(self, host: int) -> None:
        while kind := self.store.values.get(f"announced/{host}/{len(self.kinds.heard[host])}"):
            self.kinds.hear(host, kind)

    def number(self, kind: dict[str, Any]) -> Run:
        """Agrees on the number of a kind, as `Session` does."""
        if kind is STEP and self.world.bug == ("program", self.host):
            kind = {"what": "another step"}
        name = self.kinds.name(kind)
        if name in self.kinds.numbers:
            return self.kinds.numbers[name]
        place = self.kinds.come_to(kind)
        if place is not None:
            yield from self.set_once(f"announced/{self.host}/{place}", self.kinds.own[name])
        key = f"agreed/{name}"
        if self.host == 0:
            while (late := self.kinds.late(name)) is not None:
                self.hear(late)
                if self.kinds.late(name) == late:
                    yield from self.wait_for(f"announced/{late}/{len(self.kinds.heard[late])}")
            number = self.kinds.give_number(name, 1)
            keys = {f"announced/{h}/{place}" for h in range(self.world.hosts)}
            have_come = keys <= self.store.values.keys()
            require(have_come, "a collective has a number before all have come to it")
            yield from self.set_once(key, str(number))
        else:
            yield from self.wait_for(key)
            number = int(self.store.values[key])
        self.kinds.numbers[name] = number
        return number

    def leave(self, error: Exception | None) -> Run:
        """Tells the other hosts that this program ends, as `Session.leave` does."""
        self.phase = "leaves"
        with contextlib.suppress(_GoneError):  # Else TensorFlow misses it.
            yield from self.set_once(f"left/{self.host}", "")
            if error is None:
                yield from self.set_once("failed", f"host {self.host} has come to its end")
                for host in range(1, self.world.hosts) if self.host == 0 else ():
                    yield from self.get(f"left/{host}", 8.0)
            self.has_left = error is None

    def restore(self) -> Run:
        world, rules = self.world, self.world.rules
        self.turns: dict[str, int] = {}
        if self.host == 0:
            yield from self.operate(rules.take_folder(), (0, 0))
            world.takers.add(self.membership)
        yield from self.collective(_GATHER, None)  # The chief has taken the folder.
        yield world.delay(0.1)
        # A host's file system may not be up to date.
        own = world.disk.newest(world.is_stale and world.draw() < 0.5)
        positions = yield from self.collective(_GATHER, own and own[0])
        choice = rules.choose(positions)
        common = [position[:2] for position in positions if position is not None]
        require(choice or not common, "a backup is there, and none is chosen")
        if choice is None:
            return
        require(choice.position[:2] >= max(common), "the chosen backup is older than the newest")
        has_it = positions[choice.source] == choice.position
        require(has_it, "the chosen backup's source does not have it")
        has_it = positions[self.host] == choice.position
        require(has_it or choice.is_sent, "a member lacks the chosen backup")
        if choice.is_sent:
            states = yield from self.collective(_GATHER, own and own[1])
            self.state = states[choice.source]
        else:
            assert own is not None
            self.state = own[1]
        if self.host == 0:
            for name in [name for name in world.disk.files if name > choice.position[:2]]:
                del world.disk.files[name]  # A new run cannot read it.

    def save(self) -> Run:
        yield from self.finish_writing()
        if self.host == 0:
            self.writing = True
            self.world.start(self, self.write((0, len(self.state))))

    def write(self, name: tuple[int, int]) -> Run:
        world, files = self.world, self.world.disk.files
        if not (yield from self.operate(world.rules.add_backup(self.membership), name)):
            self.is_touched = True
            raise ProcessExit(1)  # Another job has the folder.
        for old in sorted(files)[:-2]:
            del files[old]
        self.writing = False
        world.fire(self.wakeup)

    def operate(self, operations: protocol.Operations, name: tuple[int, int]) -> Run:
        """Does what the rules of a folder say, with time between any two operations."""
        world, disk = self.world, self.world.disk
        result: Any = None
        while True:
            try:
                operation = operations.send(result)
            except StopIteration as end:
                return end.value
            yield world.delay(world.slowness if operation == "fill" else world.disk_delay)
            result = None
            if operation == "enter name":
                disk.owner = self.membership
            elif operation == "remove unfinished":
                disk.writing.clear()
            elif operation == "create":
                disk.writing.add(self.membership)
            elif operation == "read name":
                result = disk.owner
            elif operation == "remove own":
                disk.writing.discard(self.membership)
            elif operation == "fill" and self.is_full:
                disk.writing.discard(self.membership)
                raise ProcessExit(1)
            elif operation == "publish":
                result = self.membership in disk.writing
                if result:
                    # A new owner that has not yet removed files looks for backups later.
                    has_it = disk.owner == self.membership or disk.owner not in world.takers
                    require(has_it, "a backup of a run that has lost its folder becomes visible")
                    disk.writing.discard(self.membership)
                    disk.files[name] = self.membership, self.state[: name[1]], True

    def finish_writing(self) -> Run:
        while self.writing:
            yield self.wakeup, 1000.0

    # Leaving, as `keras.preemption` does.

    def ask(self, question: Callable[[int], bool | None], calls: int) -> Run:
        if self.is_signalled:
            self.leaving.hold()
        if question(calls) is None and self.is_signalled:
            yield from self.set_once("notice", "")
        while (answer := question(calls)) is None:
            if self.is_decided:
                raise ProcessExit(143)
            yield self.wakeup, 1000.0
        return answer

    def listen(self) -> Run:
        world = self.world
        try:
            with contextlib.suppress(_GoneError):  # The others cannot be asked.
                while (yield from self.get("notice", 60.0)) is None:
                    if not self.is_fitting:
                        return
                begun = self.leaving.hold()
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
                own = self.leaving.decision
                own_text = protocol.NO_STEP if own is None else str(own)
                require(decision in (None, own_text), "hosts come to different decisions")
        finally:
            self.is_decided = True
            world.fire(self.wakeup)

    def leave_with_backup(self, saved: int) -> Run:
        world = self.world
        self.phase = "leaves with a backup"
        begun = [one.leaving._begun[one.host] for one in world.memberships[self.membership]]
        require(max(begun) <= self.leaving.decision, "hosts come to different decisions")
        if saved != len(self.state):
            yield from self.save()
        yield from self.finish_writing()
        yield from self.collective(_GATHER, None)  # The chief has written.
        is_there = not world.disk.lacks_backup(self, self)
        require(is_there, "a host leaves after a backup that is not there")
        yield from self.leave(None)
        raise ProcessExit(protocol.RESTART_STATUS)

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
        with contextlib.suppress(_GoneError):
            yield from self.set_once("notice", "")
