"""Gradients that differ in kind between replicas, or are not finite; float8; threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras import optimizers as ko
from keras_training import TrainingTestCase, fitted, strategy_of

import tfcdo

_TABLE = np.arange(8.0, dtype=np.float32).reshape([4, 2]) - 2
_ROWS = np.array([3, 0, 3])


def table(replica: int) -> tf.Tensor:
    return tf.constant(_TABLE * (replica + 1))


def rows(replica: int) -> tf.IndexedSlices:
    values = tf.constant(_TABLE[: len(_ROWS)] * (replica + 1))
    shape = tf.constant(_TABLE.shape) if replica else None  # It can be left out.
    return tf.IndexedSlices(values, tf.constant(_ROWS), shape)


def nothing(replica: int) -> None:
    return None


def total(kinds: Any) -> np.ndarray:
    """The sum of the replicas' gradients as a table."""
    result = np.zeros_like(_TABLE, np.float64)
    for replica, kind in enumerate(kinds):
        if kind is table:
            result += _TABLE * (replica + 1)
        elif kind is rows:
            np.add.at(result, _ROWS, _TABLE[: len(_ROWS)] * (replica + 1.0))
    return result


class UnlikeKindsTest(TrainingTestCase):
    @parameterized.parameters(
        ((nothing, table, table), 2, True),
        ((rows, table, rows), None, False),
        ((table, rows, nothing), 2, False),
    )
    def test_as_on_one_device(self, kinds, accumulation, sharded):
        def trained(count: int, gradient_of: Callable[[int], Any]) -> Any:
            strategy = strategy_of(count, shard_optimizer_state=sharded)
            with strategy.scope():
                own = [keras.Variable(np.ones_like(_TABLE)) for _ in range(2)]
                optimizer = ko.Adam(
                    0.1, global_clipnorm=1.0, gradient_accumulation_steps=accumulation
                )

            def on_replica() -> None:
                replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                gradients = [gradient_of(int(replica)), tf.ones_like(_TABLE) / count]
                # The first step finds the optimizer not built; then it knows the variables.
                optimizer.apply(gradients, None if optimizer.built else own)

            with strategy.scope():
                for _ in range(3):
                    strategy.run(on_replica)
            return own

        of_all = tf.constant(total(kinds), tf.float32)
        expected = trained(1, lambda _: of_all)
        actual = trained(3, lambda replica: kinds[replica](replica))
        for one, other in zip(expected, actual, strict=True):
            self.assertAllClose(one, other, rtol=1e-5)
            self.assert_bitwise_equal([copy.read_value() for copy in other.value.values])
        self.assertNotAllClose(np.ones_like(_TABLE), expected[0])

    # A replica without a gradient adds no rows. A shared one counts once for each replica.
    @parameterized.parameters(
        ((nothing, rows, rows), None),
        ((rows,) * 3, None),
        ((table,) * 3, tfcdo.ReductionToOneDevice),
    )
    def test_sums(self, kinds, ops):
        strategy = strategy_of(3, ops and ops())
        with strategy.scope():
            variable = keras.Variable(np.zeros_like(_TABLE))
            optimizer = ko.SGD(1.0)
            optimizer.build([variable])
        shared = kinds[0](1)

        def on_replica() -> None:
            replica = int(tf.distribute.get_replica_context().replica_id_in_sync_group)
            gradient = kinds[replica](replica) if shared is None else shared
            optimizer.apply([gradient], [variable])

        strategy.run(on_replica)
        expected = total(kinds) if shared is None else 3 * tf.convert_to_tensor(shared)
        for component in variable.value.values:
            self.assertAllClose(-expected, component)

    def test_no_replica_has_one(self):
        strategy = strategy_of(2)
        with strategy.scope():
            own = [keras.Variable([1.0]), keras.Variable([1.0])]
            optimizer = ko.SGD(0.5, weight_decay=0.1)
        with self.assertWarnsRegex(UserWarning, "Gradients do not exist"):
            strategy.run(lambda: optimizer.apply([None, tf.ones([1])], own))
        self.assertAllEqual([1.0], own[0])
        self.assertNotAllEqual([1.0], own[1])


class LossScaleTest(TrainingTestCase):
    @parameterized.parameters((None, False), (2, True))
    def test_overflow_on_the_last_replica_only(self, accumulation, sharded_rows):
        """Keras alone looks at the first replica, and lets an overflow on another one in."""
        strategy = strategy_of(3, shard_optimizer_state=sharded_rows)
        with strategy.scope():
            variable = keras.Variable([1.0, 2.0])
            inner = ko.SGD(0.5, gradient_accumulation_steps=accumulation)
            optimizer = ko.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=2)
            optimizer.build([variable])

        @tf.function
        def step(bad: tf.Tensor) -> None:
            def on_replica() -> None:
                own = tf.distribute.get_replica_context().replica_id_in_sync_group
                gradient = tf.where(bad & (own == 2), np.inf, 8.0) * tf.ones([2])
                if sharded_rows:
                    gradient = tf.IndexedSlices(gradient, tf.range(2), tf.constant([2]))
                optimizer.apply([gradient], [variable])

            strategy.run(on_replica)

        scales = []
        for bad in (True, False, False):
            step(tf.constant(bad))
            scales.append(float(optimizer.dynamic_scale.numpy()))
        self.assertEqual(scales, [4.0, 4.0, 8.0])
        updates = 1 if accumulation else 2
        self.assertEqual(int(optimizer.iterations.numpy()), updates)
        # By the sum of three gradients of 8, unscaled by 4; or once by the mean of two such sums.
        change = updates * 0.5 * 6.0
        for copy in strategy.experimental_local_results(variable.value):
            self.assertAllClose([1.0 - change, 2.0 - change], copy)


def float8_layers() -> list[Any]:
    policy = keras.dtype_policies.get("float8_from_float32")
    # Without biases, whose gradients Keras rounds to bfloat16 on each replica.
    return [
        keras.layers.Input((4,)),
        keras.layers.Dense(5, activation="tanh", use_bias=False, dtype=policy),
        keras.layers.Dense(2, use_bias=False, dtype=policy),
    ]


class Float8Test(TrainingTestCase):
    @parameterized.parameters((False, 2), (True, None))
    def test_as_on_one_device(self, sharded, accumulation):
        def make() -> Any:
            inner = ko.SGD(0.1, clipnorm=0.5, gradient_accumulation_steps=accumulation)
            return ko.LossScaleOptimizer(inner, 4.0)

        options: dict[str, Any] = {"run_eagerly": False, "layers": float8_layers}
        expected = fitted(1, make, **options)
        model = fitted(2, make, shard_optimizer_state=sharded, **options)
        self.assert_same_training(expected, model, 1e-5)
        history = expected.layers[0].inputs_amax_history.numpy()
        self.assertLen(np.flatnonzero(history), 4 // (accumulation or 1))


class ThreadsTest(TrainingTestCase):
    def test_threads_trace_steps_of_one_optimizer(self):
        first_to_meet = threading.Semaphore(1)

        class Slow(ko.SGD):
            def update_step(self, *arguments: Any) -> None:
                if first_to_meet.acquire(blocking=False):
                    time.sleep(0.5)  # Meanwhile other threads get here, or have to wait.
                super().update_step(*arguments)

        strategy = strategy_of(2)
        with strategy.scope():
            variable = keras.Variable([1.0, 2.0])
            optimizer = Slow(0.25, clipnorm=100.0)
            optimizer.build([variable])

        def train(thread: int) -> None:
            @tf.function(autograph=False)
            def step() -> None:
                strategy.run(lambda: optimizer.apply([tf.fill([2], thread + 1.0)], [variable]))

            step()

        tu.call_in_six_threads(train)
        change = 0.25 * 2 * sum(range(1, 7))
        self.assertAllClose([1.0 - change, 2.0 - change], variable)


if __name__ == "__main__":
    tf.test.main()
