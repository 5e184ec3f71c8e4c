"""Trains and draws pictures of the documentation, and makes the tables next to them.

    python tools/figures.py loss    # docs/loss.png
    python tools/figures.py wire    # docs/wire.png and docs/wire.md

Both need scikit-learn (the extra `demo`), whose handwritten digits are learned.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pages
import tensorflow as tf
import testing_utils as tu  # It configures the virtual devices.
from matplotlib.figure import Figure

import tfcdo

DEVICES = tu.device_names(4)
_BATCH = 100  # 1,797 images: the last batch has 97, which does not divide.
# The wires that are compared, by name: the arguments of a class.
WIRES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"wire_dtype": "bfloat16"},
    "bfloat16, error feedback": {"wire_dtype": "bfloat16", "error_feedback": True},
    "float16": {"wire_dtype": "float16"},
    "float16, error feedback": {"wire_dtype": "float16", "error_feedback": True},
}
# By the name of the picture: its lines and its texts.
STYLES: dict[str, dict[str, dict[str, Any]]] = {
    "loss": {
        "one device": {"color": "black", "linewidth": 5, "alpha": 0.25},
        "4 devices, TensorFlow": {"color": "C1", "linestyle": "--"},
        "4 devices, tfcdo": {"color": "C0"},
    },
    "wire": {
        "float32": {"color": "k", "linewidth": 1.2},
        "bfloat16": {"color": "C0", "linestyle": "--", "linewidth": 1.2},
        "bfloat16, error feedback": {"color": "C0", "linewidth": 1.2},
    },
}
TEXTS = {
    "loss": {
        "title": "One script with clipping and Dropout; only the strategy differs",
        "xlabel": "epoch",
        "ylabel": "training loss",
    },
    "wire": {
        "title": "SGD where devices' gradients are large and their sum is small",
        "xlabel": "step",
        "ylabel": "loss above its minimum",
        "xscale": "log",
        "yscale": "log",
    },
}


def train_digits(strategy: tf.distribute.Strategy, num_tests: int = 0) -> tuple[list[float], float]:
    """Trains with clipping and Dropout; returns all losses, and the accuracy on other images."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, count = (images / 16).astype(np.float32), len(images) - num_tests
    keras.utils.set_random_seed(0)
    with strategy.scope():
        hidden = keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.5)
        model = keras.Sequential([keras.layers.Input([64]), *hidden, keras.layers.Dense(10)])
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.1)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(
        *(images[:count], labels[:count], _BATCH), epochs=12, shuffle=False, verbose=0
    )
    right = np.argmax(model(images[count:]), axis=1) == labels[count:]
    accuracy = float(np.mean(right)) if num_tests else np.nan
    return history.history["loss"], accuracy


def badly_scaled_losses(wire: str, steps: int = 2000) -> np.ndarray:
    """Descends a quadratic whose devices' gradients are large where their sum is small.

    Device k has the loss sum(curvature / 2 * (w - a_k)^2), with curvatures from 0.1 to 1 and a_k
    up to thousands apart. Near the minimum of the mean, the devices' gradients are as large as
    ever, and nearly cancel: what rounding loses of each is larger than what is left.
    """
    generator = np.random.default_rng(0)
    curvatures = np.logspace(-1, 0, 20).astype(np.float32)
    minima = (1000 * generator.standard_normal((len(DEVICES), 20))).astype(np.float32)
    goal = np.mean(minima.astype(np.float64), axis=0)
    ops = tfcdo.HierarchicalCopyAllReduce(**WIRES[wire])
    weights = np.zeros(20, np.float32)
    losses = []
    for number in range(steps):
        gradients = curvatures * (weights - minima)
        # Two values, because a value that is reduced alone is exact. They are in one pack.
        halves = [tu.per_replica([*half]) for half in np.split(gradients, 2, axis=1)]
        mean = np.concatenate([half.value for half in tu.all_reduce(ops, tu.MEAN, halves)])
        weights -= np.float32(1 / (1 + number / 50)) * mean
        losses.append(np.sum(curvatures / 2 * (weights - goal) ** 2))
    return np.array(losses)


def draw(name: str, lines: Mapping[str, Sequence[float] | np.ndarray]) -> Figure:
    """Draws the losses of some trainings after each epoch or step."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for label, style in STYLES[name].items():
        axes.plot(np.arange(1, len(lines[label]) + 1), lines[label], label=label, **style)
    axes.set(**TEXTS[name])
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def loss() -> dict[str, Any]:
    """Trains on one device, and on four under each strategy."""
    strategies = {
        "one device": tf.distribute.MirroredStrategy(DEVICES[:1]),
        "4 devices, TensorFlow": tf.distribute.MirroredStrategy(DEVICES),
        "4 devices, tfcdo": tfcdo.MirroredStrategy(DEVICES),
    }
    return {name: train_digits(strategy)[0] for name, strategy in strategies.items()}


def wire() -> dict[str, Any]:
    """Trains with each wire dtype; makes the page's tables."""
    accuracies = []
    for name, options in WIRES.items():
        strategy = tfcdo.MirroredStrategy(DEVICES, tfcdo.HierarchicalCopyAllReduce(**options))
        accuracies.append((name, f"{train_digits(strategy, num_tests=397)[1]:.2%}"))
    pages.replace("docs/wire.md", "figures.py, digits", pages.table("wire | accuracy", accuracies))
    losses = {name: badly_scaled_losses(name) for name in WIRES}
    rows = ((name, f"{one[0]:.3g}", f"{one[-1]:.3g}") for name, one in losses.items())
    table = pages.table("wire | first step | last step", rows)
    pages.replace("docs/wire.md", "figures.py, quadratic", table)
    return losses


if __name__ == "__main__":
    picture = sys.argv[1]
    drawn = draw(picture, {"loss": loss, "wire": wire}[picture]())
    drawn.savefig(pages.ROOT / "docs" / f"{picture}.png", dpi=100)
