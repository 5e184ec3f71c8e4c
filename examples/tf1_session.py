"""Trains in a graph and a session of TensorFlow 1: `python examples/tf1_session.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

import tfcdo


def train(devices: Sequence[str], steps: int = 20) -> float:
    """Moves one weight towards the mean of the examples; returns it."""
    examples = np.arange(12, dtype=np.float32).reshape(-1, 1)
    with tf.Graph().as_default():
        strategy = tf.distribute.MirroredStrategy(
            devices, cross_device_ops=tfcdo.HierarchicalCopyAllReduce()
        )
        fed = tf.compat.v1.placeholder(tf.float32, [len(examples), 1])
        with strategy.scope():
            weight = tf.compat.v1.get_variable("weight", initializer=0.0)
            # It divides each replica's loss by their number, and sums the gradients.
            optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.2)

        def on_each_replica() -> tf.Operation:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            own = tf.gather(tf.split(fed, len(devices)), replica)
            return optimizer.minimize(tf.reduce_mean((weight - own) ** 2), var_list=[weight])

        step = strategy.group(strategy.run(on_each_replica))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for _ in range(steps):
                session.run(step, {fed: examples})
            return float(session.run(weight.values[0]))


def main() -> None:
    """Trains on three virtual devices."""
    print(f"weight {train(tfcdo.configure_virtual_cpus(3)):.3f}")


if __name__ == "__main__":
    main()
