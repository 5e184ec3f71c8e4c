"""The cluster's rules on made-up schedules of faults, and each rule broken once."""

import collections
import os
import re

import simulator
from absl.testing import absltest, parameterized

from tfcdo.cluster import protocol

_SCHEDULES = int(os.environ.get("TFCDO_SCHEDULES", "20000"))


# A broken rule: its words, others, what the simulator says then, and a schedule soon before it.
_MUTANTS = {
    "meeting without a host": ("host in range(1, len(", "host in range(2, len(", "without a host"),
    "ended host counts": ("if other != connection", "if True", "known to have gone", 1455),
    "restart is ignored": ("[host] = connection", ".setdefault(host, connection)", "gone", 7150),
    "settings not compared": ("if not self._problem and dict", "if dict() and dict", "run a step"),
    "meeting without a time-out": (" and now <= self._deadline", "", "hangs"),
    "numbered early": ("if name not in self.heard[host]", "if False", "before all have come"),
    "one number for all": ("self._next_number += size", "pass", "have one number|twice"),
    "other programs unnoticed": ("if strange else None", "if False else None", "another program"),
    "failures not heard": ("reason = failure()", "reason = None", "waits for one that has left"),
    "waits without a time-out": ("waited >= self._timeout", "False", "than the time-out"),
    "leaving after the first one's step": ("str(max(begun", "str(min(begun", "different decisions"),
    "each host decides alone": (
        "if decision is not None and",
        "decision = decision and self.proposal(1e9)\n        if decision is not None and",
        "different decisions",
        2550,
    ),
    "step after notice": ("not self._is_held", "self.decision is None", "different decisions", 505),
    "endless notice": ("NO_STEP if waited", "None if waited", "not answer|has left", 175),
    "each restores its own": ("any(own != newest for own in found)", "False", "lacks the chosen"),
    "the oldest backup": ("newest = max(", "newest = min(", "older than the newest"),
    "the first host sends it": ("found.index(newest)", "0", "source does not have it"),
    "removed, then taken": (
        'yield "enter name"\n    yield "remove unfinished"',
        'yield "remove unfinished"\n    yield "enter name"',
        "has lost its folder",
        7770,
    ),
    "taken, not removed": ('    yield "remove unfinished"\n', "", "has lost its folder", 210),
    "looked, then written": (
        'yield "create"\n    owner = yield "read name"',
        'owner = yield "read name"\n    yield "create"',
        "has lost its folder",
        10_925,
    ),
    "the first that is seen is blamed": ("lambda end: (", "lambda end: 0 and (", "survivor"),
    "killed, and not blamed": ("end.status != _KILLED, ", "", "a survivor is blamed", 290),
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

    def test_a_seed_replays_its_schedule(self):
        first, second = (next(simulator.schedules(82, 1)) for _ in range(2))
        self.assertEqual((first.now, first.events), (second.now, second.events))

    def test_a_failure_counts_if_another_leaves_after_it(self):
        run = protocol.Supervision(workers="ab", grace=10.0, leave=30.0)
        run.end(protocol.End(0, status=1, at=0.0), 0.0)
        run.tick(protocol.SETTLE_SECONDS)
        run.end(protocol.End(1, protocol.RESTART_STATUS, at=5.0), 5.0)
        self.assertEqual((run.result().status, run.result().blamed), (1, 0))
        run = protocol.Supervision(workers="abcd", grace=10.0, leave=30.0)
        run.end(protocol.End(3, status=1, at=4.9), 4.9)
        said = run.end(protocol.End(0, protocol.RESTART_STATUS, at=5.0), 5.0)[:1]
        said += run.end(protocol.End(1, status=139, at=6.0), 6.0)
        self.assertEqual(said, ["d failed: exit status 1", "b failed: exit status 139 (SIGSEGV)"])
        self.assertEqual(["killing c"], run.tick(35.0)[:1])
        self.assertEqual([], run.end(protocol.End(2, status=137, at=35.1), 35.1))

    def test_who_asks_twice_does_not_wait_but_not_at_once(self):
        run = protocol.Supervision(workers="ab", grace=10.0, leave=30.0)
        self.assertEqual([5, 0], [len(run.ask(*one)) for one in ((15, 5.0), (1, 5.9))])
        killed = ["killing a, b", protocol.Send(0, 9), protocol.Send(1, 9)]
        self.assertEqual((killed, 143), (run.ask(2, 6.0), run.result().status))

    @parameterized.parameters((True, 8.3, 0), (False, 0.3, 1))
    def test_the_chief_that_others_follow_leaves_last(self, follows, seconds, blamed):
        run = protocol.Supervision(workers="abc", grace=10.0, leave=30.0)
        run.end(protocol.End(1, 1, 0.0, follows), 0.0)
        self.assertEqual(seconds, run.deadline)
        run.end(protocol.End(0, 3, 0.25), 0.25)
        self.assertEqual(0.55 if follows else 0.3, run.deadline)
        self.assertIn(f"{'ab'[blamed]} failed: ", str(run.end(protocol.End(2, 0, 0.26), 0.26)))
        self.assertEqual(blamed, run.result().blamed)

    def test_a_worker_is_stopped(self):
        run = protocol.Supervision(workers="ab", grace=10.0, leave=30.0)
        run.end(protocol.End(1, 1, 0.0, follows=True), 0.0)
        said = "b failed: exit status 1, because of another worker; ending the others"
        self.assertEqual(said, run.tick(protocol.SETTLE_SECONDS + protocol.LAST_SECONDS)[0])

    @parameterized.named_parameters((name, *mutant) for name, mutant in _MUTANTS.items())
    def test_a_broken_rule_is_found(self, old: str, new: str, message: str, first: int = 0):
        with self.assertRaisesRegex(simulator.BrokenError, message):
            for _ in simulator.schedules(first, 20_000, simulator.rules(old, new)):
                pass


if __name__ == "__main__":
    absltest.main()
