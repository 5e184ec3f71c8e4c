"""Trainings that end somewhere and go on from a backup, compared with undisturbed ones."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import pathlib
import re
import shutil
import signal
import tempfile
import time
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
import tfcdo.keras
from tfcdo import log
from tfcdo.cluster import protocol
from tfcdo.keras import backup, backup_folder, preemption, training_state

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
    own_of_each = [layers.BatchNormalization(), layers.Dropout(0.3)] if exact else []
    return [layers.Input([4]), layers.Dense(5, "tanh"), *own_of_each, layers.Dense(1)]


def _optimizer() -> keras.Optimizer:
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
    return keras.optimizers.Adam(
        rate, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2
    )


def _data(kind: str = "resumable") -> tf.data.Dataset:
    drawn = np.random.default_rng(0)
    arrays = drawn.normal(size=[_EXAMPLES, 4]), drawn.normal(size=[_EXAMPLES, 1])
    if kind == "resumable":
        return tfcdo.keras.resumable_dataset(arrays, _BATCH, seed=3)
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
        lossy: bool = False,
    ) -> None:
        strategy = tf.distribute.get_strategy()
        if replicas > 1:
            wire = "bfloat16" if lossy else None
            ops = tfcdo.AutoAllReduce(wire_dtype=wire, error_feedback=lossy)
            devices = tu.device_names(replicas)
            strategy = tfcdo.MirroredStrategy(devices, ops, shard_optimizer_state=lossy)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            self.model = keras.Sequential(_layers(exact))
            self.model.compile(
                _optimizer(),
                "mse",
                metrics=["mae"],
                steps_per_execution=at_once,
                run_eagerly=replicas == at_once,  # One step at a time is quicker than traced.
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


@functools.cache
def _undisturbed(**options: Any) -> _Training:
    return _Training(**options)


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
        backup._writer.submit(int).result()  # The last one is written.

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
        ([3], 1, {"replicas": 2, "lossy": True}),
        ([7], 1, {"data": "finite"}),
        ([10], 1, {"data": "counted"}),
        ([20], 1, {"data": "endless"}),
        ([5, 16], 3, {"at_once": 2}),
    )
    def test_ends_as_undisturbed(self, faults: list[int], save_freq: int, options: dict[str, Any]):
        expected = {"data": "finite"} if "data" in options else options
        for after in faults:
            self.interrupted(after, self.backup(save_freq=save_freq), **options)
        training = _Training(self.backup(save_freq=save_freq), **options)
        self.assert_bitwise_equal(_undisturbed(**expected), training)
        self.assertEqual(0 in training.record.logs, faults[-1] <= _STEPS)
        self.assertFalse(self.folder.exists())

    def test_on_other_numbers_of_replicas(self):
        """Amid an accumulation, after odd numbers of batches."""
        undisturbed = _undisturbed(exact=False)
        for after, replicas in (3, 2), (9, 1):
            self.interrupted(after, self.backup(save_freq=1), replicas=replicas, exact=False)
        training = _Training(self.backup(save_freq=1), replicas=3, exact=False)
        for one, other in zip(
            undisturbed.model.get_weights(), training.model.get_weights(), strict=True
        ):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
        self.assertAllClose(undisturbed.record.logs[2], training.record.logs[2], 1e-5, 1e-5)

    def test_sigterm_makes_a_backup_and_asks_for_a_restart(self):
        undisturbed = _undisturbed()
        with self.assertRaisesRegex(SystemExit, f"^{protocol.RESTART_STATUS}$"):
            self.addCleanup(preemption._signalled.clear)
            _Training(self.backup(), _Signal(4))
        preemption._signalled.clear()
        self.assertEqual(
            self.names(), ["epoch-00000-batch-00000005.npz", "progress", "training.json"]
        )
        self.assert_bitwise_equal(undisturbed, _Training(self.backup()))
        self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)


class ReportTest(BackupTestCase):
    def resumed(self, **options: Any) -> str:
        """Goes on for a batch, and returns the report, which is logged once."""
        with self.assertLogs(level="WARNING") as logs:
            self.interrupted(_EPOCHS * _STEPS - 1, self.backup(**options), exact=False)
        [line] = [line for line in logs.output if "resumed" in line]
        return line

    @parameterized.parameters((11, "batch 2 (2 batches"), (12, "batch 5 (0 batches"))
    def test_a_report_of_the_time_and_the_repeated_batches(self, after, told):
        self.interrupted(after, self.backup(save_freq=3), exact=False)
        mark = self.folder / "progress"
        now = time.time()
        os.utime(mark, (now - 7.0, now - 7.0))
        seconds, rest = re.split(r"resumed after ([\d.]+) s", self.resumed(save_freq=3))[1:]
        # As many as the test has taken since: the limit of a hang.
        self.assertBetween(float(seconds), 7.0, 7.0 + 300.0)
        self.assertEqual(rest, f" at epoch 1, {told} repeated)")

    def test_several_steps_at_once_may_pass_the_batch_of_a_backup(self):
        for batches, new, is_due in (4, 2, True), (3, 1, True), (5, 2, False):
            self.assertEqual(backup._passes(backup._Progress(batches=batches), new, 3), is_due)

    @parameterized.parameters(
        (lambda mark: mark.unlink(), ""),
        (lambda mark: mark.write_text("x"), ""),
        (lambda mark: os.utime(mark, (time.time() + 24 * 3600,) * 2), " (1 batch repeated)"),
    )
    def test_a_report_without_marks_or_with_a_clock_that_was_set_back(self, change, repeated):
        self.interrupted(19, self.backup(save_freq=6), exact=False)
        change(self.folder / "progress")
        resumed = f"tfcdo: resumed at epoch 2, batch 4{repeated}"
        self.assertEndsWith(self.resumed(save_freq=6), resumed)

    def test_nothing_is_reported_at_the_beginning(self):
        with self.assertNoLogs(level="WARNING"):
            self.interrupted(2, self.backup(), exact=False)


class BadInputTest(BackupTestCase):
    # Noticed by the next backup, and at the end.
    @parameterized.parameters(3, _EPOCHS * _STEPS)
    def test_a_backup_that_cannot_be_written_ends_the_training(self, save_freq: int):
        full = OSError("No space left on device")
        with (
            mock.patch.object(backup_folder.BackupFolder, "write", side_effect=full),
            self.assertRaisesRegex(OSError, "No space left"),
        ):
            _Training(self.backup(save_freq=save_freq), exact=False)

    def test_another_model_or_optimizer(self):
        self.interrupted(1, self.backup(save_freq=1), exact=False)
        names = self.names()

        def fit(units: int, optimizer: Any) -> None:
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(units, "tanh")])
            if units == 5:
                model.add(keras.layers.Dense(1))
            model.compile(optimizer, "mse", run_eagerly=True)
            model.fit(np.zeros([4, 4]), np.zeros([4, 1]), verbose=0, callbacks=[self.backup()])

        with self.assertRaisesRegex(
            ValueError, r"another optimizer: it was made with Adam, and the model .* with SGD; give"
        ):
            fit(5, "sgd")
        adam = keras.optimizers.Adam(
            keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9), use_ema=True
        )
        with self.assertRaisesRegex(
            ValueError, r"another model: its variable 0 is sequential/dense/kernel \[4, 5\] float32"
        ):
            fit(6, adam)
        self.assertEqual(self.names(), names)

    def test_backups_of_other_classes_and_versions(self):
        self.folder.mkdir()
        (self.folder / "latest.weights.h5").touch()
        with self.assertLogs(level="WARNING") as logs:
            self.interrupted(1, self.backup(save_freq=1), exact=False)
        self.assertRegex(
            "".join(logs.output),
            "at the beginning: .* another class, .* read: latest.weights.h5; load",
        )
        with (
            mock.patch.object(training_state, "FORMAT", 2),
            self.assertRaisesRegex(ValueError, "has format 1, and this version .* reads format 2"),
        ):
            _Training(self.backup(), exact=False)
        _Training(self.backup(), exact=False)
        self.assertEqual(self.names(), ["latest.weights.h5"])

    def test_fit_after_a_failed_fit_begins_where_it_says(self):
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        data = tf.data.Dataset.from_tensors((np.zeros([4, 4]), np.zeros([4, 1])))

        def fit(*callbacks: Any) -> list[int]:
            return model.fit(data, epochs=4, verbose=0, callbacks=list(callbacks)).epoch

        class Fail(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if epoch == 2:
                    raise KeyboardInterrupt

        same = self.backup()
        for _ in range(2):
            with self.assertRaises(KeyboardInterrupt):
                fit(same, Fail())
        backup._writer.submit(int).result()
        shutil.rmtree(self.folder)
        self.assertEqual(fit(same), [0, 1, 2, 3])

    def test_fit_in_another_thread_says_that_sigterm_is_not_heard(self):
        with (
            concurrent.futures.ThreadPoolExecutor(1) as pool,
            mock.patch.object(log, "info_once") as info,
        ):
            training = pool.submit(lambda: _Training(self.backup(), exact=False)).result()
        self.assertRegex(info.call_args.args[0], "SIGTERM makes no backup, because fit was not")
        self.assert_bitwise_equal(_undisturbed(exact=False), training)

    @parameterized.parameters(
        ({"backup_dir": ""}, ValueError, "backup_dir must be the path of a folder; got ''"),
        ({"save_freq": "batch"}, ValueError, 'save_freq must be "epoch" or a number; got'),
        ({"save_freq": 0}, ValueError, "save_freq must be at least 1"),
        ({"save_freq": 1.5}, TypeError, "save_freq must be an int"),
    )
    def test_arguments(self, arguments: dict[str, Any], error: type, message: str):
        with self.assertRaisesRegex(error, message):
            tfcdo.keras.BackupAndRestore(**{"backup_dir": "x", **arguments})


if __name__ == "__main__":
    tf.test.main()
