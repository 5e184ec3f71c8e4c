"""`check_in_sync`: `fit` finds replicas that differ, and moves no weights to do so."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import keras_training as kt
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfcdo.training import models


def _break(model: keras.Model, variable: str, replica: int, by: float = 0.25) -> None:
    variables = [*model.weights, *model.optimizer.variables]
    (found,) = [v for v in variables if v.path.endswith(variable)]
    change = np.zeros(found.shape)
    change.flat[-1] = by
    found.value.values[replica].assign_add(change)


class ComparisonTest(kt.TrainingTestCase):
    def test_names_variable_replica_and_difference(self):
        make = functools.partial(
            keras.optimizers.SGD, 0.1, momentum=0.5, gradient_accumulation_steps=2
        )
        model = kt.trained_eagerly(3, make, steps=1)
        comparison = models.WeightComparison(model)
        with self.subTest("variables of a replica's own are left out"):
            self.assertNotAllClose(*model.optimizer._accumulated_gradients[0].value.values[:2])
            self.assertIsNone(comparison.difference())
        for variable, replica in (("kernel", 2), ("bias_momentum", 1)):
            with self.subTest(variable):
                _break(model, variable, replica)
                self.assertRegex(
                    str(comparison.difference()),
                    rf"^replica {replica} holds other numbers of \S*{variable} than replica 0, by "
                    r"0\.25\d* at most; of 6 variables 1 differ somewhere$",
                )
                _break(model, variable, replica, -0.25)
        with self.subTest("only digests are sent"):
            graph = comparison._digests.get_concrete_function().graph
            (gathered,) = [op.outputs[0] for op in graph.get_operations() if op.type == "ConcatV2"]
            self.assertEqual((gathered.shape, gathered.dtype), ((3, 6), tf.int64))


class FitTest(kt.TrainingTestCase):
    @parameterized.parameters((1, 3, True), (1, 4, False), (2, 6, True))
    def test_the_first_executions(self, steps_per_execution, step, is_found):
        strategy = kt.strategy_of(2)
        strategy.extended.checks_in_sync = True
        with strategy.scope():
            model = kt.model_of(kt.dense_layers, "sgd")
        model.steps_per_execution = steps_per_execution

        def at(batch: int, logs: Any) -> None:
            if batch + 1 == step - steps_per_execution:
                _break(model, "kernel", 1)

        number = step // steps_per_execution
        found = rf"^after execution {number} of the train step, replica 1 .*check_in_sync=False"
        with self.assertRaisesRegex(RuntimeError, found) if is_found else contextlib.nullcontext():
            breaking = keras.callbacks.LambdaCallback(on_train_batch_end=at)
            model.fit(*kt.dense_data(step * kt.BATCH), kt.BATCH, callbacks=[breaking], verbose=0)


class DigestTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("float16", "bfloat16", "float32", "float64", "int32", "bool")
    def test_any_change_shows(self, dtype):
        values = tf.cast(np.random.default_rng(0).integers(0, 2, [3, 40]), dtype)
        seen = {int(models.digest(tf.identity(values))) for _ in range(2)}
        flipped = values.numpy()
        for at in ((0, 0), (1, 7), (2, 39)):  # One by one, and together.
            flipped[at] = 1 - flipped[at]
            seen.add(int(models.digest(tf.constant(flipped))))
        seen.add(int(models.digest(tf.reverse(values, [1]))))
        self.assertLen(seen, 5)

    def test_small_changes_do_not_cancel(self):
        bits = np.arange(1 << 20, dtype=np.int32)
        seen = {int(models.digest(tf.constant(bits)))}
        for changes in ((3, -1), (5, -1), (1, -1), (7, -5)):
            changed = tf.concat([bits[:2] + np.array(changes, np.int32), bits[2:]], 0)
            seen.add(int(models.digest(changed)))
        self.assertLen(seen, 5)


if __name__ == "__main__":
    tf.test.main()
