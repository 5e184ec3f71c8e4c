"""Runs the rules of `tfcdo.cluster.protocol` on made-up hosts, launchers, messages and faults.

    python tests/cluster/simulator.py [--schedules 1000000] [--seed 0]

A schedule is drawn from its seed, which replays it: hosts, launchers, delays of messages, and up to
three faults, also while the job recovers from another one. Messages of one connection stay in
order; messages of others do not.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import simulated_hosts as hosts
from simulated_hosts import BrokenError, Process, require

from tfcdo.cluster import protocol

_GRACE, _LEAVE = 10.0, 30.0
_MAX_RESTARTS = 8
# Nobody may wait for longer for a process that has ended.
_SLOWEST_NEWS = 35.0
LIMIT_SECONDS = 15_000.0
# Which faults there are, each as often as it is drawn.
FAULTS = ["kill", "kill", "kill both", "stop", "notice", "notice", "cut", "one way", "damage"]
FAULTS += ["replace", "full", "end"]
# What may be wrong with one host from the start.
BUGS = ("setting", "program", "ends", "stuck", "deaf", "busy", "busy")


def rules(old: str = "", new: str = "") -> Any:
    """Returns a copy of the rules, in which a part that is there once may be another."""
    source, name = inspect.getsource(protocol), protocol.__file__
    if old:
        assert source.count(old) == 1, f"{old!r} is no longer there, or not once"
        source, name = source.replace(old, new), "a mutant"
    copy = types.ModuleType(protocol.__name__)
    exec(compile(source, name, "exec"), vars(copy))
    vars(copy)["digest"] = repr  # Names the same kinds as a hash does, sooner.
    return copy


RULES = rules()


class _Task:
    __slots__ = ("process", "run", "turn")

    def __init__(self, process: Process, run: hosts.Run) -> None:
        self.process, self.run, self.turn = process, run, 0


class Launcher(Process):
    """Starts workers of one machine, or of all, and starts them again."""

    def __init__(self, world: World, workers: list[int], job: int) -> None:
        super().__init__(world, -1, job)
        self.workers = workers
        self.result: protocol.Result | None = None
        self.processes: list[Process] = []

    def main(self) -> hosts.Run:
        world, rules = self.world, self.world.rules
        failures = 0
        while True:
            begin = world.now
            self.inbox.clear()
            self.processes = [world.start_worker(host, self) for host in self.workers]
            supervision = rules.Supervision([*map(str, self.workers)], _GRACE, _LEAVE)
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
                    if isinstance(action, rules.Send):
                        self.processes[action.worker].take_signal(action.number)
            self.result = result = supervision.result()
            world.check_result(self, result)
            if not result.status or result.signal:
                break
            if not (result.status == protocol.RESTART_STATUS and world.now - begin >= 5.0):
                failures += 1
                if failures > (_MAX_RESTARTS if world.bug is None else 1):
                    break
            yield world.delay(0.5)
        world.open -= 1
        raise hosts.ProcessExit(result.status)


class World:
    """One schedule."""

    def __init__(self, seed: int, rules: Any = RULES) -> None:
        self.rules = rules
        self.draw = draw = random.Random(seed).random
        # Until when nothing passes from one host to another, or to and from all others.
        self.ways: dict[tuple[int, int], float] = {}
        self.now = 0.0
        self.events = 0
        self._sequence = self.meetings = 0
        self._heap: list[Any] = []
        self.hosts = 2 + int(draw() * 2.3)
        self.is_one_machine = draw() < 0.5
        self.steps = 3 + int(draw() * 3)
        self.is_stale = draw() < 0.4
        self.late = 1 + int(draw() * (self.hosts - 1)) if draw() < 0.3 else None
        self.step_seconds = (0.1, 1.0, 4.0)[int(draw() * 3)]
        self.disk_delay = 3.0 if draw() < 0.2 else 0.05
        self.slowness = 60.0 if draw() < 0.2 else 0.5
        drawn = int(draw() * 30)
        self.bug = None
        if drawn < len(BUGS) and (BUGS[drawn] not in ("stuck", "deaf") or self.is_one_machine):
            self.bug = BUGS[drawn], 1 + int(draw() * (self.hosts - 1))
        self.states: set[tuple[str, ...]] = set()  # All hosts' states, when there was a fault.
        self.memberships: dict[str, list[Process]] = {}
        count = int(draw() * 3.99)
        # After some number of events: most in a first run, some while the job recovers.
        moments = sorted(int(draw() * (60 if draw() < 0.3 else 300)) for _ in range(count))
        self._faults = [(moment, FAULTS[int(draw() * len(FAULTS))]) for moment in moments]
        self.disk = hosts.Folder()
        self.takers: set[str] = set()  # The runs that have taken the folder, in whole.
        self.clusters: dict[int, hosts.Cluster] = {}
        self.workers: dict[tuple[int, int], Process] = {}
        self.launchers: list[Launcher] = []
        self.listening: list[Any] = []
        self.serving: list[Any] = []
        self.log: list[str] = []
        self.job = 0

    def delay(self, most: float) -> float:
        """Draws a delay: mostly short, sometimes as long as it can be, or longer."""
        drawn = self.draw()
        return most * drawn if drawn < 0.97 else most * 4.0

    def blocked(self, sender: int, receiver: int) -> float:
        """Returns for how long nothing will pass from one host to another."""
        if not self.ways or sender == receiver:
            return 0.0
        ways = (sender, hosts.ALL), (hosts.ALL, receiver)
        return max(self.ways.get(way, 0.0) for way in ways) - self.now

    def deliver(self, sender: int, receiver: int, call: Callable[..., None], *content: Any) -> None:
        """Calls as soon as something passes from one host to another."""
        rest = self.blocked(sender, receiver)
        if rest > 0.0:
            self.after(rest, self.deliver, sender, receiver, call, *content)
        else:
            call(*content)

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + seconds, self._sequence, call, arguments))

    def start(self, process: Process, run: hosts.Run) -> None:
        self.after(0.0, self._resume, _Task(process, run), 0, None)

    def fire(self, signal: list[Any]) -> None:
        if signal:
            waiting, signal[:] = signal[:], []
            for task, turn in waiting:
                if task.turn == turn:
                    self.after(self.draw() * 0.05, self._resume, task, turn, True)

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
        except hosts.ProcessExit as end:
            self.end(process, end.status)
            return
        if type(effect) is tuple:
            signal, effect = effect
            signal.append((task, turn))
        self.after(effect, self._resume, task, turn, False)

    def run(self) -> None:
        """Runs the schedule; raises a `BrokenError` if an invariant does not hold."""
        self.start_job()
        heap, pop = self._heap, heapq.heappop
        faults = self._faults
        while heap:
            self.now, _, call, arguments = pop(heap)
            if self.now > self.limit:
                return self.check_end(False)
            self.events += 1
            if faults and self.events >= faults[0][0]:
                inject(self, faults.pop(0)[1])
            call(*arguments)
            if not self.open:
                break
        self.check_end(True)

    def start_job(self) -> None:
        self.job += 1
        self.ways.clear()  # These machines are others.
        self.limit = self.now + LIMIT_SECONDS
        all_hosts = list(range(self.hosts))
        groups = [all_hosts] if self.is_one_machine else [[host] for host in all_hosts]
        self.open = len(groups)
        self.launchers = [Launcher(self, group, self.job) for group in groups]
        for launcher in self.launchers:
            self.start(launcher, launcher.main())

    def start_worker(self, host: int, launcher: Launcher) -> Process:
        process = Process(self, host, launcher.job)
        process.launcher, process.index = launcher, launcher.workers.index(host)
        self.workers[host, launcher.job] = process
        self.start(process, process.main())
        return process

    def end(self, process: Process, status: int) -> None:
        """Ends a process; its launcher and the other hosts learn of it in any order."""
        if process.is_dead:
            return
        process.is_dead = True
        process.status, process.ended_at = status, self.now
        process.phase = "has ended"
        for connection in process.connections:
            self.cut(connection)
        cluster = process.cluster
        if cluster is not None and (not process.has_left or process is cluster.chief):
            most = 0.5 if self.draw() < 0.7 else hosts.HEARTBEAT_SECONDS
            self.after(self.draw() * most, self.break_up, cluster)
        if not isinstance(process, Launcher):
            # A killed process has closed its sockets before it can be waited for.
            at = self.now + (self.delay(0.1) if status == 137 else 0.0)
            self.after(at - self.now + self.delay(0.05), self._reap, process.launcher, process, at)

    def _reap(self, launcher: Launcher, process: Process, at: float) -> None:
        if not launcher.is_dead and process in launcher.processes:
            launcher.inbox.append(("end", protocol.End(process.index, process.status, at)))
            self.fire(launcher.signal)

    def break_up(self, cluster: hosts.Cluster) -> None:
        if not cluster.is_broken:
            cluster.is_broken = True
            for signal in cluster.signals.values():
                self.fire(signal)

    def cut(self, connection: hosts.Connection) -> None:
        if not connection.is_broken:
            connection.is_broken = True
            # Nothing comes from a machine that is gone, until a time-out.
            most = 30.0 if self.draw() < 0.3 else 0.2
            self.after(self.delay(most), self._lose, connection)

    def _lose(self, connection: hosts.Connection) -> None:
        self.fire(connection.signal)
        chief = connection.ends[1]
        chief.inbox.append(("loses", connection))
        self.fire(chief.signal)

    def miss(self, process: Process, cluster: hosts.Cluster) -> None:
        if process.is_stopped and not process.is_dead:
            self.break_up(cluster)

    def resume_process(self, process: Process) -> None:
        if process.is_stopped:
            process.is_stopped, process.resumed_at = False, self.now
            number = process.__dict__.pop("frozen_signal", None)
            if number is not None:
                process.take_signal(number)
            for task, turn, value in process.frozen:
                self.after(self.draw() * 0.01, self._resume, task, turn, value)
            process.frozen.clear()

    def check_result(self, launcher: Launcher, result: protocol.Result) -> None:
        processes = launcher.processes
        if result.status == protocol.RESTART_STATUS:
            has_asked = any(p.status == protocol.RESTART_STATUS for p in processes)
            require(has_asked, "nobody has asked for the restart")
            for process in processes:
                chief = process.cluster and process.cluster.chief
                if chief and chief.is_dead and chief.status == 137:
                    lacks = self.disk.lacks_backup(process, chief)
                    require(not lacks, "killed while it wrote, and said to be after a backup")
        elif result.blamed is not None:
            blamed = processes[result.blamed]
            # Later, the launcher kills those that are left.
            until = blamed.ended_at + protocol.SETTLE_SECONDS + _GRACE
            killed = [p for p in processes if p.is_victim and p.ended_at < until]
            require(not killed or blamed in killed, "a survivor is blamed")

    def check_wait(self, process: Process, start: float, host: int | None = None) -> None:
        """Nobody waits for long for a process that has ended, or runs another program."""
        assert process.cluster is not None
        start = max(start, process.resumed_at)  # Who is stopped hears no news.
        waited = self.now - start
        if waited < _SLOWEST_NEWS:
            return
        for member in process.cluster.members.values():
            if member.is_dead and host in (None, member.host):
                since = self.now - max(start, member.ended_at)
                require(since <= _SLOWEST_NEWS, "a host waits for one that has left")
        is_answered = host is None or waited <= 2 * protocol.ANSWER_SECONDS
        require(is_answered, "a host waits for one that does not answer")
        is_alike = not (self.bug and self.bug[0] == "program") or waited <= 2 * _SLOWEST_NEWS
        require(is_alike, "a host waits for one that runs another program")
        is_soon = waited <= hosts.COLLECTIVE_SECONDS + 30.0
        require(is_soon, "a host waits for longer than the time-out")

    def check_end(self, ended: bool) -> None:
        phases = [(process.host, process.phase) for process in self.workers.values()]
        ended &= all(launcher.is_dead for launcher in self.launchers)
        require(ended, f"hangs: {phases}")
        for processes in self.memberships.values():
            is_quiet = len(processes) == self.hosts and not any(p.is_touched for p in processes)
            if is_quiet and (self.bug is None or self.bug[0] == "busy"):
                statuses = {process.status for process in processes if process.is_dead}
                is_one = len(statuses) <= 1 or not statuses & {0, protocol.RESTART_STATUS}
                require(is_one, f"hosts end in different decisions: {statuses}")
        results = {launcher.result.status for launcher in self.launchers if launcher.result}
        may_fail = self.bug or "full" in str(self.log) or " end " in str(self.log)
        # A job that was replaced may take its folder back.
        is_complete = self.job > 1 or may_fail or not results or 0 in results
        require(is_complete, f"the job does not come to its end: {results}")


def inject(world: World, kind: str) -> None:
    """Makes a fault."""
    draw = world.draw
    alive = [p for (_, job), p in world.workers.items() if job == world.job and not p.is_dead]
    if not alive:
        return
    world.states.add(tuple(process.phase for process in alive))
    process = alive[int(draw() * len(alive))]
    if not (kind == "damage" or (kind == "notice" and process.is_fitting)):
        for touched in alive if kind in ("kill both", "replace", "end") else [process]:
            touched.is_touched = True
    world.log.append(f"{world.now:.2f} {kind} host {process.host} ({process.phase})")
    if kind in ("kill", "kill both"):
        for victim in alive[:2] if kind == "kill both" else [process]:
            victim.is_victim = True
            world.end(victim, 137)
    elif kind == "stop":
        process.is_stopped = True
        if process.cluster is not None:
            world.after(hosts.HEARTBEAT_SECONDS, world.miss, process, process.cluster)
        world.after(world.delay(40.0), world.resume_process, process)
    elif kind == "notice":
        process.take_signal(15)
    elif kind == "cut":
        for connection in process.connections:
            world.cut(connection)
    elif kind == "one way":
        _cut_one_way(world, process, alive)
    elif kind == "damage" and world.disk.files:
        name = max(world.disk.files)
        run, state, _ = world.disk.files[name]
        world.disk.files[name] = run, state, False
    elif kind == "full":
        process.is_full = True
    elif kind == "end":
        for launcher in world.launchers:
            launcher.inbox.append(("ask", 15))
            world.fire(launcher.signal)
    elif kind == "replace":
        # The machines cannot be reached any more, and the job is started elsewhere.
        for launcher in world.launchers:
            launcher.is_dead = True
        for old in alive:
            for connection in old.connections:
                world.cut(connection)
            if old.cluster is not None:
                world.after(draw() * hosts.HEARTBEAT_SECONDS, world.break_up, old.cluster)
        world.start_job()


def _cut_one_way(world: World, process: Process, everyone: list[Process]) -> None:
    """Lets nothing out of a host, or nothing in, until the network is mended."""
    host = process.host
    is_out = world.draw() < 0.5
    way = (host, hosts.ALL) if is_out else (hosts.ALL, host)
    world.ways[way] = world.now + world.delay(40.0)
    unanswered = [p for p in everyone if p.host] if is_out and not host else [process]

    def notice() -> None:
        if world.blocked(*way) <= 0.0:
            return
        if is_out != (host == 0):  # The chief gets no heartbeats; else a host gets no answers.
            for cluster in {id(p.cluster): p.cluster for p in everyone if p.cluster}.values():
                world.break_up(cluster)
        else:
            for other in unanswered:
                other.is_cut_off = other.cluster is not None

    world.after(hosts.HEARTBEAT_SECONDS, notice)


def schedules(first: int, count: int, rules: Any = RULES) -> Iterator[World]:
    """Runs schedules; raises a `BrokenError` that names the seed."""
    for seed in range(first, first + count):
        world = World(seed, rules)
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
    states: set[tuple[str, ...]] = set()
    for number, world in enumerate(schedules(arguments.seed, arguments.schedules), 1):
        events += world.events
        states |= world.states
        if number % 10_000 == 0 or number == arguments.schedules:
            counts = f"{number:,} schedules, {events:,} events, faults in {len(states):,} states"
            print(f"{counts} of hosts: all invariants hold", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
