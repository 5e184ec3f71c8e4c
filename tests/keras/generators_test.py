"""Python generators, which give each batch once: `fit` and `evaluate` see what one device sees."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo.keras import DistributedOptimizer

_BATCHES, _BATCH = 9, 6


def _batches():
    for index in range(_BATCHES):
        ids = np.arange(_BATCH * index, _BATCH * (index + 1))[:, None]
        yield ids, ids.astype(np.float32)


def _of_unlike_widths():
    for ids, targets in _batches():
        yield np.repeat(ids, 1 + ids[0, 0] // _BATCH % 2, 1), targets


def _mean_embedding() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((None,), dtype="int32"),
            keras.layers.Embedding(_BATCHES * _BATCH, 1, embeddings_initializer="zeros"),
            keras.layers.GlobalAveragePooling1D(),
        ]
    )


class GeneratorsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (lambda devices: tfcdo.MirroredStrategy(devices), lambda sgd: sgd),
        (
            lambda devices: tf.distribute.MirroredStrategy(devices, tfcdo.ReductionToOneDevice()),
            DistributedOptimizer,
        ),
    )
    def test_every_batch_is_seen_once(self, make_strategy, wrap):
        with make_strategy(tu.device_names(3)).scope():
            model = _mean_embedding()
            model.compile(wrap(keras.optimizers.SGD(1.0)), lambda target, output: -output)
        model.fit(_batches(), verbose=0)
        seen = _BATCH * model.get_weights()[0]
        self.assertAllClose(np.ones_like(seen), seen)

    # With widths that differ, TensorFlow does not know the shapes of batches.
    @parameterized.parameters(_batches, _of_unlike_widths)
    def test_evaluate(self, batches):
        expected, own = (self.evaluated(count, batches()) for count in (1, 3))
        self.assertAllClose(expected, own)

    def evaluated(self, count, batches):
        one = tf.distribute.get_strategy()
        strategy = one if count == 1 else tfcdo.MirroredStrategy(tu.device_names(count))
        with strategy.scope():
            model = _mean_embedding()
            model.compile("sgd", "mse", metrics=["mae"])
        return model.evaluate(batches, verbose=0)


if __name__ == "__main__":
    tf.test.main()
