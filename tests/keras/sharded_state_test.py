"""`shard_optimizer_state=True`: what it computes and sends, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import graph_testing
import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras import optimizers as ko
from keras_training import (
    BATCH,
    TrainingTestCase,
    dense_data,
    fitted,
    strategy_of,
    trained_eagerly,
)

import tfcdo

sharded = functools.partial(trained_eagerly, shard_optimizer_state=True)


class OptionsTest(TrainingTestCase):
    def test_swapped_averages(self):
        """The callback swaps the weights of all devices with their averages, and back."""
        make = functools.partial(ko.Adam, 0.05, use_ema=True, ema_momentum=0.7)
        data, losses = dense_data(), []
        for model in (trained_eagerly(1, make), sharded(3, make)):
            swap = [keras.callbacks.SwapEMAWeights()]
            losses.append(model.evaluate(*data, BATCH, verbose=0, callbacks=swap))
            losses.append(model.evaluate(*data, BATCH, verbose=0))
        self.assertAllClose(losses[:2], losses[2:], 2e-5, 2e-5)
        self.assertNotAllClose(losses[0], losses[1])

    def test_weights_of_an_epoch_are_the_averages(self):
        make = functools.partial(ko.Adam, 0.05, use_ema=True, ema_momentum=0.7)
        expected, model = (
            fitted(
                count,
                make,
                2,
                [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
                shard_optimizer_state=True,
            )
            for count in (1, 3)
        )
        self.assert_same_training(expected, model, 2e-5)

    def test_exclusions_from_weight_decay(self):
        def make() -> Any:
            optimizer = ko.AdamW(0.05, weight_decay=0.3)
            optimizer.exclude_from_weight_decay(var_names=["bias"])
            return optimizer

        expected = trained_eagerly(3, make)
        self.assert_same_training(expected, sharded(3, make), 0.0)
        decaying = trained_eagerly(3, lambda: ko.AdamW(0.05, weight_decay=0.3))
        self.assertNotAllEqual(expected.get_weights()[1], decaying.get_weights()[1])

    def test_wire_dtype_casts_gradients_but_not_weights(self):
        ops = functools.partial(tfcdo.HierarchicalCopyAllReduce, wire_dtype="bfloat16")
        model = sharded(2, lambda: ko.SGD(0.2), ops=ops())
        exact = sharded(2, lambda: ko.SGD(0.2))
        self.assert_same_training(exact, model, 2e-2)
        weights = model.get_weights()[0]
        self.assertNotAllEqual(weights, exact.get_weights()[0])
        as_bfloat16 = tf.cast(tf.cast(weights, tf.bfloat16), tf.float32)
        self.assertNotAllEqual(weights, as_bfloat16)


class TrafficTest(TrainingTestCase):
    def test_no_more_is_copied_than_is_explained(self):
        """Sums reach their owners only, and weights all devices."""
        strategy = strategy_of(2, shard_optimizer_state=True)
        shapes = [(30,), (10,), (10,)]
        with strategy.scope():
            variables = [keras.Variable(np.ones(shape, np.float32)) for shape in shapes]
            optimizer = ko.SGD(0.2)
            optimizer.build(variables)

        def step() -> None:
            optimizer.apply([tf.sin(one.value) for one in variables], variables)

        graph = tf.function(lambda: strategy.run(step)).get_concrete_function().graph
        copied = graph_testing.copied_bytes(graph, tu.device_names(2))
        told = strategy.explain(shapes, shard_optimizer_state=True)
        for link, num_bytes in told.bytes_by_link.items():
            self.assertBetween(copied[link], 1, num_bytes)

    @parameterized.parameters(
        (lambda: ko.SGD(0.2), True),
        (lambda: ko.Adam(0.2), False),
        (lambda: ko.SGD(0.2, weight_decay=0.1), False),
    )
    def test_only_rows_are_sent_back_if_only_rows_change(self, make, only_rows):
        strategy = strategy_of(2, shard_optimizer_state=True)
        with strategy.scope():
            table = keras.Variable(np.ones([1000, 2], np.float32))
            optimizer = make()
            optimizer.build([table])

        def step() -> None:
            indices, shape = tf.constant([7, 7]), tf.constant([1000, 2])
            gradient = tf.IndexedSlices(tf.ones([2, 2]), indices, shape)
            optimizer.apply([gradient], [table])

        ops = tu.traced_ops(lambda: strategy.run(step))
        scattered = [op for op in ops if op.type == "ResourceScatterUpdate"]
        self.assertLen(scattered, 1 if only_rows else 0)

    @parameterized.parameters(lambda: ko.SGD(0.2, weight_decay=0.1), lambda: ko.Adagrad(0.2))
    def test_all_replicas_hold_the_same_after_rows(self, make):
        """Weight decay changes rows that have no gradient, too."""
        results = []
        for shards in (False, True):
            strategy = strategy_of(2, shard_optimizer_state=shards)
            with strategy.scope():
                table, optimizer = keras.Variable(np.ones([6, 2], np.float32)), make()

            def step(optimizer: Any = optimizer, table: Any = table) -> None:
                gradient = tf.IndexedSlices(
                    tf.ones([2, 2]), tf.constant([4, 1]), tf.constant([6, 2])
                )
                optimizer.apply([gradient], [table])

            for _ in range(2):
                strategy.run(step)
            results += [component.read_value() for component in table.value.values]
        self.assert_bitwise_equal(results)

    def test_state_is_dealt_evenly(self):
        strategy = strategy_of(4, shard_optimizer_state=True)
        with strategy.scope():
            variables = [keras.Variable(np.zeros([size], np.float32)) for size in range(100, 200)]
            optimizer = ko.Adam()
            self.assertEqual(strategy.state_bytes(optimizer), {})
            optimizer.build(variables)
        held = strategy.state_bytes(optimizer)
        self.assertCountEqual(held, strategy.extended.worker_devices)
        quarter = 2 * 4 * sum(range(100, 200)) / 4
        for number in held.values():
            self.assertBetween(number, 0.98 * quarter, 1.02 * quarter)


class RefusalsTest(TrainingTestCase):
    def test_not_a_bool(self):
        with self.assertRaisesRegex(
            TypeError, "shard_optimizer_state must be True or False; got 1"
        ):
            tfcdo.MirroredStrategy(tu.device_names(2), shard_optimizer_state=1)  # type: ignore[arg-type]

    @parameterized.parameters(tf.distribute.ReductionToOneDevice, tfcdo.ReductionToOneDevice)
    def test_other_sums(self, ops):
        with self.assertRaisesRegex(TypeError, "is one of tfcdo's all-reduce classes"):
            strategy_of(2, ops(), shard_optimizer_state=True)


class FailureTest(TrainingTestCase):
    def test_a_step_that_fails_changes_no_weights(self):
        """The gradient of the last variable fails; no owner has begun by then."""
        strategy = strategy_of(3, shard_optimizer_state=True)
        with strategy.scope():
            variables = [keras.Variable(np.ones([4], np.float32)) for _ in range(6)]
            optimizer = ko.SGD(0.2, weight_decay=0.1)
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

    def test_slots_of_no_variable(self):
        """An optimizer's own variables belong to none of the model's: they are on all devices."""

        class Custom(ko.SGD):
            def build(self, variables: Any) -> None:
                super().build(variables)
                self.mine = self.add_variable(shape=(3,), name="mine")

        strategy = strategy_of(2, shard_optimizer_state=True)
        with strategy.scope():
            optimizer = Custom(0.5)
            variable = keras.Variable([1.0])
            optimizer.build([variable])
        strategy.run(lambda: optimizer.apply([tf.ones([1])], [variable]))
        self.assertLen(optimizer.mine.value.values, 2)
        self.assertAllClose([0.0], variable)


if __name__ == "__main__":
    tf.test.main()
