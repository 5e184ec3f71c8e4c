"""Trainings that end somewhere and go on from a backup, compared with undisturbed ones."""

from __future__ import annotations

import pathlib
import signal
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
import tfcdo.keras
from tfcdo import environment
from tfcdo.keras import preemption

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


class _Signal(keras.callbacks.Callback):
    """Sends this process a SIGTERM in a batch."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == self._batch:
            signal.raise_signal(signal.SIGTERM)


class ExactTest(BackupTestCase):
    @parameterized.parameters(
        (3, 2, "resumable"), (7, 1, "finite"), (11, 1, "resumable"), (20, 2, "endless")
    )
    def test_ends_as_undisturbed(self, after: int, replicas: int, data: str):
        undisturbed = _Training(replicas=replicas, data=data)
        self.interrupted(after, self.backup(save_freq=1), replicas=replicas, data=data)
        training = _Training(self.backup(save_freq=1), replicas=replicas, data=data)
        self.assert_bitwise_equal(undisturbed, training)
        self.assertFalse(self.folder.exists())

    def test_several_faults_and_steps_at_once(self):
        undisturbed = _Training(at_once=2)
        for after in 4, 5, 16:
            self.interrupted(after, self.backup(save_freq=3), at_once=2)
        training = _Training(self.backup(save_freq=3), at_once=2)
        self.assert_bitwise_equal(undisturbed, training)
        self.assertNotIn(0, training.record.logs)

    def test_on_other_numbers_of_replicas(self):
        undisturbed = _Training(exact=False)
        for after, replicas in (3, 2), (9, 3), (12, 1):
            self.interrupted(after, self.backup(save_freq=1), replicas=replicas, exact=False)
        training = _Training(self.backup(save_freq=1), replicas=2, exact=False)
        for one, other in zip(
            undisturbed.model.get_weights(), training.model.get_weights(), strict=True
        ):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
        self.assertAllClose(undisturbed.record.logs[2], training.record.logs[2], 1e-5, 1e-5)

    def test_residuals(self):
        def train(*callbacks: Any) -> _Training:
            ops = tfcdo.AutoAllReduce(wire_dtype="bfloat16", error_feedback=True)
            return _Training(*callbacks, replicas=2, ops=ops, exact=False)

        undisturbed = train()
        with self.assertRaises(KeyboardInterrupt):
            train(self.backup(save_freq=1), _End(5))
        self.assert_bitwise_equal(undisturbed, train(self.backup()))

    def test_sigterm_makes_a_backup_and_asks_for_a_restart(self):
        undisturbed = _Training()
        with self.assertRaisesRegex(SystemExit, f"^{environment.RESTART_STATUS}$"):
            self.addCleanup(preemption._signalled.clear)
            _Training(self.backup(), _Signal(4))
        preemption._signalled.clear()
        self.assertEqual(self.names(), ["epoch-00000-batch-00000005.npz", "training.json"])
        self.assert_bitwise_equal(undisturbed, _Training(self.backup()))
        self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)


if __name__ == "__main__":
    tf.test.main()
