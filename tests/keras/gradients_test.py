"""Gradients that differ in kind between replicas, or are not finite; float8; threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
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
        shared, expected = kinds[0](1), -total(kinds)
        if shared is not None:
            expected = -3 * tf.convert_to_tensor(shared)

        def on_replica() -> None:
            replica = int(tf.distribute.get_replica_context().replica_id_in_sync_group)
            gradient = kinds[replica](replica) if shared is None else shared
            optimizer.apply([gradient], [variable])

        strategy.run(on_replica)
        for component in variable.value.values:
            self.assertAllClose(expected, component)

    def test_no_replica_has_one(self):
        strategy = strategy_of(2)
        with strategy.scope():
            own = [keras.Variable([1.0]), keras.Variable([1.0])]
            optimizer = ko.SGD(0.5, weight_decay=0.1)
        with self.assertWarnsRegex(UserWarning, "Gradients do not exist"):
            strategy.run(lambda: optimizer.apply([None, tf.ones([1])], own))
        self.assertAllEqual([1.0], own[0])
        self.assertNotAllEqual([1.0], own[1])


class SparseInputsTest(TrainingTestCase):
    """A lookup of sparse ids adds the gradients of equal ids, which Adam then squares."""

    @parameterized.parameters(
        ("float32", False, None), ("float32", True, 0.01), ("int32", False, 0.01)
    )
    def test_as_on_one_device(self, dtype, sharded, clipnorm):
        words = np.random.default_rng(0).integers(0, 3, [19, 5]).astype(dtype)
        targets = np.sin(np.arange(19.0))

        def trained(count: int) -> keras.Model:
            keras.utils.set_random_seed(1)
            with strategy_of(count, shard_optimizer_state=sharded).scope():
                inputs = keras.Input([5], dtype=dtype, sparse=True)
                layer = (
                    keras.layers.Dense(2) if dtype == "float32" else keras.layers.Embedding(3, 2)
                )
                outputs = keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs)))
                model = keras.Model(inputs, outputs)
                model.compile(ko.Adam(0.1, global_clipnorm=clipnorm), "mse")
            # The last batch has one example, so some replicas have none.
            data = tf.data.Dataset.from_tensor_slices((words, targets)).batch(6)
            model.fit(data.map(lambda x, y: (tf.sparse.from_dense(x), y)), verbose=0)
            return model

        self.assert_same_training(trained(1), trained(3), 1e-5)


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
    def test_two_threads_trace_steps_of_one_optimizer(self):
        strategy = strategy_of(2)
        both_trace = threading.Barrier(2, timeout=30)
        first_to_meet, other_is_here = threading.Semaphore(1), threading.Event()

        class Slow(ko.SGD):
            def update_step(self, *arguments: Any) -> None:
                # On the first replica of each, wait for the other thread, which may have to wait.
                if first_to_meet.acquire(blocking=False):
                    other_is_here.wait(0.5)
                super().update_step(*arguments)

        with strategy.scope():
            variable = keras.Variable([1.0, 2.0])
            optimizer = Slow(0.25, clipnorm=100.0)
            optimizer.build([variable])
        errors: list[BaseException] = []

        def train(factor: float) -> None:
            @tf.function(autograph=False)
            def step() -> None:
                strategy.run(lambda: optimizer.apply([tf.fill([2], factor)], [variable]))

            try:
                both_trace.wait()
                step()
            except BaseException as error:
                errors.append(error)
                other_is_here.set()

        threads = [threading.Thread(target=train, args=(factor,)) for factor in (1.0, 3.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEmpty(errors)
        self.assertAllClose([1.0 - 0.25 * 2 * 4, 2.0 - 0.25 * 2 * 4], variable)


if __name__ == "__main__":
    tf.test.main()
