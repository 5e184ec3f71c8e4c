"""Keras training with TensorFlow's own strategy and the four classes, on several devices.

The oracle is the same training on one device: the same initial weights and global batches.
"""

from __future__ import annotations

import functools
import pathlib
import shutil
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

CLASSES: dict[str, Callable[[], tf.distribute.CrossDeviceOps]] = {
    "one_device": tfcdo.ReductionToOneDevice,
    "all_reduce": lambda: tfcdo.AllReduceCrossDeviceOps("ring", num_packs=3),
    "nccl": lambda: tfcdo.NcclAllReduce(num_packs=2),
    "hierarchical": tfcdo.HierarchicalCopyAllReduce,
}
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


def words_model() -> keras.Model:
    """An embedding, whose gradient is rows, and a layer."""
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Embedding(9, 2), keras.layers.Flatten(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.layers.Input((6,), dtype="int32"), *layers])
    model.compile("sgd", "mse")
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


@functools.cache
def fitted_alone(count: int) -> tuple[keras.Model, dict[str, list[float]]]:
    """The training on one device that several tests compare with: what `count` replicas do."""
    return fitted(ONE_DEVICE, dense_model, regression(6 * count), 2 * count)


class KerasTestCase(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    def ops(self, name: str) -> tf.distribute.CrossDeviceOps:
        """One of the classes, and an assertion that the test has made use of it."""
        ops = CLASSES[name]()
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
    # The class that TensorFlow gets wrong at odd numbers, and another; the others train below.
    @parameterized.parameters(("hierarchical", 3), ("one_device", 5))
    def test_odd_numbers_of_devices(self, name, count):
        data = regression(6 * count)
        expected, losses = fitted_alone(count)
        model, own_losses = fitted(strategy_of(self.ops(name), count), dense_model, data, 2 * count)
        self.assert_same_model(expected, model)
        if not keras_internals.adds_metrics_twice:  # TensorFlow's strategy would.
            self.assertAllClose(losses, own_losses)

    def test_all_layers(self):
        data, test_data = sentences(36), sentences(12, seed=1)
        expected, losses = fitted(ONE_DEVICE, all_layers_model, data, 9)
        strategy = strategy_of(self.ops("all_reduce"), 3)
        model, own_losses = fitted(
            strategy, lambda: all_layers_model(steps_per_execution=2), data, 9
        )
        # Adam divides by what may be tiny, so that rounding counts for more.
        self.assert_same_model(expected, model, tolerance=2e-4)
        self.assertAllClose(losses, own_losses, rtol=1e-4)
        sizes = {"batch_size": 9, "verbose": 0}  # The last batch is partial.
        for call, given, rtol in (("evaluate", test_data, 1e-4), ("predict", test_data[:1], 1e-3)):
            told = [getattr(one, call)(*given, **sizes) for one in (expected, model)]
            self.assertAllClose(*told, rtol=rtol)

    def test_keras_does_not_warn_of_its_own_default_for_a_dataset(self):
        with tfcdo.MirroredStrategy(tu.device_names(2)).scope():
            model = dense_model()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*shuffle=True")
            model.fit(tf.data.Dataset.from_tensor_slices(regression(8)).batch(4), verbose=0)


class ModelsTest(KerasTestCase):
    def test_saving(self):
        directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        data = regression(12)
        model, _ = fitted(strategy_of(self.ops("hierarchical"), 3), dense_model, data, 6)
        expected = model.predict(data[0], verbose=0)

        model.save(directory / "model.keras")
        loaded = keras.models.load_model(directory / "model.keras")
        self.assertAllClose(expected, loaded.predict(data[0], verbose=0))
        # The optimizer comes along: training goes on alike on one device and on others.
        with strategy_of(self.ops("nccl"), 2).scope():
            again = keras.models.load_model(directory / "model.keras")
        for one in loaded, again:
            one.fit(*data, batch_size=4, shuffle=False, verbose=0)
        self.assert_same_model(loaded, again)

        model.save_weights(directory / "model.weights.h5")
        restored = dense_model()
        restored.load_weights(directory / "model.weights.h5")
        self.assertAllClose(expected, restored.predict(data[0], verbose=0))

        model.export(directory / "exported", verbose=False)
        exported = tf.saved_model.load(str(directory / "exported"))
        self.assertAllClose(expected, exported.serve(tf.constant(data[0])))

    def test_two_strategies_and_three_models_with_one_instance(self):
        ops = self.ops("hierarchical")
        runs: list[tuple[Any, Callable[[], keras.Model], Data]] = [
            (strategy_of(ops, 3), dense_model, regression(12)),
            (strategy_of(ops, 2), words_model, sentences(12)),
        ]
        runs.append((runs[0][0], lambda: dense_model(loss="mae"), regression(12, seed=4)))
        models = []
        for strategy, build, _ in runs:
            with strategy.scope():
                models.append(build())
        for _ in range(2):  # In turn.
            for model, (_, _, data) in zip(models, runs, strict=True):
                model.fit(*data, batch_size=6, shuffle=False, verbose=0)
        for model, (_, build, data) in zip(models, runs, strict=True):
            expected, _ = fitted(ONE_DEVICE, build, data, 6, epochs=2)
            self.assert_same_model(expected, model)


if __name__ == "__main__":
    tf.test.main()
