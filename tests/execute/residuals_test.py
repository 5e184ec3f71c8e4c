"""Whose residuals are whose: each function's, each batch's and each set of devices' own."""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from feedback_testing import TINY, Training, residuals
from testing_utils import SUM

import tfcdo


class OwnersTest(tf.test.TestCase, parameterized.TestCase):
    """Each model's residuals are its own, whatever calls it, and stay with it."""

    def make(self) -> Any:
        return tfcdo.HierarchicalCopyAllReduce(wire_dtype="bfloat16", error_feedback=True)

    def test_each_batch_of_a_function_gets_its_own_back(self):
        ops = self.make()
        first, second = Training(ops), Training(ops)

        @tf.function
        def both() -> Any:
            return first.reduce()[0], second.reduce()[0]

        steps = (1 + TINY["bfloat16"], -3 - 2 * TINY["bfloat16"])
        for training, step in zip((first, second), steps, strict=True):
            for variable in training.gradients:
                variable.assign([step] * 4)
        totals = np.sum([[total[0] for total in both()] for _ in range(30)], 0, np.float64)
        self.assertAllClose(90 * np.array(steps), totals, rtol=0, atol=24 * TINY["bfloat16"])

    @parameterized.parameters(False, True)
    def test_device_sets_of_equal_size(self, function):
        """Each has residuals on its own devices, eagerly and as batches of one function."""
        ops = self.make()
        sets, steps = (tu.ALL_DEVICES[:3], tu.ALL_DEVICES[3:6]), (1 + TINY["bfloat16"], -3.0)
        values = [
            tu.per_replica([tf.fill([4], step)] * 3, devices)
            for step, devices in zip(steps, sets, strict=True)
        ]

        def reduce(value: Any) -> Any:
            return ops.batch_reduce(SUM, [(value, value)])[0].values[0]

        def both() -> Any:
            return [reduce(value) for value in values]

        call = tf.function(both) if function else both
        totals = np.sum([[total[0] for total in call()] for _ in range(30)], 0, np.float64)
        self.assertAllClose(90 * np.array(steps), totals, rtol=0, atol=12 * TINY["bfloat16"])
        self.assertCountEqual(tu.device_names(6), [one.device for one in residuals(ops)])

    def test_a_function_that_is_traced_again_goes_on(self):
        ops = self.make()
        training = Training(ops)
        traced = tf.function(lambda number: training.reduce())
        number = iter(range(100))
        training.call = lambda: traced(next(number))  # Each is another signature.
        self.assertLess(abs(training.lost(10, 1 + TINY["bfloat16"])), 12 * TINY["bfloat16"])
        self.assertLen(residuals(ops), 3)

    def test_loops(self):
        ops = self.make()
        training = Training(ops)

        @tf.function
        def many() -> tf.Tensor:
            total = tf.zeros([4])
            for _ in tf.range(40):
                total += training.reduce()[0]
            return total

        for variable in training.gradients:
            variable.assign([1 + TINY["bfloat16"]] * 4)
        self.assertAllClose([120 * (1 + TINY["bfloat16"])] * 4, many(), atol=12 * TINY["bfloat16"])

    def test_a_function_that_is_gone_leaves_its_place(self):
        ops = self.make()
        for _ in range(3):
            Training(ops).lost(2, 1 + TINY["bfloat16"])
            gc.collect()
        self.assertLen(residuals(ops), 3)
        # Who comes next begins with nothing, and 1 is not rounded.
        self.assertAllEqual([3.0] * 4, Training(ops).step(1.0))
        for kept in residuals(ops):
            self.assertAllEqual(np.zeros(4), kept)

    @parameterized.parameters("called by another", "in a strategy")
    def test_a_concrete_function_keeps_its_residuals(self, kind):
        ops = self.make()
        strategy = tf.distribute.MirroredStrategy(list(tu.ALL_DEVICES[:3]), ops)

        def made() -> Training:
            training = Training(ops)

            def reduce() -> Any:
                if kind != "in a strategy":
                    return training.reduce()
                totals = strategy.run(
                    lambda own: tf.distribute.get_replica_context().all_reduce(SUM, [own, own])[0],
                    (tu.per_replica(training.gradients),),
                )
                return strategy.experimental_local_results(totals)

            training.call = tf.function(reduce).get_concrete_function()
            if kind == "called by another":
                inner = training.call
                training.call = tf.function(lambda: inner()).get_concrete_function()
            gc.collect()
            return training

        first, second = made(), made()
        lost = [0.0, 0.0]
        for _ in range(20):
            lost[0] += first.lost(1, 1 + TINY["bfloat16"])
            lost[1] += second.lost(1, -3 - 2 * TINY["bfloat16"])
        self.assertAllClose([0.0, 0.0], lost, atol=24 * TINY["bfloat16"])
        # Those of functions that are gone are used again, in a strategy too.
        number = len(residuals(ops))
        del first, second
        gc.collect()
        third = made()
        self.assertLess(abs(third.lost(20, 1 + TINY["bfloat16"])), 12 * TINY["bfloat16"])
        self.assertLen(residuals(ops), number)

    def test_eager_residuals_are_not_those_of_a_function_that_is_gone(self):
        ops = self.make()
        training = Training(ops)
        training.lost(5, 1 + TINY["bfloat16"])
        concrete: Any = training.call
        concrete = concrete.get_concrete_function()
        training.call = training.reduce
        gc.collect()
        self.assertAllEqual([3.0] * 4, training.step(1.0))
        self.assertLen(residuals(ops), 6)
        del concrete

    def test_explaining_and_copying_take_none(self):
        ops = self.make()
        ops.explain([(4,)], devices=["/cpu:0", "/cpu:1"])
        self.assertEmpty(residuals(ops))
        Training(ops).step(1.0)
        self.assertEmpty(residuals(copy.deepcopy(ops)))

    def test_reset(self):
        ops = self.make()
        training = Training(ops)
        training.lost(5, 1 + TINY["bfloat16"])
        ops.reset_error_feedback()
        for _ in range(4):
            self.assertAllEqual([3.0] * 4, training.step(1.0))
        with self.assertRaisesRegex(ValueError, "error_feedback must be True"):
            tfcdo.AutoAllReduce(wire_dtype="bfloat16").reset_error_feedback()


if __name__ == "__main__":
    tf.test.main()
