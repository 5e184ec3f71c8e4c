"""Hosts that are killed and cut off: a part of `tools/faults.py`, whose table is docs/faults.md."""

from __future__ import annotations

import errno
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import faults
from absl.testing import absltest, parameterized

_CONNECT = """
import socket, sys
with socket.socket() as probe:
    probe.settimeout(2.0)
    sys.exit(probe.connect_ex(("10.0.0.2", 2222)))
"""


# As tools/fault_training.py, without TensorFlow; hosts may go wrong once they were started again.
_TRAINING = """
import json, os, pathlib, sys, time
import numpy as np
folder, backup = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1], "backup")
config = json.loads(os.environ.get("TF_CONFIG", "null")) or {"cluster": {"worker": [0]}}
hosts, task = range(len(config["cluster"]["worker"])), config.get("task", {"index": 0})["index"]
run = int(os.environ.get("TFCDO_RESTART_COUNT", "0"))
wrong = os.environ["WRONG"] if run else ""
def write(path, text):
    (folder / f"new-{task}").write_text(text)
    (folder / f"new-{task}").rename(path)
write(folder / f"pid-{run}-{task}", str(os.getpid()))
for step in range(1 + int(backup.read_text() if backup.exists() else 0), 91 - (wrong == "skips")):
    (folder / f"begins-{run}-{task}-{step}").touch()
    while not all((folder / f"begins-{run}-{host}-{step}").exists() for host in hosts):
        time.sleep(0.001)
    with (folder / f"steps-{run}-{task}").open("a") as file:
        file.write(f"{step} {time.time()}\\n")
    if task == 0 and step % 10 == 0:
        write(backup, str(step))
np.savez(folder / f"weights-{task}.npz", np.full(2, 1e-6 * (wrong == "differs")))
"""
_undisturbed = functools.cache(faults.undisturbed.__wrapped__)  # Of these hosts.


class FaultsTest(parameterized.TestCase):
    def check(self, case: faults.Case, runs: int, problem: str = "") -> None:
        outcome = faults.run_case(case)
        self.assertEqual((outcome.problem, outcome.runs), (problem, runs))
        if not problem:
            self.assertLessEqual(outcome.from_one_device, faults.LARGEST_DIFFERENCE)
            self.assertBetween(outcome.repeated, *((1, 30) if case.step and runs == 2 else (0, 0)))
            self.assertBetween(outcome.useful, 0.0, 1.0)

    def test_ends_with_the_same_weights(self):
        cases = [faults.Case("kill worker", "step", 2, victims=(1,), step=25, delay=0.05)]
        # The chief waits for it before the first collective, where TensorFlow raises nothing.
        cases.append(faults.Case("stop", "first step", 2, victims=(1,)))
        for case in cases if "TFCDO_NIGHTLY" in os.environ else ():
            self.check(case, 2)

    @parameterized.parameters(
        ("kill worker", (1,), 2, "", ""),
        ("kill both", (0, 1), 2, "differs", "differs by 1e-06 from the same hosts"),
        ("kill chief", (0,), 2, "skips", "steps are missing"),
    )
    def test_judges_hosts(self, kind, victims, runs, wrong, problem):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        (folder / "train.py").write_text(_TRAINING)
        training = mock.Mock(__file__=str(folder / "train.py"))
        self.enter_context(mock.patch.object(faults, "fault_training", training))
        self.enter_context(mock.patch.object(faults, "undisturbed", _undisturbed))
        self.enter_context(mock.patch.dict(os.environ, WRONG=wrong))
        self.check(faults.Case(kind, "step", 2, victims, step=25, seconds=0.2), runs, problem)


class CasesTest(absltest.TestCase):
    def test_a_hang_is_a_problem_and_nothing_is_left(self):
        process = subprocess.Popen(["sleep", "600"])
        self.enter_context(mock.patch.object(faults, "_start", lambda *_, **__: process))
        self.enter_context(mock.patch.object(faults, "LIMIT_SECONDS", 0.2))
        outcome = faults.run_case(faults.Case("kill worker", "step", 2, (1,), 12))
        self.assertEqual(outcome.problem, "hangs: no sign of step 12 in 0.2 s")
        self.assertEqual(process.returncode, -9)

    def test_a_network_that_is_cut(self):
        if not faults.can_cut():
            self.skipTest("network namespaces need root")
        with faults.network(2) as (host, _, bridge):
            ping = ["nsenter", "--net", "--target", str(host)]
            ping += [sys.executable, "-c", _CONNECT]
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
        left = subprocess.Popen(["sleep", "600"])
        self.addCleanup(left.wait)
        self.addCleanup(left.kill)
        for host, pid in enumerate((os.getpid(), left.pid)):
            (folder / f"pid-0-{host}").write_text(str(pid))
        os.utime(folder / "pid-0-0", (0, 0))  # A number that was given again.
        self.enter_context(mock.patch.object(faults, "_ENDED_SECONDS", 0.1))
        self.assertEqual(faults._left(folder), [left.pid])


if __name__ == "__main__":
    absltest.main()
