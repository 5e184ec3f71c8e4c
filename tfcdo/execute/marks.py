"""Marks in a graph: how often, and when, collectives between hosts are entered and left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.cluster import progress
from tfcdo.cluster.protocol import digest
from tfcdo.execute import handles


class Marks:
    """Counts the events of one kind of collectives, and keeps the time of the last ones."""

    def __init__(self, device: str, description: Mapping[str, Any]) -> None:
        self._device = device
        self._shape = progress.shape_of_times(description["collectives"])
        self._length: int = np.prod(self._shape).item()
        name = digest(description)
        self._count = handles.bare_variable(f"progress_{name}", device, tf.int64)
        self._times = handles.bare_variable(f"times_{name}", device, tf.float64, [self._length])

    def mark(self, tensors: Sequence[tf.Tensor], after: tf.Operation | None = None) -> tf.Operation:
        """Counts one more event as soon as these tensors, and an earlier mark, are there."""
        before = [*tensors, after] if after is not None else list(tensors)
        with tf.control_dependencies(before), tf.device(self._device):
            count, times = map(tf_internals.captured, (self._count, self._times))
            number = tf.raw_ops.ReadVariableOp(resource=count, dtype=tf.int64)
            # The time first, so that each event that is counted has its time.
            timed = tf.raw_ops.ResourceScatterUpdate(
                resource=times, indices=number % self._length, updates=tf.raw_ops.Timestamp()
            )
            with tf.control_dependencies([] if timed is None else [timed]):
                mark = tf.raw_ops.AssignAddVariableOp(
                    resource=count, value=tf.constant(1, tf.int64)
                )
        if mark is not None:
            tf_internals.run_before_function_returns(mark)
        return mark

    def count(self) -> int:
        """Returns the number of events: odd while a collective waits."""
        return int(tf.raw_ops.ReadVariableOp(resource=self._count, dtype=tf.int64))

    def times(self) -> np.ndarray:
        """Returns when the last events were, in seconds: `[use, collective, entered or left]`."""
        times = tf.raw_ops.ReadVariableOp(resource=self._times, dtype=tf.float64)
        array: np.ndarray = times.numpy()
        return array.reshape(self._shape)
