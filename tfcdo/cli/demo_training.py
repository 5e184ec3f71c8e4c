"""Trains the demo's model: in the command itself, and in each of several workers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

SEED = 7
_TEST_IMAGES = 360
GLOBAL_BATCH = 128


@dataclasses.dataclass(frozen=True)
class Digits:
    """scikit-learn's handwritten digits, 8x8 grey values in 0..1, shuffled and split."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def find_cross_device_ops_class(name: str) -> type[tf.distribute.CrossDeviceOps]:
    """Finds one of the package's classes by its name in any case."""
    import tensorflow as tf

    import tfcdo

    public = {known: getattr(tfcdo, known) for known in tfcdo.__all__}
    classes = {
        known.lower(): item
        for known, item in public.items()
        if isinstance(item, type) and issubclass(item, tf.distribute.CrossDeviceOps)
    }
    if name.lower() not in classes:
        names = ", ".join(item.__name__ for item in classes.values())
        raise click.UsageError(f"--cross-device-ops: no class {name!r} in tfcdo, which has {names}")
    return classes[name.lower()]


def load_digits() -> Digits:
    """Loads, shuffles and splits the images."""
    import numpy as np
    from sklearn import datasets

    flat_images, labels = datasets.load_digits(return_X_y=True)
    images = (flat_images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    order = np.random.default_rng(SEED).permutation(len(images))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    return Digits(images[train], labels[train], images[test], labels[test])


def train(
    digits: Digits, devices: int, epochs: int, strategy: tf.distribute.Strategy, verbose: str | int
) -> Any:
    """Trains a new model: always the same first weights, and the same batches in the same order."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(SEED)
    # The same number of images for each device, and so the same mean of their gradients.
    batch = max(1, round(GLOBAL_BATCH / devices)) * devices
    batches = (
        tf.data.Dataset.from_tensor_slices((digits.train_images, digits.train_labels))
        .batch(batch, drop_remainder=True)
        # One endless iterator, not one an epoch: ending one may take tf.data seconds of waiting.
        .repeat()
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input(digits.train_images.shape[1:]),
                keras.layers.Conv2D(16, 3, padding="same", activation="tanh"),
                keras.layers.Conv2D(32, 3, strides=2, activation="tanh"),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        # Smooth from end to end: relu's kink, or Adam's division by the size of a gradient, would
        # now and then make a large difference of a rounding.
        model.compile(
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(
        batches,
        steps_per_epoch=len(digits.train_images) // batch,
        epochs=epochs,
        shuffle=False,
        verbose=verbose,
    )
    return model
