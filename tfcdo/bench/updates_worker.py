"""Takes steps of all-reduce plus update under one strategy, in a process of its own.

Runs as `python -m tfcdo.bench.updates_worker KIND NUM_DEVICES OPTIMIZER`, and answers requests of
`tfcdo.bench.updates`.
"""

from __future__ import annotations

import functools
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo.bench import devices as bench_devices
from tfcdo.bench import updates, worker_pool
from tfcdo.keras import DistributedOptimizer

_SEED = 7
_SHOWN_WEIGHTS = 8  # Number of weights shown of each variable.


class _Updates:
    """Variables, an optimizer, and the step that reduces gradients and updates."""

    def __init__(self, kind: str, num_devices: int, name: str) -> None:
        self._devices = bench_devices.choose_devices(num_devices)
        names = list(self._devices.names)
        make = tf.distribute.MirroredStrategy if kind == "tf" else tfcdo.MirroredStrategy
        self._strategy = make(names)
        generator = np.random.default_rng(_SEED)
        with self._strategy.scope():
            self._variables = [
                keras.Variable(generator.normal(0, 0.01, shape).astype(np.float32))
                for shape in updates.SHAPES
            ]
            optimizer = keras.optimizers.get(name)
            if kind != "tf":
                sharded = kind == "sharded"
                optimizer = DistributedOptimizer(optimizer, shard_optimizer_state=sharded)
            optimizer.build(self._variables)
        self._optimizer = optimizer
        self._function = tf.function(lambda: self._strategy.run(self._on_replica))

    def _on_replica(self) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        rank = tf.cast(replica, tf.float32)
        gradients = [one.value * 0.001 * (1.0 + rank) + 0.01 for one in self._variables]
        self._optimizer.apply(gradients, self._variables)

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Answers one request."""
        if request["do"] == "report":
            return self._report()
        start = time.perf_counter()
        self._function()
        if not self._devices.on_cpu:
            tf.test.experimental.sync_devices()
        return time.perf_counter() - start

    def _report(self) -> dict[str, Any]:
        parts = [[part.numpy() for part in one.value.values] for one in self._variables]
        state = [
            component.shape.num_elements() * component.dtype.size
            for one in self._optimizer.variables
            for component in getattr(one.value, "values", (one.value,))
        ]
        return {
            "state_bytes": sum(state),
            "peak_memory": self._peak_memory(),
            "weights": [part[0].ravel()[:_SHOWN_WEIGHTS].tolist() for part in parts],
            "alike": all(
                other.tobytes() == first.tobytes() for first, *others in parts for other in others
            ),
        }

    def _peak_memory(self) -> int:
        if self._devices.on_cpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        infos = map(tf.config.experimental.get_memory_info, self._devices.names)
        return max(int(info["peak"]) for info in infos)


def main() -> None:
    """Answers requests until standard input ends."""
    kind, num_devices, name = sys.argv[1:]
    # With the first request, as its answer may take long.
    made = functools.cache(lambda: _Updates(kind, int(num_devices), name))
    worker_pool.serve(lambda request: made().answer(request))


if __name__ == "__main__":
    main()
