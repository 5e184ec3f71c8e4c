"""Moving statistics: the mean over replicas is what is saved, and what all replicas use."""

from __future__ import annotations

import pathlib

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras_training import TrainingTestCase, model_of, strategy_of

import tfcdo
from tfcdo.training import statistics


def layers_with_statistics() -> list[keras.Layer]:
    frozen = keras.layers.Dense(3, trainable=False)
    normalization = keras.layers.BatchNormalization(momentum=0.5)
    return [keras.layers.Input((2,)), frozen, normalization, keras.layers.Dense(1)]


def data(examples: int = 24) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(0).normal(1, 3, [examples, 2]).astype(np.float32)
    return inputs, inputs.sum(1, keepdims=True)


def trained(strategy: tf.distribute.Strategy, examples: int = 24, batch: int = 6) -> keras.Model:
    with strategy.scope():
        model = model_of(layers_with_statistics, "sgd")
    model.fit(*data(examples), batch, verbose=0, shuffle=False)
    return model


def by_replica(model: keras.Model) -> list[list[np.ndarray]]:
    """Returns each replica's own moving mean and variance."""
    strategy = model.distribute_strategy
    moving = [v.value for v in model.layers[1].non_trainable_variables]
    return [[copy.numpy() for copy in strategy.experimental_local_results(v)] for v in moving]


class StatisticsTest(TrainingTestCase):
    def test_read_used_saved_and_loaded_agree(self):
        path = pathlib.Path(self.get_temp_dir()) / "model.keras"
        model = trained(strategy_of(3))
        means = [np.mean(own, 0, np.float64) for own in by_replica(model)]
        for own, mean, read in zip(
            by_replica(model), means, model.layers[1].get_weights()[2:], strict=True
        ):
            self.assertNotAllClose(own[0], own[1])
            self.assertAllClose(mean, read, rtol=1e-6)
        inside = model.evaluate(*data(), 6, verbose=0)
        for mean, own in zip(means, by_replica(model), strict=True):
            self.assert_bitwise_equal([tf.constant(copy) for copy in own])
            self.assertAllClose(mean, own[0], rtol=1e-6)
        # What is equal stays as it is, to the last bit: here, the frozen layer.
        first = model_of(layers_with_statistics, "sgd").layers[0].get_weights()[0]
        self.assertAllEqual(first, model.layers[0].get_weights()[0])
        model.save(path)
        loaded = keras.models.load_model(path)
        self.assertAllClose(inside, loaded.evaluate(*data(), 6, verbose=0), rtol=1e-6)
        # Validation within `fit` uses them too.
        options = {"verbose": 0, "shuffle": False, "validation_data": data(12)}
        history = model.fit(*data(), 6, validation_batch_size=6, **options).history
        self.assertAllClose(
            history["val_loss"][-1], model.evaluate(*data(12), 6, verbose=0), rtol=1e-6
        )

    def test_replicas_without_examples_take_the_others(self):
        expected, model = (trained(strategy_of(count), 3, batch=1) for count in (1, 3))
        self.assert_same_training(expected, model)

    def test_equal_numbers_stay_as_they_are(self):
        # Seven: with two or three replicas, a mean in 32 bits is exact as well.
        strategy = strategy_of(7)
        with strategy.scope():
            model = keras.Sequential([keras.Input((50,)), keras.layers.BatchNormalization()])
        model.run_eagerly = True
        frozen = model.layers[-1].non_trainable_variables[0]
        expected = np.random.default_rng(0).normal(size=50).astype(np.float32)
        frozen.assign(expected)
        self.assertAllEqual(expected, frozen)
        model.predict(np.zeros([7, 50]), verbose=0)
        for copy in strategy.experimental_local_results(frozen.value):
            self.assertAllEqual(expected, copy)

    @parameterized.parameters("evaluate", "predict")
    def test_each_method(self, method):
        with strategy_of(2).scope():
            model = model_of(layers_with_statistics, "sgd")
        given = data(6) if method == "evaluate" else data(6)[:1]
        mean = model.layers[1].non_trainable_variables[0].value
        for turn in (1.0, 2.0):  # A function that has been made is not made again.
            for replica, copy in enumerate(mean.values):
                copy.assign([turn + replica, 2.0, 4.0 * replica])
            getattr(model, method)(*given, verbose=0)
            for copy in mean.values:
                self.assertAllEqual([turn + 0.5, 2.0, 2.0], copy)


class WireTest(TrainingTestCase):
    """With a wire dtype only gradients are rounded: statistics are as on one device."""

    def test_synchronized_batch_normalization(self):
        inputs = np.random.default_rng(0).normal(10, 0.1, [24, 4]).astype(np.float32)

        def fitted(strategy: tf.distribute.Strategy) -> list[np.ndarray]:
            with strategy.scope():
                normalization = keras.layers.BatchNormalization(momentum=0.5)
                model = keras.Sequential([keras.layers.Input((4,)), normalization])
                model.compile("sgd", "mse", run_eagerly=True)
            model.fit(inputs, inputs, 6, verbose=0, shuffle=False)
            # Keras computes E(x^2) - E(x)^2 in float32, which rounds the variance to about 1e-5.
            return model.get_weights()

        ops = tfcdo.AutoAllReduce(wire_dtype="bfloat16")
        strategy = strategy_of(3, ops, synchronize_batch_norm=True)
        gamma, beta, mean, variance = fitted(strategy)
        expected = fitted(tf.distribute.get_strategy())
        self.assertAllClose(expected[0], gamma, rtol=0.01)
        self.assertAllClose(expected[1], beta, rtol=0.01)
        self.assertAllClose(expected[2], mean, rtol=1e-5)
        self.assertAllClose(expected[3], variance, atol=1e-4)


class CreationTest(parameterized.TestCase):
    @parameterized.parameters(
        {"trainable": True},
        {"dtype": "int64"},
        {"dtype": None},
        {"aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA},
        {"synchronization": tf.VariableSynchronization.ON_WRITE},
        {"colocate_with": object()},
    )
    def test_other_variables_stay_as_they_are(self, **changes):
        options = {"trainable": False, "dtype": "float32", **changes}
        self.assertEqual(statistics.as_kept(options), options)


if __name__ == "__main__":
    tf.test.main()
