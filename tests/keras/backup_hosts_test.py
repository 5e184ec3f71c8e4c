"""Two hosts, one of which gets a SIGTERM and is killed: both end as undisturbed."""

from __future__ import annotations

import pathlib
import subprocess
import tempfile

import host_backup
import numpy as np
import tensorflow as tf
import warm_python

_TIMEOUT = 400.0


class BackupHostsTest(tf.test.TestCase):
    def launch(self, *faults: str) -> tuple[pathlib.Path, subprocess.CompletedProcess[str]]:
        """Trains with a number of faults; returns the folder with the results, and the output."""
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        result = warm_python.run(
            *("-m", "tfcdo.cli.main", "launch", "--workers", "2"),
            *("--max-restarts", str(sum(fault.startswith("SIGKILL") for fault in faults))),
            *(host_backup.__file__, str(folder), *faults),
            seconds=_TIMEOUT,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        return folder, result

    def test_a_preempted_host_that_is_killed_twice(self):
        plain, _ = self.launch()
        disturbed, result = self.launch("SIGTERM", "SIGKILL", "SIGKILL")
        self.assertIn("starting all workers again, as asked after a backup", result.stderr)
        # Only the kills are failures.
        self.assertIn("worker 1 failed: exit status 137 (SIGKILL)", result.stderr)
        self.assertIn("starting all workers again (restart 2 of 2)", result.stderr)
        self.assertRegex(result.stdout, "run 1 goes on after batch [45]\n")
        # The last backup may not be complete when all are killed.
        self.assertRegex(result.stdout, "run 2 goes on after batch [67]\n")
        self.assertRegex(result.stdout, "run 3 goes on after batch (9|10)\n")
        self.assertIn("run 3 began in epoch 1", result.stdout)
        self.assertFalse((disturbed / "backup").exists())
        for host in 0, 1:
            expected = np.load(plain / f"host-{host}.npz")
            actual = np.load(disturbed / f"host-{host}.npz")
            for name in expected.files:
                self.assertEqual(expected[name].tobytes(), actual[name].tobytes(), name)

    def test_a_host_is_killed_between_exchanges(self):
        plain, _ = self.launch("outer")
        disturbed, result = self.launch("outer", "SIGKILL")
        self.assertRegex(result.stdout, "run 1 goes on after batch [23]\n")
        for host in 0, 1:
            expected = np.load(plain / f"host-{host}.npz")
            actual = np.load(disturbed / f"host-{host}.npz")
            for name in expected.files:
                self.assertEqual(expected[name].tobytes(), actual[name].tobytes(), name)


if __name__ == "__main__":
    tf.test.main()
