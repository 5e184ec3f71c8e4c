"""Times all-reduce plus update, each strategy in a process of its own for its peak memory."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfcdo.bench import results, worker_pool

NAMES: Mapping[str, str] = {
    "tf": "tf.distribute.MirroredStrategy",
    "tfcdo": "tfcdo.MirroredStrategy",
    "sharded": "shard_optimizer_state=True",
}
# A convolutional and fully connected mixture of large and small variables: 69 MB in float32.
SHAPES = (
    *[(1024, 1024)] * 12,
    *[(1024,)] * 12,
    *[(3, 3, 256, 256)] * 8,
    *[(256,)] * 40,
)
_TIMEOUT = 600.0
_LARGEST_DIFFERENCE = 1e-6


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

        for kind in NAMES:
            command = [sys.executable, "-m", "tfcdo.bench.updates_worker", kind]
            command += [str(num_devices), optimizer]
            pools[kind] = stack.enter_context(worker_pool.start_workers(command, [variables]))
        first = {kind: ask(kind, "step") for kind in track(list(NAMES), description="first steps")}
        steps = {kind: functools.partial(ask, kind, "step") for kind in NAMES}
        taken = results.take_turns(steps, iterations, warmup, track)
        reports = {kind: ask(kind, "report") for kind in NAMES}
    found = []
    for kind, name in NAMES.items():
        report = reports[kind]
        difference = float(
            np.abs(np.subtract(report["weights"], reports["tfcdo"]["weights"])).max()
        )
        differs = report["unlike"] + (difference > _LARGEST_DIFFERENCE)
        found.append(
            results.Measurement(
                name,
                kind,
                num_devices,
                *results.median_and_spread(taken[kind]),
                workload=optimizer,
                size=4 * sum(map(math.prod, SHAPES)),
                wrong=differs if kind != "tf" else None,
                first_call=first[kind],
                peak_memory=report["peak_memory"],
                state_bytes=report["state_bytes"],
                difference=difference,
            )
        )
    return found
