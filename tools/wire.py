"""Trains with each wire dtype; prints the tables of docs/wire.md and draws its picture.

python tools/wire.py docs/wire.png
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

import tfcdo
from tfcdo import virtual_devices
from tfcdo.cli import demo

NUM_DEVICES = 4
# The wires that are compared, by name: the arguments of a class.
WIRES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"wire_dtype": "bfloat16"},
    "bfloat16, error feedback": {"wire_dtype": "bfloat16", "error_feedback": True},
    "float16": {"wire_dtype": "float16"},
    "float16, error feedback": {"wire_dtype": "float16", "error_feedback": True},
}


def strategy_with(wire: str) -> tf.distribute.Strategy:
    """Returns a strategy over the first virtual devices whose gradients are sent as in `WIRES`."""
    devices = [f"/cpu:{index}" for index in range(NUM_DEVICES)]
    return tfcdo.MirroredStrategy(devices, tfcdo.HierarchicalCopyAllReduce(**WIRES[wire]))


def digits_accuracy(wire: str, epochs: int = 8) -> float:
    """Trains the demo's model and returns its accuracy on the test images."""
    digits = demo.load_digits()
    model = demo.train(
        digits,
        NUM_DEVICES,
        epochs,
        strategy_with(wire),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    )
    logits = model(digits.test_images).numpy()
    return float(np.mean(np.argmax(logits, axis=1) == digits.test_labels))


@dataclasses.dataclass(frozen=True)
class Ratings:
    """Generated likes of users for items: of a hidden model, with one in ten turned round.

    Attributes:
      pairs: the user's and the item's number, one row for each rating.
      likes: 1 for a like, else 0.
    """

    pairs: np.ndarray
    likes: np.ndarray

    @classmethod
    def generate(cls, seed: int, count: int, users: int, items: int) -> Ratings:
        """Draws ratings; the hidden model depends on the number of users and items alone."""
        hidden = np.random.default_rng(users * items)
        user_tastes, item_tastes = (hidden.standard_normal((n, 4)) for n in (users, items))
        generator = np.random.default_rng(seed)
        pairs = np.stack([generator.integers(0, n, count) for n in (users, items)], axis=1)
        likes = np.sum(user_tastes[pairs[:, 0]] * item_tastes[pairs[:, 1]], axis=1) > 0
        likes ^= generator.random(count) < 0.1
        return cls(pairs.astype(np.int32), likes.astype(np.float32))


def two_towers(users: int, items: int) -> keras.Model:
    """Builds a recommender: an embedding and dense layers each for users and items."""
    pair = keras.Input((2,), dtype="int32")
    towers = [
        keras.layers.Dense(16)(
            keras.layers.Dense(32, activation="tanh")(
                keras.layers.Embedding(count, 16)(pair[:, column])
            )
        )
        for column, count in enumerate((users, items))
    ]
    return keras.Model(pair, keras.layers.Dot(axes=1)(towers))


def recommender_accuracy(
    wire: str, epochs: int = 4, ratings: int = 30_000, users: int = 200, items: int = 100
) -> float:
    """Trains a two-tower recommender and returns its accuracy on new ratings, at most 0.9."""
    keras.utils.set_random_seed(demo.SEED)
    train, test = (
        Ratings.generate(seed, count, users, items) for seed, count in ((1, ratings), (2, 10_000))
    )
    with strategy_with(wire).scope():
        model = two_towers(users, items)
        model.compile(
            keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True)
        )
    batches = tf.data.Dataset.from_tensor_slices((train.pairs, train.likes))
    batches = batches.batch(256, drop_remainder=True).repeat()
    steps = len(train.likes) // 256
    model.fit(batches, epochs=epochs, steps_per_epoch=steps, shuffle=False, verbose=0)
    logits = model(test.pairs).numpy()[:, 0]
    return float(np.mean((logits > 0) == (test.likes > 0)))


def badly_scaled_losses(wire: str, steps: int = 2000) -> np.ndarray:
    """Descends a quadratic whose devices' gradients are large where their sum is small.

    Device k has the loss sum(curvature / 2 * (w - a_k)^2), with curvatures from 0.1 to 1 and a_k
    up to thousands apart. Near the minimum of the mean, the devices' gradients are as large as
    ever, and nearly cancel: what rounding loses of each is larger than what is left.
    """
    generator = np.random.default_rng(0)
    curvatures = np.logspace(-1, 0, 20).astype(np.float32)
    minima = (1000 * generator.standard_normal((NUM_DEVICES, 20))).astype(np.float32)
    goal = np.mean(minima.astype(np.float64), axis=0)
    strategy = strategy_with(wire)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([20]))
    rate = tf.Variable(1.0)

    @tf.function
    def step() -> Any:
        def replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            own = tf.constant(minima)[context.replica_id_in_sync_group]
            gradient = curvatures * (weights - own)
            # Two values, because a value that is reduced alone is exact. They are in one pack.
            halves = context.all_reduce(tf.distribute.ReduceOp.MEAN, tf.split(gradient, 2))
            weights.assign_sub(rate * tf.concat(halves, 0))
            return weights.read_value()

        return strategy.experimental_local_results(strategy.run(replica))[0]

    losses = []
    for number in range(steps):
        rate.assign(1 / (1 + number / 50))
        losses.append(np.sum(curvatures / 2 * (step().numpy() - goal) ** 2))
    return np.array(losses)


def draw(losses: Mapping[str, np.ndarray]) -> Figure:
    """Draws descents, by wire, as losses above the minimum over the steps."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    styles = {"float32": "k-", "bfloat16": "C0--", "bfloat16, error feedback": "C0-"}
    for wire, style in styles.items():
        descent = losses[wire]
        axes.loglog(np.arange(1, len(descent) + 1), descent, style, label=wire, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss above its minimum")
    axes.set_title("SGD where devices' gradients are large and their sum is small")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def main(picture: str) -> None:
    """Trains, prints the tables and writes the picture."""
    virtual_devices.configure_virtual_cpus(NUM_DEVICES)
    print("| wire | digits (the demo's) | two-tower recommender |\n|---|---|---|")
    for wire in WIRES:
        print(f"| {wire} | {digits_accuracy(wire):.2%} | {recommender_accuracy(wire):.2%} |")
    losses = {wire: badly_scaled_losses(wire) for wire in WIRES}
    print("\n| wire | first step | last step |\n|---|---|---|")
    for wire, descent in losses.items():
        print(f"| {wire} | {descent[0]:.3g} | {descent[-1]:.3g} |")
    draw(losses).savefig(picture, dpi=100)


if __name__ == "__main__":
    main(sys.argv[1])
