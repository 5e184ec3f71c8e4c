"""tfcdo's classes in TensorFlow's `MirroredStrategy`: calls, Keras, and graphs of TensorFlow 1."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import keras_training as kt
import numpy as np
import tensorflow as tf
import testing_utils as tu
import warm_python
from absl.testing import parameterized
from testing_utils import MEAN, SUM

import tfcdo
from tfcdo import keras_internals

# A class of each public base, and numbers of replicas. The contract has each class in each mode.
CLASSES = ((tfcdo.ReductionToOneDevice, 3), (tfcdo.HierarchicalCopyAllReduce, 5))


def made(make: Callable[[], Any], count: int) -> tuple[Any, tf.distribute.MirroredStrategy]:
    ops = make()
    return ops, tf.distribute.MirroredStrategy(tu.device_names(count), cross_device_ops=ops)


def directly(body: Any) -> Any:
    return body


def compiled(body: Any) -> Any:
    """On CPUs the strategy compiles all replicas, and what `ops` adds between them, together."""
    return tf.function(body, jit_compile=True, autograph=False)


class StrategyTest(kt.TrainingTestCase):
    @contextlib.contextmanager
    def used(self, ops: tf.distribute.CrossDeviceOps, method: str = "batch_reduce") -> Iterator:
        """Asserts that the strategy calls a method of `ops`, so that this is what is tested."""
        with mock.patch.object(ops, method, wraps=getattr(ops, method)) as spy:
            yield
        self.assertGreater(spy.call_count, 0)

    @parameterized.parameters(
        (*CLASSES[0], tf.function, directly), (*CLASSES[1], directly, directly),
        (*CLASSES[0], directly, compiled), (*CLASSES[1], tf.function, compiled),
    )  # fmt: skip
    def test_all_reduces_nested_structures(self, make, count, in_mode, in_replica_mode):
        ops, strategy = made(make, count)
        dtypes = (tf.float32, tf.float16, tf.int64, tf.complex64, tf.float32)
        leaves = [
            [tu.numbers(shape, dtype, 10 * leaf + rank) for rank in range(count)]
            for leaf, (shape, dtype) in enumerate(zip(((2, 3), (5,), (), (4,), (0, 2)), dtypes))
        ]
        a, b, c, d, e = map(tu.per_replica, leaves)

        @in_replica_mode
        def on_replica(own):
            # While a function is traced, its arguments have no device.
            own = tf.nest.map_structure(tf.identity, own)
            context = tf.distribute.get_replica_context()
            total = context.all_reduce(SUM, own)
            return total, context.all_reduce(MEAN, tf.nest.map_structure(lambda x: x + x, own))

        with self.used(ops):
            results = in_mode(lambda own: strategy.run(on_replica, (own,)))(
                {"a": a, "b": [b, (c,)], "c": {"d": d, "e": e}}
            )
        for reduce_op, factor, result in zip((SUM, MEAN), (1, 2), results, strict=True):
            for own, arrays in zip(tf.nest.flatten(result), leaves, strict=True):
                dtype = tu.result_dtype(reduce_op, tf.as_dtype(arrays[0].dtype))
                self.assertLen(own.values, count)
                self.assert_exact(own.values[0], factor * tu.oracle(reduce_op, arrays), dtype)
                self.assert_bitwise_equal(own.values)

    def test_all_gather_and_its_gradient(self):
        ops, strategy = made(*CLASSES[0])
        own = [tu.numbers((n, 2), tf.float32, n) for n in (1, 2, 3)]
        weights = [tu.numbers((6, 2), tf.float32, 50 + rank) for rank in range(3)]

        def on_replica(x, w):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.distribute.get_replica_context().all_gather(x, axis=0)
            return y, tape.gradient(y, x, output_gradients=w)

        values = tu.per_replica(own), tu.per_replica(weights)
        with self.used(ops, "_gather"):
            gathered, gradient = tf.function(lambda *a: strategy.run(on_replica, args=a))(*values)
        for component in gathered.values:
            self.assertAllEqual(np.concatenate(own), component)
        parts = np.split(tu.oracle(SUM, weights), [1, 3])
        for part, component in zip(parts, gradient.values, strict=True):
            self.assertAllEqual(part, component)

    def test_with_version_1_behavior(self):
        """Graphs of TensorFlow 1, and gradients in them."""
        # It cannot be switched off again, so it gets a process of its own.
        result = warm_python.run("-c", _SESSION, str(pathlib.Path(__file__).parent))
        self.assertEqual(0, result.returncode, result.stderr)
        self.assertEqual([f"ok {count}" for _, count in CLASSES], result.stdout.split("\n")[:-1])

    # The class that TensorFlow gets wrong at odd numbers, and another one.
    @parameterized.parameters(tfcdo.HierarchicalCopyAllReduce, tfcdo.ReductionToOneDevice)
    def test_odd_numbers_of_devices(self, make):
        ops, strategy = made(make, 3)
        expected = kt.fitted(1, keras.optimizers.SGD)
        with self.used(ops):
            model = kt.fitted(3, keras.optimizers.SGD, run_eagerly=False, strategy=strategy)
        self.assert_same_training(expected, model, 2e-5)
        if not keras_internals.adds_metrics_twice:  # TensorFlow's strategy would.
            self.assertAllClose(expected.history.history, model.history.history)


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


if __name__ == "__main__":
    tf.test.main()
