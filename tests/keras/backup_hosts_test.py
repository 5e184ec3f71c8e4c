"""Two hosts, one of which gets a SIGTERM, is killed: both go on, and end as undisturbed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

import host_backup
import numpy as np
import tensorflow as tf

_TIMEOUT = 400.0


def _launch(folder: pathlib.Path, *faults: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "tfcdo.cli.main", "launch", "--workers", "2"),
        *("--max-restarts", "1", host_backup.__file__, str(folder), *faults),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    return subprocess.run(
        command, env=environment, text=True, capture_output=True, timeout=_TIMEOUT, check=False
    )


class BackupHostsTest(tf.test.TestCase):
    def test_a_preempted_host_and_a_killed_one(self):
        with tempfile.TemporaryDirectory() as folder:
            plain, disturbed = pathlib.Path(folder, "plain"), pathlib.Path(folder, "disturbed")
            result = _launch(plain)
            self.assertEqual(result.returncode, 0, result.stderr)
            result = _launch(disturbed, "SIGTERM", "SIGKILL")
            self.assertEqual(result.returncode, 0, result.stderr)
            # Only the kill is a failure.
            self.assertIn("starting all workers again, as asked after a backup", result.stderr)
            self.assertIn("worker 1 failed: exit status 137 (SIGKILL)", result.stderr)
            self.assertIn("starting all workers again (restart 1 of 1)", result.stderr)
            self.assertIn("run 2 began in epoch 1", result.stdout)
            self.assertFalse((disturbed / "backup").exists())
            for host in 0, 1:
                expected = np.load(plain / f"host-{host}.npz")
                actual = np.load(disturbed / f"host-{host}.npz")
                for name in expected.files:
                    self.assertEqual(expected[name].tobytes(), actual[name].tobytes(), name)


if __name__ == "__main__":
    tf.test.main()
