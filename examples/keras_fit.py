"""Trains a Keras model with `fit` on several replicas: `python examples/keras_fit.py`.

Four virtual CPU devices here; on GPUs, leave the devices out: `tfcdo.MirroredStrategy()`.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfcdo

GLOBAL_BATCH = 48


def make_data() -> tf.data.Dataset:
    """Draws points around three centers; the label says which."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 10 * GLOBAL_BATCH)
    points = random.normal(size=(3, 8))[labels] + 0.3 * random.normal(size=(len(labels), 8))
    return tf.data.Dataset.from_tensor_slices((points, labels)).batch(GLOBAL_BATCH)


def train(strategy: tf.distribute.Strategy) -> keras.Model:
    """Trains on the replicas of a strategy."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input([8]), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
        )
        model.compile(
            # Clips the sum of the replicas' gradients, as one device does.
            keras.optimizers.Adam(0.02, global_clipnorm=1.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    # A batch is the global one: the strategy gives each replica its part.
    model.fit(make_data(), epochs=2, shuffle=False, verbose=0)
    return model


def main() -> None:
    """Trains and evaluates."""
    strategy = tfcdo.MirroredStrategy(tfcdo.configure_virtual_cpus(4))
    loss, accuracy = train(strategy).evaluate(make_data(), verbose=0)
    print(f"{strategy.num_replicas_in_sync} replicas: loss {loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
