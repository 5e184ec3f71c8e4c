"""`shard_optimizer_state=True`: what it computes, sends, saves and refuses."""

from __future__ import annotations

import functools
import tempfile

import keras
import keras_training as kt
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras import optimizers as ko

import tfcdo

sharded = functools.partial(kt.trained_eagerly, shard_optimizer_state=True)
_data = functools.partial(kt.dense_data, 60)  # Divides by four.
_adam = functools.partial(ko.Adam, 0.05, global_clipnorm=0.5)


class ShardedStateTest(kt.TrainingTestCase):
    def test_wire_dtype_casts_gradients_but_not_weights(self):
        make = functools.partial(ko.SGD, 0.2)
        ops = tfcdo.HierarchicalCopyAllReduce(wire_dtype="bfloat16")
        model, exact = sharded(2, make, ops=ops), sharded(2, make)
        self.assert_same_training(exact, model, 2e-2)
        weights = model.get_weights()[0]
        self.assertNotAllEqual(weights, exact.get_weights()[0])
        self.assertNotAllEqual(weights, tf.cast(tf.cast(weights, tf.bfloat16), tf.float32))

    def test_no_more_is_copied_than_is_explained(self):
        """Sums reach their owners only, and weights all devices."""
        strategy = kt.strategy_of(2, shard_optimizer_state=True)
        shapes = [(30,), (10,), (10,)]
        with strategy.scope():
            variables = [keras.Variable(np.ones(shape, np.float32)) for shape in shapes]
            optimizer = ko.SGD(0.2)
            optimizer.build(variables)

        def step() -> None:
            optimizer.apply([tf.sin(one.value) for one in variables], variables)

        with self.assertNoLogs("tensorflow", "WARNING"):  # AutoGraph leaves tfcdo's functions out.
            graph = tf.function(lambda: strategy.run(step)).get_concrete_function().graph
        copied = tu.copied_bytes(graph, tu.device_names(2))
        told = strategy.explain(shapes, shard_optimizer_state=True)
        for link, num_bytes in told.bytes_by_link.items():
            self.assertBetween(copied[link], 1, num_bytes)

    @parameterized.parameters(
        (lambda: ko.SGD(0.2), True),
        (lambda: ko.Adam(0.2), False),
        (lambda: ko.SGD(0.2, weight_decay=0.1), False),
    )
    def test_only_rows_are_sent_back_if_only_rows_change(self, make, only_rows):
        strategy = kt.strategy_of(2, shard_optimizer_state=True)
        with strategy.scope():
            table = keras.Variable(np.ones([1000, 2], np.float32))
            optimizer = make()
            optimizer.build([table])

        def step() -> None:
            indices, shape = tf.constant([7, 7]), tf.constant([1000, 2])
            optimizer.apply([tf.IndexedSlices(tf.ones([2, 2]), indices, shape)], [table])

        ops = tu.traced_ops(lambda: strategy.run(step))
        scattered = [op for op in ops if op.type == "ResourceScatterUpdate"]
        self.assertLen(scattered, 1 if only_rows else 0)
        strategy.run(step)
        self.assert_bitwise_equal([one.read_value() for one in table.value.values])

    def test_a_step_that_fails_changes_no_weights(self):
        """The gradient of the last variable fails; no owner has begun by then."""
        strategy = kt.strategy_of(3, shard_optimizer_state=True)
        with strategy.scope():
            variables = [keras.Variable(np.ones([4], np.float32)) for _ in range(6)]
            optimizer = ko.SGD(0.2, weight_decay=0.1)
            optimizer.build(variables)

        def on_replica(last: tf.Tensor) -> None:
            gradients = [tf.ones([4])] * 5 + [tf.debugging.check_numerics(last, "bad")]
            optimizer.apply(gradients, variables)

        step = tf.function(lambda last: strategy.run(on_replica, (last,)))
        step(tf.ones([4]))
        components = [component for one in variables for component in one.value.values]
        before = [component.numpy() for component in components]
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "bad"):
            step(tf.constant([1.0, np.nan, 1.0, 1.0]))
        self.assertAllEqual(before, [component.numpy() for component in components])

    def test_saved_on_four_devices_and_restored_on_one(self):
        source = sharded(4, _adam, 2, data=_data)
        folder = self.enter_context(tempfile.TemporaryDirectory())
        path = tf.train.Checkpoint(model=source, optimizer=source.optimizer).save(f"{folder}/c")
        model = kt.model_of(kt.dense_layers, _adam())
        restore = tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
        model.optimizer.build(model.trainable_variables)
        restore.assert_existing_objects_matched()
        kt.train_eagerly(model, tf.distribute.get_strategy(), range(2, 4), _data)
        self.assert_same_training(kt.trained_eagerly(1, _adam, data=_data), model, 2e-5)


if __name__ == "__main__":
    tf.test.main()
