"""Trainings that end somewhere and go on from a backup, compared with undisturbed ones."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
import tfcdo.keras

_EPOCHS, _STEPS, _BATCH = 3, 7, 12
_EXAMPLES = 80  # Not a multiple of the batch: batches begin in one epoch and end in the next.


class _End(keras.callbacks.Callback):
    """Interrupts a training after some batches of all epochs."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        epoch = int(self.model._epoch)
        steps = min(batch + 1, _STEPS)
        if epoch * _STEPS + steps >= self._after:
            raise KeyboardInterrupt

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model._epoch = epoch


class _Record(keras.callbacks.Callback):
    """Keeps the logs of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[int, dict[str, float]] = {}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs[epoch] = dict(logs)


def _layers(exact: bool) -> list[Any]:
    layers = keras.layers
    if not exact:
        return [layers.Input([4]), layers.Dense(5, "tanh"), layers.Dense(1)]
    return [
        layers.Input([4]),
        layers.Dense(5, "tanh"),
        layers.BatchNormalization(),
        layers.Dropout(0.3),
        layers.Dense(1),
    ]


def _optimizer(exact: bool) -> keras.Optimizer:
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
    accumulating = {"gradient_accumulation_steps": 2} if exact else {}
    adam = keras.optimizers.Adam(rate, use_ema=True, ema_momentum=0.9, **accumulating)
    return tfcdo.keras.DistributedOptimizer(adam)


def _data(kind: str = "resumable") -> tf.data.Dataset:
    drawn = np.random.default_rng(0)
    arrays = drawn.normal(size=[_EXAMPLES, 4]), drawn.normal(size=[_EXAMPLES, 1])
    if kind == "resumable":
        return tfcdo.keras.resumable(arrays, _BATCH, seed=3)
    dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(_BATCH)  # Seven batches.
    return dataset.repeat() if kind == "endless" else dataset


class _Training:
    """One process's part of a training: a model, and what `fit` returned."""

    def __init__(
        self,
        *callbacks: keras.callbacks.Callback,
        replicas: int = 1,
        at_once: int = 1,
        exact: bool = True,
        data: str = "resumable",
        ops: Any = None,
    ) -> None:
        strategy = tf.distribute.get_strategy()
        if replicas > 1:
            strategy = tfcdo.MirroredStrategy(tu.device_names(replicas), ops)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            self.model = keras.Sequential(_layers(exact))
            self.model.compile(
                _optimizer(exact), "mse", metrics=["mae"], steps_per_execution=at_once
            )
        self.record = _Record()
        steps = None if data == "finite" else _STEPS
        self.history = self.model.fit(
            _data(data),
            epochs=_EPOCHS,
            steps_per_epoch=steps,
            verbose=0,
            callbacks=[*callbacks, self.record],
        )

    @property
    def arrays(self) -> list[np.ndarray]:
        variables = [*self.model.variables, *self.model.optimizer.variables]
        return [
            component.numpy()
            for variable in variables
            for component in getattr(variable.value, "values", (variable.value,))
        ]


class BackupTestCase(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "backup")

    def backup(self, **options: Any) -> tfcdo.keras.BackupAndRestore:
        return tfcdo.keras.BackupAndRestore(self.folder, **options)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def interrupted(self, after: int, *callbacks: Any, **options: Any) -> None:
        with self.assertRaises(KeyboardInterrupt):
            _Training(*callbacks, _End(after), **options)

    def assert_bitwise_equal(self, expected: _Training, actual: _Training) -> None:
        for one, other in zip(expected.arrays, actual.arrays, strict=True):
            self.assertEqual(one.tobytes(), other.tobytes())
        for epoch, logs in actual.record.logs.items():
            self.assertEqual(logs, expected.record.logs[epoch])


class ExactTest(BackupTestCase):
    @parameterized.product(
        [
            {"after": 3, "replicas": 2},
            {"after": 7, "replicas": 1},
            {"after": 11, "replicas": 1},
            {"after": 20, "replicas": 2},
        ],
        data=["resumable", "finite", "endless"],
    )
    def test_ends_as_undisturbed(self, after: int, replicas: int, data: str):
        undisturbed = _Training(replicas=replicas, data=data)
        self.interrupted(after, self.backup(save_freq=1), replicas=replicas, data=data)
        training = _Training(self.backup(save_freq=1), replicas=replicas, data=data)
        self.assert_bitwise_equal(undisturbed, training)
        self.assertFalse(self.folder.exists())


if __name__ == "__main__":
    tf.test.main()
