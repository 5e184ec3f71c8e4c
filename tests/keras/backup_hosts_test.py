"""Two hosts, one of which gets a SIGTERM and then a SIGKILL: both end as undisturbed.

`tfcdo launch` runs this file with a folder; its first run also trains undisturbed.
"""

import os
import pathlib
import signal
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
from tfcdo.keras import training_state

# In each run, after a batch counted over all epochs; the first one is the last of its epoch.
_FAULTS = (("SIGTERM", 4), ("SIGKILL", 6))
_STEPS, _EPOCHS, _BATCH = 4, 2, 8


class _Fault(keras.callbacks.Callback):
    """Sends this process a signal after the run's batch."""

    def __init__(self, name: str, batch: int) -> None:
        super().__init__()
        self._signal, self._batch = signal.Signals[name], batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer._iterations.numpy() == self._batch:
            time.sleep(1.0)  # The other host has come to the end of the epoch.
            signal.raise_signal(self._signal)


def main(folder: str) -> None:
    """Trains, and saves all values of this host's replicas."""
    mock.patch.object(strategies, "_HEARTBEAT_SECONDS", 100.0).start()
    mock.patch.object(training_state, "_CHUNK", 4096).start()  # A backup has several.
    strategy = tfcdo.MultiWorkerMirroredStrategy(devices_per_worker=2)
    host, run = strategy.cluster_resolver.task_id, int(os.environ[worker.RESTART_COUNT])
    if run == 0:
        _train(strategy, pathlib.Path(folder, f"undisturbed-{host}.npz"))
    if (host, run) == (1, 0):  # It trains a model alone, which is none of the hosts' trainings.
        alone = tfcdo.keras.BackupAndRestore(pathlib.Path(folder, "alone"), delete_checkpoint=False)
        _train(tfcdo.MirroredStrategy(), pathlib.Path(folder, "alone.npz"), alone)
    backup = tfcdo.keras.BackupAndRestore(pathlib.Path(folder, "backup"), save_freq=1)

    def tell(logs: Any) -> None:
        epoch, batch = backup._progress.position
        print(f"run {run} goes on after batch {epoch * _STEPS + batch}", flush=True)

    callbacks = [backup, keras.callbacks.LambdaCallback(on_train_begin=tell)]
    if host == 1 and run < len(_FAULTS):
        callbacks.insert(0, _Fault(*_FAULTS[run]))
    epochs = _train(strategy, pathlib.Path(folder, f"disturbed-{host}.npz"), *callbacks)
    print(f"run {run} began in epoch {epochs[0]}", flush=True)


def _train(strategy: Any, path: pathlib.Path, *callbacks: Any) -> list[int]:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [layers.Input([4]), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1)]
        )
        adam = keras.optimizers.Adam(0.05, gradient_accumulation_steps=2)
        model.compile(adam, "mse", metrics=["mae"], run_eagerly=True)
    drawn = np.random.default_rng(0)
    arrays = drawn.normal(size=[45, 4]), drawn.normal(size=[45, 1])
    data = tfcdo.keras.resumable_dataset(arrays, _BATCH, seed=1)
    model.fit(data, steps_per_epoch=_STEPS, epochs=_EPOCHS, verbose=0, callbacks=[*callbacks])
    variables = [*model.variables, *model.optimizer.variables]
    values = [part.numpy() for variable in variables for part in variable.value.values]
    np.savez(path, *values, loss=model.history.history["loss"][-1])
    return model.history.epoch


# A shorter run that asks for a restart would count as a failure.
_LAUNCH = """
from tfcdo.__main__ import main
from tfcdo.launch import supervisor
supervisor._SHORTEST_RUN_SECONDS = 0.0
main()
"""


class BackupHostsTest(tf.test.TestCase):
    def test_a_preempted_host_that_is_killed(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        result = warm_python.run(
            *("-c", _LAUNCH, "launch", "--workers", "2", "--max-restarts", "1"),
            *(__file__, str(folder)),
            seconds=400.0,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("starting all workers again, as asked after a backup", result.stderr)
        self.assertIn("worker 1 failed: exit status 137 (SIGKILL)", result.stderr)
        self.assertIn("starting all workers again (restart 1 of 1)", result.stderr)
        self.assertRegex(result.stdout, "run 1 goes on after batch [45]\n")
        # The last backup may not be complete when all are killed.
        self.assertRegex(result.stdout, "run 2 goes on after batch [45]\n")
        self.assertIn("run 2 began in epoch 1", result.stdout)
        self.assertFalse((folder / "backup").exists())
        self.assertLen([*(folder / "alone").glob("*.npz")], 2)
        for host in 0, 1:
            expected = np.load(folder / f"undisturbed-{host}.npz")
            actual = np.load(folder / f"disturbed-{host}.npz")
            for name in expected.files:
                self.assertEqual(expected[name].tobytes(), actual[name].tobytes(), name)


if __name__ == "__main__":
    if worker.RESTART_COUNT in os.environ:
        tf.get_logger().setLevel("ERROR")
        main(*sys.argv[1:])
    else:
        tf.test.main()
