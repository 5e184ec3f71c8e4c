"""The cluster's rules on made-up schedules of faults, and each rule broken once."""

from __future__ import annotations

import collections
import os
import re
import types
from typing import Any

import simulator
from absl.testing import absltest, parameterized

from tfcdo.cluster import protocol

_SCHEDULES = int(os.environ.get("TFCDO_SCHEDULES", "20000"))


class _EarlyMeeting(protocol.Meeting):
    def decide(self, now: float) -> str | None:
        return "" if len(self.missing) < 2 else super().decide(now)


class _MeetingWithTheDead(protocol.Meeting):
    def lose(self, connection: Any) -> None:
        pass


class _MeetingWithTheFirst(protocol.Meeting):
    def arrive(self, host: int, settings: Any, connection: Any, now: float) -> Any:
        if host in self.arrived:
            return None
        return super().arrive(host, settings, connection, now)


class _MeetingOfAnybody(protocol.Meeting):
    def arrive(self, host: int, settings: Any, connection: Any, now: float) -> Any:
        return super().arrive(host, self._settings, connection, now)


class _MeetingWithoutEnd(protocol.Meeting):
    def decide(self, now: float) -> str | None:
        return super().decide(0.0)


class _NumberAtOnce(protocol.Kinds):
    def late(self, name: str) -> int | None:
        return None


class _OneNumber(protocol.Kinds):
    def give_number(self, name: str, size: int) -> int:
        return self.numbers.setdefault(name, 0)


class _NeverStray(protocol.Kinds):
    def stray(self, host: int) -> Any:
        return None


class _WaitWithoutNews(protocol.Wait):
    def look(self, waited: float, failure: Any, mismatch: Any, line: Any) -> Any:
        return super().look(waited, lambda: None, mismatch, line)


class _WaitWithoutEnd(protocol.Wait):
    def __init__(self, timeout: float, news_after: float = 0.0) -> None:
        super().__init__(1e9, news_after)


class _LeaveAfterTheFirst(protocol.Leaving):
    def proposal(self, waited: float) -> str | None:
        if self.unheard:
            return super().proposal(waited)
        return str(min(begun for begun in self._begun if begun is not None))


class _EachDecides(protocol.Leaving):
    """As before protocol.py: who has waited for too long leaves, and others go on."""

    def proposal(self, waited: float) -> str | None:
        self._own = super().proposal(waited)
        return self._own

    def decide(self, decision: str | None) -> None:
        super().decide(decision and self._own)


class _BeginAfterTheNotice(protocol.Leaving):
    def may_begin(self, call: int) -> bool | None:
        self._begun[self._host] = call
        return True


class _AnswerWithoutEnd(protocol.Leaving):
    def proposal(self, waited: float) -> str | None:
        return super().proposal(0.0)


def _own_backup(found: Any) -> Any:
    choice = protocol.choose(found)
    return choice and protocol.Choice(choice.position, choice.source, False)


def _oldest_backup(found: Any) -> Any:
    oldest = min((position for position in found if position), default=None)
    return oldest and protocol.Choice(oldest, found.index(oldest), True)


def _first_source(found: Any) -> Any:
    choice = protocol.choose(found)
    return choice and protocol.Choice(choice.position, 0, choice.is_sent)


def _take_in_the_other_order() -> protocol.Operations:
    yield "remove unfinished"
    yield "enter name"
    return True


def _take_without_removing() -> protocol.Operations:
    yield "enter name"
    return True


def _look_before_creating(run: str) -> protocol.Operations:
    """As before protocol.py: the owner is checked, then a file is written."""
    if (yield "read name") != run:
        return False
    yield "create"
    yield "fill"
    return bool((yield "publish"))


class _BlameTheFirstSeen(protocol.Supervision):
    """As before protocol.py: the first end that is seen."""

    def _blamed(self) -> Any:
        return self._failures[0] if self._failures else None


class _NoKill(protocol.Supervision):
    def _kill(self) -> Any:
        self.deadline = None
        return []


class _LetOthersRun(protocol.Supervision):
    def _stop(self, number: int, now: float) -> Any:
        self.deadline = None
        return []


# The rule that is broken, and what the simulator says.
_MUTANTS = {
    "the meeting ends without a host": ({"Meeting": _EarlyMeeting}, "without a host"),
    "a host that has ended counts": ({"Meeting": _MeetingWithTheDead}, "known to have gone"),
    "a restarted host does not count": ({"Meeting": _MeetingWithTheFirst}, "known to have gone"),
    "settings are not compared": ({"Meeting": _MeetingOfAnybody}, "hosts that differ run a step"),
    "the meeting has no time-out": ({"Meeting": _MeetingWithoutEnd}, "hangs"),
    "a number before all have come": ({"Kinds": _NumberAtOnce}, "before all have come"),
    "one number for all": ({"Kinds": _OneNumber}, "different collectives have one number|twice"),
    "other programs are not noticed": ({"Kinds": _NeverStray}, "runs another program"),
    "failures are not heard": ({"Wait": _WaitWithoutNews}, "waits for one that has left"),
    "waits have no time-out": ({"Wait": _WaitWithoutEnd}, "longer than the time-out"),
    "leaving after the first one's step": (
        {"Leaving": _LeaveAfterTheFirst},
        "different decisions",
    ),
    "each host decides alone": ({"Leaving": _EachDecides}, "different decisions"),
    "a step begins after the notice": ({"Leaving": _BeginAfterTheNotice}, "different decisions"),
    "no time-out of the notice": (
        {"Leaving": _AnswerWithoutEnd},
        "does not answer|one that has left",
    ),
    "nobody waits for the backup": (
        {"may_end": lambda written: True},
        "a backup that is not there",
    ),
    "each restores its own backup": ({"choose": _own_backup}, "lacks the chosen backup"),
    "the oldest backup": ({"choose": _oldest_backup}, "older than the newest"),
    "the first host sends it": ({"choose": _first_source}, "source does not have it"),
    "removed, then taken": ({"take_folder": _take_in_the_other_order}, "has lost its folder"),
    "taken, not removed": ({"take_folder": _take_without_removing}, "has lost its folder"),
    "looked, then written": ({"add_backup": _look_before_creating}, "has lost its folder"),
    "the first that is seen is blamed": ({"Supervision": _BlameTheFirstSeen}, "survivor"),
    "nothing is killed": ({"Supervision": _NoKill}, "hangs"),
    "others are not ended": ({"Supervision": _LetOthersRun}, "hangs|longer"),
}


# Rare ones: schedules are tried from these on.
_FIRST = {
    "a host that has ended counts": 760,
    "a restarted host does not count": 6_000,
    "each host decides alone": 2_550,
    "a step begins after the notice": 765,
    "no time-out of the notice": 175,
    "removed, then taken": 3_530,
    "taken, not removed": 210,
    "looked, then written": 7_475,
    "nothing is killed": 5_420,
}


class SimulatorTest(parameterized.TestCase):
    def test_all_invariants_hold_with_each_fault_in_each_part_of_a_run(self):
        seen, count = collections.defaultdict(set), 0
        for world in simulator.schedules(0, _SCHEDULES):
            count += 1
            for line in world.log:
                kind, phase = re.split(r"^[\d.]+ ([a-z ]+) host \d \(|\)$", line)[1:3]
                seen[kind].add(phase)
        self.assertEqual(count, _SCHEDULES)
        self.assertEqual({*seen}, {*simulator.FAULTS})
        for kind, phases in seen.items():
            self.assertContainsSubset({"meets", "starts servers", "restores", "step"}, phases, kind)

    def test_a_network_that_lets_one_direction_through(self):
        world = simulator.World(0)
        world.now = 5.0
        world.ways = {(1, simulator.ALL): 12.0}
        blocked = {way: world.blocked(*way) > 0.0 for way in ((1, 0), (0, 1), (1, 2), (2, 0))}
        self.assertEqual(blocked, {(1, 0): True, (0, 1): False, (1, 2): True, (2, 0): False})
        world.now = 13.0
        self.assertLessEqual(world.blocked(1, 0), 0.0)

    def test_a_seed_replays_its_schedule(self):
        first, second = (next(simulator.schedules(82, 1)) for _ in range(2))
        self.assertEqual((first.now, first.events), (second.now, second.events))

    @parameterized.named_parameters((name, name, *mutant) for name, mutant in _MUTANTS.items())
    def test_a_broken_rule_is_found(self, name: str, broken: dict[str, Any], message: str):
        rules = types.SimpleNamespace(**{**vars(protocol), **broken})
        with self.assertRaisesRegex(simulator.BrokenError, message):
            for _ in simulator.schedules(_FIRST.get(name, 0), 20_000, rules):
                pass


if __name__ == "__main__":
    absltest.main()
