"""`tfcdo.keras.DistributedOptimizer` is what Keras, callbacks and checkpoints take it for."""

from __future__ import annotations

import pathlib
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras import optimizers as ko
from keras_training import (
    BATCH,
    Make,
    TrainingTestCase,
    dense_data,
    dense_layers,
    fitted,
    model_of,
    strategy_of,
    trained_eagerly,
)

import tfcdo
from tfcdo.keras import DistributedOptimizer


def wrapped(make: Make) -> Make:
    return lambda: DistributedOptimizer(make())


class TrafficTest(TrainingTestCase):
    def test_steps_of_accumulation_given_to_the_wrapper(self):
        expected = trained_eagerly(1, lambda: ko.Adam(0.05, gradient_accumulation_steps=2))
        model = trained_eagerly(
            2, lambda: DistributedOptimizer(ko.Adam(0.05), gradient_accumulation_steps=2)
        )
        self.assert_same_training(expected, model)

    def test_nothing_travels_while_gradients_accumulate(self):
        ops = tfcdo.ReductionToOneDevice()
        sums: list[list[int]] = []
        original = ops.batch_reduce

        def batch_reduce(reduce_op: Any, pairs: Any, options: Any = None) -> Any:
            pairs = list(pairs)
            sums[-1].append(len(pairs))
            return original(reduce_op, pairs, options)

        def count_from_here(step: int) -> float:
            sums.append([])
            return 1.0

        with (
            mock.patch.object(ops, "batch_reduce", batch_reduce),
            mock.patch.object(ops, "reduce", side_effect=AssertionError),
        ):
            trained_eagerly(
                3,
                lambda: DistributedOptimizer(ko.Adam(0.1, clipnorm=1.0), 3),
                steps=6,
                ops=ops,
                scale_of=count_from_here,
            )
        # Both gradients in one batch, at each update.
        self.assertEqual(sums, [[], [], [2], [], [], [2]])

    @parameterized.parameters(False, True)
    def test_variables_of_tensorflow(self, sharded: bool):
        strategy = tfcdo.MirroredStrategy(strategy_of(3).extended.worker_devices)
        with strategy.scope():
            variables = [tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])]
            optimizer = DistributedOptimizer(ko.Adam(0.1), shard_optimizer_state=sharded)

        @tf.function
        def step(x: tf.Tensor) -> None:
            strategy.run(lambda: optimizer.apply([x * one for one in variables], variables))

        alone, expected = ko.Adam(0.1), [keras.Variable(one.numpy()) for one in variables]
        for x in (1.0, -3.0):
            step(tf.constant(x))
            alone.apply([3 * x * one.value for one in expected], expected)
        for own, other in zip(variables, expected, strict=True):
            for component in own.values:
                self.assertAllClose(other, component, rtol=1e-6)

    def test_one_sum_of_each_gradient_in_a_traced_step(self):
        strategy = strategy_of(3)
        with strategy.scope():
            variable = tf.Variable([1.0, 2.0])
            optimizer = DistributedOptimizer(ko.SGD(0.5, global_clipnorm=1.0))

        @tf.function
        def step(x: tf.Tensor) -> None:
            # Nothing is built yet: the optimizer makes its variables here.
            strategy.run(lambda: optimizer.apply([x * variable], [variable]))

        step(tf.constant(2.0))
        gradient = 3 * 2 * np.array([1.0, 2.0])
        expected = [1.0, 2.0] - 0.5 * gradient / np.linalg.norm(gradient)
        self.assertAllClose(expected, strategy.experimental_local_results(variable)[2])


class LossScaleTest(TrainingTestCase):
    @parameterized.parameters(0, 2)
    def test_overflow_on_one_replica_only(self, replica):
        """Keras alone looks at the first replica, and lets an overflow on another one in."""
        strategy = strategy_of(3)
        with strategy.scope():
            variable = keras.Variable([1.0, 2.0])
            optimizer = DistributedOptimizer(
                ko.LossScaleOptimizer(ko.SGD(0.5), initial_scale=8.0, dynamic_growth_steps=2)
            )
            optimizer.build([variable])

        @tf.function
        def step(bad: tf.Tensor) -> None:
            def on_replica() -> None:
                own = tf.distribute.get_replica_context().replica_id_in_sync_group
                gradient = tf.where(bad & (own == replica), np.inf, 8.0) * tf.ones([2])
                optimizer.apply([gradient, None][:1], [variable])

            strategy.run(on_replica)

        scales = []
        for bad in (True, False, False):
            step(tf.constant(bad))
            scales.append(float(optimizer.inner_optimizer.dynamic_scale.numpy()))
        self.assertEqual(scales, [4.0, 4.0, 8.0])
        self.assertEqual(int(optimizer.iterations.numpy()), 2)
        # Two updates by half of the sum of three gradients of 8, unscaled by 4.
        for copy in strategy.experimental_local_results(variable.value):
            self.assertAllClose([1.0 - 6.0, 2.0 - 6.0], copy)


class KerasTest(TrainingTestCase):
    """Tests of what Keras does with an optimizer beside calling it."""

    def test_saved_amid_an_accumulation(self):
        def make():
            return ko.Adam(0.1, clipnorm=0.1, gradient_accumulation_steps=3)

        path = pathlib.Path(self.get_temp_dir()) / "model.keras"
        inputs, targets = dense_data(5 * BATCH)
        options: dict[str, Any] = {"shuffle": False, "verbose": 0}
        whole = model_of(dense_layers, make())
        whole.fit(inputs, targets, BATCH, **options)

        with strategy_of(3).scope():
            model = model_of(dense_layers, wrapped(make)())
        model.fit(inputs[: 2 * BATCH], targets[: 2 * BATCH], BATCH, **options)
        model.save(path)
        for count in (1, 2):
            with strategy_of(count).scope():
                loaded = keras.models.load_model(path)
            self.assertIsInstance(loaded.optimizer, DistributedOptimizer)
            loaded.fit(inputs[2 * BATCH :], targets[2 * BATCH :], BATCH, **options)
            self.assert_same_training(whole, loaded)

    @parameterized.parameters(
        lambda: ko.SGD(0.1, global_clipnorm=0.5, name="mine"),
        lambda: ko.LossScaleOptimizer(ko.SGD(0.2, gradient_accumulation_steps=2), 16.0),
        lambda: ko.MultiOptimizer(ko.OptimizerMap(ko.SGD(0.2), {".*bias": ko.Adam(0.1)})),
    )
    def test_config(self, make):
        optimizer = DistributedOptimizer(make(), name="outer")
        config = keras.optimizers.serialize(optimizer)
        self.assertEqual(config["registered_name"], "tfcdo>DistributedOptimizer")
        again = keras.optimizers.deserialize(config)
        self.assertIsInstance(again, DistributedOptimizer)
        self.assertEqual(again.get_config(), optimizer.get_config())
        self.assertEqual(again.name, "outer")

    def test_callbacks_find_what_they_change(self):
        def with_callbacks(count, make):
            return fitted(
                count,
                make,
                epochs=2,
                callbacks=[
                    keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
                    keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
                ],
            )

        def make():
            return ko.SGD(0.2, use_ema=True, ema_momentum=0.7, clipnorm=0.05)

        expected, model = with_callbacks(1, make), with_callbacks(2, wrapped(make))
        self.assert_same_training(expected, model)
        self.assertAllClose(0.2 / 4, model.optimizer.learning_rate)

    def test_it_is_the_optimizer_inside(self):
        inner = ko.AdamW(0.1, clipvalue=0.3)
        optimizer = DistributedOptimizer(inner)
        self.assertEqual((optimizer.clipvalue, optimizer.clipnorm), (0.3, None))
        optimizer.learning_rate = 0.25
        optimizer.weight_decay = 0.5
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        self.assertEqual((float(inner.learning_rate.numpy()), inner.weight_decay), (0.25, 0.5))
        kernel = keras.Variable([2.0], name="kernel")
        bias = keras.Variable([2.0], name="bias")
        optimizer.apply_gradients([(tf.zeros([1]), kernel), (tf.zeros([1]), bias)])
        self.assertAllClose(([1.75], [2.0]), (kernel, bias))
        self.assertEqual(int(optimizer.iterations.numpy()), 1)
        self.assertFalse(hasattr(optimizer, "optimizers"))
        weights = [np.full(v.shape, 3, v.dtype) for v in optimizer.variables]
        optimizer.set_weights(weights)
        self.assertAllEqual([3.0], inner.variables[-1])


class RefusedTest(TrainingTestCase):
    def test_what_is_not_an_optimizer(self):
        for given_ in ("adam", None, ko.SGD, DistributedOptimizer(ko.SGD())):
            with self.assertRaisesRegex(TypeError, "optimizer must be a Keras 3 optimizer"):
                DistributedOptimizer(given_)

    @parameterized.parameters((True, TypeError), (2.0, TypeError), (1, ValueError), (0, ValueError))
    def test_steps(self, steps, error):
        with self.assertRaisesRegex(error, "gradient_accumulation_steps must be"):
            DistributedOptimizer(ko.SGD(), steps)

    def test_other_steps_than_the_optimizer_says(self):
        with self.assertRaisesRegex(ValueError, "got 3 for .* gradient_accumulation_steps=2"):
            DistributedOptimizer(ko.SGD(gradient_accumulation_steps=2), 3)
        built = ko.SGD()
        built.build([keras.Variable([1.0])])
        with self.assertRaisesRegex(ValueError, "which is built"):
            DistributedOptimizer(built, 3)

    def test_not_the_outermost(self):
        with self.assertRaisesRegex(ValueError, "outermost.*auto_scale_loss=False"):
            ko.LossScaleOptimizer(DistributedOptimizer(ko.SGD()))
        keras.config.set_dtype_policy("mixed_float16")
        self.addCleanup(keras.config.set_dtype_policy, "float32")
        model = keras.Sequential(dense_layers())
        with self.assertRaisesRegex(ValueError, "outermost.*auto_scale_loss=False"):
            model.compile(DistributedOptimizer(ko.SGD()), "mse")

    def test_accumulation_by_optimizers_not_known_before_they_are_built(self):
        accumulating = ko.SGD(gradient_accumulation_steps=2, name="mine")
        optimizer = DistributedOptimizer(ko.MultiOptimizer(lambda variable: accumulating))
        with self.assertRaisesRegex(ValueError, "OptimizerMap.*mine"):
            optimizer.build([keras.Variable([1.0])])

    def test_where_it_cannot_run(self):
        variable = keras.Variable([1.0])
        outside = DistributedOptimizer(ko.SGD())
        strategy = strategy_of(2)
        with self.assertRaisesRegex(ValueError, "made in the scope of the strategy"):
            strategy.run(lambda: outside.apply([tf.ones([1])], [variable]))
        with strategy.scope():
            optimizer = DistributedOptimizer(ko.SGD())
            with self.assertRaisesRegex(ValueError, "on each replica, in strategy.run"):
                optimizer.apply([tf.ones([1])], [variable])


if __name__ == "__main__":
    tf.test.main()
