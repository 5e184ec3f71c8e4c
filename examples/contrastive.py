"""Trains two towers with in-batch negatives: `python examples/contrastive.py`.

The loss compares each query with the items of the whole batch. A replica has only its part, so the
loss calls `tfcdo.keras.global_batch`, and four devices train as one does.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcdo
import tfcdo.keras

GLOBAL_BATCH = 24


class InBatchNegatives(keras.losses.Loss):
    """Says how well each query finds its own item among the items of the whole batch."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the loss of each query of the batch; `y_true` is not used."""
        queries, items = tf.unstack(tfcdo.keras.global_batch(y_pred), axis=1)
        similarities = 5.0 * tf.matmul(queries, items, transpose_b=True)
        own = tf.range(tf.shape(queries)[0])
        return tf.nn.sparse_softmax_cross_entropy_with_logits(own, similarities)


def train(strategy: tf.distribute.Strategy) -> keras.Model:
    """Trains on the replicas of a strategy."""
    random = np.random.default_rng(0)
    queries = random.normal(size=(10 * GLOBAL_BATCH, 8)).astype(np.float32)
    items = queries @ random.normal(size=(8, 6)).astype(np.float32)

    keras.utils.set_random_seed(1)
    with strategy.scope():
        inputs = [keras.Input([8]), keras.Input([6])]
        towers = [keras.layers.UnitNormalization()(keras.layers.Dense(4)(one)) for one in inputs]
        model = keras.Model(inputs, keras.ops.stack(towers, axis=1))
        model.compile(keras.optimizers.Adam(0.02), InBatchNegatives())
    labels = np.zeros(len(queries))
    model.fit((queries, items), labels, GLOBAL_BATCH, epochs=5, shuffle=False, verbose=0)
    return model


def main() -> None:
    """Trains on four virtual devices and on one, and compares the weights."""
    devices = tfcdo.configure_virtual_cpus(4)
    several, one = train(tfcdo.MirroredStrategy(devices)), train(tfcdo.MirroredStrategy(["CPU:0"]))
    pairs = zip(several.get_weights(), one.get_weights(), strict=True)
    difference = max(np.abs(weight - expected).max() for weight, expected in pairs)
    print(f"4 devices against one: the largest difference of weights is {difference:.0e}")


if __name__ == "__main__":
    main()
