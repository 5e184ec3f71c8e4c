"""Hosts that are slow, killed, asked or wrong, and tfcdo itself broken: all end, and say why."""

from __future__ import annotations

import json
import pathlib
import re
import tempfile
from concurrent import futures
from unittest import mock

import clusters
import tensorflow as tf
from absl.testing import parameterized

from tfcdo.doctor import blackbox

_TIMEOUT = 180.0
# 8 steps add 1 + 2 + 3 + 4, on 2 x 2 replicas.
_CORRECT = "values [80.0]"
_HOST_1 = r"host 1 \(/job:worker/task:1 at 127.0.0.1:\d+\)"


# What goes wrong on host 1, and what host 0 then says.
_FAULTS = {
    # `host_unlike` has all settings.
    "another setting": "not set up alike: cross_device_ops: .* on host 0 .* on host 1",
    "another shape": r"differ: values, element 0 of 1: float32\[3\d\] on host \d, float32\[3\d\]",
    "unlike keys": r"timed out: pack 1 of 2, time 1, of the all-reduce .* has waited 1\d s",
    "sleeps": r"timed out: pack . of 2, time 5, .* for " + _HOST_1 + ", which is busy or",
    "ends": _HOST_1 + " has come to the end of its program before others: all hosts must make",
    "absent": f"RendezvousError: timed out waiting for {_HOST_1} to start",
}


class BreakingTest(tf.test.TestCase):
    def test_all_end_with_the_reason(self):
        """One test, as each of pytest's processes would start all hosts."""
        # They mostly wait, so all wait at once.
        with futures.ThreadPoolExecutor(max_workers=6) as pool:
            runs = {
                fault: pool.submit(clusters.run, 2, "faulty_host", [fault], _TIMEOUT)
                for fault in (*_FAULTS, "late")
            }
        for fault, run in runs.items():
            with self.subTest(fault):
                outcomes = run.result()
                for outcome in outcomes:
                    self.assertIsNotNone(outcome.returncode, f"it hangs: {outcome.output}")
                if fault in _FAULTS:
                    self.check_fault(_FAULTS[fault], *outcomes)
                    continue
                for outcome in outcomes:
                    self.assertEqual(0, outcome.returncode, outcome.output)
                    self.assertIn(_CORRECT, outcome.output)

    def check_fault(self, message, outcome, faulty):
        self.assertNotEqual(0, outcome.returncode, outcome.output)
        self.assertRegex(outcome.output.replace("\n", " "), message, faulty.output)
        self.assertNotIn("values [", faulty.output)


class SlowHostsTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        variables = mock.patch.dict("os.environ", {"TFCDO_CACHE_DIR": self.folder.name})
        variables.start()
        self.addCleanup(variables.stop)

    def boxes(self):
        files = sorted(pathlib.Path(self.folder.name).glob("blackbox/*.json"))
        return blackbox.read(files) if files else []

    # 200 ms late in each of 24 steps, so that it is named within 20 of them.
    @parameterized.parameters(("data", 1), ("backward", 4))
    def test_a_slow_host_is_named(self, fault, steps_per_execution):
        pattern = _HOST_1 + r" enters \d+ ms after the others in (\d+) of (\d+) steps: \d+ % of a"
        # A busy machine also delays the other host; only more attempts tell.
        for _ in range(6):
            outcomes = clusters.run(2, "slow_host", [fault, str(steps_per_execution)], _TIMEOUT)
            if re.search(pattern, outcomes[0].output):
                break
        for outcome in outcomes:
            self.assertEqual(0, outcome.returncode, outcome.output)
            [line] = re.findall("^delays (.*)$", outcome.output, re.MULTILINE)
            fast, slow = json.loads(line)
            self.assertEqual((0, 1), (fast["host"], slow["host"]))
            # Wide limits: a busy machine delays both hosts.
            self.assertLess(fast["seconds"], 0.5 * slow["seconds"])
            self.assertGreaterEqual(slow["late_steps"], 0.5 * slow["steps"])
            self.assertGreater(slow["step_seconds"], slow["seconds"])
        chief, other = outcomes
        self.assertLen(re.findall(pattern, chief.output), 1, chief.output)
        self.assertNotIn("after the others", other.output)
        self.assertEmpty(self.boxes())

    def test_sigusr1_writes_black_boxes_while_hosts_wait(self):
        outcomes = clusters.run(2, "slow_host", ["signal"], _TIMEOUT)
        for outcome in outcomes:
            self.assertEqual(0, outcome.returncode, outcome.output)
            # One late step is no slow host.
            self.assertNotIn("after the others", outcome.output)
        boxes = self.boxes()
        self.assertEqual([(0, "SIGUSR1"), (1, "SIGUSR1")], [(b.host, b.reason) for b in boxes])
        # It waits in the first collective of a step, in which hosts ask each other for data.
        self.check_stopped_before(boxes, r"time 1[1-4], of the all-reduce of 1 value \(int64.*")

    def test_a_killed_host_is_named_by_the_black_box_of_the_other(self):
        alive, killed = clusters.run(2, "slow_host", ["killed"], _TIMEOUT)
        self.assertNotIn(alive.returncode, (0, None), alive.output)
        self.assertNotIn(killed.returncode, (0, None), killed.output)
        [box] = self.boxes()
        self.assertEqual(0, box.host)
        self.assertIn("UnavailableError", box.reason)
        self.assertRegex(blackbox.compare([box])[1], f"^{_HOST_1}: no file: it was killed")
        # It fetches data ahead of time, so the step in which it is killed is not known.
        self.check_stopped_before([box], r"time \d+, of the all-reduce of .*")

    def check_stopped_before(self, boxes, where):
        """Asserts that host 0 waits in a collective that host 1 did not come to."""
        *_, verdict = blackbox.compare(boxes)
        pattern = (
            rf"^Host 0 waited in pack \d of \d+, {where}, plan \w{{8}}: Host 1 stopped before it\.$"
        )
        self.assertRegex(verdict, pattern, "\n".join(blackbox.compare(boxes)))


if __name__ == "__main__":
    tf.test.main()
