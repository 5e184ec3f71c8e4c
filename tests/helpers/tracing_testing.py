"""Shared by tests of traces: a step to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import testing_utils as tu

from tfcdo import tf_internals


def step_on(ops: Any, devices: Sequence[int]) -> Any:
    """Returns a function that computes on each of some devices, and all-reduces that."""
    values = tu.per_replica(
        [tf.ones([60_000])] * len(devices), [tu.device_name(device) for device in devices]
    )

    @tf.function
    def step() -> Any:
        with tf.name_scope("computation"):
            factors = []
            for value in values.values:
                with tf.device(value.device):
                    factors.append(tf.math.sin(value))
        own = tf_internals.per_replica(factors)
        return ops.reduce(tu.SUM, own, own).values

    return step
