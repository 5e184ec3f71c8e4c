"""Keras training with TensorFlow's own strategy and the four classes, on several devices.

The oracle is the same training on one device: the same initial weights and global batches.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras_training import TrainingTestCase, dense_data, dense_layers, fitted, model_of, strategy_of

import tfcdo
from tfcdo import keras_internals


def all_layers_model(**options: Any) -> keras.Model:
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
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["mae"], **options)
    return model


class FitTest(TrainingTestCase):
    def strategy_of(self, ops: Any, count: int) -> tf.distribute.Strategy:
        """One of TensorFlow's, and an assertion that the test has made use of `ops`."""
        spy = mock.patch.object(ops, "batch_reduce", wraps=ops.batch_reduce).start()
        self.addCleanup(mock.patch.stopall)
        self.addCleanup(lambda: self.assertGreater(spy.call_count, 0))
        return tf.distribute.MirroredStrategy(tu.device_names(count), cross_device_ops=ops)

    # The class that TensorFlow gets wrong at odd numbers, and another one.
    @parameterized.parameters(tfcdo.HierarchicalCopyAllReduce, tfcdo.ReductionToOneDevice)
    def test_odd_numbers_of_devices(self, make):
        strategy = self.strategy_of(make(), 3)
        expected = fitted(1, keras.optimizers.SGD)
        model = fitted(3, keras.optimizers.SGD, run_eagerly=False, strategy=strategy)
        self.assert_same_training(expected, model, 2e-5)
        if not keras_internals.adds_metrics_twice:  # TensorFlow's strategy would.
            self.assertAllClose(expected.history.history, model.history.history)

    def test_all_layers(self):
        ids = np.random.default_rng(0).integers(0, 9, [48, 6])
        targets = np.stack([ids[:, 0] > ids[:, 1], ids.sum(1) > 24], 1).astype(np.float32)
        ops = tfcdo.AllReduceCrossDeviceOps("ring", num_packs=3)
        expected = all_layers_model(run_eagerly=True)
        with self.strategy_of(ops, 2).scope():
            model = all_layers_model(steps_per_execution=2)
        told = []
        for one in (expected, model):
            sizes = {"batch_size": 8, "verbose": 0}  # The last batch is partial.
            history = one.fit(ids[:36], targets[:36], shuffle=False, **sizes).history
            told += [list(history.values()), one.evaluate(ids[36:], targets[36:], **sizes)]
        # Adam divides by what may be tiny, so that rounding counts for more.
        self.assert_same_training(expected, model, 2e-4)
        self.assertAllClose(told[:2], told[2:], 1e-3)

    def test_keras_does_not_warn_of_its_own_default_for_a_dataset(self):
        with strategy_of(2).scope():
            model = model_of(dense_layers, "sgd")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*shuffle=True")
            model.fit(tf.data.Dataset.from_tensor_slices(dense_data(8)).batch(4), verbose=0)

    def test_an_exported_model_predicts_alike(self):
        model = fitted(3, keras.optimizers.SGD, examples=30)
        folder = self.enter_context(tempfile.TemporaryDirectory())
        model.export(folder, verbose=False)
        exported = tf.saved_model.load(folder)
        inputs = dense_data()[0]
        expected = model.predict(inputs, verbose=0)
        self.assertAllClose(expected, exported.serve(tf.constant(inputs)))


if __name__ == "__main__":
    tf.test.main()
