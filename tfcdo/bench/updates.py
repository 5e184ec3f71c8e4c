"""Times all-reduce plus update under TensorFlow's strategy and tfcdo's, which take turns."""

from __future__ import annotations

import math
import time

import keras
import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo.bench import results
from tfcdo.bench.devices import ChosenDevices

# The optimizers of Keras, whose `get` does not know all.
BY_NAME = {name.lower(): one for name, one in vars(keras.optimizers).items()}
# A convolutional and fully connected mixture of large and small variables: 69 MB in float32.
_SHAPES = (*[(1024, 1024)] * 12, *[(1024,)] * 12, *[(3, 3, 256, 256)] * 8, *[(256,)] * 40)


def run(
    optimizer: str, devices: ChosenDevices, iterations: int, warmup: int, track: results.Track
) -> list[results.Measurement]:
    """Takes steps under each strategy, in turn."""
    names = list(devices.names)
    ours = tfcdo.MirroredStrategy(names)
    strategies = {
        "tf.distribute.MirroredStrategy": tf.distribute.MirroredStrategy(names),
        "tfcdo.MirroredStrategy": ours,
        "shard_optimizer_state=True": tfcdo.MirroredStrategy(names, shard_optimizer_state=True),
    }
    updates = {
        name: _Updates(strategies[name], optimizer, devices)
        for name in track(list(strategies), description="first steps")
    }
    steps = {name: one.step for name, one in updates.items()}
    taken = results.take_turns(steps, iterations, warmup, track)
    return [
        results.Measurement(
            name,
            results.TENSORFLOW if name.startswith("tf.") else results.OURS,
            len(names),
            *results.median_and_spread(taken[name]),
            workload=optimizer,
            size=4 * sum(map(math.prod, _SHAPES)),
            first_call=one.first_call,
            state_bytes=sum(ours.state_bytes(one.optimizer).values()),
        )
        for name, one in updates.items()
    ]


class _Updates:
    """Variables, an optimizer, and the step that reduces gradients and updates."""

    def __init__(self, strategy: tf.distribute.Strategy, name: str, devices: ChosenDevices) -> None:
        self._strategy, self._devices = strategy, devices
        generator = np.random.default_rng(7)
        with self._strategy.scope():
            self._variables = [
                keras.Variable(generator.normal(0, 0.01, shape).astype(np.float32))
                for shape in _SHAPES
            ]
            self.optimizer = BY_NAME[name]()
            self.optimizer.build(self._variables)
        self._function = tf.function(lambda: self._strategy.run(self._on_replica))
        self.first_call = self.step()

    def _on_replica(self) -> None:
        rank = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        gradients = [one.value * 0.001 * (1.0 + rank) + 0.01 for one in self._variables]
        self.optimizer.apply(gradients, self._variables)

    def step(self) -> float:
        """Reduces and updates; returns the seconds."""
        start = time.perf_counter()
        self._function()
        self._devices.wait()
        return time.perf_counter() - start
