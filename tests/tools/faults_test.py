"""Hosts that are killed: a short version of `tools/faults.py`, whose table is docs/faults.md."""

from __future__ import annotations

import collections
import pathlib
import subprocess
import sys
from unittest import mock

import fault_training
import faults
import warm_python
from absl.testing import absltest

from tfcdo.launch import cluster

_HOSTS = fault_training.Hosts(2, 1)

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
    def test_the_others_end_and_a_restart_has_the_right_weights(self):
        self.enter_context(mock.patch.object(sys, "executable", warm_python.executable()))
        expected = faults.undisturbed_weights(_HOSTS)
        for case in (
            # In the third epoch; the chief, whom the others ask for everything.
            faults.Case("kill", _HOSTS, victim=0, moment=23, delay=0.02),
            faults.Case("launch", _HOSTS, victim=1, moment=15),
        ):
            with self.subTest(case.kind):
                outcome = faults.run_case(case, expected)
                self.assertEqual(outcome.problem, "")
                assert outcome.continued is not None
                assert outcome.seconds is not None
                self.assertGreater(outcome.continued, 1)
                self.assertStartsWith(outcome.moment, "epoch ")

    def test_a_host_that_ends_while_the_servers_start(self):
        with cluster.reserved_ports(2) as addresses:
            processes = [
                subprocess.Popen(
                    [warm_python.executable(), "-c", _ENDS_EARLY, what],
                    env={**fault_training.environment_of_a_host(), "TF_CONFIG": config},
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for what, config in (
                    ("stays", cluster.tf_config(addresses, 0)),
                    ("ends", cluster.tf_config(addresses, 1)),
                )
            ]
            try:
                _, error = processes[0].communicate(timeout=fault_training.LIMIT_SECONDS)
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
        kinds = collections.Counter(case.kind for case in cases)
        self.assertEqual(kinds, {"start": 3, "launch": 7, "kill": 10, "stop": 5, "late": 5})
        for kind in kinds:
            self.assertGreater(len({case.victim for case in cases if case.kind == kind}), 1)

    def test_a_hang_is_seen_and_nothing_is_left(self):
        with fault_training.training(_HOSTS) as one:
            # As if it were a host.
            one._processes[0] = subprocess.Popen(["sleep", "600"])
            self.enter_context(mock.patch.object(fault_training, "LIMIT_SECONDS", 0.2))
            with self.assertRaisesRegex(fault_training.HangError, "no end within 0.2 s"):
                one.wait_all()
            process = one._processes[0]
        self.assertEqual(process.returncode, -9)

    def test_document(self):
        case = faults.Case("kill", _HOSTS, 1, 12)
        right = faults.Outcome("epoch 2, after step 2", "UnavailableError", 1.5, 2, "")
        hangs = faults.Outcome("12.0", "steps [1, 2]", None, None, "hangs: no end")
        text = faults.document([(case, right), (case, hangs)])
        self.assertIn("| killed, started by hand | 2 | 1 | 1 | 1.5 s, 1.5 s |", text)
        self.assertIn(
            "| killed, started by hand | 2 x 1 | 1 | epoch 2, after step 2 | UnavailableError | "
            "1.5 s | epoch 2 | right |",
            text,
        )
        self.assertIn("| - | - | hangs: no end |", text)

    def test_the_page_that_is_kept_has_no_wrong_case(self):
        page = pathlib.Path(__file__).parents[2] / "docs" / "faults.md"
        rows = [line.split(" | ") for line in page.read_text().splitlines() if " x " in line]
        rows = [row for row in rows if len(row) == 8 and row[1][0].isdigit()]
        self.assertLen(rows, len(faults.draw_cases()))
        self.assertEqual({row[-1] for row in rows}, {"right |"})


if __name__ == "__main__":
    absltest.main()
