"""Data whose order is known: each example once an epoch, and other data is named."""

from __future__ import annotations

import tempfile
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfcdo.keras
from tfcdo import log
from tfcdo.keras import data_order


class ResumableTest(tf.test.TestCase):
    def test_every_epoch_has_each_example_once_in_its_own_order(self):
        data = tfcdo.keras.resumable(np.arange(10), batch_size=4, seed=5)
        examples = np.concatenate([batch.numpy() for batch in data.take(10)])
        epochs = examples.reshape(4, 10)
        for epoch, order in enumerate(epochs):
            self.assertCountEqual(order, range(10))
            seed = tf.constant([5, epoch], tf.int64)
            expected = [
                int(tf.random.experimental.index_shuffle(tf.constant(i, tf.int64), seed, 9))
                for i in range(10)
            ]
            self.assertEqual(order.tolist(), expected)
        self.assertLen(np.unique(epochs, axis=0), 4)
        known = data_order.order_of(mock.Mock(data_adapter=mock.Mock(_dataset=data)))
        assert known is not None
        known.first.assign(7)
        self.assertAllEqual(next(iter(data)), examples[7:11])

    def test_random_access_and_no_shuffle(self):
        class Squares:
            def __len__(self) -> int:
                return 3

            def __getitem__(self, index: int) -> Any:
                return {"x": np.float32(index), "y": np.full([2], index**2)}

        data = tfcdo.keras.resumable(Squares(), 2, shuffle=False)
        batches = [tf.nest.map_structure(lambda x: x.numpy().tolist(), b) for b in data.take(2)]
        self.assertEqual(
            batches,
            [{"x": [0.0, 1.0], "y": [[0, 0], [1, 1]]}, {"x": [2.0, 0.0], "y": [[4, 4], [0, 0]]}],
        )

    def test_bad_input(self):
        with self.assertRaisesRegex(ValueError, r"arrays of the same length; got \[2, 3\]"):
            tfcdo.keras.resumable((np.zeros(2), np.zeros(3)), 1)
        with self.assertRaisesRegex(ValueError, "at least one example; got none"):
            tfcdo.keras.resumable(np.zeros([0, 2]), 1)
        with self.assertRaisesRegex(TypeError, "data must be arrays, .* got 5"):
            tfcdo.keras.resumable(5, 1)
        with self.assertRaisesRegex(ValueError, "batch_size must be at least 1"):
            tfcdo.keras.resumable(np.zeros(2), 0)

    def test_data_that_cannot_be_resumed_is_named_at_the_start(self):
        folder = self.enter_context(tempfile.TemporaryDirectory())
        arrays = np.zeros([4, 4]), np.zeros([4, 1])
        dataset = tf.data.Dataset.from_tensor_slices(arrays)
        kept = dataset.shuffle(4, seed=1, reshuffle_each_iteration=False).batch(2)
        for data, reason in [
            (arrays, "fit.shuffle=True. draws another order"),
            (dataset.shuffle(4).batch(2), "reshuffle_each_iteration=True"),
            (kept, None),
        ]:
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=True)
            x, y = data if isinstance(data, tuple) else (data, None)
            with mock.patch.object(log, "warn_once") as warn:
                model.fit(x, y, verbose=0, callbacks=[tfcdo.keras.BackupAndRestore(folder)])
            messages = [call.args[0] for call in warn.call_args_list]
            if reason is None:
                self.assertEmpty(messages)
            else:
                self.assertRegex(messages[0], reason)

    def test_an_endless_dataset_needs_steps(self):
        folder = self.enter_context(tempfile.TemporaryDirectory())
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        with self.assertRaisesRegex(ValueError, "steps_per_epoch .* got None"):
            model.fit(
                tfcdo.keras.resumable(np.zeros(4), 2),
                verbose=0,
                callbacks=[tfcdo.keras.BackupAndRestore(folder)],
            )


if __name__ == "__main__":
    tf.test.main()
