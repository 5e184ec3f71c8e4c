"""`global_batch` has the rows of all replicas, and hands each replica the gradient of its rows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo

# Each replica's rows; it keeps those that are not 0.
PARTS = np.array([[[1], [2], [0]], [[0], [3], [0]], [[4], [5], [6]]], np.float32)
WEIGHTS = np.arange(1.0, 10.0, dtype=np.float32)[:, None]


def rows_and_gradient(select: Callable[[tf.Tensor], tf.Tensor], own: Any = None) -> Any:
    """Returns, on a replica, the rows of all, and the gradient of their weighted sum."""
    if own is None:
        own = tf.gather(PARTS, tf.distribute.get_replica_context().replica_id_in_sync_group)
    with tf.GradientTape() as tape:
        tape.watch(own)
        rows = tfcdo.keras.global_batch(select(own))
        loss = tf.reduce_sum(rows * tf.constant(WEIGHTS)[: tf.shape(rows)[0]])
    return rows, tape.gradient(loss, own)


def chosen(own: tf.Tensor) -> tf.Tensor:
    return tf.boolean_mask(own, own[:, 0] > 0)


class GlobalBatchTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        select=[tf.identity, chosen], eager=[True, False], has_batch=[True, False]
    )
    def test_rows_of_all(self, select, eager, has_batch):
        strategy = tfcdo.MirroredStrategy(tu.device_names(3))
        data = tf.data.Dataset.from_tensors(np.concatenate(PARTS))
        [batch] = strategy.experimental_distribute_dataset(data)

        def step() -> Any:
            return strategy.run(rows_and_gradient, args=(select, batch if has_batch else None))

        rows, gradients = (step if eager else tf.function(step))()
        of_all = np.concatenate(PARTS)
        kept = np.arange(9) if select is tf.identity else np.flatnonzero(of_all[:, 0])
        expected = np.zeros_like(of_all)
        expected[kept] = 3 * WEIGHTS[: len(kept)]  # Each of the replicas has this loss.
        for replica, own in enumerate(strategy.experimental_local_results(rows)):
            self.assertAllEqual(own, of_all[kept], f"replica {replica}")
        self.assertAllEqual(tf.concat(strategy.experimental_local_results(gradients), 0), expected)

    def test_known_parts_that_no_dataset_has_cut(self):
        strategy = tfcdo.MirroredStrategy(tu.device_names(3))
        sizes = (2, 1, 3)  # The first one is the mean.
        parts = strategy.experimental_distribute_values_from_function(
            lambda context: tf.ones([sizes[context.replica_id_in_sync_group], 1])
        )
        step = tf.function(lambda own: strategy.run(tfcdo.keras.global_batch, (own,)))
        for rows in strategy.experimental_local_results(step(parts)):
            self.assertAllEqual(rows, tf.ones([6, 1]))

    def test_graph_ends_with_its_function(self):
        strategy = tfcdo.MirroredStrategy(tu.device_names(2))
        with strategy.scope():
            layer = keras.layers.BatchNormalization(synchronized=True)
            layer.build((None, 3))

        def gradient() -> Any:
            inputs = tf.ones([4, 3])
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = layer(tfcdo.keras.global_batch(inputs), training=True)
            return tape.gradient(outputs**2, inputs)

        step = tf.function(lambda: strategy.run(gradient), autograph=False)
        graph = weakref.ref(step.get_concrete_function().graph)
        del step
        gc.collect()
        self.assertIsNone(graph())


if __name__ == "__main__":
    tf.test.main()
