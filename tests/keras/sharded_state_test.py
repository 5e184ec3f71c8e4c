"""`shard_optimizer_state=True`: weights and slots as without it, on one device and on several."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras import optimizers as ko
from keras_optimizers import MENDED, OPTIMIZERS
from keras_training import (
    BATCH,
    Make,
    TrainingTestCase,
    dense_data,
    fitted,
    strategy_of,
    trained_eagerly,
    word_data,
    word_layers,
)

import tfcdo
from tfcdo.keras import CheckInSync, DistributedOptimizer


def sharded(make: Make) -> Make:
    return lambda: DistributedOptimizer(make(), shard_optimizer_state=True)


def unsharded(make: Make) -> Make:
    return lambda: DistributedOptimizer(make())


class ShardedTestCase(TrainingTestCase):
    def assert_bits_of(
        self, expected: keras.Model, model: keras.Model, tolerance: float = 0.0
    ) -> None:
        """Asserts the same weights and slots, and slots on one device each."""
        self.assert_same_training(expected, model, tolerance)
        slots = [own for own in model.optimizer.variables if len(own.shape)]
        for slot in slots:
            if slot.synchronization != "on_read" and not slot.path.endswith("_average"):
                self.assertFalse(hasattr(slot.value, "values"), slot.path)


class OptimizersTest(ShardedTestCase):
    @parameterized.parameters(*OPTIMIZERS)
    def test_as_on_one_device(self, name):
        make = functools.partial(getattr(ko, name), 0.05)
        expected = trained_eagerly(1, make, steps=3)
        model = trained_eagerly(3, sharded(make), steps=3)
        self.assert_same_training(expected, model, 2e-5)
        self.assert_moved(expected)

    def test_fit_in_a_graph_on_five_devices_is_in_sync(self):
        make = functools.partial(ko.Adam, 0.05)
        in_sync = [CheckInSync(every=1)]
        expected = fitted(1, make)
        model = fitted(5, sharded(make), run_eagerly=False, callbacks=in_sync)
        self.assert_bits_of(expected, model, 2e-5)


class OptionsTest(ShardedTestCase):
    @parameterized.parameters(*MENDED)
    def test_bits_of_the_unsharded(self, row):
        steps = 8 if row == "ema_accumulation" else 4
        expected = trained_eagerly(3, unsharded(MENDED[row]), steps)
        model = trained_eagerly(3, sharded(MENDED[row]), steps)
        self.assert_bits_of(expected, model)

    @parameterized.parameters("ema_accumulation", "loss_scale", "several", "global_clipnorm")
    def test_fit_in_a_graph(self, row):
        expected = fitted(2, unsharded(MENDED[row]))
        in_sync = [CheckInSync(every=1)]
        model = fitted(2, sharded(MENDED[row]), run_eagerly=False, callbacks=in_sync)
        # TensorFlow rewrites the arithmetic of graphs.
        self.assert_bits_of(expected, model, 1e-6)

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
        models = [
            fitted(count, optimizer, 2, [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
            for count, optimizer in ((1, make), (3, sharded(make)))
        ]
        self.assert_same_training(*models, 2e-5)

    def test_exclusions_from_weight_decay(self):
        def make() -> Any:
            optimizer = ko.AdamW(0.05, weight_decay=0.3)
            optimizer.exclude_from_weight_decay(var_names=["bias"])
            return optimizer

        expected = trained_eagerly(3, unsharded(make))
        self.assert_bits_of(expected, trained_eagerly(3, sharded(make)))
        decaying = trained_eagerly(3, unsharded(lambda: ko.AdamW(0.05, weight_decay=0.3)))
        self.assertNotAllEqual(expected.get_weights()[1], decaying.get_weights()[1])

    def test_one_replica(self):
        strategy = tfcdo.MirroredStrategy(["CPU:0"])
        expected = fitted(1, MENDED["ema_accumulation"])
        model = fitted(1, sharded(MENDED["ema_accumulation"]), run_eagerly=False, strategy=strategy)
        self.assert_same_training(expected, model)

    def test_wire_dtype_casts_gradients_but_not_weights(self):
        ops = functools.partial(tfcdo.HierarchicalCopyAllReduce, wire_dtype="bfloat16")
        model = trained_eagerly(2, sharded(lambda: ko.SGD(0.2)), ops=ops())
        exact = trained_eagerly(2, sharded(lambda: ko.SGD(0.2)))
        self.assert_same_training(exact, model, 2e-2)
        weights = model.get_weights()[0]
        self.assertNotAllEqual(weights, exact.get_weights()[0])
        as_bfloat16 = tf.cast(tf.cast(weights, tf.bfloat16), tf.float32)
        self.assertNotAllEqual(weights, as_bfloat16)


class RowsTest(ShardedTestCase):
    @parameterized.parameters(
        (lambda: ko.SGD(0.2),),
        (lambda: ko.Adagrad(0.2),),
        (lambda: ko.SGD(0.2, weight_decay=0.1),),
        (lambda: ko.Adam(0.05, global_clipnorm=0.05),),
        (lambda: ko.Adam(0.05, gradient_accumulation_steps=2),),
    )
    def test_embeddings(self, make):
        train = functools.partial(trained_eagerly, layers=word_layers, data=word_data)
        expected = train(3, unsharded(make))
        self.assert_bits_of(expected, train(3, sharded(make)))
        self.assert_moved(expected, word_layers)

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


class BytesTest(ShardedTestCase):
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


if __name__ == "__main__":
    tf.test.main()
