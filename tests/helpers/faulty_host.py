"""One host of a cluster that may do something wrong; a small loop without Keras."""

from __future__ import annotations

import json
import os
import time
from typing import Any
from unittest import mock

import tensorflow as tf

import tfcdo
from tfcdo import strategies
from tfcdo.cluster import session

# What these faults show is a time-out; the others wait, however busy the machine is.
_TIMED_OUT = {"absent": 12.0, "sleeps": 12.0, "unlike keys": 12.0}


def main(fault: str) -> None:
    """Trains a little; the fault happens on host 1."""
    here = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1
    timeout = _TIMED_OUT.get(fault, 100.0)
    if fault != "ends":
        # The machine may be so busy that a host that is well says nothing for ten seconds.
        mock.patch.object(strategies, "_HEARTBEAT_SECONDS", 100.0).start()
    options = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=timeout, bytes_per_pack=64
    )
    settings: dict[str, Any] = {}
    if fault == "another setting" and here:
        settings["cross_device_ops"] = tfcdo.HierarchicalCopyAllReduce()
    if fault == "absent" and here:
        return
    if fault == "late" and here:
        time.sleep(6.0)
    strategy = tfcdo.MultiWorkerMirroredStrategy(None, options, devices_per_worker=2, **settings)
    print("started", flush=True)
    width = 33 if fault == "another shape" and here else 32
    with strategy.scope():
        variable = tf.Variable(tf.zeros([width]))
    if fault == "unlike keys" and here:
        keys = session.Session.next_keys
        replacement: Any = lambda *arguments: [key + 1 for key in keys(*arguments)]  # noqa: E731
        mock.patch.object(session.Session, "next_keys", replacement).start()

    @tf.function
    def train() -> None:
        def step() -> None:
            context = tf.distribute.get_replica_context()
            replica = tf.cast(context.replica_id_in_sync_group, tf.float32)
            gradient = tf.fill([width], replica + 1.0)
            variable.assign_add(context.all_reduce("SUM", gradient))

        strategy.run(step)

    for number in range(8):
        if here and number == 4:
            if fault == "ends":
                return
            if fault == "sleeps":
                time.sleep(2 * timeout)
        train()
    values = {float(element) for part in variable.values for element in part.numpy()}
    print("values", sorted(values), flush=True)
