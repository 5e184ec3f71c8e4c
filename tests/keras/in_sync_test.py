"""`tfcdo.keras.CheckInSync`: it finds replicas that differ, and moves no weights to do so."""

from __future__ import annotations

import tempfile
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras_training import (
    BATCH,
    TrainingTestCase,
    dense_data,
    dense_layers,
    fitted,
    model_of,
    strategy_of,
    trained_eagerly,
)

import tfcdo.keras
from tfcdo.digests import digest
from tfcdo.keras import CheckInSync


class Break(keras.callbacks.Callback):
    """Changes one number on one replica, after one step."""

    def __init__(self, variable: str, replica: int, step: int) -> None:
        super().__init__()
        self._variable, self._replica, self._step = variable, replica, step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 == self._step:
            variables = [*self.model.weights, *self.model.optimizer.variables]
            (variable,) = [v for v in variables if v.path.endswith(self._variable)]
            copies = self.model.distribute_strategy.experimental_local_results(variable.value)
            change = np.zeros(variable.shape)
            change.flat[-1] = 0.25
            copies[self._replica].assign_add(change)


class CheckInSyncTest(TrainingTestCase):
    @parameterized.parameters(("kernel", 2, 3, 4), ("bias_momentum", 1, 2, 2))
    def test_names_variable_replica_step_and_difference(self, variable, replica, broken, found):
        # Not raised: of a fit that ends early on three devices, TensorFlow's iterator may take a
        # minute to be collected, in whichever test the garbage collector comes to it.
        check = CheckInSync(every=2, raise_on_difference=False)
        with self.assertLogs("absl", "ERROR") as logs:
            fitted(
                3,
                lambda: keras.optimizers.SGD(0.0, momentum=0.5),
                callbacks=[Break(variable, replica, broken), check],
            )
        message = logs.records[0].getMessage()
        self.assertRegex(
            message,
            rf"^tfcdo: after step {found}, replica {replica} holds other numbers of \S*{variable} "
            r"than replica 0, by 0\.\d+ at most; of 6 variables",
        )
        self.assertGreater(float(message.split(" by ")[1].split()[0]), 0.1)

    def test_compares_after_the_last_step_too(self):
        with self.assertRaisesRegex(RuntimeError, "after step 4, replica 1"):
            fitted(2, lambda: "sgd", callbacks=[Break("kernel", 1, 4), CheckInSync(every=3)])

    # Of an epoch's four steps in executions of three, Keras calls the last one the sixth.
    @parameterized.parameters((1, 3, [3, 6, 8]), (3, 2, [3, 4, 7, 8]), (3, 4, [4, 8]))
    def test_counts_steps_across_epochs(self, steps_per_execution, every, expected):
        model = model_of(dense_layers, "sgd", run_eagerly=False)
        model.steps_per_execution = steps_per_execution
        check = CheckInSync(every=every)
        checked: list[int] = []

        def record() -> None:
            check._checked = check._step
            checked.append(check._step)

        with mock.patch.object(check, "_check", record):
            model.fit(*dense_data(4 * BATCH), BATCH, epochs=2, callbacks=[check], verbose=0)
        self.assertEqual(checked, expected)

    def test_replicas_in_sync(self):
        fitted(3, lambda: "adam", 2, [CheckInSync(every=3)])
        fitted(1, lambda: "adam", 1, [CheckInSync(every=1)])

    def test_only_digests_travel(self):
        with strategy_of(3).scope():
            model = model_of(dense_layers, "adam")
            model.optimizer.build(model.trainable_variables)
        check = CheckInSync(every=1)
        check.set_model(model)
        check.on_train_begin()
        check.on_train_batch_end(0)
        assert check._comparison is not None
        (gathered,) = [
            op.outputs[0]
            for op in check._comparison._digests.get_concrete_function().graph.get_operations()
            if op.type == "ConcatV2"
        ]
        self.assertEqual((gathered.shape, gathered.dtype), ((3, 8), tf.int64))

    @parameterized.parameters(("every", 0), ("every", 1.5), ("raise_on_difference", 1))
    def test_bad_arguments(self, name, value):
        with self.assertRaisesRegex((TypeError, ValueError), f"^{name} must be"):
            CheckInSync(**{name: value})


class CallbackTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        lambda: tfcdo.keras.BackupAndRestore(tempfile.gettempdir()),
        CheckInSync,
        tfcdo.keras.SynchronizeStatistics,
        tfcdo.keras.TraceSummary,
    )
    def test_needs_keras_3(self, make):
        callback = make()
        name = type(callback).__name__
        with self.assertRaisesRegex(TypeError, f"^tfcdo.keras.{name} needs Keras 3.*; got <object"):
            callback.set_model(object())


class DigestTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("float16", "bfloat16", "float32", "float64", "int32", "bool")
    def test_any_change_shows(self, dtype):
        generator = np.random.default_rng(0)
        values = tf.cast(generator.integers(0, 2, [3, 40]), dtype)
        seen = {int(digest(values))}
        self.assertEqual(seen, {int(digest(tf.identity(values)))})
        flipped = values.numpy()
        for row, column in ((0, 0), (1, 7), (2, 39)):  # One by one, and together.
            flipped[row, column] = 1 - flipped[row, column]
            seen.add(int(digest(tf.constant(flipped))))
        seen.add(int(digest(tf.reverse(values, [1]))))
        self.assertLen(seen, 5)

    def test_small_changes_do_not_cancel(self):
        bits = np.arange(1 << 20, dtype=np.int32)
        expected = int(digest(tf.constant(bits)))
        for first, second in ((3, -1), (5, -1), (1, -1), (7, -5)):
            changed = bits.copy()
            changed[[0, 1]] += [first, second]
            self.assertNotEqual(expected, int(digest(tf.constant(changed))))

    def test_variables_of_a_replica_s_own_are_left_out(self):
        model = trained_eagerly(
            2, lambda: keras.optimizers.SGD(0.1), steps=1, layers=_with_statistics
        )
        strategy = model.distribute_strategy
        moving = model.non_trainable_variables[0].value
        own = [copy.numpy() for copy in strategy.experimental_local_results(moving)]
        self.assertNotAllClose(own[0], own[1])
        check = CheckInSync(every=1)
        check.set_model(model)
        check.on_train_begin()
        check.on_train_batch_end(0)


def _with_statistics() -> list[Any]:
    return [*dense_layers(), keras.layers.BatchNormalization()]


if __name__ == "__main__":
    tf.test.main()
