"""Generators, which give each batch once: `fit` and `evaluate` see what one device sees."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras_training import strategy_of

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


class _Counted(keras.utils.PyDataset):
    """Batches whose loading is counted."""

    loaded = 0

    def __len__(self) -> int:
        return _BATCHES

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        return list(_batches())[index]


class GeneratorsTest(tf.test.TestCase, parameterized.TestCase):
    def test_every_batch_is_seen_once(self):
        with strategy_of(3).scope():
            model = _mean_embedding()
            model.compile(keras.optimizers.SGD(1.0), lambda target, output: -output)
        model.fit(_batches(), verbose=0)
        seen = _BATCH * model.get_weights()[0]
        self.assertAllClose(np.ones_like(seen), seen)

    def test_only_steps_that_ran_are_counted(self):
        """Not the one that finds no data, at the end of an epoch of unknown length."""
        signature = (tf.TensorSpec([_BATCH, 1], tf.int64), tf.TensorSpec([_BATCH, 1]))
        with strategy_of(2).scope():
            model = _mean_embedding()
            model.compile("adam", "mse")
        data = tf.data.Dataset.from_generator(_batches, output_signature=signature)
        model.fit(data, epochs=3, verbose=0)
        self.assertEqual(3 * _BATCHES, model.optimizer.iterations.numpy())

    def test_a_dataset_of_keras_is_loaded_as_on_one_device(self):
        data = [_Counted(workers=2) for _ in range(2)]
        for count, one in enumerate(data, 1):
            self.evaluated(count, one)
        self.assertEqual(data[0].loaded, data[1].loaded)

    def test_widths_that_differ(self):
        """TensorFlow does not know the shapes of batches then."""
        self.assertAllClose(*(self.evaluated(count, _of_unlike_widths()) for count in (1, 2)))

    def evaluated(self, count, batches):
        with strategy_of(count).scope():
            model = _mean_embedding()
            model.compile("sgd", "mse", metrics=["mae"])
        return model.evaluate(batches, verbose=0)

    def test_arrays_that_a_generator_has_parts_of_stay_as_they_are(self):
        """TensorFlow takes those whose address divides by 64 without a copy, and splits them."""
        arrays = [_aligned([256, 16]) for _ in range(2)]
        before = [array.copy() for array in arrays]
        with strategy_of(2).scope():
            activation = keras.layers.Activation("relu")  # It may write into its input.
            model = keras.Sequential([keras.Input([16]), activation, keras.layers.Dense(16)])
            model.compile("sgd", "mse")
        parts = (tuple(array[i : i + 32] for array in arrays) for i in range(0, 256, 32))
        model.fit(parts, verbose=0)
        for array, expected in zip(arrays, before, strict=True):
            self.assertAllEqual(expected, array)


def _aligned(shape: list[int]) -> np.ndarray:
    memory = np.empty(4 * np.prod(shape) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : memory.size - 64 + start].view(np.float32).reshape(shape)
    array[:] = np.random.default_rng(0).normal(size=shape)
    return array


if __name__ == "__main__":
    tf.test.main()
