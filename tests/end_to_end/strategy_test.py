"""The four classes inside a `MirroredStrategy`: calls, control flow, and graphs of TensorFlow 1."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
import testing_utils as tu
import warm_python
from absl.testing import parameterized
from testing_utils import EAGER, FUNCTION, MEAN, SUM

import tfcdo

CLASSES: dict[str, Callable[[], tf.distribute.CrossDeviceOps]] = {
    "one_device": tfcdo.ReductionToOneDevice,
    "hierarchical": tfcdo.HierarchicalCopyAllReduce,
}

# One of the classes that share a public base, and all the code that is not about packs. The
# contract has each in each mode.
BASES = [("one_device", 3), ("hierarchical", 5)]
BASE_CASES = [("one_device", FUNCTION, 3), ("hierarchical", EAGER, 5)]


def strategy_of(
    ops: tf.distribute.CrossDeviceOps, count: int, first: int = 0
) -> tf.distribute.MirroredStrategy:
    return tf.distribute.MirroredStrategy(
        tu.ALL_DEVICES[first : first + count], cross_device_ops=ops
    )


def in_mode(mode: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """The body as it is, or as a `tf.function` that is called by another one."""
    if mode == EAGER:
        return body
    function = tf.function(body, autograph=False)
    return tf.function(lambda *arguments: function(*arguments), autograph=False)


def context() -> Any:
    return tf.distribute.get_replica_context()


def on_replica(value: Any) -> Any:
    """The value with a device: a function's arguments have none while it is traced."""
    return tf.nest.map_structure(tf.identity, value)


def distributed(
    strategy: tf.distribute.Strategy, data: Any, batch_size: int
) -> tf.distribute.DistributedDataset:
    """Batches of `data`, without the thread that tunes what makes them.

    Such a thread may sleep on for seconds when its iterator ends, which waits for it.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(batch_size).with_options(options)
    return strategy.experimental_distribute_dataset(dataset)


class StrategyTestCase(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @contextlib.contextmanager
    def used(self, ops: tf.distribute.CrossDeviceOps, method: str = "batch_reduce") -> Iterator:
        """Asserts that the strategy calls a method of `ops`, so that this is what is tested."""
        with mock.patch.object(ops, method, wraps=getattr(ops, method)) as spy:
            yield
        self.assertGreater(spy.call_count, 0)

    def assert_close(self, expected: Any, actual: tf.Tensor, dtype: Any = None) -> None:
        """Asserts a result of a few roundings of numbers that may be larger than it is."""
        self.assertEqual(tf.as_dtype(dtype or actual.dtype), actual.dtype)
        self.assertEqual(np.shape(expected), tuple(actual.shape))
        rtol = 4 * tu.unit_roundoff(actual.dtype)
        np.testing.assert_allclose(tu.exact(actual), expected, rtol=rtol, atol=100 * rtol)

    def assert_replicas(self, expected: Any, value: Any, count: int) -> None:
        """Asserts the value of each replica, and that all have the same bits."""
        self.assert_components(expected, strategy_results(value), count)

    def assert_components(self, expected: Any, components: Sequence[Any], count: int) -> None:
        self.assertLen(components, count)
        for component in components:
            self.assert_close(expected, component)
        self.assert_bitwise_equal(components)


def strategy_results(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, "values", (value,)))


class AllReduceTest(StrategyTestCase):
    """`ReplicaContext.all_reduce`."""

    @parameterized.parameters(*BASE_CASES)
    def test_all_reduces_nested_structures(self, name, mode, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
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
            results = in_mode(mode, run)(value)
        for reduce_op in SUM, MEAN:
            result = results[reduce_op.name]
            self.assertEqual(["a", "b", "c"], sorted(result))
            flat = [result["a"], result["b"][0], result["b"][1][0], *result["c"].values()]
            for own, arrays, dtype in zip(flat, leaves, dtypes, strict=True):
                self.assert_replicas(tu.oracle(reduce_op, arrays), own, count)
                self.assertEqual(tu.result_dtype(reduce_op, dtype), strategy_results(own)[0].dtype)
                if mode == EAGER:
                    devices = [component.device for component in own.values]
                    self.assertEqual(list(tu.device_names(count)), devices)

    @parameterized.parameters(BASE_CASES[0])
    def test_gradient_of_all_reduce(self, name, mode, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        own = [[tu.numbers((3,), tf.float32, 10 * k + r) for r in range(count)] for k in (0, 1)]
        weights = [[tu.numbers((3,), tf.float32, 50 + r) for r in range(count)] for _ in (0, 1)]

        def gradients(xs, ws, reduce_op):
            with tf.GradientTape() as tape:
                tape.watch(xs)
                # Squares, so that what goes backward depends on the sums.
                ys = context().all_reduce(reduce_op, [xs[0] * 1.0, {"b": xs[1]}])
                loss = tf.reduce_sum(ws[0] * ys[0] ** 2) + tf.reduce_sum(ws[1] * ys[1]["b"])
            return tape.gradient(loss, xs)

        def run(xs, ws):
            return [strategy.run(gradients, args=(xs, ws, reduce_op)) for reduce_op in (SUM, MEAN)]

        with self.used(ops):
            results = in_mode(mode, run)(
                [tu.per_replica(x) for x in own], [tu.per_replica(w) for w in weights]
            )
        for (first, second), divisor in zip(results, (1, count), strict=True):
            y = tu.oracle(SUM, own[0]) / divisor
            # One y on all replicas, each of whose losses weighs it differently.
            self.assert_replicas(2 * y * tu.oracle(SUM, weights[0]) / divisor, first, count)
            self.assert_replicas(tu.oracle(SUM, weights[1]) / divisor, second, count)

    @parameterized.parameters(BASES[0])
    def test_values_that_are_all_on_one_device(self, name, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        own = [tu.numbers((3,), tf.float32, rank) for rank in range(count)]
        # Nothing puts what such a function makes on the replicas' devices.
        value = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(own[context.replica_id_in_sync_group])
        )
        with self.used(ops):
            (result,) = strategy.extended.batch_reduce_to(SUM, [(value, value)])
            self.assert_replicas(tu.oracle(SUM, own), result, count)
            result = strategy.run(lambda own: context().all_reduce(MEAN, own), args=(value,))
            self.assert_replicas(tu.oracle(MEAN, own), result, count)

    @parameterized.parameters(BASES[1])
    def test_compiled_replica_function(self, name, count):
        # On CPUs the strategy compiles all replicas, and what `ops` adds between them, together.
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
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
    @parameterized.parameters(BASE_CASES[0])
    def test_all_gather_and_its_gradient(self, name, mode, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
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
            gathered, gradient = in_mode(mode, lambda *a: strategy.run(replica, args=a))(
                tu.per_replica(own), tu.per_replica(weights)
            )
        self.assert_replicas(np.concatenate(own), gathered, count)
        parts = np.split(tu.oracle(SUM, weights), np.cumsum(rows)[:-1])
        for part, component in zip(parts, gradient.values, strict=True):
            self.assert_close(part, component)


class ControlFlowTest(StrategyTestCase):
    @parameterized.parameters(BASES[1])
    def test_loops_and_branches(self, name, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        own = [tu.numbers((2,), tf.float32, rank, limit=5) for rank in range(count)]
        value = tu.per_replica(own)
        total, mean = tu.oracle(SUM, own), tu.oracle(MEAN, own)

        def reduced(reduce_op, factor):
            result = strategy.run(
                lambda x: context().all_reduce(reduce_op, x * factor), args=(value,)
            )
            return strategy_results(result)[-1]

        @tf.function(autograph=False)
        def loop(steps):
            return tf.while_loop(
                lambda step, _: step < steps,
                lambda step, state: (step + 1, state + reduced(SUM, tf.cast(step, tf.float32))),
                (0, tf.zeros([2])),
            )[1]

        @tf.function(autograph=False)
        def branch(steps):
            return tf.cond(
                steps > 2,
                lambda: reduced(SUM, 1.0),
                lambda: tf.cond(steps > 1, lambda: reduced(MEAN, 1.0), lambda: tf.zeros([2])),
            )

        with self.used(ops):
            for steps in 0, 4:
                factor = sum(range(steps))
                self.assert_close(factor * total, loop(tf.constant(steps)))
            for steps, expected in (3, total), (2, mean), (1, 0 * total):
                self.assert_close(expected, branch(tf.constant(steps)))

    @parameterized.parameters(BASES[0])
    def test_autograph_loop_over_a_dataset(self, name, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        rows = np.arange(1.0, 2 * count + 2, dtype=np.float32)  # The last batch: a single row.
        dataset = distributed(strategy, rows, count)
        with strategy.scope():
            sums = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

        def replica(x):
            batch = context().all_reduce(SUM, tf.reduce_sum(x))
            sums.assign_add(batch * batch)

        @tf.function
        def epoch():
            for batch in dataset:
                strategy.run(replica, args=(batch,))

        with self.used(ops):
            epoch()
        batches = np.split(rows.astype(np.float64), [count, 2 * count])
        self.assert_replicas(sum(batch.sum() ** 2 for batch in batches), sums, count)


_SESSION = """
import sys
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
import numpy as np
sys.path.append(sys.argv[1])
import strategy_test as st
from testing_utils import SUM, MEAN

for name, count in st.BASES:
    with tf.Graph().as_default():
        ops = st.CLASSES[name]()
        strategy = st.strategy_of(ops, count)
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
        print("ok", name)
"""


class SessionTest(StrategyTestCase):
    """Graphs of TensorFlow 1, and gradients in them."""

    def test_with_version_1_behavior(self):
        # It cannot be switched off again, so it gets a process of its own.
        result = warm_python.run("-c", _SESSION, str(pathlib.Path(__file__).parent))
        self.assertEqual(0, result.returncode, result.stderr)
        self.assertEqual([f"ok {name}" for name, _ in BASES], result.stdout.split("\n")[:-1])


if __name__ == "__main__":
    tf.test.main()
