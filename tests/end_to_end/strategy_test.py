"""The four classes inside a real `tf.distribute.MirroredStrategy`: calls of its methods."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from strategy_testing import (
    BASE_CASES,
    BASES,
    CLASSES,
    EAGER,
    StrategyTestCase,
    context,
    in_mode,
    instead_of_tensorflows,
    on_replica,
    strategy_of,
    strategy_results,
)
from testing_utils import MEAN, SUM


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


class ReduceTest(StrategyTestCase):
    """`Strategy.reduce`, when what the strategy keeps for TensorFlow's class comes here."""

    @parameterized.parameters(BASE_CASES[1])
    def test_reduces_along_an_axis(self, name, mode, _):
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


class VariableTest(StrategyTestCase):
    """Variables that the strategy aggregates when a replica writes or somebody reads."""

    @parameterized.parameters(BASE_CASES[1])
    def test_aggregates_what_replicas_write(self, name, mode, count):
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


if __name__ == "__main__":
    tf.test.main()
