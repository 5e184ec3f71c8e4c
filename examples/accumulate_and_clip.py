"""Accumulates gradients and clips their sum: `python examples/accumulate_and_clip.py`.

Under TensorFlow's strategy Keras cannot accumulate, and clips on each replica before the sum. Under
tfcdo's it does both as on one device.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfcdo

GLOBAL_BATCH = 24
STEPS_PER_UPDATE = 4


def train(strategy: tf.distribute.Strategy) -> keras.Model:
    """Trains on the replicas of a strategy."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(16 * GLOBAL_BATCH, 8)).astype(np.float32)
    targets = (inputs @ random.normal(size=(8, 1))).astype(np.float32)

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input([8]), keras.layers.Dense(1)])
        # One update for four batches, from the mean of their gradients. Until then each replica
        # adds to its own accumulators, and nothing is sent.
        optimizer = keras.optimizers.SGD(
            0.1, momentum=0.9, clipnorm=0.5, gradient_accumulation_steps=STEPS_PER_UPDATE
        )
        model.compile(optimizer, "mse")
    model.fit(inputs, targets, batch_size=GLOBAL_BATCH, epochs=2, shuffle=False, verbose=0)
    return model


def main() -> None:
    """Trains on three virtual devices."""
    model = train(tfcdo.MirroredStrategy(tfcdo.configure_virtual_cpus(3)))
    updates = int(model.optimizer.iterations)
    print(f"{updates} updates of {STEPS_PER_UPDATE} batches each, weights of norm", end=" ")
    print(f"{np.linalg.norm(model.get_weights()[0]):.4f}")


if __name__ == "__main__":
    main()
