"""What is rounded to 16 bits, and how often: only gradients, and means once."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from testing_utils import ARGUMENTS, EAGER, FUNCTION, MEAN

import tfcdo

STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tfcdo.MirroredStrategy,
    tfcdo.MultiWorkerMirroredStrategy,
)


class GradientsTest(tf.test.TestCase, parameterized.TestCase):
    """Of what a strategy reduces, batches of gradients are cast, and nothing else."""

    def strategy(self, make: Any, count: int = 3, **wire: Any) -> tf.distribute.Strategy:
        ops = tfcdo.AutoAllReduce(**(wire or {"wire_dtype": "bfloat16"}))
        if make is tfcdo.MultiWorkerMirroredStrategy:
            return make(cross_device_ops=ops, devices_per_worker=count)
        return make(tu.device_names(count), ops)

    @parameterized.parameters(
        (STRATEGIES[0], True, False), (STRATEGIES[1], False, True), (STRATEGIES[2], True, True)
    )
    def test_batches_are_cast_and_nothing_else(self, make, function, feedback):
        strategy = self.strategy(make, wire_dtype="bfloat16", error_feedback=feedback)

        def replica() -> dict[str, Any]:
            context = tf.distribute.get_replica_context()
            vector = tf.constant([1.2345678, 333.67])
            with tf.GradientTape() as tape:
                tape.watch(vector)
                total = context.all_reduce("SUM", vector)
                loss = tf.reduce_sum(total * [0.1, 0.3])
            return {
                "number": context.all_reduce("SUM", tf.constant(333.67)),
                "numbers": context.all_reduce(
                    "MEAN", {"a": tf.constant(0.1), "b": tf.fill([1], 0.3)}
                ),
                "alone": total,
                "gradient of it": tape.gradient(loss, vector),
                "batch": context.all_reduce("SUM", [vector, vector]),
            }

        def step() -> Any:
            return strategy.run(replica)

        results = tf.nest.map_structure(
            lambda value: strategy.experimental_local_results(value)[-1],
            tf.function(step)() if function else step(),
        )
        batch = results.pop("batch")
        self.assertAllClose(np.float64(3) * 333.67, results["number"], rtol=1e-6)
        self.assertAllClose({"a": 0.1, "b": [0.3]}, results["numbers"], rtol=1e-6)
        self.assertAllClose([3.7037034, 1001.01], results["alone"], rtol=1e-6)
        self.assertAllClose([0.3, 0.9], results["gradient of it"], rtol=1e-6)
        for total in batch:
            self.assertAllClose([3.7037034, 1001.01], total, rtol=0.02)
            self.assertNotAllClose([3.7037034, 1001.01], total, rtol=1e-4)

    @parameterized.parameters(*zip(STRATEGIES, (False, True, True)))
    def test_what_is_read_of_variables_is_exact(self, make, function):
        strategy = self.strategy(make)
        with strategy.scope():
            variables = [
                tf.Variable(
                    tf.fill([2000], 1.2345678),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=aggregation,
                )
                for aggregation in (tf.VariableAggregation.MEAN, tf.VariableAggregation.SUM)
            ]

        def read() -> Any:
            return [tf.identity(variable) for variable in variables]

        mean, total = tf.function(read)() if function else read()
        self.assertAllClose(np.full(2000, 1.2345678), mean, rtol=1e-6)
        self.assertAllClose(np.full(2000, 1.2345678) * 3, total, rtol=1e-6)


class MeanTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (tfcdo.HierarchicalCopyAllReduce, tf.bfloat16, FUNCTION, False),
        (tfcdo.HierarchicalCopyAllReduce, tf.float16, EAGER, True),
        (tfcdo.ReductionToOneDevice, tf.float16, EAGER, True),
        (functools.partial(tfcdo.ReductionToOneDevice, "/cpu:7"), tf.float16, ARGUMENTS, False),
        (functools.partial(tfcdo.AllReduceCrossDeviceOps, "ring"), tf.float16, ARGUMENTS, False),
    )
    def test_of_16_bits_are_rounded_once(self, make, dtype, mode, rows):
        arrays = [
            tf.cast(tu.numbers((100, 1), tf.float32, rank, limit=20_000), dtype).numpy()
            for rank in range(3)
        ]
        expected = tf.cast(tu.oracle(MEAN, arrays), dtype)
        twice = tf.cast(tf.cast(np.sum(arrays, 0, np.float64), dtype), tf.float64) / 3
        self.assertNotAllEqual(expected, tf.cast(twice, dtype))
        given: list[Any] = arrays
        if rows:
            given = [tf.IndexedSlices(tf.constant(one), tf.range(100)) for one in arrays]
        (result,) = tu.all_reduce(make(sum_equal_rows=rows), MEAN, [tu.per_replica(given)], mode)
        for one in result.values:
            self.assertAllEqual(expected, one.values if rows else one)

    @parameterized.parameters(None, tf.add_n)
    def test_of_rows_of_small_integers_do_not_overflow(self, accumulation_fn):
        ops = tfcdo.ReductionToOneDevice(accumulation_fn=accumulation_fn)
        rows = tf.IndexedSlices(tf.constant([[100], [-128]], tf.int8), tf.constant([2, 5]))
        (result,) = tu.all_reduce(ops, MEAN, [tu.per_replica([rows] * 3)])
        self.assertEqual(tf.float32, result.value.dtype)
        third = np.array([[100], [-128]], np.float32) / 3
        self.assertAllEqual(np.concatenate([third] * 3), result.value.values)


if __name__ == "__main__":
    tf.test.main()
