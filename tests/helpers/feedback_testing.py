"""Training steps with error feedback, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from testing_utils import SUM

# More than half of what bfloat16 loses of numbers from 1 to 2, and what float16 does.
TINY = {"bfloat16": 0.3 * 2.0**-7, "float16": 0.3 * 2.0**-10}


def residuals(ops: Any) -> list[tf.Variable]:
    """The residuals that some cross-device ops keep."""
    return list(ops._feedback.by_name.values())


class Training:
    """The gradients of some devices, all-reduced step by step."""

    def __init__(
        self,
        ops: Any,
        count: int = 3,
        shape: Sequence[int] = (4,),
        reduce_op: Any = SUM,
        function: bool = True,
        dtype: tf.DType = tf.float32,
    ) -> None:
        self.ops, self.reduce_op = ops, reduce_op
        self.gradients = []
        for rank in range(count):
            with tf.device(tu.device_name(rank)):
                self.gradients.append(tf.Variable(tf.zeros(shape, dtype)))
        self.call = tf.function(self.reduce, autograph=False) if function else self.reduce

    def reduce(self) -> Any:
        value = tu.per_replica(self.gradients)
        return self.ops.batch_reduce(self.reduce_op, [(value, value)])[0].values

    def step(self, gradients: Any) -> np.ndarray:
        """All-reduces one gradient a device, or one for all, and returns the result."""
        arrays = np.broadcast_to(gradients, (len(self.gradients), *self.gradients[0].shape))
        for variable, array in zip(self.gradients, arrays, strict=True):
            variable.assign(array)
        results = [result.numpy() for result in self.call()]
        for result in results[1:]:
            np.testing.assert_array_equal(results[0], result)
        return results[0]

    def lost(self, steps: int, gradient: float) -> float:
        """How much less than the values all results are, after so many equal steps."""
        total = sum(self.step(gradient)[0].astype(np.float64) for _ in range(steps))
        return steps * len(self.gradients) * float(np.float32(gradient)) - total
