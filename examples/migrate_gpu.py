"""Moves a training from TensorFlow's MirroredStrategy to tfcdo's: `python examples/migrate_gpu.py`.

`train_before` is an ordinary script; `train_after` has the one changed line. On a machine with
several GPUs both use all of them; without, three virtual CPU devices stand for them.
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


def make_model() -> keras.Model:
    """Builds a classifier."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.layers.Input([8]), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
    )


def train_before(devices: list[str] | None = None) -> keras.Model:
    """Trains under TensorFlow's strategy; None for all GPUs."""
    strategy = tf.distribute.MirroredStrategy(devices)
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(make_data(), epochs=2, shuffle=False, verbose=0)
    return model


def train_after(devices: list[str] | None = None) -> keras.Model:
    """Trains under tfcdo's strategy, which clips the sum of the gradients, not each part."""
    strategy = tfcdo.MirroredStrategy(devices)  # was: tf.distribute
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(make_data(), epochs=2, shuffle=False, verbose=0)
    return model


def main() -> None:
    """Trains before and after, and on one device, which `train_after` equals."""
    several = len(tf.config.list_physical_devices("GPU")) > 1
    devices = None if several else tfcdo.configure_virtual_cpus(3)
    for name, model in (
        ("before", train_before(devices)),
        ("after", train_after(devices)),
        ("one device", train_before(["GPU:0" if several else "CPU:0"])),
    ):
        print(f"{name:10}: loss {model.evaluate(make_data(), verbose=0):.6f}")


if __name__ == "__main__":
    main()
