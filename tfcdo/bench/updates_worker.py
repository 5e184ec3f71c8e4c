"""Takes steps of all-reduce plus update under one strategy: a worker of `bench.updates`."""

from __future__ import annotations

import resource
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo.bench import devices as bench_devices
from tfcdo.bench import updates, worker_pool

_SEED = 7
_SHOWN_WEIGHTS = 8  # Number of weights shown of each variable.


class _Updates:
    """Variables, an optimizer, and the step that reduces gradients and updates."""

    def __init__(self, kind: str, num_devices: str, name: str) -> None:
        self._devices = bench_devices.choose_devices(int(num_devices))
        names = list(self._devices.names)
        self._strategy = (
            tf.distribute.MirroredStrategy(names)
            if kind == "tf"
            else tfcdo.MirroredStrategy(names, shard_optimizer_state=kind == "sharded")
        )
        generator = np.random.default_rng(_SEED)
        with self._strategy.scope():
            self._variables = [
                keras.Variable(generator.normal(0, 0.01, shape).astype(np.float32))
                for shape in updates.SHAPES
            ]
            self._optimizer = keras.optimizers.get(name)
            self._optimizer.build(self._variables)
        self._function = tf.function(lambda: self._strategy.run(self._on_replica))

    def _on_replica(self) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        rank = tf.cast(replica, tf.float32)
        gradients = [one.value * 0.001 * (1.0 + rank) + 0.01 for one in self._variables]
        self._optimizer.apply(gradients, self._variables)

    def step(self) -> float:
        """Reduces and updates; returns the seconds."""
        start = time.perf_counter()
        self._function()
        self._devices.wait()
        return time.perf_counter() - start

    def report(self) -> dict[str, Any]:
        """Returns the memory, some weights, and the number of variables whose copies differ."""
        parts = [[part.numpy() for part in one.value.values] for one in self._variables]
        state = [
            component.shape.num_elements() * component.dtype.size
            for one in self._optimizer.variables
            for component in getattr(one.value, "values", (one.value,))
        ]
        return {
            "state_bytes": sum(state),
            "peak_memory": self._peak_memory(),
            "weights": [copies[0].ravel()[:_SHOWN_WEIGHTS].tolist() for copies in parts],
            "unlike": sum(len({part.tobytes() for part in copies}) > 1 for copies in parts),
        }

    def _peak_memory(self) -> int:
        if self._devices.on_cpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        infos = map(tf.config.experimental.get_memory_info, self._devices.names)
        return max(int(info["peak"]) for info in infos)


if __name__ == "__main__":
    worker_pool.serve(_Updates)
