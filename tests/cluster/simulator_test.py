"""The cluster's rules on made-up schedules of faults, and each rule broken once."""

from __future__ import annotations

import collections
import os
import re

import simulator
from absl.testing import absltest, parameterized

_SCHEDULES = int(os.environ.get("TFCDO_SCHEDULES", "20000"))


# The rule that is broken: what it says, what it is to say, and what the simulator says then; rare
# ones are found after the schedule that comes last.
_MUTANTS = {
    "the meeting ends without a host": (
        "for host in range(1, len(self._names))",
        "for host in range(2, len(self._names))",
        "without a host",
    ),
    "a host that has ended counts": (
        "if other != connection",
        "if True",
        "known to have gone",
        760,
    ),
    "a restarted host does not count": (
        "before = self.arrived.get(host)",
        "before = None\n        if host in self.arrived:\n            return None",
        "known to have gone",
        6_000,
    ),
    "settings are not compared": (
        "if not self._problem and dict(settings) != self._settings",
        "if False",
        "hosts that differ run a step",
    ),
    "the meeting has no time-out": (" and now <= self._deadline", "", "hangs"),
    "a number before all have come": (
        "if name not in self.heard[host]",
        "if False",
        "before all have come",
    ),
    "one number for all": (
        "self._next_number += size",
        "pass",
        "different collectives have one number|twice",
    ),
    "other programs are not noticed": (
        "if strange else None",
        "if False else None",
        "runs another program",
    ),
    "failures are not heard": (
        "failure() if waited >= self._news_after else None",
        "None",
        "waits for one that has left",
    ),
    "waits have no time-out": ("if waited >= self._timeout", "if False", "than the time-out"),
    "leaving after the first one's step": ("str(max(begun", "str(min(begun", "different decisions"),
    "each host decides alone": (
        "self.is_off = decision in",
        "decision = decision and self.proposal(1e9)\n        self.is_off = decision in",
        "different decisions",
        2550,
    ),
    "a step begins after the notice": (
        "if not self._is_held:\n            self._begun",
        "if True:\n            self._begun",
        "different decisions",
        765,
    ),
    "no time-out of the notice": (
        "NO_STEP if waited >= ANSWER_SECONDS else None",
        "None",
        "does not answer|one that has left",
        175,
    ),
    "nobody waits for the backup": ("all(written)", "True", "a backup that is not there"),
    "each restores its own backup": (
        "any(own != newest for own in found)",
        "False",
        "lacks the chosen backup",
    ),
    "the oldest backup": ("newest = max(", "newest = min(", "older than the newest"),
    "the first host sends it": ("found.index(newest)", "0", "source does not have it"),
    "removed, then taken": (
        'yield "enter name"\n    yield "remove unfinished"',
        'yield "remove unfinished"\n    yield "enter name"',
        "has lost its folder",
        3530,
    ),
    "taken, not removed": ('    yield "remove unfinished"\n', "", "has lost its folder", 210),
    "looked, then written": (
        'yield "create"\n    owner = yield "read name"',
        'owner = yield "read name"\n    yield "create"',
        "has lost its folder",
        7_475,
    ),
    "the first that is seen is blamed": (
        "key=lambda end: (end.status != _KILLED, end.at)",
        "key=lambda end: 0",
        "survivor",
    ),
    "nothing is killed": ("workers = tuple(sorted(self.running))", "workers = ()", "hangs", 5420),
    "others are not ended": (
        "return [Send(w, sent) for w in sorted(self.running)",
        "self.deadline = None\n        return [Send(w, sent) for w in ()",
        "hangs|longer",
    ),
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

    @parameterized.named_parameters((name, *mutant) for name, mutant in _MUTANTS.items())
    def test_a_broken_rule_is_found(self, old: str, new: str, message: str, first: int = 0):
        with self.assertRaisesRegex(simulator.BrokenError, message):
            for _ in simulator.schedules(first, 20_000, simulator.rules(old, new)):
                pass


if __name__ == "__main__":
    absltest.main()
