"""Hosts that do something wrong, and tfcdo itself broken: all end, and say why."""

from __future__ import annotations

from concurrent import futures

import clusters
import tensorflow as tf
from absl.testing import parameterized

_TIMEOUT = 120.0
# 8 steps add 1 + 2 + 3 + 4, on 2 x 2 replicas.
_RIGHT = "values [80.0]"
_HOST_1 = r"host 1 \(/job:worker/task:1 at 127.0.0.1:\d+\)"


# What goes wrong on host 1, and what host 0 then says.
_FAULTS = {
    # `host_unlike` has all settings.
    "another setting": "not set up alike: cross_device_ops: .* on host 0 .* on host 1",
    "another shape": r"differ: values, element 0 of 1: float32\[3\d\] on host \d, float32\[3\d\]",
    "unlike keys": r"timed out: pack 1 of 2, time 1, of the all-reduce .* has waited 1\d s",
    "sleeps": r"timed out: pack . of 2, time 5, .* for " + _HOST_1 + ", which is busy or",
    "ends": _HOST_1 + " has come to the end of its program before others: all hosts must make",
    "dies": "UnavailableError",
    "absent": f"RendezvousError: timed out waiting for {_HOST_1} to start",
}


class BreakingTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # They mostly wait, so all wait at once.
        pool = futures.ThreadPoolExecutor(max_workers=6)
        cls.addClassCleanup(pool.shutdown)
        cls.outcomes = {
            fault: pool.submit(clusters.run, 2, "faulty_host", [fault, where], _TIMEOUT)
            for where, faults in (("1", [*_FAULTS, "late"]), ("all", ["no collective", "nothing"]))
            for fault in faults
        }

    def outcomes_of(self, fault):
        outcomes = self.outcomes[fault].result()
        for outcome in outcomes:
            self.assertIsNotNone(outcome.returncode, f"it hangs: {outcome.output}")
        return outcomes

    @parameterized.parameters("nothing", "late")
    def test_right(self, fault):
        for outcome in self.outcomes_of(fault):
            self.assertIn(_RIGHT, outcome.output)
            self.assertEqual(0, outcome.returncode, outcome.output)

    @parameterized.parameters(*_FAULTS.items())
    def test_the_other_host_ends_with_the_reason(self, fault, message):
        outcome, faulty = self.outcomes_of(fault)
        self.assertNotEqual(0, outcome.returncode, outcome.output)
        self.assertRegex(outcome.output.replace("\n", " "), message, faulty.output)
        self.assertNotIn("values [", faulty.output)

    def test_without_the_collective_the_values_are_wrong(self):
        """So tests that compare values would notice."""
        for outcome in self.outcomes_of("no collective"):
            self.assertEqual(0, outcome.returncode, outcome.output)
            self.assertNotIn(_RIGHT, outcome.output)


if __name__ == "__main__":
    tf.test.main()
