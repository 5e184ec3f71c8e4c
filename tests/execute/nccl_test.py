"""NCCL by execution: the ops that GPUs would run, on virtual CPU devices, by a kernel for tests.

What would hang on GPUs is an error here: see `nccl_on_cpu`. What is reduced to what is in
`nccl_contract_test`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from concurrent import futures
from typing import Any
from unittest import mock

import nccl_on_cpu
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl import logging
from absl.testing import parameterized
from nccl_on_cpu import (
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)
from nccl_testing import K, all_reduce, delayed, function, nccl, one, packs_of, ranks
from testing_utils import EAGER, FUNCTION

import tfcdo
from tfcdo import log


class GraphTest(tf.test.TestCase, parameterized.TestCase):
    """Tests of what can only be seen in the graph."""

    def trace(self, ops: Any, *values: Sequence[Any]) -> dict[bytes, list[Any]]:
        return packs_of(function(lambda: all_reduce(ops, *values)).get_concrete_function().graph)

    def check_packs(self, packs: dict[bytes, list[Any]], count: int) -> None:
        for nodes in packs.values():
            self.assertCountEqual(tu.device_names(count), [node.device for node in nodes])
            for node in nodes:
                self.assertEqual(b"sum", node.attr["reduction"].s)
                self.assertEqual(count, node.attr["num_devices"].i)
            self.assertLen({node.attr["T"].type for node in nodes}, 1)

    # A pack is one tensor however large; along copy trees, the last two would be sent alone.
    @parameterized.parameters(
        (2, 1, (5, 14), 1), (8, 3, (5, 14), 3), (3, 0, (1, 5, 2, 9), 4), (3, 1, (20_000, 30_000), 1)
    )
    def test_one_op_per_device_and_pack(self, count, num_packs, sizes, expected):
        packs = self.trace(nccl(num_packs), *[[tf.ones([size])] * count for size in sizes])
        self.assertLen(packs, expected)
        self.check_packs(packs, count)

    def test_no_name_is_used_twice(self):
        """By instances and threads, retraces and repeated calls, and gradients of gradients."""
        ops = [nccl(2), tfcdo.AllReduceCrossDeviceOps("nccl", 2, require_nccl=True)]

        def trace(number: int) -> list[bytes]:
            step = function(lambda own: all_reduce(ops[number % 2], own, own))
            graphs = [step.get_concrete_function([tf.ones([s])] * 3).graph for s in (4, 6)]
            return [name for graph in graphs for name in packs_of(graph)]

        with futures.ThreadPoolExecutor(6) as pool:
            names = [name for found in pool.map(trace, range(12)) for name in found]
        step = function(lambda own: self.second_gradient(own))
        packs = packs_of(step.get_concrete_function(ranks()).graph)
        self.check_packs(packs, K)
        self.assertGreaterEqual(len(packs), 3)
        self.assertLen({*names, *packs}, 12 * 2 * 2 + len(packs))

    def second_gradient(self, own: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(own)
            with tf.GradientTape() as inner:
                inner.watch(own)
                loss = tf.add_n([y**2 for y in one(*own)])
            total = tf.add_n(inner.gradient(loss, own))
        return outer.gradient(total, own)

    def test_sums_stay_on_their_devices(self):
        # What TensorFlow runs in the end, seen where it has taken the graph apart by device.
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            own = [tf.compat.v1.placeholder(tf.float32, [3]) for _ in range(K)]
            doubled = [tu.place(2 * tensor, tu.device_name(r)) for r, tensor in enumerate(own)]
            results = []
            for rank, total in enumerate(one(*doubled)):
                with tf.device(tu.device_name(rank)):
                    results.append(tf.reduce_sum(total) > 0)  # Only this leaves the device.
            metadata = tf.compat.v1.RunMetadata()
            fed = {tensor: np.ones([3]) for tensor in own}
            options = tf.compat.v1.RunOptions(output_partition_graphs=True)
            session.run(results, fed, options, metadata)
        nodes = [node for graph in metadata.partition_graphs for node in graph.node]
        self.assertLen([node for node in nodes if node.op == "NcclAllReduce"], K)
        sent = {node.input[0] for node in nodes if node.op == "_Send" and "/ctrl/" not in str(node)}
        moved = {name for name in sent if not name.startswith(("_", "Placeholder"))}
        products = {tensor.op.inputs[0].op.name for tensor in doubled}
        self.assertContainsSubset(moved, products | {tensor.op.name for tensor in results})


class FunctionTest(tf.test.TestCase, parameterized.TestCase):
    """Where the ops are: in functions, branches, loops and sessions, once or several times."""

    @parameterized.parameters(False, True)
    def test_a_function_called_several_times_in_one_step(self, noinline):
        inner = function(one, experimental_attributes={"_noinline": noinline})
        middle = function(lambda *own: [x + y for x, y in zip(inner(*own), inner(*own))])
        packs = function(lambda own: all_reduce(nccl(0), own, own)[1])
        outer = function(
            lambda: (middle(*ranks()), inner(*ranks(100.0)), middle(*ranks(1e3)), packs(ranks()))
        )
        expected = np.array([[[20.0]], [[1e3]], [[2e4]], [[10.0]]]) * np.ones([K, 1])
        for _ in range(20):
            self.assertAllEqual(expected, outer())

    def test_branches(self):
        inner = function(one)
        step = function(
            lambda which: tf.cond(
                which, lambda: inner(*ranks()) + one(*ranks(3.0)), lambda: 2 * inner(*ranks(2.0))
            )
        )
        for _ in range(5):
            self.assertAllEqual([[10.0]] * K + [[30.0]] * K, step(tf.constant(True)))
            self.assertAllEqual([[20.0]] * 2 * K, step(tf.constant(False)))

    @parameterized.parameters(False, True)
    def test_iterations_of_a_loop(self, by_function):
        steps = 12
        inner = function(one) if by_function else one

        def body(i: tf.Tensor, firsts: Any, lasts: Any) -> Any:
            scale = tf.cast(i, tf.float32)
            first = inner(*[scale * x for x in ranks()])[0]
            last = inner(*[scale * x for x in ranks(100.0)])[-1]
            return i + 1, firsts.write(i, first), lasts.write(i, last)

        def loop() -> Any:
            arrays = [tf.TensorArray(tf.float32, steps) for _ in range(2)]
            _, firsts, lasts = tf.while_loop(
                lambda i, *_: i < steps, body, [0, *arrays], parallel_iterations=10
            )
            return firsts.stack(), lasts.stack()

        step = function(loop)
        for _ in range(10):
            firsts, lasts = step()
            self.assertAllEqual(10.0 * np.arange(steps)[:, None], firsts)
            self.assertAllEqual(1000.0 * np.arange(steps)[:, None], lasts)

    def test_a_graph_and_a_session(self):
        """Also where nobody asks for the other devices' results, whose ops have to run."""
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            own = [tf.compat.v1.placeholder(tf.float32, [1]) for _ in range(K)]
            fed = {tensor: [rank + 1.0] for rank, tensor in enumerate(own)}
            direct = one(*own)
            by_function = function(one)(*own)
            loop = tf.while_loop(lambda i, *_: i < 3, lambda i, *x: (i + 1, *one(*x)), [0, *own])
            branch = tf.cond(own[0][0] > 0, lambda: one(*own), lambda: own)
            with tf.control_dependencies([delayed(own[1], 0.01)]):
                late = tf.identity(own[2])
            # The devices come to the packs in different orders.
            packs = all_reduce(nccl(0), [own[0], late, own[0]], [late, own[1], late])
            for rank in range(K):
                self.assertAllEqual([[10.0]] * K, session.run(direct, fed))
                self.assertAllEqual([10.0], session.run(direct[rank], fed))
                self.assertAllEqual([[10.0]] * K, session.run(by_function, fed))
                self.assertAllEqual([[160.0]] * K, session.run(loop[1:], fed))
                self.assertAllEqual([[10.0]] * K, session.run(branch, fed))
                self.assertAllEqual([[[5.0]] * 3, [[8.0]] * 3], session.run(packs, fed))

    def test_functions_that_xla_compiles_use_copy_trees(self):
        own = ranks()
        log.warn_once.cache_clear()
        with mock.patch.object(logging, "warning") as warning:
            step = function(lambda *own: one(*own, ops=tfcdo.NcclAllReduce()), jit_compile=True)
            self.assertAllEqual([[10.0]] * K, step(*own))
        warning.assert_called_once()
        self.assertIn("jit_compile=True", warning.call_args.args[0] % warning.call_args.args[1:])
        with self.assertRaisesRegex(RuntimeError, "(?s)require_nccl.*jit_compile=True"):
            function(one, jit_compile=True)(*own)
        # Only the function itself is compiled, not the one that calls it.
        double = function(lambda x: 2 * x, jit_compile=True)
        outer = function(lambda: one(*[double(x) for x in own]))
        self.assertAllEqual([[20.0]] * K, outer())

    @parameterized.parameters(EAGER, FUNCTION)
    def test_six_threads(self, mode):
        shared = function(one)

        def work(thread: int) -> None:
            step = one if mode == EAGER else function(one)
            for turn in range(10):
                own = [
                    tf.fill([5], float(thread * 1000 + turn + rank)) for rank in range(2 + thread)
                ]
                expected = np.sum([x.numpy() for x in own], axis=0)
                np.testing.assert_array_equal([expected] * len(own), step(*own))
                scale = float(100 * thread + turn)
                np.testing.assert_array_equal([[10 * scale]] * K, shared(*ranks(scale)))

        tu.call_in_six_threads(work)


class MemoryTest(tf.test.TestCase):
    def test_graphs_end_with_their_functions(self):
        def gradients() -> Any:
            own = ranks()
            with tf.GradientTape() as tape:
                tape.watch(own)
                loss = tf.add_n([tf.reduce_sum(each) for each in one(*own)])
            return tape.gradient(loss, own)

        traced = tf.function(gradients, autograph=False)
        self.assertAllEqual(np.full([K, 1], float(K)), traced())
        graph = weakref.ref(traced.get_concrete_function().graph)
        del traced
        gc.collect()
        self.assertIsNone(graph())


class StrategyTest(tf.test.TestCase, parameterized.TestCase):
    def strategy(self, devices: Sequence[int]) -> tf.distribute.MirroredStrategy:
        names = [tu.device_name(index) for index in devices]
        return tf.distribute.MirroredStrategy(names, cross_device_ops=nccl(2))

    def values(self, strategy: Any, numbers: Sequence[float]) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(float(numbers[context.replica_id_in_sync_group]))
        )

    def test_two_strategies_at_once(self):
        def work(own: Sequence[int], scale: float) -> None:
            strategy = self.strategy(own)
            with strategy.scope():
                counter = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

            def replica(x: tf.Tensor) -> tf.Tensor:
                context = tf.distribute.get_replica_context()
                total, _ = context.all_reduce("SUM", [tf.stack([x, 2 * x]), tf.ones([3])])
                counter.assign_add(x)
                return total

            step = tf.function(lambda x: strategy.run(replica, [x]))
            x = self.values(strategy, [scale * (rank + 1) for rank in range(len(own))])
            total = scale * len(own) * (len(own) + 1) / 2
            for count in range(1, 16):
                totals = step(x)
                np.testing.assert_array_equal([[total, 2 * total]] * len(own), totals.values)
                np.testing.assert_array_equal(count * total, counter.numpy())

        with futures.ThreadPoolExecutor(2) as pool:
            for future in [
                pool.submit(work, own, 10.0**i) for i, own in enumerate([range(3), range(4)])
            ]:
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

    def test_an_exception_in_one_replica_function(self):
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
            tf.function(step, autograph=False)(x)
        fails[0] = False
        self.assertAllEqual([14.0] * 3, tf.function(step, autograph=False)(x).values)


if __name__ == "__main__":
    tf.test.main()
