"""One host of a cluster: runs scenarios by their names, and saves what they return."""

from __future__ import annotations

import pathlib
import time
from unittest import mock

import host_exchange
import host_keras
import host_scenarios
import host_unlike
import host_values
import host_wire
import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo import strategies

_SCENARIOS = {
    name: scenario
    for module in (
        host_wire,
        host_unlike,
        host_values,
        host_scenarios,
        host_keras,
        host_exchange,
    )
    for name, scenario in vars(module).items()
}


def main(devices: str, folder: str, *names: str) -> None:
    """Runs scenarios with a number of devices, and saves results in a folder."""
    tf.get_logger().setLevel("ERROR")
    # The machine may be so busy that a host that is well says nothing for ten seconds.
    mock.patch.object(strategies, "_HEARTBEAT_SECONDS", 100.0).start()
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=200.0)
    strategy = tfcdo.MultiWorkerMirroredStrategy(None, options, devices_per_worker=int(devices))
    host = strategy.cluster_resolver.task_id
    for name in names:
        start = time.monotonic()
        results = _SCENARIOS[name](strategy)
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        if results:
            np.savez(pathlib.Path(folder, f"{name}-{host}.npz"), **results)
