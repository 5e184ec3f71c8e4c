"""Trainings that end somewhere and go on from a backup, compared with undisturbed ones."""

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import weakref
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras_training import TwoOptimizers, model_of, strategy_of

import tfcdo
import tfcdo.keras
from tfcdo import log, tf_internals
from tfcdo.cluster import config, protocol, session, worker
from tfcdo.keras import backup, backup_folder, preemption, training_state
from tfcdo.training import step

_EPOCHS, _STEPS, _BATCH = 2, 5, 12
_EXAMPLES = 56  # Not a multiple of the batch: batches begin in one epoch and end in the next.


def _end(after: int) -> keras.callbacks.Callback:
    """Interrupts a training after some batches of all epochs."""

    def end(batch: int, logs: Any) -> None:
        if callback.model.optimizer._iterations.numpy() >= after:
            raise KeyboardInterrupt

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    return callback


def _ending(event: str, at: int) -> keras.callbacks.Callback:
    """Interrupts a training at an event of a batch, or an epoch, of this number."""

    def end(number: int, logs: Any) -> None:
        if number == at:
            raise KeyboardInterrupt

    return keras.callbacks.LambdaCallback(**{event: end})


class _Slower(keras.callbacks.LearningRateScheduler):
    """Multiplies the learning rate in each epoch, and before each batch."""

    def __init__(self) -> None:
        super().__init__(lambda epoch, rate: 0.8 * rate)
        self.on_train_begin = lambda logs: self.model.evaluate(_data("finite"), verbose=0)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        rate = self.model.optimizer.learning_rate
        rate.assign(0.97 * rate)


class WithoutCall(keras.Model):
    """Trains a network of its own, as Keras's example of a DDIM does."""

    def __init__(self, is_built: bool = True) -> None:
        super().__init__()
        first = [keras.Input([4])] if is_built else []
        self.network = keras.Sequential([*first, keras.layers.Dense(1)], name="network")

    def train_step(self, data: Any) -> Any:
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = self.loss(targets, self.network(inputs))
        variables = self.network.trainable_variables
        gradients = tape.gradient(loss, [one.value for one in variables])
        self.optimizer.apply(gradients, variables)
        return {"own": loss}


class _Noise(keras.layers.Layer):
    """Adds numbers that are drawn without a seed."""

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(keras.ops.shape(inputs))


def _layers(exact: bool) -> list[Any]:
    layers = keras.layers
    own_of_each = [layers.BatchNormalization(), layers.Dropout(0.3)] if exact else []
    return [layers.Input([4]), layers.Dense(5, "tanh"), *own_of_each, layers.Dense(1)]


def _model(*layers: Any, **options: Any) -> keras.Model:
    return model_of(lambda: [keras.Input([4]), *layers, keras.layers.Dense(1)], "sgd", **options)


def _optimizer(rate: Any = None) -> keras.Optimizer:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
    return keras.optimizers.Adam(
        rate or schedule, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2
    )


def _data(kind: str = "resumable") -> tf.data.Dataset:
    drawn = np.random.default_rng(0)
    arrays = drawn.normal(size=[_EXAMPLES, 4]), drawn.normal(size=[_EXAMPLES, 1])
    if kind == "resumable":
        return tfcdo.keras.resumable_dataset(arrays, _BATCH, seed=3)
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    dataset = dataset.batch(_BATCH, drop_remainder=kind == "full batches")  # Else five batches.
    return dataset.repeat() if kind in ("endless", "full batches") else dataset


class _Training:
    """One process's part of a training: a model, and the logs of epochs."""

    def __init__(
        self,
        *callbacks: keras.callbacks.Callback,
        replicas: int = 1,
        at_once: int = 1,
        exact: bool = True,
        data: str = "resumable",
        lossy: bool = False,
        sharded: bool = False,
        rate: float | None = None,
    ) -> None:
        strategy = tf.distribute.get_strategy()
        if replicas > 1:
            wire = "bfloat16" if lossy else None
            ops = tfcdo.AutoAllReduce(wire_dtype=wire, error_feedback=lossy)
            devices = tu.device_names(replicas)
            strategy = tfcdo.MirroredStrategy(devices, ops, shard_optimizer_state=sharded)
        options: dict[str, Any] = {"metrics": ["mae"], "steps_per_execution": at_once}
        with strategy.scope():
            self.model = model_of(lambda: _layers(exact), _optimizer(rate), **options)
        steps = None if data == "finite" else _STEPS
        options = {"steps_per_epoch": steps, "callbacks": list(callbacks), "verbose": 0}
        history = self.model.fit(_data(data), epochs=_EPOCHS, **options)
        logs = zip(*history.history.values(), strict=True)
        self.logs = dict(zip(history.epoch, logs, strict=True))

    @property
    def arrays(self) -> list[np.ndarray]:
        variables = [*self.model.variables, *self.model.optimizer.variables]
        return [one.numpy() for each in variables for one in step.components(each)]


@functools.cache
def _undisturbed(**options: Any) -> _Training:
    return _Training(**options)


class BackupTestCase(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "backup")
        self.addCleanup(os.chdir, pathlib.Path.cwd())
        self.addCleanup(preemption._signalled.clear)
        os.chdir(self.folder.parent)

    def backup(self, **options: Any) -> tfcdo.keras.BackupAndRestore:
        return tfcdo.keras.BackupAndRestore(self.folder.name, **options)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def assert_ends(self, fit: Any, *callbacks: Any, **options: Any) -> None:
        """Asserts that a callback ends a training, and waits for its last backup."""
        self.assertRaises(KeyboardInterrupt, fit, *callbacks, **options)
        backup._writer.submit(int).result()

    def interrupted(self, after: int, *callbacks: Any, **options: Any) -> None:
        self.assert_ends(_Training, *callbacks, _end(after), **options)

    def assert_bitwise_equal(self, expected: _Training, actual: _Training) -> None:
        for one, other in zip(expected.arrays, actual.arrays, strict=True):
            self.assertEqual(one.tobytes(), other.tobytes())
        for epoch, logs in actual.logs.items():
            self.assertEqual(logs, expected.logs[epoch])


class ExactTest(BackupTestCase):
    @parameterized.parameters(
        ([3], 1, {"replicas": 2, "lossy": True, "sharded": True}),
        ([9], 1, {"data": "endless"}),
        ([3, 9], 3, {"at_once": 2}),  # Two steps at once pass the batch of a backup.
        *tu.nightly(([5], 1, {"data": "finite"}), ([7], 1, {"data": "counted"})),
    )
    def test_ends_as_undisturbed(self, faults: list[int], save_freq: int, options: dict[str, Any]):
        expected = {"data": "finite"} if "data" in options else options
        for after in faults:
            self.interrupted(after, self.backup(save_freq=save_freq), **options)
            self.assertNotEmpty(list(self.folder.glob("*.npz")))
        training = _Training(self.backup(save_freq=save_freq), **options)
        self.assert_bitwise_equal(_undisturbed(**expected), training)
        self.assertEqual(0 in training.logs, faults[-1] <= _STEPS)
        self.assertFalse(self.folder.exists())

    @parameterized.parameters(
        (1, 7, lambda: [_Slower()]),
        # A backup at the end of an epoch, whose weights are swapped until the next one begins.
        ("epoch", 7, lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]),
        *tu.nightly(("epoch", 7, lambda: [_Slower()])),
    )
    def test_callbacks_that_change_the_model(self, save_freq, after, make):
        """They are called again for the first batches of the epoch."""
        options: Any = {"exact": False, "rate": 0.1}
        self.interrupted(after, *make(), self.backup(save_freq=save_freq), **options)
        training = _Training(*make(), self.backup(save_freq=save_freq), **options)
        self.assert_bitwise_equal(_Training(*make(), **options), training)

    def assert_goes_on(self, make: Any, replicas: int, last: int = 2, tests: Any = None) -> None:
        """Checks that a training that ends after a batch then goes on as undisturbed."""

        def fit(*callbacks: Any) -> Any:
            keras.backend.clear_session()
            keras.utils.set_random_seed(0)
            with strategy_of(replicas).scope():
                model = make()
            data = tf.data.Dataset.zip(tuple(_data().map(lambda *xy, at=i: xy[at]) for i in (0, 1)))
            options: Any = {"steps_per_epoch": 5, "callbacks": [*callbacks], "verbose": 0}
            options |= {"validation_data": tests and data, "validation_steps": tests}
            history = model.fit(data, **options).history
            [optimizer] = tf.nest.flatten(getattr(model, "second", model.optimizer))
            values = [one.numpy().tobytes() for one in (*model.weights, *optimizer.variables)]
            return values, history, next(iter(data))[1].numpy().tobytes()

        self.assert_ends(fit, self.backup(save_freq=1), _ending("on_train_batch_end", last))
        self.assertEqual(fit(), fit(self.backup()))

    @parameterized.parameters((1, False), (2, True), *tu.nightly((1, True), (2, False)))
    def test_optimizers_of_a_train_step(self, replicas, held_in_a_dict):
        """On one device they are built in the first step, and one wraps another."""

        def make() -> keras.Model:
            scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, 0.9))
            model = model_of(lambda: _layers(exact=False), scaling, kind=TwoOptimizers)
            model.first, second = model.optimizer, keras.optimizers.Nadam(0.1)
            model.second = {"of": [second]} if held_in_a_dict else second
            return model

        self.assert_goes_on(make, replicas)

    @parameterized.parameters(
        ("unknown", (5, 1), (7, 1), (7, "epoch")),
        ("endless", (5, "epoch"), (7, 1)),
        *tu.nightly(("known", (3, 1), (7, "epoch"))),
    )
    def test_epochs_of_a_part_of_the_data(self, length, *ends):
        """Keras continues with the data in the next epoch, and begins it again after three.

        Or after a fourth one without a batch, if it does not know the length.
        """

        def fit(*callbacks: Any, steps: int = 2, epochs: int = 5) -> Any:
            model = _model()
            data = _data("finite").take(4).concatenate(_data("finite").take(2))
            if length == "endless":
                data = data.repeat()
            if length == "unknown":
                data = data.filter(lambda *batch: True)
            options: Any = {"steps_per_epoch": steps, "epochs": epochs, "verbose": 0}
            history = model.fit(data, callbacks=[*callbacks], **options).history
            return model.get_weights()[0].tobytes(), history["loss"][-1:]

        expected = fit()
        for after, save_freq in ends:
            self.assert_ends(fit, self.backup(save_freq=save_freq), _end(after))
            self.assertEqual(expected, fit(self.backup()))
        if length == "endless":  # The first epoch ends before the position of the backup.
            self.assert_ends(fit, self.backup(save_freq=1), _end(3), steps=4)
            self.assertEqual(fit(steps=5, epochs=1)[0], fit(self.backup(), steps=2, epochs=2)[0])

    def test_an_epoch_without_a_batch(self):
        """Keras reports metrics of nothing for it, by the names in the last batch's logs."""

        def fit(*callbacks: Any) -> Any:
            data = _data("finite").filter(lambda *batch: True)  # Its end is found in epoch 1.
            options: Any = {"steps_per_epoch": 5, "epochs": 3, "verbose": 0}
            return _model(metrics=["mae"]).fit(data, callbacks=[*callbacks], **options).history

        self.assert_ends(fit, self.backup(), _ending("on_epoch_begin", 1))
        self.assertEqual({name: logs[1:] for name, logs in fit().items()}, fit(self.backup()))

    @parameterized.parameters((2, 4), *tu.nightly((1, 2)))
    def test_a_model_without_a_call(self, replicas, last):
        """It reports a number of its last batch."""

        def make() -> keras.Model:
            model = WithoutCall()
            model.compile("sgd", keras.losses.MeanSquaredError(), run_eagerly=True)
            return model

        self.assert_goes_on(make, replicas, last)

    @parameterized.parameters((2, 4), *tu.nightly((1, 2), (2, 2)))
    def test_random_numbers_without_a_seed(self, replicas, last):
        self.assert_goes_on(lambda: _model(_Noise()), replicas, last, tests=2)

    def test_a_training_that_a_callback_ends_has_a_backup_of_its_last_epoch(self):
        def stop(epoch: int, logs: Any) -> None:
            end.model.stop_training = True
            os.chdir("/")  # The backup's path is still in the folder of the beginning.

        end = keras.callbacks.LambdaCallback(on_epoch_end=stop)
        backups = self.backup(delete_checkpoint=False)
        for callbacks in ([end, backups], [backups, end]):
            _Training(*callbacks, exact=False)
            self.assertIn("epoch-00001-batch-00000000.npz", self.names())
            shutil.rmtree(self.folder)

    def test_on_other_numbers_of_replicas(self):
        """Amid an accumulation, after odd numbers of batches; the state is sharded."""
        options: Any = {"sharded": True, "exact": False}
        for after, replicas in (3, 2), (7, 1):
            self.interrupted(after, self.backup(save_freq=1), replicas=replicas, **options)
        training = _Training(self.backup(), replicas=3, **options)
        undisturbed = _undisturbed(exact=False)
        weights = (each.model.get_weights() for each in (undisturbed, training))
        self.assertAllClose(*weights, 1e-5, 1e-5)
        self.assertAllClose(undisturbed.logs[1], training.logs[1], 1e-5, 1e-5)

    @parameterized.parameters("bfloat16", None)
    def test_rounding_errors_on_another_number_of_replicas(self, wire):
        ops = tfcdo.AutoAllReduce(wire_dtype=wire, error_feedback=wire is not None)
        with tfcdo.MirroredStrategy(tu.device_names(2), ops).scope():
            model = keras.Sequential()
        header = {"built": {}, "variables": [], "hosts": 1, "replicas": 3}
        with mock.patch.object(log, "warn_once") as warn:
            training_state.restore(model, header, {"r.0.x": np.zeros(1)})
        told = "devices: 3 on 1 host instead of 2 on 1 host" if wire else "None"
        self.assertIn(told, str(warn.call_args))

    def test_sigterm_before_the_position_of_the_backup(self):
        """Callbacks have changed the model again by then."""
        options: Any = {"exact": False, "rate": 0.1}
        self.interrupted(8, _Slower(), self.backup(save_freq=1), **options)

        def end_two(epoch: int, logs: Any) -> None:
            if not (reader := os.fork()):  # As a PyDataset with processes does.
                signal.raise_signal(signal.SIGTERM)
                os._exit(0)
            self.assertEqual(os.waitpid(reader, 0)[1], signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

        end = keras.callbacks.LambdaCallback(on_epoch_begin=end_two)
        self.assertRaises(SystemExit, _Training, _Slower(), end, self.backup(), **options)
        preemption._signalled.clear()
        training = _Training(_Slower(), self.backup(), **options)
        self.assert_bitwise_equal(_Training(_Slower(), **options), training)

    @parameterized.parameters(
        # Hosts and replicas of the backup, and its values; those that go on, and host 1's values.
        ("mean", (1, 3), [1, -2, 4], (2, 2), [1]),
        ("sum", (1, 3), [1, 2, 4], (2, 4), [0, 0]),
        ("host", (2, 4), [1, 3], (2, 4), [3]),  # A sharded slot is on one device of each host.
        ("host", (2, 2), [1, 3], (3, 6), [2, 2]),
        ("sum of host", (2, 4), [1, 2, 3, 4], (2, 4), [3, 4]),
        ("sum of host", (2, 4), [1, 2, 3, 4], (2, 2), [7]),
        ("sum of host", (2, 4), [1, 2, 3, 4], (3, 6), [5, 0]),
    )
    def test_values_of_other_replicas(self, combine, before, values, now, expected):
        dtype = tf.bfloat16.as_numpy_dtype  # Which numpy does not have, so that files have bits.
        saved = {f"v0.{index}": np.asarray(value, dtype) for index, value in enumerate(values)}
        strategy = mock.Mock(num_replicas_in_sync=now[1])
        strategy.extended.worker_devices = ["/cpu:0"] * (now[1] // now[0])
        slot = training_state._StateEntry(
            "v", combine, tuple(tf.Variable(9, dtype=tf.bfloat16) for _ in expected)
        )
        with mock.patch.object(session, "_current", mock.Mock(**{"cluster.index": 1})):
            header = {"hosts": before[0], "replicas": before[1]}
            arrays = backup_folder.unpack(backup_folder.pack(saved))
            signature = ["v", [], "bfloat16", combine]
            training_state._assign(strategy, [slot], "v", header, [signature], arrays)
        self.assertEqual(expected, [int(one.numpy()) for one in slot.components])

    def test_the_number_of_a_worker_beside_a_chief(self):
        cluster = config.from_spec({"chief": ["a:1"], "worker": ["b:1"]}, "worker", 0)
        strategy = mock.Mock(num_replicas_in_sync=4)
        strategy.extended.worker_devices = ["CPU:0", "CPU:1"]
        with mock.patch.object(session, "_current", mock.Mock(cluster=cluster)):
            self.assertEqual(training_state.host_of(strategy), (1, 2))

    def test_sigterm_makes_a_backup_and_asks_for_a_restart(self):
        def at(batch: int, logs: Any) -> None:
            if batch == 3:
                own.held = weakref.ref(own._iterator)
                signal.raise_signal(signal.SIGTERM)

        own: Any = self.backup()
        ends = contextlib.ExitStack()
        ends.callback(lambda: self.assertIsNone(own.held()))  # Else Python could wait at its end.
        with self.assertRaisesRegex(SystemExit, f"^{protocol.RESTART_STATUS}$"), ends:
            _Training(own, keras.callbacks.LambdaCallback(on_train_batch_begin=at))
        preemption._signalled.clear()
        names = ["epoch-00000-batch-00000004.npz", "progress", "training.json"]
        self.assertEqual(self.names(), names)
        self.assert_bitwise_equal(_undisturbed(), _Training(self.backup()))
        self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)

    def test_a_chief_that_does_not_answer_a_notice(self):
        error = tf.errors.DeadlineExceededError(None, None, "no answer")
        store = mock.Mock(**{"get.side_effect": [None, ""], "set.side_effect": error})
        joined = mock.Mock(store=store, **{"cluster.tasks": "ab", "cluster.index": 1})
        leaving = preemption.Preemption(joined)
        preemption._signalled.set()
        with mock.patch.object(tf_internals, "has_preemption_notice"):  # It says that there is one.
            leaving._listen(joined)
        store.set.assert_called_once_with(f"{leaving._prefix}/notice", "")
        self.assertRaisesRegex(type(error), "no answer", leaving.may_begin, 1)
        failed = mock.patch.object(worker, "another_has_failed", side_effect=[True])
        with failed, mock.patch.object(os, "_exit", side_effect=SystemExit):
            self.assertRaises(SystemExit, leaving._end_with_the_run)


def _dated(seconds: float) -> Any:
    return lambda mark: os.utime(mark, (time.time() + seconds,) * 2)


class ReportTest(BackupTestCase):
    def test_a_resumed_training_is_reported_once(self):
        with self.assertNoLogs(level="WARNING"):
            self.interrupted(8, self.backup(save_freq=3), exact=False)
        left = self.folder.rename(self.folder.with_name("left"))
        for change, told in (
            # The time is at least as long ago as the mark.
            (_dated(-7), r" after ([7-9]|\d{2,})\.\d s at epoch 1, batch 1 \(2 batches repeated\)"),
            (lambda mark: mark.unlink(), " at epoch 1, batch 1"),
            (lambda mark: mark.write_text("x"), " at epoch 1, batch 1"),
            # A clock that was set back.
            (_dated(24 * 3600), r" at epoch 1, batch 1 \(2 batches repeated\)"),
        ):
            shutil.copytree(left, self.folder)
            change(self.folder / "progress")
            with self.assertLogs(level="WARNING") as logs:
                self.interrupted(9, self.backup(save_freq=3), exact=False)
            [line] = [line for line in logs.output if "resumed" in line]
            self.assertRegex(line, f"tfcdo: resumed{told}$")
            shutil.rmtree(self.folder)


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

        for units, optimizer, message in (
            (5, "sgd", r"another optimizer: it was made with Adam, .* is compiled with SGD; give"),
            (6, _optimizer(), r"another model: its variable 0 is \S*dense/kernel \[4, 5\] float32"),
            (5, "adam", r"setting of the optimizer \(optimizer: .*use_ema: True on the backup, F"),
        ):
            layers = [keras.Input([4]), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)]
            model = model_of(functools.partial(list, layers), optimizer)
            with self.assertRaisesRegex(ValueError, message):
                model.fit(np.zeros([4, 4]), np.zeros([4, 1]), verbose=0, callbacks=[self.backup()])
        self.assertEqual(self.names(), names)

    @parameterized.parameters("resumable", "full batches")
    def test_batches_of_another_size(self, data: str):
        """A new epoch may begin with them, but a backup counts an epoch's batches."""
        self.interrupted(7, self.backup(save_freq=1), data=data, exact=False)
        with (
            mock.patch.object(sys.modules[__name__], "_BATCH", 8),
            self.assertRaisesRegex(ValueError, "size must be 12, as before .* batch 2, .* got 8"),
        ):
            _Training(self.backup(), data=data, exact=False)

    def test_layers_that_the_first_step_builds(self):
        def fit(*callbacks: Any) -> None:
            model = WithoutCall(is_built=False)
            model.compile("sgd", keras.losses.MeanSquaredError(), run_eagerly=True)
            data = tf.data.Dataset.from_tensors((np.zeros([4, 4]), np.zeros([4, 1])))
            model.fit(data, verbose=0, callbacks=[self.backup(save_freq=1), *callbacks])

        self.assert_ends(fit, _end(1))
        self.assertRaisesRegex(ValueError, "same model, build its layer 'network' before fit", fit)

    def test_backups_of_other_classes_and_versions(self):
        self.folder.mkdir()
        (self.folder / "latest.weights.h5").touch()
        with self.assertLogs(level="WARNING") as logs:
            self.interrupted(1, self.backup(save_freq=1), exact=False)
        told = "at the beginning: .* another class, .* read: latest.weights.h5; load"
        self.assertRegex("".join(logs.output), told)
        with (
            mock.patch.object(training_state, "FORMAT", 3),
            self.assertRaisesRegex(ValueError, "has format 2, and this version .* reads format 3"),
        ):
            _Training(self.backup(), exact=False)
        _Training(self.backup(), exact=False)
        self.assertEqual(self.names(), ["latest.weights.h5"])

    @parameterized.parameters("before it has come to the backup's position", "after that")
    def test_fit_after_one_that_resumed_and_failed(self, when):
        model = _model()

        def fit(*callbacks: Any) -> tuple[list[int], int]:
            before = model.optimizer.iterations.numpy()
            options: Any = {"epochs": 2, "verbose": 0, "callbacks": list(callbacks)}
            epochs = model.fit(_data("finite"), **options).epoch
            return epochs, int(model.optimizer.iterations.numpy() - before)

        early = _ending("on_train_batch_begin", 0)
        same = self.backup(save_freq=1)
        for one in _end(7), _end(8) if when == "after that" else early:
            self.assert_ends(fit, same, one)
        self.assertIs(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)
        self.assertEqual(fit(), ([0, 1], 10))
        shutil.rmtree(self.folder)
        self.assertEqual(fit(same), ([0, 1], 10))

    def test_fit_in_another_thread_says_that_sigterm_is_not_heard(self):
        with (
            concurrent.futures.ThreadPoolExecutor(1) as pool,
            mock.patch.object(log, "info_once") as info,
        ):
            training = pool.submit(lambda: _Training(self.backup(), exact=False)).result()
        self.assertRegex(info.call_args.args[0], "SIGTERM makes no backup, because fit was not")
        self.assert_bitwise_equal(_undisturbed(exact=False), training)

    @parameterized.parameters(
        ({"backup_dir": ""}, ValueError, "backup_dir must be a path; got ''"),
        ({"save_freq": "batch"}, ValueError, 'save_freq must be "epoch" or a number; got'),
        ({"save_freq": 0}, ValueError, "save_freq must be at least 1"),
        ({"backup_dir": "gs://x/y"}, ValueError, "in a mounted file system; got 'gs://x/y'"),
        ({"backup_dir": None}, TypeError, "backup_dir must be a path; got None"),
        ({"delete_checkpoint": "no"}, TypeError, "delete_checkpoint must be True or False; got"),
    )
    def test_arguments(self, arguments: dict[str, Any], error: type, message: str):
        with self.assertRaisesRegex(error, message):
            tfcdo.keras.BackupAndRestore(**{"backup_dir": "x", **arguments})


if __name__ == "__main__":
    tf.test.main()
