"""Keras training with TensorFlow's own strategy and the four classes, on several devices.

The oracle is the same training on one device: the same initial weights and global batches.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo import keras_internals

ONE_DEVICE = tf.distribute.get_strategy()
Data = tuple[Any, np.ndarray]


def strategy_of(ops: Any, count: int) -> tf.distribute.MirroredStrategy:
    return tf.distribute.MirroredStrategy(tu.device_names(count), cross_device_ops=ops)


def regression(number: int, seed: int = 0) -> Data:
    generator = np.random.default_rng(seed)
    inputs = generator.normal(size=[number, 4]).astype(np.float32)
    return inputs, np.sin(inputs[:, :2]) * 2 + inputs[:, 2:]


def dense_model(**compile_arguments: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(3, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )
    model.compile(**{"optimizer": keras.optimizers.SGD(0.2), "loss": "mse", **compile_arguments})
    return model


def sentences(number: int, seed: int = 0) -> Data:
    ids = np.random.default_rng(seed).integers(0, 9, [number, 6])
    return ids, np.stack([ids[:, 0] > ids[:, 1], ids.sum(1) > 24], 1).astype(np.float32)


def all_layers_model(**compile_arguments: Any) -> keras.Model:
    """An embedding, whose gradient is rows; a convolution; normalization over the global batch."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.layers.Input((6,), dtype="int32"),
            keras.layers.Embedding(9, 4),
            keras.layers.Reshape((6, 4, 1)),
            keras.layers.Conv2D(3, 2, activation="relu"),
            keras.layers.BatchNormalization(synchronized=True, momentum=0.8),
            keras.layers.Flatten(),
            keras.layers.Dense(2, activation="sigmoid"),
        ]
    )
    arguments = {
        "optimizer": keras.optimizers.Adam(0.02),
        "loss": "binary_crossentropy",
        "metrics": ["mae"],
    }
    model.compile(**{**arguments, **compile_arguments})
    return model


def fitted(
    strategy: tf.distribute.Strategy,
    build: Callable[[], keras.Model],
    data: Data,
    batch_size: int,
    epochs: int = 1,
) -> tuple[keras.Model, dict[str, list[float]]]:
    with strategy.scope():
        model = build()
    history = model.fit(
        *data, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0
    ).history
    return model, history


class KerasTestCase(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    def used(self, ops: tf.distribute.CrossDeviceOps) -> tf.distribute.CrossDeviceOps:
        """Asserts that the test makes use of an object of the classes."""
        spy = mock.patch.object(ops, "batch_reduce", wraps=ops.batch_reduce).start()
        self.addCleanup(mock.patch.stopall)
        self.addCleanup(lambda: self.assertGreater(spy.call_count, 0))
        return ops

    def assert_same_model(
        self, expected: keras.Model, model: keras.Model, tolerance: float = 2e-5
    ) -> None:
        """Asserts equal weights but for rounding, and equal bits on all replicas."""
        for weight, own in zip(expected.weights, model.weights, strict=True):
            components = getattr(own.value, "values", (own.value,))
            self.assert_bitwise_equal([component.read_value() for component in components])
            np.testing.assert_allclose(
                own.numpy(), weight.numpy(), rtol=tolerance, atol=tolerance, err_msg=own.path
            )


class FitTest(KerasTestCase):
    # The class that TensorFlow gets wrong at odd numbers, and another one.
    @parameterized.parameters((tfcdo.HierarchicalCopyAllReduce, 3), (tfcdo.ReductionToOneDevice, 3))
    def test_odd_numbers_of_devices(self, make, count):
        data = regression(6 * count)
        expected, losses = fitted(ONE_DEVICE, dense_model, data, 2 * count)
        strategy = strategy_of(self.used(make()), count)
        model, own_losses = fitted(strategy, dense_model, data, 2 * count)
        self.assert_same_model(expected, model)
        if not keras_internals.adds_metrics_twice:  # TensorFlow's strategy would.
            self.assertAllClose(losses, own_losses)

    def test_all_layers(self):
        data, test_data = sentences(36), sentences(12, seed=1)
        expected, losses = fitted(ONE_DEVICE, all_layers_model, data, 8)
        strategy = strategy_of(self.used(tfcdo.AllReduceCrossDeviceOps("ring", num_packs=3)), 2)
        model, own_losses = fitted(
            strategy, lambda: all_layers_model(steps_per_execution=2), data, 8
        )
        # Adam divides by what may be tiny, so that rounding counts for more.
        self.assert_same_model(expected, model, tolerance=2e-4)
        self.assertAllClose(losses, own_losses, rtol=1e-4)
        sizes = {"batch_size": 8, "verbose": 0}  # The last batch is partial.
        for call, given, rtol in (("evaluate", test_data, 1e-4), ("predict", test_data[:1], 1e-3)):
            told = [getattr(one, call)(*given, **sizes) for one in (expected, model)]
            self.assertAllClose(*told, rtol=rtol)

    def test_keras_does_not_warn_of_its_own_default_for_a_dataset(self):
        with tfcdo.MirroredStrategy(tu.device_names(2)).scope():
            model = dense_model()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*shuffle=True")
            model.fit(tf.data.Dataset.from_tensor_slices(regression(8)).batch(4), verbose=0)

    def test_an_exported_model_predicts_alike(self):
        data = regression(12)
        with tfcdo.MirroredStrategy(tu.device_names(3)).scope():
            model = dense_model()
        model.fit(*data, batch_size=6, verbose=0)
        folder = self.enter_context(tempfile.TemporaryDirectory())
        model.export(folder, verbose=False)
        exported = tf.saved_model.load(folder)
        expected = model.predict(data[0], verbose=0)
        self.assertAllClose(expected, exported.serve(tf.constant(data[0])))


if __name__ == "__main__":
    tf.test.main()
