"""Hosts that are killed and join: a part of `tools/faults.py`, whose table is docs/faults.md."""

from __future__ import annotations

import collections
import os
import pathlib
import subprocess
from unittest import mock

import faults
import warm_python
from absl.testing import absltest

from tfcdo.launch import cluster

# A host that comes to the rendezvous and ends before TensorFlow's server has started, and one that
# is left alone with a server that has.
_ENDS_EARLY = """
import os, sys, tfcdo
from tfcdo import strategies, tf_internals
strategies._SERVER_START_SECONDS = 3.0
if sys.argv[1] == "ends":
    tf_internals.configure_coordination = lambda **_: os._exit(0)
tfcdo.MultiWorkerMirroredStrategy()
"""


class FaultsTest(absltest.TestCase):
    def test_a_kill_ends_with_the_same_weights(self):
        outcome = faults.run_case(faults.Case("kill", 2, victim=1, step=25, delay=0.05))
        self.assertEqual(outcome.problem, "")
        self.assertEqual(outcome.from_hosts, 0.0)
        self.assertBetween(outcome.repeated, 1, 30)

    def test_a_host_that_ends_while_the_servers_start(self):
        with cluster.reserved_ports(2) as addresses:
            processes = [
                subprocess.Popen(
                    [warm_python.executable(), "-c", _ENDS_EARLY, what],
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CONFIG": config},
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for what, config in (
                    ("stays", cluster.tf_config(addresses, 0)),
                    ("ends", cluster.tf_config(addresses, 1)),
                )
            ]
            try:
                _, error = processes[0].communicate(timeout=faults.LIMIT_SECONDS)
            finally:
                for process in processes:
                    process.kill()
                    process.communicate()
        self.assertEqual(processes[0].returncode, 1)
        self.assertIn("DeadlineExceededError", error)
        self.assertIn("/job:worker/replica:0/task:1", error)


class CasesTest(absltest.TestCase):
    def test_drawn_cases(self):
        cases = faults.draw_cases()
        self.assertEqual(cases, faults.draw_cases())
        self.assertEqual(collections.Counter(case.kind for case in cases), faults.COUNTS)
        self.assertEqual({case.hosts for case in cases}, {2, 3, 4})
        kinds = collections.Counter(case.kind for case in faults.draw_cases(0.1))
        self.assertEqual(kinds, {"kill": 2, "notice": 1, "stop": 1})

    def test_a_hang_is_a_problem_and_nothing_is_left(self):
        process = subprocess.Popen(["sleep", "600"])
        self.enter_context(mock.patch.object(faults, "_start", lambda *_, **__: process))
        self.enter_context(mock.patch.object(faults, "LIMIT_SECONDS", 0.2))
        outcome = faults.run_case(faults.Case("kill", 2, 1, 12, 0.0))
        self.assertEqual(outcome.problem, "hangs: no sign of step 12 in 0.2 s")
        self.assertEqual(process.returncode, -9)

    def test_the_page_that_is_kept_has_no_wrong_case(self):
        page = pathlib.Path(__file__).parents[2] / "docs" / "faults.md"
        rows = [line.split(" | ") for line in page.read_text().splitlines()]
        results = {row[-1] for row in rows if row[0].strip("| ") in faults.COUNTS}
        self.assertEqual(results, {"correct |"})


if __name__ == "__main__":
    absltest.main()
