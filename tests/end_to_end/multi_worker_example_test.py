"""examples/multi_worker.py, run as docs/several-hosts.md says."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import keras
import warm_python
from absl.testing import absltest

_EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "multi_worker.py"
_SECONDS = 300


class MultiWorkerExampleTest(absltest.TestCase):
    def test_two_workers_save_one_model(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        command = [
            *(warm_python.executable(), "-m", "tfcdo.cli.main", "launch"),
            *("--workers", "2", "--devices-per-worker", "2"),
            *(str(_EXAMPLE), "--epochs", "2", "--folder", str(folder)),
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        # One worker speaks for all, and nobody else has written to the folder.
        self.assertEqual(set(re.findall(r"^worker \d", done.stdout, re.MULTILINE)), {"worker 0"})
        self.assertIn("Training on 4 replicas", done.stdout)
        self.assertIn("Epoch 2/2", done.stdout)
        self.assertEqual([path.name for path in folder.iterdir()], ["model.keras"])

        accuracy = float(re.findall(r"accuracy ([\d.]+)$", done.stdout, re.MULTILINE)[-1])
        self.assertGreater(accuracy, 0.95)
        model = keras.models.load_model(folder / "model.keras")
        self.assertEqual(model.count_params(), 16 * 64 + 64 + 64 * 10 + 10)


if __name__ == "__main__":
    absltest.main()
