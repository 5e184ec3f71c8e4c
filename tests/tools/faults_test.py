"""Hosts that are killed and cut off: a part of `tools/faults.py`, whose table is docs/faults.md."""

import errno
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import faults
import numpy as np
import testing_utils as tu
from absl.testing import absltest, parameterized

_CONNECT = """
import socket, sys
with socket.socket() as probe:
    probe.settimeout(2.0)
    sys.exit(probe.connect_ex(("10.0.0.2", 2222)))
"""


class FaultsTest(parameterized.TestCase):
    def test_ends_with_the_same_weights(self):
        cases = [faults.Case("kill worker", "step", 2, victims=(1,), step=25, delay=0.05)]
        # The chief waits for it before the first collective, where TensorFlow raises nothing.
        cases.append(faults.Case("stop", "first step", 2, victims=(1,)))
        for case in tu.nightly(*cases):
            outcome = faults.run_case(case)
            self.assertEqual((outcome.problem, outcome.runs), ("", 2))
            self.assertLessEqual(outcome.from_one_device, faults.LARGEST_DIFFERENCE)
            self.assertBetween(outcome.repeated, *((1, 30) if case.step else (0, 0)))
            self.assertBetween(outcome.useful, 0.0, 1.0)

    @parameterized.parameters(
        ("", ""),
        ("differs", "differs by 1e-06 from the same hosts"),
        ("differs much", "differs by 0.1 from one device"),
        ("skips", "steps are missing"),
    )
    def test_judges_hosts(self, wrong, problem):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        difference = {"differs": 1e-6, "differs much": 0.1}.get(wrong, 0.0)
        # Five of 90 steps, a second each, were made again in a second run.
        runs = (1, 26, 0.0), (21, 91 - (wrong == "skips"), 100.0)
        for host in range(2):
            np.savez(folder / f"weights-{host}.npz", np.full(2, difference))
            for number, (first, end, begin) in enumerate(runs):
                (folder / f"pid-{number}-{host}").write_text("1")
                steps = (f"{step} {begin + step}\n" for step in range(first, end))
                (folder / f"steps-{number}-{host}").write_text("".join(steps))
        case = faults.Case("kill worker", "step", 2, victims=(1,), step=25)
        with mock.patch.object(faults, "undisturbed", return_value=([np.zeros(2)], 1.0)):
            outcome = faults._outcome(case, folder, 0.0, 25.5)
        self.assertEqual((outcome.problem, outcome.runs), (problem, 2))
        if not problem:
            self.assertEqual((outcome.repeated, outcome.seconds), (5, 121.0 - 25.5))
            self.assertAlmostEqual(outcome.useful, 90 / 190)

    def test_a_hang_is_a_problem_and_nothing_is_left(self):
        process = subprocess.Popen(["sleep", "600"])
        self.enter_context(mock.patch.object(subprocess, "Popen", lambda *_, **__: process))
        self.enter_context(mock.patch.object(faults, "LIMIT_SECONDS", 0.2))
        outcome = faults.run_case(faults.Case("kill worker", "step", 2, (1,), 12))
        self.assertEqual(outcome.problem, "hangs: no sign of step 12 in 0.2 s")
        self.assertEqual(process.returncode, -9)

    def test_a_network_that_is_cut(self):
        if not faults.can_cut():
            self.skipTest("network namespaces need root")
        with faults.network(2) as (host, _, bridge):
            ping = [*host, sys.executable, "-c", _CONNECT]
            # Nothing listens there: a refusal shows that the host is reached.
            reached = subprocess.run(ping, check=False, timeout=faults.LIMIT_SECONDS)
            self.assertEqual(reached.returncode, errno.ECONNREFUSED)
            stays = mock.patch.object(faults.time, "sleep", side_effect=KeyboardInterrupt)
            with stays, self.assertRaises(KeyboardInterrupt):
                faults.cut(bridge, 1, 5.0)
            cut = subprocess.run(ping, check=False, timeout=faults.LIMIT_SECONDS)
            self.assertNotIn(cut.returncode, (0, errno.ECONNREFUSED))

    def test_the_page_that_is_kept_has_no_wrong_case(self):
        page = pathlib.Path(__file__).parents[2] / "docs" / "faults.md"
        rows = [line.split(" | ") for line in page.read_text().splitlines()]
        results = [row[-1] for row in rows if row[0].strip("| ") in faults.KINDS]
        self.assertGreaterEqual(len(results), 10)
        self.assertEqual({*results}, {"correct |"})

    def test_a_process_that_is_left_is_a_problem(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        left = self.enter_context(subprocess.Popen(["sleep", "600"]))
        self.addCleanup(left.kill)
        for host, pid in enumerate((os.getpid(), left.pid)):
            (folder / f"pid-0-{host}").write_text(str(pid))
        os.utime(folder / "pid-0-0", (0, 0))  # A number that was given again.
        self.enter_context(mock.patch.object(faults, "_ENDED_SECONDS", 0.1))
        self.assertEqual(faults._left(folder), [left.pid])


if __name__ == "__main__":
    absltest.main()
