"""Times all-reduce plus update, each strategy in a process of its own for its peak memory.

Run as a module, it is such a process.
"""

from __future__ import annotations

import contextlib
import functools
import math
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo.bench import results, worker_pool
from tfcdo.bench.devices import choose_devices

_NAMES: Mapping[str, str] = {
    "tf": "tf.distribute.MirroredStrategy",
    "tfcdo": "tfcdo.MirroredStrategy",
    "sharded": "shard_optimizer_state=True",
}
# A convolutional and fully connected mixture of large and small variables: 69 MB in float32.
_SHAPES = (
    *[(1024, 1024)] * 12,
    *[(1024,)] * 12,
    *[(3, 3, 256, 256)] * 8,
    *[(256,)] * 40,
)
_SEED = 7
_TIMEOUT = 600.0


def run(
    optimizer: str,
    num_devices: int,
    iterations: int,
    warmup: int,
    track: results.Track = results.silently,
) -> list[results.Measurement]:
    """Takes steps under each strategy, in turn."""
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    with contextlib.ExitStack() as stack:
        pools: dict[str, worker_pool.WorkerPool] = {}

        def ask(kind: str, method: str) -> Any:
            return pools[kind].call(method, _TIMEOUT)[0]

        for kind in _NAMES:
            command = [sys.executable, "-m", "tfcdo.bench.updates", kind]
            command += [str(num_devices), optimizer]
            pools[kind] = stack.enter_context(worker_pool.start_workers(command, [variables]))
        first = {kind: ask(kind, "step") for kind in track(list(_NAMES), description="first steps")}
        steps = {kind: functools.partial(ask, kind, "step") for kind in _NAMES}
        taken = results.take_turns(steps, iterations, warmup, track)
        reports = {kind: ask(kind, "report") for kind in _NAMES}
    return [
        results.Measurement(
            name,
            kind,
            num_devices,
            *results.median_and_spread(taken[kind]),
            workload=optimizer,
            size=4 * sum(map(math.prod, _SHAPES)),
            first_call=first[kind],
            **reports[kind],
        )
        for kind, name in _NAMES.items()
    ]


class _Updates:
    """Variables, an optimizer, and the step that reduces gradients and updates."""

    def __init__(self, kind: str, num_devices: str, name: str) -> None:
        self._devices = choose_devices(int(num_devices))
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
                for shape in _SHAPES
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

    def report(self) -> dict[str, int]:
        """Returns the bytes of the optimizer's state, and the most that the process used."""
        state = [
            component.shape.num_elements() * component.dtype.size
            for one in self._optimizer.variables
            for component in getattr(one.value, "values", (one.value,))
        ]
        return {"state_bytes": sum(state), "peak_memory": self._peak_memory()}

    def _peak_memory(self) -> int:
        if self._devices.on_cpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        infos = map(tf.config.experimental.get_memory_info, self._devices.names)
        return max(int(info["peak"]) for info in infos)


if __name__ == "__main__":
    worker_pool.serve(_Updates)
