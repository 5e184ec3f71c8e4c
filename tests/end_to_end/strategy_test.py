"""The four classes inside a real `tf.distribute.MirroredStrategy`: what a training loop does."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from testing_utils import MEAN
from testing_utils import SUM

import tfcdo

CLASSES: dict[str, Callable[[], tf.distribute.CrossDeviceOps]] = {
    "one_device": tfcdo.ReductionToOneDevice,
    "all_reduce": lambda: tfcdo.AllReduceCrossDeviceOps("halving_doubling", num_packs=3),
    "nccl": lambda: tfcdo.NcclAllReduce(num_packs=2),
    "hierarchical": tfcdo.HierarchicalCopyAllReduce,
    "unpacked": lambda: tfcdo.AllReduceCrossDeviceOps("ring", 0, agg_small_grads_max_bytes=64),
}
EAGER, FUNCTION = "eager", "function"  # The function is called by another function.

# Every class in both modes; the device counts take turns.
CASES = [
    (*pair, count)
    for pair, count in zip(
        itertools.product(CLASSES, (EAGER, FUNCTION)), itertools.cycle((3, 5, 4, 8, 7, 3, 2))
    )
]
BY_CLASS = list(zip(CLASSES, (3, 5, 4, 7, 3)))


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


@contextlib.contextmanager
def instead_of_tensorflows(ops: tf.distribute.CrossDeviceOps) -> Iterator[None]:
    """Gives `ops` what the strategy keeps for a class of TensorFlow's.

    Whatever it was made with, a MirroredStrategy reduces int32 values, and on CPUs all values of
    `strategy.reduce`, with a `tf.distribute.ReductionToOneDevice` of its own.
    """
    cls = tf.distribute.ReductionToOneDevice
    with mock.patch.object(sys.modules[cls.__module__], cls.__name__, lambda: ops):
        yield


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

    @parameterized.parameters(*CASES)
    def test_nested_structures(self, name, mode, count):
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

    @parameterized.parameters(*CASES)
    def test_gradient(self, name, mode, count):
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

    @parameterized.parameters(*CASES)
    def test_slices_among_tensors(self, name, mode, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        dense = [tu.numbers((2,), tf.float32, rank) for rank in range(count)]
        # As many rows as the rank: none on the first replica; some more than once.
        values = [tu.numbers((rank, 2), tf.float32, 20 + rank) for rank in range(count)]
        indices = [np.arange(rank) % 3 for rank in range(count)]
        table = np.zeros([4, 2])
        for own, rows in zip(values, indices, strict=True):
            np.add.at(table, rows, own.astype(np.float64))

        def reduce(dense, values, indices):
            slices = tf.IndexedSlices(values, indices, tf.constant([4, 2], tf.int64))
            result = context().all_reduce(MEAN, on_replica([slices, dense, (slices,)]))
            self.assertIsInstance(result[0], tf.IndexedSlices)
            return [tf.convert_to_tensor(one) for one in (result[0], result[1], result[2][0])]

        def run(*arguments):
            return strategy.run(reduce, args=arguments)

        with self.used(ops):
            first, middle, last = in_mode(mode, run)(*map(tu.per_replica, (dense, values, indices)))
        self.assert_replicas(tu.oracle(MEAN, dense), middle, count)
        for result in first, last:
            self.assert_replicas(table / count, result, count)

    @parameterized.parameters(*BY_CLASS)
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

    @parameterized.product(name=tuple(CLASSES), mode=(EAGER, FUNCTION))
    def test_shapes_that_differ(self, name, mode):
        strategy = strategy_of(CLASSES[name](), 3)
        value = tu.per_replica([np.ones([2]), np.ones([2]), np.ones([3])])
        run = in_mode(mode, lambda value: strategy.run(
            lambda own: context().all_reduce(SUM, on_replica(own)), args=(value,)
        ))  # fmt: skip
        with self.assertRaisesRegex(ValueError, r"(?s)shape.*\(2,\).*CPU:0.*\(3,\).*CPU:2"):
            run(value)

    @parameterized.parameters(*BY_CLASS)
    def test_replicas_are_bitwise_equal_and_runs_too(self, name, count):
        own = [np.random.default_rng(rank).normal(size=[99]) for rank in range(count)]
        values = [tu.per_replica([x.astype(dtype) for x in own]) for dtype in ("f", "d", "e")]

        def all_reduce(mode):
            strategy = strategy_of(CLASSES[name](), count)
            run = in_mode(mode, lambda values: strategy.run(
                lambda own: context().all_reduce(SUM, on_replica(own)), args=(values,)
            ))  # fmt: skip
            return run(values)

        # Grappler may order a function's additions in another way than they are written.
        for mode in EAGER, FUNCTION:
            for results in zip(*(all_reduce(mode) for _ in range(3)), strict=True):
                self.assert_bitwise_equal([x for result in results for x in result.values])

    @parameterized.parameters(*BY_CLASS)
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

    @parameterized.parameters(*BY_CLASS)
    def test_compiled_part_of_a_replica_function(self, name, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        own = [tu.numbers((4, 2), tf.float32, rank) for rank in range(count)]
        compiled = tf.function(lambda x: 2 * x + 1, jit_compile=True, autograph=False)

        @tf.function(autograph=False)
        def step(value):
            return strategy.run(
                lambda x: compiled(context().all_reduce(SUM, compiled(x))), args=(value,)
            )

        with self.used(ops):
            result = step(tu.per_replica(own))
        inner = sum(2 * tu.exact(x) + 1 for x in own)
        self.assert_replicas(2 * inner + 1, result, count)


class ReduceTest(StrategyTestCase):
    """`Strategy.reduce`, when what the strategy keeps for TensorFlow's class comes here."""

    @parameterized.product(name=tuple(CLASSES), mode=(EAGER, FUNCTION))
    def test_axis(self, name, mode):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, 3)
        rows = (4, 1, 0)  # The last batch of an epoch, with nothing left for the last replica.
        for dtype in tf.float32, tf.int32, tf.int64:
            own = [tu.numbers((n, 2), dtype, rank) for rank, n in enumerate(rows)]
            value = tu.per_replica(own)
            everything = np.concatenate(own).astype(np.float64)
            with instead_of_tensorflows(ops), self.used(ops, "reduce"):
                total, mean, of_all = in_mode(
                    mode,
                    lambda value: (
                        strategy.reduce(SUM, value, axis=0),
                        strategy.reduce("MEAN", value, axis=0),
                        strategy.reduce(MEAN, value, axis=(0, 1)),
                    ),
                )(value)
            self.assert_close(everything.sum(0), total, dtype)
            self.assertAllClose(everything.mean(0), mean)
            self.assertAllClose(everything.mean(), of_all)

    @parameterized.parameters(*CASES)
    def test_across_replicas(self, name, mode, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        own = [tu.numbers((2, 3), tf.float32, rank) for rank in range(count)]
        integers = [tu.numbers((), tf.int32, rank) for rank in range(count)]

        def reduce(value, integer):
            nested = {"a": value, "b": [integer]}
            return [strategy.reduce(reduce_op, nested, axis=None) for reduce_op in (SUM, MEAN)]

        with instead_of_tensorflows(ops), self.used(ops, "reduce"):
            results = in_mode(mode, reduce)(tu.per_replica(own), tu.per_replica(integers))
        for reduce_op, result in zip((SUM, MEAN), results, strict=True):
            self.assert_close(tu.oracle(reduce_op, own), result["a"], tf.float32)
            dtype = tu.result_dtype(reduce_op, tf.int32)
            self.assert_close(tu.oracle(reduce_op, integers), result["b"][0], dtype)


class GatherTest(StrategyTestCase):
    @parameterized.product(name=tuple(CLASSES), axis=(0, 1, 2), mode=(EAGER, FUNCTION))
    def test_gather(self, name, axis, mode):
        ops = CLASSES[name]()
        count = 3 + axis
        strategy = strategy_of(ops, count)
        own = []
        for rank in range(count):
            shape = [2, 3, 2]
            shape[axis] = (2, 0, 3, 1, 1)[rank]
            own.append(tu.numbers(shape, tf.float32, rank))
        with self.used(ops, "_gather"):
            result = in_mode(mode, lambda v: strategy.gather(v, axis=axis))(tu.per_replica(own))
        self.assertAllEqual(np.concatenate(own, axis), result)

    @parameterized.parameters(*CASES)
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


class BatchReduceToTest(StrategyTestCase):
    @parameterized.parameters(*CASES)
    def test_destinations(self, name, mode, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        with strategy.scope():
            variable = tf.Variable([7.0, 7.0])
        arrays = [[tu.numbers((2,), tf.float32, 9 * k + r) for r in range(count)] for k in range(4)]
        elsewhere = tu.per_replica([0.0, 0.0], tu.ALL_DEVICES[-2:])

        def reduce(*arguments):
            values = [strategy.run(on_replica, args=(value,)) for value in arguments]
            destinations = (values[0], variable, "/cpu:1", elsewhere)
            return [
                [
                    strategy_results(result)
                    for result in strategy.extended.batch_reduce_to(
                        reduce_op, list(zip(values, destinations))
                    )
                ]
                for reduce_op in (SUM, MEAN)
            ]

        with self.used(ops):
            results = in_mode(mode, reduce)(*map(tu.per_replica, arrays))
        for reduce_op, result in zip((SUM, MEAN), results, strict=True):
            for own, one, number in zip(arrays, result, (count, count, 1, 2), strict=True):
                self.assert_components(tu.oracle(reduce_op, own), one, number)
        self.assertAllEqual([7.0, 7.0], variable)

    @parameterized.parameters(*BY_CLASS)
    def test_int32_comes_here_too(self, name, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        own = [tu.numbers((3,), tf.int32, rank) for rank in range(count)]
        with instead_of_tensorflows(ops), self.used(ops):
            result = strategy.run(
                lambda x: context().all_reduce(SUM, x), args=(tu.per_replica(own),)
            )
        self.assert_replicas(tu.oracle(SUM, own), result, count)


class VariableTest(StrategyTestCase):
    """Variables that the strategy aggregates when a replica writes or somebody reads."""

    @parameterized.parameters(*CASES)
    def test_aggregation(self, name, mode, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        aggregations = {
            "SUM": count * (count + 1) / 2, "MEAN": (count + 1) / 2, "ONLY_FIRST_REPLICA": 1.0,
        }  # fmt: skip
        with strategy.scope():
            variables = [
                tf.Variable(10.0, aggregation=getattr(tf.VariableAggregation, aggregation))
                for aggregation in aggregations
            ]

        def replica():
            own = tf.cast(context().replica_id_in_sync_group + 1, tf.float32)
            for variable in variables:
                variable.assign_add(own)

        with instead_of_tensorflows(ops), self.used(ops, "reduce"), self.used(ops, "broadcast"):
            in_mode(mode, lambda: strategy.run(replica))()
        for variable, expected in zip(variables, aggregations.values(), strict=True):
            self.assert_replicas(10.0 + expected, variable, count)

    @parameterized.parameters(*BY_CLASS)
    def test_sync_on_read(self, name, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        with strategy.scope():
            variables = [
                tf.Variable(
                    0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=aggregation
                )
                for aggregation in (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)
            ]

        def replica():
            for variable in variables:
                variable.assign_add(tf.cast(context().replica_id_in_sync_group + 1, tf.float32))

        strategy.run(replica)
        with instead_of_tensorflows(ops), self.used(ops, "reduce"):
            total, mean = (variable.read_value() for variable in variables)
        self.assertAllClose([count * (count + 1) / 2, (count + 1) / 2], [total, mean])
        results = strategy.extended.batch_reduce_to(SUM, [(one, one) for one in variables])
        for result in results:
            self.assert_replicas(count * (count + 1) / 2, result, count)


class ControlFlowTest(StrategyTestCase):
    @parameterized.parameters(*BY_CLASS)
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

    @parameterized.parameters(*BY_CLASS)
    def test_autograph_loop_over_a_dataset(self, name, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        rows = np.arange(1.0, 2 * count + 2, dtype=np.float32)  # The last batch: a single row.
        dataset = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(rows).batch(count)
        )
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
import strategy_test as st
from testing_utils import SUM, MEAN

for name, count in st.BY_CLASS:
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
        with st.instead_of_tensorflows(ops):
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
    """Graphs of TensorFlow 1."""

    @parameterized.parameters(*BY_CLASS)
    def test_graph(self, name, count):
        ops = CLASSES[name]()
        own = [tu.numbers((3,), tf.float32, rank) for rank in range(count)]
        with tf.Graph().as_default():
            strategy = strategy_of(ops, count)
            feeds = tf.compat.v1.placeholder(tf.float32, [count, 3])

            def replica():
                x = tf.gather(feeds, context().replica_id_in_sync_group)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = context().all_reduce(MEAN, x)
                    loss = tf.reduce_sum(y * x)
                return context().all_reduce(SUM, {"x": x}), y, tape.gradient(loss, x)

            with self.used(ops):
                total, mean, gradient = strategy.run(replica)
            fetches = [strategy_results(one) for one in (total["x"], mean, gradient)]
            with tf.compat.v1.Session() as session:
                total, mean, gradient = session.run(fetches, {feeds: np.stack(own)})
        self.assertAllEqual([tu.oracle(SUM, own)] * count, total)
        self.assertAllClose([tu.oracle(MEAN, own)] * count, mean)
        # Through y: the mean over the replicas of what multiplies it; and x itself, times y.
        self.assertAllClose([2 * tu.oracle(MEAN, own)] * count, gradient)

    def test_with_version_1_behavior(self):
        # It cannot be switched off again, so it gets a process of its own.
        result = subprocess.run(
            [sys.executable, "-c", _SESSION],
            env={**os.environ, "PYTHONPATH": _python_path()},
            capture_output=True,
            text=True,
        )
        self.assertEqual(0, result.returncode, result.stderr)
        self.assertEqual([f"ok {name}" for name in CLASSES], result.stdout.split("\n")[:-1])


def _python_path() -> str:
    """This process's modules for another one, wherever it runs."""
    return ":".join([str(pathlib.Path(__file__).parent), *filter(None, sys.path)])


# A real training: an embedding, whose gradient is rows, and a linear layer on it.

_LEARNING_RATE = 0.1
_ROWS, _WIDTH, _OUTPUTS = 6, 3, 2


@dataclasses.dataclass
class Weights:
    table: np.ndarray
    kernel: np.ndarray
    bias: np.ndarray


def initial_weights(seed: int = 0) -> Weights:
    generator = np.random.default_rng(seed)
    shapes = ((_ROWS, _WIDTH), (_WIDTH, _OUTPUTS), (_OUTPUTS,))
    return Weights(*(generator.normal(size=shape).astype(np.float32) for shape in shapes))


def examples(number: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, _ROWS, [number])
    return ids, generator.normal(size=[number, _OUTPUTS]).astype(np.float32)


def numpy_training(
    weights: Weights, batches: Sequence[tuple[np.ndarray, np.ndarray]], epochs: int = 1
) -> Weights:
    """The oracle: the same training in float64, on one device, by hand."""
    table, kernel, bias = (x.astype(np.float64) for x in vars(weights).values())
    for ids, targets in [*batches] * epochs:
        rows = table[ids]
        error = 2 * (rows @ kernel + bias - targets) / len(ids)
        table_gradient = np.zeros_like(table)
        np.add.at(table_gradient, ids, error @ kernel.T)
        kernel_gradient, bias_gradient = rows.T @ error, error.sum(0)
        table = table - _LEARNING_RATE * table_gradient
        kernel = kernel - _LEARNING_RATE * kernel_gradient
        bias = bias - _LEARNING_RATE * bias_gradient
    return Weights(table, kernel, bias)


class Model(tf.Module):
    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.table = tf.Variable(weights.table)
        self.kernel = tf.Variable(weights.kernel)
        self.bias = tf.Variable(weights.bias)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def predict(self, ids: tf.Tensor) -> tf.Tensor:
        return self(ids)

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.table, ids) @ self.kernel + self.bias


def batches_of(data: tuple[np.ndarray, np.ndarray], size: int) -> list[Any]:
    number = len(data[0])
    return [tuple(part[i : i + size] for part in data) for i in range(0, number, size)]


def train_step(model: Model, ids: tf.Tensor, targets: tf.Tensor) -> None:
    """What one replica does with its part of a global batch, whatever its size."""
    number = context().all_reduce(SUM, tf.cast(tf.shape(ids)[0], tf.float32))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(ids) - targets) ** 2) / number
    variables = [model.table, model.kernel, model.bias]
    gradients = context().all_reduce(SUM, tape.gradient(loss, variables))

    def update(strategy, gradients):
        for variable, gradient in zip(variables, gradients, strict=True):
            strategy.extended.update(variable, descend, args=(gradient,))

    context().merge_call(update, args=(gradients,))


def descend(variable: tf.Variable, gradient: Any) -> None:
    if isinstance(gradient, tf.IndexedSlices):
        variable.scatter_sub(tf.IndexedSlices(_LEARNING_RATE * gradient.values, gradient.indices))
    else:
        variable.assign_sub(_LEARNING_RATE * gradient)


def train(
    strategy: tf.distribute.Strategy,
    model: Model,
    data: tuple[np.ndarray, np.ndarray],
    batch_size: int,
    epochs: int = 1,
    mode: str = FUNCTION,
) -> None:
    dataset = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(data).batch(batch_size)
    )

    def step(batch):
        strategy.run(lambda ids, targets: train_step(model, ids, targets), args=batch)

    if mode != EAGER:
        step = tf.function(step, input_signature=[dataset.element_spec], autograph=False)
    for _ in range(epochs):
        for batch in dataset:
            step(batch)


class TrainingTest(StrategyTestCase):
    def trained(
        self, ops: Any, count: int, mode: str = FUNCTION, first: int = 0, seed: int = 0
    ) -> Model:
        """A model after two epochs of three batches, the last of which is partial."""
        strategy = strategy_of(ops, count, first)
        with strategy.scope():
            model = Model(initial_weights(seed))
        data = examples(5 * count + 1)
        train(strategy, model, data, 2 * count, 2, mode)
        self.assert_weights(
            numpy_training(initial_weights(seed), batches_of(data, 2 * count), 2), model, count
        )
        return model

    def assert_weights(self, expected: Weights, model: Model, count: int) -> None:
        for name, value in vars(expected).items():
            components = strategy_results(getattr(model, name))
            self.assertLen(components, count)
            self.assert_bitwise_equal([component.read_value() for component in components])
            self.assertAllClose(value, components[0], rtol=1e-5, atol=1e-5)

    def assert_same_weights(self, first: Model, second: Model) -> None:
        for name in vars(initial_weights()):
            self.assert_bitwise_equal(
                [strategy_results(getattr(m, name))[0].read_value() for m in (first, second)]
            )

    def test_the_oracle_notices(self):
        with self.assertRaises(AssertionError):
            self.trained(tfcdo.ReductionToOneDevice(accumulation_fn=lambda v: tf.add_n(v[1:])), 4)

    @parameterized.parameters(*CASES)
    def test_partial_batches(self, name, mode, count):
        ops = CLASSES[name]()
        with self.used(ops):
            self.trained(ops, 3 if mode == EAGER else count, mode)

    def test_tensorflows_hierarchical_copy_is_wrong_at_odd_counts(self):
        # What tfcdo is for; and the proof that this training shows it.
        self.trained(tfcdo.HierarchicalCopyAllReduce(), 3)
        with self.assertRaises(AssertionError):
            self.trained(tf.distribute.HierarchicalCopyAllReduce(), 3)

    @parameterized.parameters(*CLASSES)
    def test_copies_and_repetitions_agree_in_every_bit(self, name):
        ops = CLASSES[name]()
        before = copy.deepcopy(ops)
        used = self.trained(ops, 3)
        for other in before, copy.deepcopy(ops), CLASSES[name]():
            self.assertIsNot(ops, other)
            self.assert_same_weights(used, self.trained(other, 3))

    @parameterized.parameters(*CLASSES)
    def test_one_instance_for_two_strategies(self, name):
        ops = CLASSES[name]()
        strategies = [strategy_of(ops, 3), strategy_of(ops, 5, first=3)]
        for strategy in *strategies, strategy_of(ops, 3, first=2):  # Each on its own devices.
            devices = strategy.extended.worker_devices
            value = tu.per_replica([1.0] * len(devices), devices)
            (result,) = strategy.extended.batch_reduce_to(SUM, [(value, value)])
            self.assert_replicas(float(len(devices)), result, len(devices))
            self.assertEqual(devices, tuple(component.device for component in result.values))
        models, data = [], examples(16)
        for seed, strategy in enumerate(strategies):
            with strategy.scope():
                models.append(Model(initial_weights(seed)))
        for _ in range(2):  # In turn.
            for strategy, model in zip(strategies, models, strict=True):
                train(strategy, model, data, 7)
        for seed, (strategy, model) in enumerate(zip(strategies, models, strict=True)):
            expected = numpy_training(initial_weights(seed), batches_of(data, 7), 2)
            self.assert_weights(expected, model, strategy.num_replicas_in_sync)

    @parameterized.parameters(*CLASSES)
    def test_saving_and_restoring(self, name):
        model = self.trained(CLASSES[name](), 3)
        directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)

        path = tf.train.Checkpoint(model=model).save(str(directory / "checkpoint"))
        data = examples(7, seed=3)
        for strategy in strategy_of(CLASSES[name](), 4), tf.distribute.get_strategy():
            with strategy.scope():
                restored = Model(initial_weights(seed=5))
            tf.train.Checkpoint(model=restored).restore(path).assert_consumed()
            self.assert_same_weights(model, restored)
            before = Weights(*(getattr(model, key).numpy() for key in vars(initial_weights())))
            # It goes on where it stopped.
            train(strategy, restored, data, 4)
            self.assert_weights(
                numpy_training(before, batches_of(data, 4)), restored, strategy.num_replicas_in_sync
            )

        tf.saved_model.save(model, str(directory / "model"))
        ids = np.array([5, 0, 3, 3])
        expected = model.table.numpy()[ids] @ model.kernel.numpy() + model.bias.numpy()
        for strategy in strategy_of(CLASSES[name](), 2), tf.distribute.get_strategy():
            with strategy.scope():
                loaded = tf.saved_model.load(str(directory / "model"))
            self.assertAllClose(expected, loaded.predict(tf.constant(ids)))


class ThreadsTest(StrategyTestCase):
    """Six threads at once.

    They call functions and feed them themselves: neither a distributed dataset nor the eager tape
    of a replica function works in several threads, whatever class the strategy is given.
    """

    def in_six_threads(self, work: Callable[[int], None]) -> None:
        failures: list[str] = []

        def run(thread: int) -> None:
            try:
                work(thread)
            except BaseException:  # Whatever it is, it must not be lost in the thread.
                failures.append(traceback.format_exc())

        threads = [threading.Thread(target=run, args=(thread,)) for thread in range(6)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(timeout=300)
        self.assertFalse(any(one.is_alive() for one in threads))
        self.assertEmpty(failures, "\n".join(failures))

    @parameterized.parameters(*CLASSES)
    def test_each_trains_with_a_strategy_of_its_own(self, name):
        ops = CLASSES[name]()

        def work(thread):
            count = 2 + thread // 2  # Two threads each on the same devices.
            strategy = strategy_of(ops, count, first=thread // 2)
            devices = strategy.extended.worker_devices
            with strategy.scope():
                model = Model(initial_weights(thread))
            step = in_mode(FUNCTION, lambda *batch: strategy.run(
                lambda ids, targets: train_step(model, ids, targets), args=batch
            ))  # fmt: skip
            batches = batches_of(examples(6 * count, seed=thread), 2 * count)
            for batch in batches:
                step(*(tu.per_replica(np.split(part, count), devices) for part in batch))
            expected = numpy_training(initial_weights(thread), batches)
            for key, value in vars(expected).items():
                np.testing.assert_allclose(getattr(model, key), value, rtol=1e-5, atol=1e-5)

        self.in_six_threads(work)

    @parameterized.parameters(*CLASSES)
    def test_all_use_one_strategy(self, name):
        strategy = strategy_of(CLASSES[name](), 3)

        def work(thread):
            own = [tu.numbers((4,), tf.float32, 10 * thread + rank) for rank in range(3)]
            run = in_mode(FUNCTION, lambda value: strategy.run(
                lambda x: context().all_reduce(SUM, on_replica(x)), args=(value,)
            ))  # fmt: skip
            for _ in range(3):
                self.assert_replicas(tu.oracle(SUM, own), run(tu.per_replica(own)), 3)

        self.in_six_threads(work)


if __name__ == "__main__":
    tf.test.main()
