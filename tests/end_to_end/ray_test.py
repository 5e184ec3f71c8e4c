"""examples/ray_train.py on a Ray cluster whose workers are killed, and whose size changes."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

import keras
import numpy as np
import psutil
import ray_training
from absl.testing import absltest

_SECONDS = 1200  # Alone on a machine with two cores it takes about five minutes.


@unittest.skipUnless(importlib.util.find_spec("ray"), "needs Ray: pip install '.[ray]'")
class RayTest(absltest.TestCase):
    def test_five_kills_and_three_changes_of_size_end_with_the_weights_of_one_device(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        process = subprocess.Popen(
            [sys.executable, ray_training.__file__, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )
        try:
            log, _ = process.communicate(timeout=_SECONDS)
        finally:
            self._end(process)
        self.assertEqual(process.returncode, 0, log)
        faults = [line.split()[1] for line in (folder / "faults").read_text().splitlines()]
        self.assertEqual(faults, list(ray_training.FAULTS))
        # One line for each worker of each run.
        replicas = [line.split()[1] for line in (folder / "events").read_text().splitlines()]
        self.assertEqual([size for size, _ in itertools.groupby(replicas)], ["1", "2", "1", "2"])
        self.assertLen(replicas, 1 + 3 * 2 + 2 * 1 + 3 * 2)
        self.assertIn("'replicas': 2", log)

        alone = folder / "alone"
        alone.mkdir()
        ray_training.train_on_one_device(alone)
        weights = [
            keras.models.load_model(path / "model" / "model.keras", compile=False).get_weights()
            for path in (folder, alone)
        ]
        for own, expected in zip(*weights):
            np.testing.assert_allclose(own, expected, rtol=0, atol=1e-5)

    def _end(self, process: subprocess.Popen[str]) -> None:
        """Ends Ray's processes: the session of `process`, and its descendants."""
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    absltest.main()
