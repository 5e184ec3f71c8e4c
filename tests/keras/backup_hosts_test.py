"""Two hosts, one of which gets a SIGTERM, is killed and replaced: both end as undisturbed."""

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

    def test_a_preempted_host_and_two_new_machines(self):
        plain, _ = self.launch()
        # After the SIGTERM there are no snapshots: all go on from the backup that it has caused.
        disturbed, result = self.launch("SIGTERM,0,1", "SIGKILL,1", "SIGKILL,0")
        self.assertIn("starting all workers again, as asked after a backup", result.stderr)
        # Only the kills are failures.
        self.assertIn("worker 1 failed: exit status 137 (SIGKILL)", result.stderr)
        self.assertIn("starting all workers again (restart 2 of 2)", result.stderr)
        self.assertRegex(result.stdout, "run 1 goes on after batch [45]\n")
        # Each new machine gets the snapshot of the other host; the last may not be complete when
        # all are killed.
        self.assertRegex(result.stdout, "run 2 goes on after batch [67]\n")
        self.assertRegex(result.stdout, "run 3 goes on after batch (9|10)\n")
        for host in 0, 1:
            self.assertRegex(result.stdout, f"host {host} has lost [1-3] snapshots")
        self.assertIn("run 3 began in epoch 1", result.stdout)
        self.assertFalse((disturbed / "backup").exists())
        self.assertEmpty(list((disturbed / "memory").iterdir()))
        for host in 0, 1:
            expected = np.load(plain / f"host-{host}.npz")
            actual = np.load(disturbed / f"host-{host}.npz")
            for name in expected.files:
                self.assertEqual(expected[name].tobytes(), actual[name].tobytes(), name)

    def test_a_host_is_killed_between_exchanges(self):
        plain, _ = self.launch("outer")
        disturbed, result = self.launch("outer", "SIGKILL,1")
        self.assertRegex(result.stdout, "run 1 goes on after batch [23]\n")
        for host in 0, 1:
            expected = np.load(plain / f"host-{host}.npz")
            actual = np.load(disturbed / f"host-{host}.npz")
            for name in expected.files:
                self.assertEqual(expected[name].tobytes(), actual[name].tobytes(), name)


if __name__ == "__main__":
    tf.test.main()
