"""Trains in a loop of one's own, without Keras's `fit`: `python examples/own_loop.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

import tfcdo

GLOBAL_BATCH = 24
LEARNING_RATE = 0.3


def make_batches() -> tf.data.Dataset:
    """Draws points of a plane."""
    inputs = np.random.default_rng(0).normal(size=(10 * GLOBAL_BATCH, 3)).astype(np.float32)
    targets = inputs @ np.float32([[1], [-2], [0.5]]) + 3
    return tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(GLOBAL_BATCH)


def train(strategy: tf.distribute.Strategy, epochs: int = 2) -> list[tf.Tensor]:
    """Fits the plane on the replicas of a strategy; returns its slopes and its height."""
    with strategy.scope():
        variables = [tf.Variable(tf.zeros([3, 1])), tf.Variable(0.0)]

    def loss_of(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        slopes, height = variables
        errors = inputs @ slopes + height - targets
        # Each replica has its part of the mean over the global batch: their sum is the mean.
        return tf.reduce_sum(errors**2) / GLOBAL_BATCH

    def on_each_replica(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(inputs, targets)
        gradients: Sequence[tf.Tensor] = tape.gradient(loss, variables)
        # Here tfcdo works: one batch of values, packed, along copy trees.
        gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        for variable, gradient in zip(variables, gradients):
            variable.assign_sub(LEARNING_RATE * gradient)
        return loss

    @tf.function
    def step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        losses = strategy.run(on_each_replica, args=(inputs, targets))
        return strategy.reduce("SUM", losses, axis=None)

    for _ in range(epochs):
        for inputs, targets in strategy.experimental_distribute_dataset(make_batches()):
            step(inputs, targets)
    return [tf.convert_to_tensor(variable) for variable in variables]


def main() -> None:
    """Trains on three virtual devices, on which TensorFlow's own class gives incorrect sums."""
    strategy = tf.distribute.MirroredStrategy(
        tfcdo.configure_virtual_cpus(3), cross_device_ops=tfcdo.AutoAllReduce()
    )
    slopes, height = train(strategy)
    print("slopes", *(f"{slope:.2f}" for slope in slopes.numpy().ravel()), f"height {height:.2f}")


if __name__ == "__main__":
    main()
