"""Two hosts, one of which gets a SIGTERM and is killed: both end as undisturbed.

`tfcdo launch` runs this file with a folder and faults. The first fault is the first run's, and so
on: a signal to the last host. With "outer" before them, hosts train alone between exchanges after
each fourth batch. Each batch has a backup.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import warm_python

import tfcdo
import tfcdo.keras
from tfcdo import strategies
from tfcdo.cluster import worker
from tfcdo.exchange import DiLoCo
from tfcdo.keras import training_state

_FAULT_BATCHES = (3, 7, 10)  # Counted over all epochs.
_STEPS, _EPOCHS, _BATCH = 6, 2, 8


class _Fault(keras.callbacks.Callback):
    """Sends this process a signal in the run's batch."""

    def __init__(self, name: str, batch: int) -> None:
        super().__init__()
        self._signal, self._batch = signal.Signals[name], batch
        # A shorter run that asks for a restart counts as a failure.
        self._earliest = time.monotonic() + 5.5 * (name == "SIGTERM")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._epoch * _STEPS + batch == self._batch:
            time.sleep(max(0.0, self._earliest - time.monotonic()))
            signal.raise_signal(self._signal)


def main(folder: str, *faults: str) -> None:
    """Trains, and saves all values of this host's replicas."""
    mock.patch.object(strategies, "_HEARTBEAT_SECONDS", 100.0).start()
    mock.patch.object(training_state, "_CHUNK", 4096).start()  # A backup has several.
    outer = None
    if faults[:1] == ("outer",):  # Two updates are four batches.
        outer, faults = DiLoCo(2), faults[1:]
    strategy = tfcdo.MultiWorkerMirroredStrategy(devices_per_worker=2, outer=outer)
    host = strategy.cluster_resolver.task_id
    run = int(os.environ[worker.RESTART_COUNT])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                layers.Input([4]),
                layers.Dense(5),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Dense(1),
            ]
        )
        adam = keras.optimizers.Adam(0.05, gradient_accumulation_steps=2)
        # A few steps are quicker eagerly than traced.
        model.compile(adam, "mse", metrics=["mae"], run_eagerly=True)
    drawn = np.random.default_rng(0)
    arrays = drawn.normal(size=[45, 4]), drawn.normal(size=[45, 1])
    backup = tfcdo.keras.BackupAndRestore(pathlib.Path(folder, "backup"), save_freq=1)

    def tell(logs: Any) -> None:
        epoch, batch = backup._progress.position
        print(f"run {run} goes on after batch {epoch * _STEPS + batch}", flush=True)

    callbacks = [backup, keras.callbacks.LambdaCallback(on_train_begin=tell)]
    if host == 1 and run < len(faults):
        callbacks.append(_Fault(faults[run], _FAULT_BATCHES[run]))
    history = model.fit(
        tfcdo.keras.resumable_dataset(arrays, _BATCH, seed=1),
        steps_per_epoch=_STEPS,
        epochs=_EPOCHS,
        verbose=0,
        callbacks=callbacks,
    )
    print(f"run {run} began in epoch {history.epoch[0]}", flush=True)
    variables = [*model.variables, *model.optimizer.variables]
    values = [part.numpy() for variable in variables for part in variable.value.values]
    np.savez(pathlib.Path(folder, f"host-{host}.npz"), *values, loss=history.history["loss"][-1])


_TIMEOUT = 400.0


class BackupHostsTest(tf.test.TestCase):
    def launch(self, *faults: str) -> tuple[pathlib.Path, subprocess.CompletedProcess[str]]:
        """Trains with a number of faults; returns the folder with the results, and the output."""
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        result = warm_python.run(
            *("-m", "tfcdo.cli.main", "launch", "--workers", "2"),
            *("--max-restarts", str(sum(fault.startswith("SIGKILL") for fault in faults))),
            *(__file__, str(folder), *faults),
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
    if worker.RESTART_COUNT in os.environ:
        tf.get_logger().setLevel("ERROR")
        main(*sys.argv[1:])
    else:
        tf.test.main()
