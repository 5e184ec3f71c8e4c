"""The four classes inside TensorFlow's `MirroredStrategy`: calls, and graphs of TensorFlow 1."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
import testing_utils as tu
import warm_python
from absl.testing import parameterized
from testing_utils import MEAN, SUM

import tfcdo

# A class of each public base, and numbers of replicas. The contract has each class in each mode.
CLASSES = ((tfcdo.ReductionToOneDevice, 3), (tfcdo.HierarchicalCopyAllReduce, 5))


def made(make: Callable[[], Any], count: int) -> tuple[Any, tf.distribute.MirroredStrategy]:
    """Makes cross-device ops, and a strategy that uses them."""
    ops = make()
    return ops, tf.distribute.MirroredStrategy(tu.device_names(count), cross_device_ops=ops)


def context() -> Any:
    return tf.distribute.get_replica_context()


def on_replica(value: Any) -> Any:
    """The value with a device: a function's arguments have none while it is traced."""
    return tf.nest.map_structure(tf.identity, value)


class StrategyTestCase(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @contextlib.contextmanager
    def used(self, ops: tf.distribute.CrossDeviceOps, method: str = "batch_reduce") -> Iterator:
        """Asserts that the strategy calls a method of `ops`, so that this is what is tested."""
        with mock.patch.object(ops, method, wraps=getattr(ops, method)) as spy:
            yield
        self.assertGreater(spy.call_count, 0)

    def assert_close(self, expected: Any, actual: tf.Tensor) -> None:
        """Asserts a result of a few roundings of numbers that may be larger than it is."""
        self.assertEqual(np.shape(expected), tuple(actual.shape))
        rtol = 4 * tu.unit_roundoff(actual.dtype)
        np.testing.assert_allclose(tu.exact(actual), expected, rtol=rtol, atol=100 * rtol)

    def assert_replicas(self, expected: Any, value: Any, count: int) -> None:
        """Asserts the value of each replica, and that all have the same bits."""
        components = strategy_results(value)
        self.assertLen(components, count)
        for component in components:
            self.assert_close(expected, component)
        self.assert_bitwise_equal(components)


def strategy_results(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, "values", (value,)))


class AllReduceTest(StrategyTestCase):
    """`ReplicaContext.all_reduce`."""

    @parameterized.parameters((*CLASSES[0], tf.function), (*CLASSES[1], lambda body: body))
    def test_all_reduces_nested_structures(self, make, count, in_mode):
        ops, strategy = made(make, count)
        dtypes = (tf.float32, tf.float16, tf.int64, tf.complex64, tf.float32)
        shapes = ((2, 3), (5,), (), (4,), (0, 2))
        leaves = [
            [tu.numbers(shape, dtype, 10 * leaf + rank) for rank in range(count)]
            for leaf, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        a, b, c, d, e = map(tu.per_replica, leaves)
        value = {"a": a, "b": [b, (c,)], "c": {"d": d, "e": e}}

        def run(value):
            return strategy.run(
                lambda own: {
                    reduce_op.name: context().all_reduce(reduce_op, on_replica(own))
                    for reduce_op in (SUM, MEAN)
                },
                args=(value,),
            )

        with self.used(ops):
            results = in_mode(run)(value)
        for reduce_op in SUM, MEAN:
            result = results[reduce_op.name]
            self.assertEqual(["a", "b", "c"], sorted(result))
            flat = [result["a"], result["b"][0], result["b"][1][0], *result["c"].values()]
            for own, arrays, dtype in zip(flat, leaves, dtypes, strict=True):
                self.assert_replicas(tu.oracle(reduce_op, arrays), own, count)
                self.assertEqual(tu.result_dtype(reduce_op, dtype), strategy_results(own)[0].dtype)

    def test_compiled_replica_function(self):
        # On CPUs the strategy compiles all replicas, and what `ops` adds between them, together.
        count = 3
        ops, strategy = made(tfcdo.HierarchicalCopyAllReduce, count)
        own = [tu.numbers((4, 2), tf.float32, rank) for rank in range(count)]

        @tf.function(jit_compile=True, autograph=False)
        def replica(x):
            total, mean = context().all_reduce(SUM, [x * 2, tf.reduce_sum(x)]), x / 2
            return total, context().all_reduce(MEAN, mean)

        value = tu.per_replica(own)
        with self.used(ops):
            direct = strategy.run(replica, args=(value,))
            within = tf.function(lambda v: strategy.run(replica, args=(v,)), autograph=False)(value)
        for (total, scalar), mean in direct, within:
            self.assert_replicas(2 * tu.oracle(SUM, own), total, count)
            self.assert_replicas(np.sum(tu.oracle(SUM, own)), scalar, count)
            self.assert_replicas(tu.oracle(MEAN, own) / 2, mean, count)


class GatherTest(StrategyTestCase):
    def test_all_gather_and_its_gradient(self):
        count = 3
        ops, strategy = made(tfcdo.ReductionToOneDevice, count)
        rows = [1 + rank % 3 for rank in range(count)]
        own = [tu.numbers((n, 2), tf.float32, rank) for rank, n in enumerate(rows)]
        weights = [tu.numbers((sum(rows), 2), tf.float32, 50 + rank) for rank in range(count)]

        def replica(x, w):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = context().all_gather(x, axis=0)
                loss = tf.reduce_sum(w * y)
            return y, tape.gradient(loss, x)

        with self.used(ops, "_gather"):
            gathered, gradient = tf.function(lambda *a: strategy.run(replica, args=a))(
                tu.per_replica(own), tu.per_replica(weights)
            )
        self.assert_replicas(np.concatenate(own), gathered, count)
        parts = np.split(tu.oracle(SUM, weights), np.cumsum(rows)[:-1])
        for part, component in zip(parts, gradient.values, strict=True):
            self.assert_close(part, component)


_SESSION = """
import sys
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
import numpy as np
sys.path.append(sys.argv[1])
import strategy_test as st
from testing_utils import SUM, MEAN

for make, count in st.CLASSES:
    with tf.Graph().as_default():
        ops, strategy = st.made(make, count)
        feeds = tf.placeholder(tf.float32, [count, None])
        with strategy.scope():
            variable = tf.get_variable("v", [], initializer=tf.zeros_initializer(),
                                       aggregation=tf.VariableAggregation.MEAN)
        def replica():
            context = tf.distribute.get_replica_context()
            own = feeds[context.replica_id_in_sync_group]
            (gradient,) = tf.gradients(tf.reduce_sum(own * (variable + 1.0)), [variable])
            total, mean = (context.all_reduce(op, [own, gradient]) for op in (SUM, MEAN))
            return total, mean, variable.assign_add(gradient)
        fetches = tf.nest.map_structure(strategy.experimental_local_results,
                                        strategy.run(replica))
        fed = np.arange(2.0 * count).reshape(count, 2)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            (total, total_gradient), (mean, mean_gradient), _ = session.run(fetches, {feeds: fed})
            after = session.run(variable.values)
        np.testing.assert_allclose(total, [fed.sum(0)] * count)
        np.testing.assert_allclose(mean, [fed.mean(0)] * count, rtol=1e-6)
        np.testing.assert_allclose(total_gradient, [fed.sum()] * count)
        np.testing.assert_allclose(mean_gradient, [fed.sum() / count] * count, rtol=1e-6)
        np.testing.assert_allclose(after, [fed.sum() / count] * count, rtol=1e-6)
        print("ok", count)
"""


class SessionTest(StrategyTestCase):
    """Graphs of TensorFlow 1, and gradients in them."""

    def test_with_version_1_behavior(self):
        # It cannot be switched off again, so it gets a process of its own.
        result = warm_python.run("-c", _SESSION, str(pathlib.Path(__file__).parent))
        self.assertEqual(0, result.returncode, result.stderr)
        self.assertEqual([f"ok {count}" for _, count in CLASSES], result.stdout.split("\n")[:-1])


if __name__ == "__main__":
    tf.test.main()
