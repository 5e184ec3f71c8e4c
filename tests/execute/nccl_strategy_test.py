"""NCCL by execution in strategies and threads, and after errors.

What would hang on GPUs is an error here: see `nccl_on_cpu`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import nccl_on_cpu
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from nccl_on_cpu import (
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)
from nccl_testing import K, all_reduce, function, nccl, one, ranks
from testing_utils import EAGER, FUNCTION


class StrategyTest(tf.test.TestCase, parameterized.TestCase):
    def strategy(self, devices: Sequence[int]) -> tf.distribute.MirroredStrategy:
        names = [tu.device_name(index) for index in devices]
        return tf.distribute.MirroredStrategy(names, cross_device_ops=nccl(2))

    @staticmethod
    def summed(strategy: Any) -> Any:
        """A step: from a number per replica to its sum on each, through a variable."""
        with strategy.scope():
            counter = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

        def replica(x: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            total, one_more = context.all_reduce("SUM", [tf.stack([x, 2 * x]), tf.ones([3])])
            counter.assign_add(x)
            return total, one_more

        step = tf.function(lambda x: strategy.run(replica, [x]))
        return step, counter

    def values(self, strategy: Any, numbers: Sequence[float]) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(float(numbers[context.replica_id_in_sync_group]))
        )

    def test_a_thousand_steps(self):
        strategy = self.strategy(range(3))
        step, counter = self.summed(strategy)
        x = self.values(strategy, [1, 2, 4])
        for _ in range(1000):
            totals, ones = step(x)
        for result in totals.values:
            self.assertAllEqual([7.0, 14.0], result)
        self.assertAllEqual([[3.0] * 3] * 3, ones.values)
        self.assertAllEqual(7000.0, counter.numpy())

    @parameterized.named_parameters(
        ("apart", [(0, 1, 2, 3), (4, 5, 6, 7)]), ("on_the_same_devices", [range(3), range(3)])
    )
    def test_two_strategies_at_once(self, devices):
        def work(own: Sequence[int], scale: float) -> None:
            strategy = self.strategy(own)
            step, counter = self.summed(strategy)
            x = self.values(strategy, [scale * (rank + 1) for rank in range(len(own))])
            total = scale * len(own) * (len(own) + 1) / 2
            for count in range(1, 51):
                totals, _ = step(x)
                np.testing.assert_array_equal([[total, 2 * total]] * len(own), totals.values)
                np.testing.assert_array_equal(count * total, counter.numpy())

        with futures.ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(work, own, 10.0**i) for i, own in enumerate(devices)]:
                future.result()

    @parameterized.parameters(EAGER, FUNCTION)
    def test_six_threads(self, mode):
        ops = nccl(3)

        def work(thread: int) -> None:
            count = 2 + thread
            reduce = functools.partial(all_reduce, ops)
            step = reduce if mode == EAGER else function(reduce)
            for turn in range(10):
                own = [tf.fill([5], float(thread * 1000 + turn + rank)) for rank in range(count)]
                expected = np.sum([x.numpy() for x in own], axis=0)
                first, second = step(own, own)
                np.testing.assert_array_equal([expected] * count, first)
                np.testing.assert_array_equal([expected] * count, second)

        with futures.ThreadPoolExecutor(6) as pool:
            for future in [pool.submit(work, thread) for thread in range(6)]:
                future.result()

    def test_six_threads_with_one_function(self):
        step = function(one)

        def work(thread: int) -> None:
            for turn in range(30):
                scale = float(100 * thread + turn)
                np.testing.assert_array_equal([[10 * scale]] * K, step(*ranks(scale)))

        with futures.ThreadPoolExecutor(6) as pool:
            for future in [pool.submit(work, thread) for thread in range(6)]:
                future.result()

    def test_an_error_in_one_replica(self):
        strategy = self.strategy(range(3))

        def replica(x: tf.Tensor) -> tf.Tensor:
            checked = tf.debugging.check_numerics(x, "this replica fails")
            return tf.distribute.get_replica_context().all_reduce("SUM", checked)

        step = tf.function(lambda x: strategy.run(replica, [x]))
        good = self.values(strategy, [1, 2, 4])
        for rank in range(3):
            self.assertAllEqual([7.0] * 3, step(good).values)
            bad = self.values(strategy, [np.nan if i == rank else 1 for i in range(3)])
            with (
                # The others must not wait for their time to be up.
                nccl_on_cpu.patience(600),
                self.assertRaisesRegex(tf.errors.InvalidArgumentError, "this replica fails"),
            ):
                step(bad)
        self.assertAllEqual([7.0] * 3, step(good).values)

    @parameterized.parameters(EAGER, FUNCTION)
    def test_an_exception_in_one_replica_function(self, mode):
        strategy = self.strategy(range(3))
        fails = [True]

        def replica(x: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            if fails[0] and tf.get_static_value(context.replica_id_in_sync_group) == 1:
                raise KeyError("mine")
            return context.all_reduce("SUM", 2 * x)

        def step(x: Any) -> Any:
            return strategy.run(replica, [x])

        x = self.values(strategy, [1, 2, 4])
        with self.assertRaisesRegex(KeyError, "mine"):
            (tf.function(step, autograph=False) if mode == FUNCTION else step)(x)
        fails[0] = False
        again = (tf.function(step, autograph=False) if mode == FUNCTION else step)(x)
        self.assertAllEqual([14.0] * 3, again.values)

    def test_shapes_that_differ_fail_and_the_next_step_works(self):
        step = function(
            lambda *own: one(*own), input_signature=[tf.TensorSpec([None])] * 3
        )  # fmt: skip
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "NcclAllReduce"):
            step(tf.ones([2]), tf.ones([3]), tf.ones([2]))
        self.assertAllEqual([[3.0, 3.0]] * 3, step(*[tf.ones([2])] * 3))

    def test_keras_trains_as_on_one_device(self):
        generator = np.random.default_rng(0)
        x = generator.normal(size=(32, 3)).astype(np.float32)
        y = x @ np.array([[1.0], [-2.0], [0.5]], np.float32)

        def train(strategy: Any) -> list[np.ndarray]:
            tf.keras.utils.set_random_seed(1)
            with strategy.scope():
                model = tf.keras.Sequential(
                    [tf.keras.Input((3,)), tf.keras.layers.Dense(4, "tanh"),
                     tf.keras.layers.Dense(1)]
                )  # fmt: skip
                model.compile(tf.keras.optimizers.SGD(0.1), "mse")
            model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
            return model.get_weights()

        names = tu.device_names(4)
        strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=nccl(2))
        alone = train(tf.distribute.OneDeviceStrategy("/cpu:0"))
        for expected, weights in zip(alone, train(strategy), strict=True):
            self.assertAllClose(expected, weights, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    tf.test.main()
