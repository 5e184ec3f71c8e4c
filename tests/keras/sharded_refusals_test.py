"""Bad input for `shard_optimizer_state=True`, and steps that fail."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras import optimizers as ko
from keras_training import Make, TrainingTestCase, strategy_of

import tfcdo
from tfcdo.keras import DistributedOptimizer


def sharded(make: Make) -> Make:
    return lambda: DistributedOptimizer(make(), shard_optimizer_state=True)


class RefusalsTest(TrainingTestCase):
    def test_not_a_bool(self):
        with self.assertRaisesRegex(TypeError, "must be True or False; got 1"):
            DistributedOptimizer(ko.SGD(), shard_optimizer_state=1)  # type: ignore[arg-type]

    def test_optimizer_of_elsewhere(self):
        optimizer = ko.SGD()
        with strategy_of(2).scope(), self.assertRaisesRegex(ValueError, "make both in strategy.sc"):
            DistributedOptimizer(optimizer, shard_optimizer_state=True)

    def test_built_optimizer(self):
        with strategy_of(2).scope():
            optimizer = ko.SGD()
            optimizer.build([keras.Variable(1.0)])
            with self.assertRaisesRegex(ValueError, "not built yet; got sgd.*make a new one"):
                DistributedOptimizer(optimizer, shard_optimizer_state=True)

    @parameterized.parameters(None, 2)
    def test_model_of_elsewhere(self, count):
        if count:
            with strategy_of(count).scope():
                variable = keras.Variable([1.0])
        else:
            variable = keras.Variable([1.0])
        with strategy_of(2).scope():
            optimizer = sharded(ko.SGD)()
            with self.assertRaisesRegex(ValueError, "make the model in strategy.scope"):
                optimizer.build([variable])

    @parameterized.parameters(
        lambda: tf.distribute.MirroredStrategy(tu.device_names(2)),
        lambda: tfcdo.MirroredStrategy(tu.device_names(2), tfcdo.ReductionToOneDevice()),
    )
    def test_other_sums(self, make):
        with (
            make().scope(),
            self.assertRaisesRegex(TypeError, "needs a strategy that sums with one of tfcdo's"),
        ):
            sharded(ko.SGD)()

    def test_optimizers_by_a_function(self):
        @functools.cache
        def adam() -> keras.optimizers.Optimizer:
            return ko.Adam()

        def choose(_: Any) -> keras.optimizers.Optimizer:
            return adam()

        with strategy_of(2).scope():
            optimizer = sharded(lambda: ko.MultiOptimizer(choose))()
            with self.assertRaisesRegex(ValueError, "given an OptimizerMap"):
                optimizer.build([keras.Variable([1.0])])

    def test_slots_of_no_variable(self):
        class Custom(ko.SGD):
            def build(self, variables: Any) -> None:
                super().build(variables)
                self.add_variable(shape=(3,), name="mine")

        with strategy_of(2).scope():
            optimizer = sharded(Custom)()
            with self.assertRaisesRegex(ValueError, "Custom makes 'custom/mine' elsewhere"):
                optimizer.build([keras.Variable([1.0])])


class FailureTest(TrainingTestCase):
    def test_a_step_that_fails_changes_no_weights(self):
        """The gradient of the last variable fails; no owner has begun by then."""
        strategy = strategy_of(3)
        with strategy.scope():
            variables = [keras.Variable(np.ones([4], np.float32)) for _ in range(6)]
            optimizer = sharded(lambda: ko.SGD(0.2, weight_decay=0.1))()
            optimizer.build(variables)

        @tf.function
        def step(last: tf.Tensor) -> None:
            def on_replica() -> None:
                gradients = [tf.ones([4])] * 5 + [tf.debugging.check_numerics(last, "bad")]
                optimizer.apply(gradients, variables)

            strategy.run(on_replica)

        step(tf.ones([4]))
        before = [component.numpy() for one in variables for component in one.value.values]
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "bad"):
            step(tf.constant([1.0, np.nan, 1.0, 1.0]))
        after = [component.numpy() for one in variables for component in one.value.values]
        self.assertAllEqual(before, after)
        step(tf.ones([4]))


if __name__ == "__main__":
    tf.test.main()
