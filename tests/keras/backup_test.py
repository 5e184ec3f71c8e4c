"""Backups that all hosts restore alike; `faults_test` has them with real hosts that are killed."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
import tfcdo.keras
from tfcdo import strategies

_EPOCHS = 4


class _End(keras.callbacks.Callback):
    """Interrupts a training when an epoch begins."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._epoch:
            raise KeyboardInterrupt


class BackupAndRestoreTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "backup")
        drawn = np.random.default_rng(0)
        self.data = drawn.normal(size=[24, 4]), drawn.normal(size=[24, 1])

    def train(self, *callbacks: keras.callbacks.Callback, replicas: int = 1) -> Any:
        """Trains a new model; returns its weights and the epochs that it took."""
        strategy = tf.distribute.get_strategy()
        if replicas > 1:
            strategy = tfcdo.MirroredStrategy(tu.device_names(replicas))
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
            # Momentum is a part of the state, and so is the number of steps.
            rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
            model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
        history = model.fit(
            *self.data,
            batch_size=12,
            epochs=_EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        )
        return model.get_weights(), history.epoch

    def backup(self, **options: Any) -> tfcdo.keras.BackupAndRestore:
        return tfcdo.keras.BackupAndRestore(self.folder, **options)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def test_continues_as_if_nothing_had_happened(self):
        undisturbed, _ = self.train(replicas=2)
        with self.assertRaises(KeyboardInterrupt):
            self.train(self.backup(), _End(2), replicas=2)
        self.assertEqual(self.names(), ["epoch-2"])
        weights, epochs = self.train(self.backup(), replicas=2)
        self.assertEqual(epochs, [2, 3])
        self.assertAllEqual(weights[0], undisturbed[0])
        self.assertFalse(self.folder.exists())

    @parameterized.parameters("rename", "rmtree")
    def test_an_end_in_the_middle_of_a_backup_leaves_a_whole_one(self, last: str):
        """Whatever was the last thing that it did not come to, from a certain backup on."""
        undisturbed, _ = self.train()
        with self.assertRaises(KeyboardInterrupt):
            self.train(self.backup(), _End(1))
        remove = shutil.rmtree

        def end_at_the_older_one(path: Any, **options: Any) -> None:
            if pathlib.Path(path).name == "epoch-1":
                raise KeyboardInterrupt
            remove(path, **options)

        broken: Any = {
            "rename": mock.patch.object(pathlib.Path, "rename", side_effect=KeyboardInterrupt),
            "rmtree": mock.patch.object(shutil, "rmtree", end_at_the_older_one),
        }[last]
        with broken, self.assertRaises(KeyboardInterrupt):
            self.train(self.backup())
        expected = {"rename": ["epoch-1", "writing"], "rmtree": ["epoch-1", "epoch-2"]}[last]
        self.assertEqual(self.names(), expected)
        (self.folder / "writing").mkdir(exist_ok=True)
        (self.folder / "writing" / "latest.weights.h5").write_bytes(b"half of it")
        weights, epochs = self.train(self.backup(delete_checkpoint=False))
        self.assertEqual(epochs[0], {"rename": 1, "rmtree": 2}[last])
        self.assertAllEqual(weights[0], undisturbed[0])
        self.assertEqual(self.names(), [f"epoch-{_EPOCHS}"])

    def test_only_the_chief_writes(self):
        with mock.patch.object(strategies, "is_chief", return_value=False):
            self.train(self.backup())
        self.assertFalse(self.folder.exists())

    def test_all_hosts_must_find_the_same(self):
        strategy = tf.distribute.get_strategy()
        found = mock.patch.object(type(strategy), "gather", return_value=tf.constant([2, 0]))
        with found, self.assertRaisesRegex(RuntimeError, r"backup_dir, '.*backup'.* \[2, 0\]"):
            self.train(self.backup())

    def test_a_folder_must_be_given(self):
        with self.assertRaisesRegex(ValueError, "backup_dir must be the path of a folder; got ''"):
            tfcdo.keras.BackupAndRestore("")


if __name__ == "__main__":
    tf.test.main()
