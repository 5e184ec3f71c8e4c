"""Draws docs/loss.png: one training on one device, and on four under each strategy.

    python tools/loss_curves.py docs/loss.png

It needs scikit-learn (the extra `demo`), whose handwritten digits the model learns.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import tfcdo

NUM_DEVICES = 4
EPOCHS = 12
_BATCH = 100  # 1,797 images: the last batch has 97, which does not divide.
_STYLES: dict[str, dict[str, Any]] = {
    "one device": {"color": "black", "linewidth": 5, "alpha": 0.25},
    "4 devices, TensorFlow": {"color": "C1", "linestyle": "--"},
    "4 devices, tfcdo": {"color": "C0"},
}


def train(strategy: Any, epochs: int = EPOCHS) -> list[float]:
    """Trains on handwritten digits with clipped gradients and Dropout; returns the losses."""
    import keras
    from sklearn.datasets import load_digits

    digits = load_digits()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input([64]),
                keras.layers.Dense(64, "relu"),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.1)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(
        np.float32(digits.data / 16),
        digits.target,
        batch_size=_BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
    )
    return [float(loss) for loss in history.history["loss"]]


def draw(losses: Mapping[str, Sequence[float]]) -> Figure:
    """Draws the losses over the epochs."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in _STYLES.items():
        axes.plot(np.arange(1, len(losses[name]) + 1), losses[name], label=name, **style)
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss")
    axes.set_title("One script with clipping and Dropout; only the strategy differs")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def main(picture: str) -> None:
    """Trains three times, prints the losses and writes the picture."""
    devices = tfcdo.configure_virtual_cpus(NUM_DEVICES)
    import tensorflow as tf

    strategies = {
        "one device": tf.distribute.MirroredStrategy(devices[:1]),
        "4 devices, TensorFlow": tf.distribute.MirroredStrategy(devices),
        "4 devices, tfcdo": tfcdo.MirroredStrategy(devices),
    }
    losses = {name: train(strategy) for name, strategy in strategies.items()}
    for name, values in losses.items():
        print(f"{name:22}", *(f"{value:.4f}" for value in values))
    draw(losses).savefig(picture, dpi=100)


if __name__ == "__main__":
    main(sys.argv[1])
