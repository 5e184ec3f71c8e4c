"""Measures TensorFlow's and tfcdo's multi-worker strategies in turn, on processes of this host."""

from __future__ import annotations

import functools
import sys

import numpy as np

from tfcdo.bench import link, results, worker_pool
from tfcdo.launch import cluster

ALONE = "computing alone"  # A step that drops its gradients.
WIRES = ("bfloat16", "int8")
# Seconds for a step; tracing its graph takes a minute on a busy machine.
_TIMEOUT = 900.0


def least_bytes(num_workers: int, gradient_bytes: int) -> int:
    """Returns the bytes that workers must send each other at least to sum their gradients."""
    # Patarasuk and Yuan 2009: each of N workers sends at least 2 (N - 1) / N times its data.
    return 2 * (num_workers - 1) * gradient_bytes


def run(
    opened: link.Loopback,
    num_workers: int,
    num_devices: int,
    iterations: int,
    warmup: int,
    num_blocks: int = 6,
    track: results.Track = results.silently,
) -> list[results.Measurement]:
    """Trains a model on the same data under each strategy, a step of each in turn."""
    names = {
        "tfcdo": "tfcdo.MultiWorkerMirroredStrategy",
        **{f"tfcdo {wire}": f"the same, exchange={wire!r}" for wire in WIRES},
        "tf": "tf.distribute.MultiWorkerMirroredStrategy",
    }
    command = [*opened.command, sys.executable, "-m", "tfcdo.bench.hosts_worker"]
    command += [str(num_devices), str(num_blocks)]
    with cluster.reserved_ports(num_workers) as addresses:
        variables = [
            {
                "TF_CONFIG": cluster.tf_config(addresses, index),
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "CUDA_VISIBLE_DEVICES": "",
            }
            for index in range(num_workers)
        ]
        with worker_pool.start_workers(command, variables) as pool:
            gradient_bytes, *_ = pool.call("gradient_bytes", _TIMEOUT)
            wrong = {
                kind: sum(pool.call("num_wrong", _TIMEOUT, name=kind))
                for kind in track(list(names), description="checking")
            }

            def step(kind: str) -> tuple[float, int]:
                before = opened.count_bytes()
                # A step ends when the slowest worker's does.
                seconds = max(pool.call("step", _TIMEOUT, name=kind))
                return seconds, opened.count_bytes() - before

            names[ALONE] = ALONE
            steps = {kind: functools.partial(step, kind) for kind in names}
            taken = results.take_turns(steps, iterations, warmup, track)
    found = []
    for kind, name in names.items():
        seconds, sent = zip(*taken[kind], strict=True)
        found.append(
            results.Measurement(
                name,
                kind,
                num_devices,
                *results.median_and_spread(seconds),
                size=gradient_bytes,
                wrong=wrong.get(kind),
                bytes_sent=float(np.mean(sent)),
            )
        )
    return found
