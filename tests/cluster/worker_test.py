"""Signals while the main thread runs no Python: the black box and the end of a failed run."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import warm_python
from absl.testing import absltest

from tfcdo.cluster import worker

_SECONDS = 60.0
# Stuck for ever in a lock of the C library, as in a collective: no signal interrupts it.
_SCRIPT = """
import ctypes
from tfcdo.cluster import progress
from tfcdo.keras import preemption
progress.listen()
preemption.Preemption().start()
lock, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
library.pthread_mutex_lock(lock)
print("stuck", flush=True)
library.pthread_mutex_lock(lock)
"""


class SignalsTest(absltest.TestCase):
    def test_a_failed_run_ends_a_worker_that_listens_for_the_black_box_too(self):
        failed = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "failed")
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            [warm_python.executable(), "-c", _SCRIPT],
            stdout=subprocess.PIPE,
            env={**os.environ, **variables, worker.FAILURE_FILE: str(failed)},
        )
        self.addCleanup(process.kill)
        assert process.stdout
        with process.stdout:
            self.assertEqual(b"stuck\n", process.stdout.readline())
        failed.touch()
        process.send_signal(signal.SIGTERM)
        self.assertEqual(128 + signal.SIGTERM, process.wait(_SECONDS))


if __name__ == "__main__":
    absltest.main()
