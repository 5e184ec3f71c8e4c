"""Hosts that are killed and cut off: a part of `tools/faults.py`, whose table is docs/faults.md."""

from __future__ import annotations

import collections
import errno
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from unittest import mock

import faults
import nightly
import warm_python
from absl.testing import absltest, parameterized

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
# Ends with the number of the error.
_CONNECT = """
import socket, sys
with socket.socket() as probe:
    probe.settimeout(2.0)
    sys.exit(probe.connect_ex(("10.0.0.2", 2222)))
"""


class FaultsTest(parameterized.TestCase):
    @parameterized.parameters(
        (faults.Case("kill worker", "step", 2, victims=(1,), step=25, delay=0.05),),
        # The chief waits for it before the first collective, where TensorFlow raises nothing.
        *nightly.cases((faults.Case("stop", "first step", 2, victims=(1,)),)),
    )
    def test_ends_with_the_same_weights(self, case: faults.Case):
        outcome = faults.run_case(case)
        self.assertEqual(outcome.problem, "")
        self.assertEqual(outcome.from_hosts, 0.0)
        self.assertBetween(outcome.repeated, 1 if case.step else 0, 30)
        self.assertEqual(outcome.runs, 2)
        self.assertBetween(outcome.useful, 0.0, 1.0)

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
        self.assertEqual(cases, faults.draw_cases(200, faults.SEED))
        self.assertEqual(cases[:10], faults.draw_cases(10))
        self.assertNotEqual(cases, faults.draw_cases(200, 8))
        kinds = collections.Counter(case.kind for case in cases)
        self.assertEqual(kinds, {kind: 10 * times for kind, times in faults.ROUND.items()})
        self.assertEqual({case.hosts for case in cases}, {2, 3, 4})
        self.assertEqual({case.moment for case in cases}, {*faults.MOMENTS})
        cuts = {case.seconds for case in cases if case.kind == "cut"}
        self.assertEqual(cuts, {*faults.CUT_SECONDS})
        for case in cases:
            if case.kind.startswith("kill"):
                self.assertEqual(0 in case.victims, case.kind != "kill worker")
            self.assertLen(case.victims, 2 if case.kind == "kill both" else 1)
            self.assertLess(max(case.victims), case.hosts)

    def test_a_hang_is_a_problem_and_nothing_is_left(self):
        process = subprocess.Popen(["sleep", "600"])
        self.enter_context(mock.patch.object(faults, "_start", lambda *_, **__: process))
        self.enter_context(mock.patch.object(faults, "LIMIT_SECONDS", 0.2))
        outcome = faults.run_case(faults.Case("kill worker", "step", 2, (1,), 12))
        self.assertEqual(outcome.problem, "hangs: no sign of step 12 in 0.2 s")
        self.assertEqual(process.returncode, -9)

    def test_a_process_that_is_left_is_a_problem(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        left = subprocess.Popen(
            ["sh", "-c", "sleep 600; true", str(folder)], start_new_session=True
        )
        self.addCleanup(left.wait)
        self.addCleanup(os.killpg, left.pid, signal.SIGKILL)
        (folder / "pid-0-1").write_text(str(left.pid))
        (folder / "pid-0-2").write_text(str(os.getpid()))  # A number that was given again.
        self.enter_context(mock.patch.object(faults, "_ENDED_SECONDS", 0.1))
        self.assertEqual(faults._left(folder), [left.pid])

    def test_a_network_that_is_cut(self):
        if not faults.can_cut():
            self.skipTest("network namespaces need root")
        with faults._Network.of(2) as network:
            ping = ["nsenter", "--net", "--target", str(network.namespaces[0])]
            ping += [sys.executable, "-c", _CONNECT]
            # Nothing listens there: a refusal shows that the host is reached.
            reached = subprocess.run(ping, check=False, timeout=faults.LIMIT_SECONDS)
            self.assertEqual(reached.returncode, errno.ECONNREFUSED)
            stays = mock.patch.object(faults.time, "sleep", side_effect=KeyboardInterrupt)
            with stays, self.assertRaises(KeyboardInterrupt):
                network.cut(1, 5.0)
            cut = subprocess.run(ping, check=False, timeout=faults.LIMIT_SECONDS)
            self.assertNotIn(cut.returncode, (0, errno.ECONNREFUSED))

    def test_the_page_that_is_kept_has_no_wrong_case(self):
        page = pathlib.Path(__file__).parents[2] / "docs" / "faults.md"
        rows = [line.split(" | ") for line in page.read_text().splitlines()]
        results = [row[-1] for row in rows if row[0].strip("| ") in faults.ROUND]
        self.assertGreaterEqual(len(results), 10)
        self.assertEqual({*results}, {"correct |"})


if __name__ == "__main__":
    absltest.main()
