"""Keras training with TensorFlow's own strategy and tfcdo's classes ends as on one device."""

from __future__ import annotations

import functools
import warnings
from typing import Any
from unittest import mock

import keras
import keras_training as kt
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo import keras_internals


class FitTest(kt.TrainingTestCase):
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
        expected = kt.fitted(1, keras.optimizers.SGD)
        model = kt.fitted(3, keras.optimizers.SGD, run_eagerly=False, strategy=strategy)
        self.assert_same_training(expected, model, 2e-5)
        if not keras_internals.adds_metrics_twice:  # TensorFlow's strategy would.
            self.assertAllClose(expected.history.history, model.history.history)

    def test_rows_of_embeddings_and_synchronized_normalization(self):
        def layers() -> list[Any]:
            return [*kt.word_layers(), keras.layers.BatchNormalization(synchronized=True)]

        make = functools.partial(keras.optimizers.Adagrad, 0.2)
        train = functools.partial(kt.trained_eagerly, make=make, layers=layers, data=kt.word_data)
        ops = tfcdo.AllReduceCrossDeviceOps("ring", num_packs=3)
        self.assert_same_training(train(1), train(2, strategy=self.strategy_of(ops, 2)), 2e-5)

    def test_keras_does_not_warn_of_its_own_default_for_a_dataset(self):
        with kt.strategy_of(2).scope():
            model = kt.model_of(kt.dense_layers, "sgd")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*shuffle=True")
            model.fit(tf.data.Dataset.from_tensor_slices(kt.dense_data(8)).batch(4), verbose=0)


if __name__ == "__main__":
    tf.test.main()
