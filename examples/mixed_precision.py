"""Trains in float16 with a loss scale on several replicas: `python examples/mixed_precision.py`.

tfcdo adds 16-bit floats in 32 bits, and the optimizer looks for overflows on all replicas.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfcdo


def train(strategy: tf.distribute.Strategy) -> tuple[keras.Model, float]:
    """Trains on the replicas of a strategy; returns the model and its last loss."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(240, 8)).astype(np.float32)
    targets = (inputs @ random.normal(size=(8, 1))).astype(np.float32)

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input([8]),
                keras.layers.Dense(16, "relu", dtype="mixed_float16"),
                # The loss is computed in 32 bits.
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.02))
        model.compile(optimizer, "mse")
    history = model.fit(inputs, targets, batch_size=24, epochs=4, shuffle=False, verbose=0)
    return model, history.history["loss"][-1]


def main() -> None:
    """Trains on four virtual devices."""
    model, loss = train(tfcdo.MirroredStrategy(tfcdo.configure_virtual_cpus(4)))
    print(f"loss {loss:.4f}, computed in {model.layers[0].compute_dtype}")


if __name__ == "__main__":
    main()
