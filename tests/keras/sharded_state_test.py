"""`shard_optimizer_state=True`: what it computes and sends, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras import optimizers as ko
from keras_training import (
    BATCH,
    Make,
    TrainingTestCase,
    dense_data,
    fitted,
    strategy_of,
    trained_eagerly,
)

import tfcdo
from tfcdo.keras import DistributedOptimizer


def sharded(make: Make) -> Make:
    return lambda: DistributedOptimizer(make(), shard_optimizer_state=True)


def unsharded(make: Make) -> Make:
    return lambda: DistributedOptimizer(make())


class OptionsTest(TrainingTestCase):
    def test_swapped_averages(self):
        """The callback swaps the weights of all devices with their averages, and back."""
        make = functools.partial(ko.Adam, 0.05, use_ema=True, ema_momentum=0.7)
        data, losses = dense_data(), []
        for count, optimizer in ((1, make), (3, sharded(make))):
            model = trained_eagerly(count, optimizer)
            swap = [keras.callbacks.SwapEMAWeights()]
            losses.append(model.evaluate(*data, BATCH, verbose=0, callbacks=swap))
            losses.append(model.evaluate(*data, BATCH, verbose=0))
        self.assertAllClose(losses[:2], losses[2:], 2e-5, 2e-5)
        self.assertNotAllClose(losses[0], losses[1])

    def test_weights_of_an_epoch_are_the_averages(self):
        make = functools.partial(ko.Adam, 0.05, use_ema=True, ema_momentum=0.7)
        expected, model = (
            fitted(count, optimizer, 2, [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
            for count, optimizer in ((1, make), (3, sharded(make)))
        )
        self.assert_same_training(expected, model, 2e-5)

    def test_exclusions_from_weight_decay(self):
        def make() -> Any:
            optimizer = ko.AdamW(0.05, weight_decay=0.3)
            optimizer.exclude_from_weight_decay(var_names=["bias"])
            return optimizer

        expected = trained_eagerly(3, unsharded(make))
        self.assert_same_training(expected, trained_eagerly(3, sharded(make)), 0.0)
        decaying = trained_eagerly(3, unsharded(lambda: ko.AdamW(0.05, weight_decay=0.3)))
        self.assertNotAllEqual(expected.get_weights()[1], decaying.get_weights()[1])

    def test_wire_dtype_casts_gradients_but_not_weights(self):
        ops = functools.partial(tfcdo.HierarchicalCopyAllReduce, wire_dtype="bfloat16")
        model = trained_eagerly(2, sharded(lambda: ko.SGD(0.2)), ops=ops())
        exact = trained_eagerly(2, sharded(lambda: ko.SGD(0.2)))
        self.assert_same_training(exact, model, 2e-2)
        weights = model.get_weights()[0]
        self.assertNotAllEqual(weights, exact.get_weights()[0])
        as_bfloat16 = tf.cast(tf.cast(weights, tf.bfloat16), tf.float32)
        self.assertNotAllEqual(weights, as_bfloat16)


class TrafficTest(TrainingTestCase):
    @parameterized.parameters((lambda: ko.SGD(0.2), True), (lambda: ko.Adam(0.2), False))
    def test_only_rows_are_sent_back_if_only_rows_change(self, make, only_rows):
        strategy = strategy_of(2)
        with strategy.scope():
            table = keras.Variable(np.ones([1000, 2], np.float32))
            optimizer = sharded(make)()
            optimizer.build([table])

        def step() -> None:
            indices, shape = tf.constant([7, 7]), tf.constant([1000, 2])
            gradient = tf.IndexedSlices(tf.ones([2, 2]), indices, shape)
            optimizer.apply([gradient], [table])

        ops = tu.traced_ops(lambda: strategy.run(step))
        scattered = [op for op in ops if op.type == "ResourceScatterUpdate"]
        self.assertLen(scattered, 1 if only_rows else 0)

    def test_state_is_dealt_evenly(self):
        strategy = strategy_of(4)
        with strategy.scope():
            variables = [keras.Variable(np.zeros([size], np.float32)) for size in range(100, 200)]
            optimizer = sharded(ko.Adam)()
            optimizer.build(variables)
        held = optimizer.state_bytes()
        self.assertCountEqual(held, strategy.extended.worker_devices)
        quarter = 2 * 4 * sum(range(100, 200)) / 4
        for number in held.values():
            self.assertBetween(number, 0.98 * quarter, 1.02 * quarter)


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
