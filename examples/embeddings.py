"""Trains an embedding, whose gradients are rows: `python examples/embeddings.py`.

The gradient of an embedding is a `tf.IndexedSlices`: a row for each word of the batch. Each replica
gets the rows of all, in the order of the batch, so Adam updates repeated words as on one device.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfcdo

WORDS = 1000
GLOBAL_BATCH = 48


def make_data() -> tf.data.Dataset:
    """Draws sentences of four words; the label says whether most are from the first half."""
    words = np.random.default_rng(0).integers(0, WORDS, size=(10 * GLOBAL_BATCH, 4))
    labels = (words < WORDS // 2).sum(axis=1) >= 2
    return tf.data.Dataset.from_tensor_slices((words, labels)).batch(GLOBAL_BATCH)


def train(strategy: tf.distribute.Strategy) -> keras.Model:
    """Trains on the replicas of a strategy."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input([4], dtype="int32"),
                keras.layers.Embedding(WORDS, 8),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.03), loss)
    model.fit(make_data(), epochs=6, shuffle=False, verbose=0)
    return model


def main() -> None:
    """Trains on four virtual devices."""
    model = train(tfcdo.MirroredStrategy(tfcdo.configure_virtual_cpus(4)))
    loss = model.evaluate(make_data(), verbose=0)
    share = np.mean([label for _, label in make_data().unbatch().as_numpy_iterator()])
    constant = -share * np.log(share) - (1 - share) * np.log(1 - share)
    print(f"loss {loss:.4f}; of the best constant answer: {constant:.4f}")


if __name__ == "__main__":
    main()
