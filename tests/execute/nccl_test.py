"""NCCL by execution: the ops that GPUs would run, on virtual CPU devices, by a kernel for tests.

What would hang on GPUs is an error here: see `nccl_on_cpu`. All ops are made with
`require_nccl=True`, so that no test can pass by way of the copy trees.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any
from unittest import mock

import nccl_on_cpu
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl import logging
from absl.testing import parameterized
from testing_utils import EAGER
from testing_utils import FUNCTION
from testing_utils import MEAN
from testing_utils import SUM

import tfcdo
from tfcdo import log

DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
K = 4  # How many devices, where their number is not what is tested.

_nccl = contextlib.ExitStack()


def setUpModule() -> None:
    _nccl.enter_context(nccl_on_cpu.running())


def tearDownModule() -> None:
    _nccl.close()


def nccl(num_packs: int = 1) -> tfcdo.NcclAllReduce:
    return tfcdo.NcclAllReduce(num_packs, require_nccl=True)


def all_reduce(
    ops: tf.distribute.CrossDeviceOps, *values: Sequence[Any], reduce_op: Any = SUM
) -> list[tuple[tf.Tensor, ...]]:
    """All-reduces values, each a list of one tensor per device, in one batch."""
    replicated = [tu.per_replica(own) for own in values]
    results = ops.batch_reduce(reduce_op, [(value, value) for value in replicated])
    return [tuple(result.values) for result in results]


def one(*tensors: tf.Tensor, ops: tf.distribute.CrossDeviceOps | None = None) -> list[tf.Tensor]:
    """All-reduces one value."""
    return list(all_reduce(ops or nccl(), tensors)[0])


def ranks(scale: float = 1.0, count: int = K) -> list[tf.Tensor]:
    """One tensor per device: `scale` times 1, 2, 3... Their sum is 10 times the scale, for 4."""
    return [tf.constant([scale * (rank + 1)]) for rank in range(count)]


def function(body: Callable[..., Any], **kwargs: Any) -> Any:
    return tf.function(body, autograph=False, **kwargs)


def packs_of(graph: Any) -> dict[bytes, list[Any]]:
    """The NCCL ops of a graph and of all functions it calls, by their shared name."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    packs = collections.defaultdict(list)
    for node in nodes:
        if node.op == "NcclAllReduce":
            packs[node.attr["shared_name"].s].append(node)
    return packs


def delayed(tensor: tf.Tensor, seconds: float) -> tf.Tensor:
    """The same tensor, but only after a while."""

    def wait(array: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return array

    result = tf.numpy_function(wait, [tensor], tensor.dtype)
    result.set_shape(tensor.shape)
    return result


class EmittedOpsTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    """What can only be seen in the graph."""

    def trace(self, ops: Any, *values: Sequence[Any]) -> dict[bytes, list[Any]]:
        return packs_of(function(lambda: all_reduce(ops, *values)).get_concrete_function().graph)

    def check_packs(self, packs: dict[bytes, list[Any]], count: int) -> None:
        for nodes in packs.values():
            self.assertCountEqual(tu.device_names(count), [node.device for node in nodes])
            for node in nodes:
                self.assertEqual(b"sum", node.attr["reduction"].s)
                self.assertEqual(count, node.attr["num_devices"].i)
            self.assertLen({node.attr["T"].type for node in nodes}, 1)

    @parameterized.product(count=tuple(range(2, 9)), num_packs=(1, 3))
    def test_one_op_per_device_and_pack(self, count, num_packs):
        packs = self.trace(nccl(num_packs), [tf.ones([5])] * count, [tf.ones([7, 2])] * count)
        self.assertLen(packs, num_packs)
        self.check_packs(packs, count)

    def test_one_pack_per_value(self):
        packs = self.trace(nccl(0), *[[tf.ones([size])] * 3 for size in (1, 5, 2, 9)])
        self.assertLen(packs, 4)
        self.check_packs(packs, 3)

    def test_packs_of_one_dtype(self):
        packs = self.trace(nccl(), *[[tf.ones([3], dtype)] * 3 for dtype in [*DTYPES, *DTYPES]])
        self.check_packs(packs, 3)
        types = [tf.as_dtype(nodes[0].attr["T"].type) for nodes in packs.values()]
        # 16-bit floats are summed as 32-bit ones.
        expected = [tf.float32, tf.float32, tf.float64, tf.int32, tf.int64]
        self.assertCountEqual(expected, types)

    def test_no_name_is_used_twice(self):
        names: list[bytes] = []
        lock = threading.Lock()
        instances = [nccl(2), nccl(2), tfcdo.AllReduceCrossDeviceOps("nccl", 2, require_nccl=True)]

        def trace(instance: Any) -> None:
            for size in (4, 6):
                packs = self.trace(instance, [tf.ones([size])] * 3, [tf.ones([size])] * 3)
                with lock:
                    names.extend(packs)

        with futures.ThreadPoolExecutor(6) as pool:
            list(pool.map(trace, 4 * instances))
        self.assertLen(names, 12 * 2 * 2)
        self.assertLen(set(names), len(names))

    def test_no_name_is_used_twice_by_retraces_and_repeated_calls(self):
        ops = nccl()
        step = function(lambda own: all_reduce(ops, own) + all_reduce(ops, own))
        names: list[bytes] = []
        for size in (2, 3, 4):
            names += packs_of(step.get_concrete_function([tf.ones([size])] * 3).graph)
        self.assertLen(names, 6)
        self.assertLen(set(names), 6)

    def test_no_name_is_used_twice_in_gradients(self):
        def gradients() -> Any:
            with tf.GradientTape() as outer:
                own = ranks()
                outer.watch(own)
                with tf.GradientTape() as inner:
                    inner.watch(own)
                    loss = tf.add_n([y**2 for y in one(*own)])
                total = tf.add_n(inner.gradient(loss, own))
            return outer.gradient(total, own)

        packs = packs_of(function(gradients).get_concrete_function().graph)
        self.assertGreaterEqual(len(packs), 3)
        self.check_packs(packs, K)

    def test_sums_stay_on_their_devices(self):
        # What TensorFlow runs in the end, seen where it has taken the graph apart by device.
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            own = [tf.compat.v1.placeholder(tf.float32, [3]) for _ in range(K)]
            doubled = []
            for rank, tensor in enumerate(own):
                with tf.device(tu.device_name(rank)):
                    doubled.append(2 * tensor)
            results = []
            for rank, total in enumerate(one(*doubled)):
                with tf.device(tu.device_name(rank)):
                    results.append(tf.reduce_sum(total) > 0)  # Only this leaves the device.
            metadata = tf.compat.v1.RunMetadata()
            session.run(
                results,
                {tensor: np.ones([3]) for tensor in own},
                tf.compat.v1.RunOptions(output_partition_graphs=True),
                metadata,
            )
        nodes = [node for graph in metadata.partition_graphs for node in graph.node]
        self.assertLen([node for node in nodes if node.op == "NcclAllReduce"], K)
        sent = {node.input[0] for node in nodes if node.op == "_Send"}
        fed = {tensor.op.name for tensor in own}
        returned = {tensor.op.name for tensor in results}
        # The rest says no more than that an op has run.
        others = [name for name in sent if "/ctrl/" not in name and not name.startswith("_")]
        self.assertContainsSubset(others, fed | returned)

    @parameterized.parameters(1, 2)
    def test_eager_results_are_where_they_say(self, num_packs):
        (results,) = all_reduce(nccl(num_packs), ranks())
        for rank, result in enumerate(results):
            self.assertEqual(tu.device_name(rank), result.device)
            self.assertEqual(tu.device_name(rank), result.backing_device)


class ResultsTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(count=tuple(range(2, 9)), mode=(EAGER, FUNCTION), reduce_op=(SUM, MEAN))
    def test_every_dtype_on_every_device_count(self, count, mode, reduce_op):
        batch = [
            [tu.numbers(shape, dtype, 10 * index + rank) for rank in range(count)]
            for index, (dtype, shape) in enumerate(
                (dtype, shape) for dtype in DTYPES for shape in ((), (3, 2), (0,))
            )
        ]
        values = [tu.per_replica(own) for own in batch]
        results = tu.all_reduce(nccl(), reduce_op, values, mode)
        for result, own in zip(results, batch, strict=True):
            dtype = tu.result_dtype(reduce_op, tf.as_dtype(own[0].dtype))
            for value in result.values:
                self.assertEqual(dtype, value.dtype)
                # TensorFlow may multiply by the reciprocal of the number of devices.
                tolerance = 0 if reduce_op == SUM else 2.002 * tu.unit_roundoff(dtype)
                np.testing.assert_allclose(
                    tu.exact(value), _rounded(tu.oracle(reduce_op, own), dtype), rtol=tolerance
                )
            self.assert_bitwise_equal(result.values)

    @parameterized.parameters(EAGER, FUNCTION)
    def test_float16_is_summed_in_32_bits_and_rounded_once(self, mode):
        # From 2048 on, float16 has the even numbers only: each 1 would be lost, 7 of them are not.
        own = [np.array([value, -value], np.float16) for value in [2048.0] + 7 * [1.0]]
        (result,) = tu.all_reduce(nccl(), SUM, [tu.per_replica(own)], mode)
        for value in result.values:
            self.assertEqual(tf.float16, value.dtype)
            self.assertAllEqual([2056.0, -2056.0], value)  # 2055, rounded to even.

    @parameterized.product(num_packs=(0, 1, 3, 8), mode=(EAGER, FUNCTION))
    def test_packs_do_not_change_values(self, num_packs, mode):
        shapes = ((5,), (), (2, 3), (40,), (0,), (1,))
        batch = [
            [tu.numbers(shape, dtype, 100 * index + rank) for rank in range(5)]
            for index, shape in enumerate(shapes)
            for dtype in (tf.float32, tf.int64)
        ]
        values = [tu.per_replica(own) for own in batch]
        for result, own in zip(
            tu.all_reduce(nccl(num_packs), SUM, values, mode), batch, strict=True
        ):
            for value in result.values:
                self.assertAllEqual(tu.oracle(SUM, own), tu.exact(value))

    @parameterized.parameters(tf.bfloat16, tf.complex64, tf.int8, tf.uint16)
    def test_other_dtypes_go_by_copy_trees(self, dtype):
        own = [tu.numbers((5,), dtype, rank) % 7 if dtype.is_integer else
               tu.numbers((5,), dtype, rank) for rank in range(3)]  # fmt: skip
        values = [tu.per_replica(own), tu.per_replica([tf.ones([2])] * 3)]
        log.warn_once.cache_clear()
        with mock.patch.object(logging, "warning") as warning:
            for _ in range(3):
                results = tu.all_reduce(tfcdo.NcclAllReduce(), SUM, values)
        self.assert_exact(results[0].value, tu.oracle(SUM, own), dtype)
        self.assertAllEqual([3.0, 3.0], results[1].value)
        warning.assert_called_once()
        self.assertRegex(warning.call_args.args[0] % warning.call_args.args[1:], dtype.name)
        with self.assertRaisesRegex(RuntimeError, f"(?s)require_nccl.*{dtype.name}.*float32"):
            tu.all_reduce(nccl(), SUM, values)

    @parameterized.parameters(EAGER, FUNCTION)
    def test_slices_among_dense_values(self, mode):
        dense = [tu.numbers((4,), tf.float32, rank) for rank in range(3)]
        rows = [
            tf.IndexedSlices(tf.ones([rank + 1, 2]), tf.range(rank + 1), tf.constant([5, 2]))
            for rank in range(3)
        ]
        values = [tu.per_replica(own) for own in (rows, dense, rows, dense)]
        results = tu.all_reduce(nccl(), SUM, values, mode)
        for result in results[0], results[2]:
            for value in result.values:
                self.assertAllEqual([0, 0, 1, 0, 1, 2], value.indices)
                self.assertAllEqual([3, 2, 1, 0, 0], tu.dense(value, 5)[:, 0])
        for result in results[1], results[3]:
            for value in result.values:
                self.assertAllEqual(tu.oracle(SUM, dense), value)

    def test_only_slices(self):
        rows = [tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank])) for rank in range(3)]
        (result,) = tu.all_reduce(nccl(), SUM, [tu.per_replica(rows)])
        self.assertAllEqual([0, 1, 2], result.value.indices)

    def test_shapes_unknown_while_traced(self):
        step = function(
            lambda *own: all_reduce(nccl(3), own, ranks(count=3)),
            input_signature=[tf.TensorSpec([None])] * 3,
        )
        for size in (0, 1, 6):
            results, known = step(*[tf.fill([size], float(rank)) for rank in range(3)])
            for result in results:
                self.assertAllEqual(np.full([size], 3.0), result)
            self.assertAllEqual([[6.0]] * 3, known)

    def test_devices_that_are_not_the_first_and_not_in_order(self):
        devices = [tu.device_name(index) for index in (6, 2, 7)]
        value = tu.per_replica([[1.0], [2.0], [4.0]], devices)
        (result,) = tu.all_reduce(nccl(), SUM, [value])
        self.assert_on(result, devices)
        self.assertAllEqual([[7.0]] * 3, result.values)


class FunctionTest(tf.test.TestCase, parameterized.TestCase):
    """Where the ops are: in functions, branches, loops and sessions, once or several times."""

    @parameterized.parameters(False, True)
    def test_a_function_called_twice_in_one_step(self, noinline):
        inner = function(one, experimental_attributes={"_noinline": noinline})
        outer = function(lambda: (inner(*ranks()), inner(*ranks(100.0)), inner(*ranks(1e4))))
        for _ in range(30):
            self.assertAllEqual(np.array([[[10.0]], [[1e3]], [[1e5]]]) * np.ones([K, 1]), outer())

    def test_a_function_that_calls_a_function_that_calls_a_function(self):
        inner = function(one)
        middle = function(lambda *own: [x + y for x, y in zip(inner(*own), inner(*own))])
        outer = function(lambda: (middle(*ranks()), inner(*ranks(10.0)), middle(*ranks(100.0))))
        for _ in range(20):
            self.assertAllEqual(
                np.array([[[20.0]], [[100.0]], [[2000.0]]]) * np.ones([K, 1]), outer()
            )

    def test_a_function_with_several_packs_called_twice(self):
        inner = function(lambda own: all_reduce(nccl(0), own, own, own))
        outer = function(lambda: (inner(ranks()), inner(ranks(7.0))))
        for _ in range(20):
            self.assertAllEqual(np.array([[10.0], [70.0]])[:, None, None] * np.ones([3, K, 1]),
                                outer())  # fmt: skip

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

    def test_a_loop_written_in_python(self):
        ops = nccl()

        @tf.function
        def loop(count):
            own = ranks()
            for _ in tf.range(count):
                own = [x / 4 for x in one(*own, ops=ops)]
            return own

        # The sum of four numbers, over four, is their mean from then on.
        self.assertAllEqual([[2.5]] * K, loop(tf.constant(5)))

    def test_a_graph_and_a_session(self):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            own = [tf.compat.v1.placeholder(tf.float32, [1]) for _ in range(K)]
            fed = {tensor: [rank + 1.0] for rank, tensor in enumerate(own)}
            direct = one(*own)
            by_function = function(one)(*own)
            loop = tf.while_loop(lambda i, *_: i < 3, lambda i, *x: (i + 1, *one(*x)), [0, *own])
            branch = tf.cond(own[0][0] > 0, lambda: one(*own), lambda: own)
            for _ in range(10):
                self.assertAllEqual([[10.0]] * K, session.run(direct, fed))
                self.assertAllEqual([[10.0]] * K, session.run(by_function, fed))
                self.assertAllEqual([[160.0]] * K, session.run(loop[1:], fed))
                self.assertAllEqual([[10.0]] * K, session.run(branch, fed))

    def test_a_session_over_several_packs(self):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            results = all_reduce(nccl(3), ranks(), ranks(2.0), [tf.constant([5], tf.int64)] * K)
            for _ in range(20):
                self.assertAllEqual([[10.0], [20.0], [20.0]], session.run([r[1] for r in results]))

    def test_functions_that_are_told_to_run_eagerly(self):
        self.addCleanup(tf.config.run_functions_eagerly, False)
        tf.config.run_functions_eagerly(True)
        self.assertAllEqual([[10.0]] * K, one(*ranks()))
        self.assertAllEqual([[10.0]] * K, function(one)(*ranks()))

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

    def test_a_concrete_function_and_a_wrapped_one(self):
        own = ranks()
        for step in (
            function(one).get_concrete_function(*own),
            tf.compat.v1.wrap_function(one, [tf.TensorSpec([1])] * K),
        ):
            for _ in range(3):
                self.assertAllEqual([[10.0]] * K, step(*own))


class SubsetTest(tf.test.TestCase, parameterized.TestCase):
    """Nobody asks for the other devices' results, but their ops have to run."""

    @parameterized.parameters(*range(K))
    def test_a_function_that_returns_one_output(self, rank):
        step = function(lambda: one(*ranks())[rank])
        for _ in range(3):
            self.assertAllEqual([10.0], step())

    @parameterized.product(noinline=(False, True), tracing=("own", "twice"))
    def test_a_function_of_whose_outputs_one_is_used(self, noinline, tracing):
        inner = function(one, experimental_attributes={"_noinline": noinline})

        def first_and_last() -> Any:
            if tracing == "own":
                return inner(*ranks())[0], one(*ranks(3.0))[3]
            return inner(*ranks())[0], inner(*ranks(3.0))[3]

        step = function(first_and_last)
        for _ in range(10):
            self.assertAllEqual([[10.0], [30.0]], step())

    def test_a_function_none_of_whose_outputs_are_used(self):
        inner = function(one)

        def ignore() -> Any:
            inner(*ranks())
            one(*ranks())
            return tf.constant(1)

        step = function(ignore)
        for _ in range(5):
            self.assertAllEqual(1, step())

    @parameterized.parameters(*range(K))
    def test_a_session_that_fetches_one_output(self, rank):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            results = one(*ranks())
            others = all_reduce(nccl(2), [tf.ones([4])] * K)[0]
            self.assertAllEqual([10.0], session.run(results[rank]))
            self.assertAllEqual([4.0] * 4, session.run(others[rank]))
            self.assertAllEqual([[10.0], [10.0]], session.run([results[0], results[rank]]))

    def test_one_of_several_values_on_one_device(self):
        step = function(lambda: all_reduce(nccl(3), *[ranks(scale) for scale in (1, 2, 3)])[1][2])
        for _ in range(5):
            self.assertAllEqual([20.0], step())

    def test_one_iteration_result(self):
        def loop() -> Any:
            return tf.while_loop(
                lambda i, *_: i < 3, lambda i, *x: (i + 1, one(*x)[0], *x[1:]), [0, *ranks()]
            )[1]

        # Each time x0 becomes x0 + 2 + 3 + 4.
        self.assertAllEqual([28.0], function(loop)())


class OrderTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*range(6))
    def test_devices_come_to_the_packs_in_different_orders(self, seed):
        generator = random.Random(seed)
        packs = 5

        def step() -> Any:
            values: list[list[Any]] = [[None] * K for _ in range(packs)]
            for rank in range(K):
                previous: list[tf.Tensor] = []
                for pack in generator.sample(range(packs), packs):
                    # The device comes to this pack when it has come to the one before.
                    with tf.device(tu.device_name(rank)), tf.control_dependencies(previous):
                        pause = 0.001 * generator.randrange(4)
                        previous = [delayed(tf.constant([10.0 * pack + rank]), pause)]
                    values[pack][rank] = previous[0]
            return all_reduce(nccl(0), *values)

        traced = function(step)
        expected = [[[K * 10.0 * pack + 6]] * K for pack in range(packs)]
        for _ in range(5):
            self.assertAllEqual(expected, traced())

    def test_orders_differ_in_a_session(self):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            first, second = tf.constant([1.0]), tf.constant([2.0])
            with tf.control_dependencies([delayed(first, 0.01)]):
                late = [tf.identity(first), tf.identity(second)]
            results = all_reduce(nccl(0), [first, late[0], first], [late[1], second, late[1]])
            for _ in range(10):
                self.assertAllEqual([[[3.0]] * 3, [[6.0]] * 3], session.run(results))


class GradientTest(tf.test.TestCase, parameterized.TestCase):
    """Against the derivatives written out: y_d = sum_i x_i^3 on each device d."""

    WEIGHTS = np.array([2.0, 3.0, 5.0, 7.0])
    X = np.arange(1.0, K + 1)

    def loss(self, own: Sequence[tf.Tensor], reduce: Any = one) -> tf.Tensor:
        results = reduce(*[x**3 for x in own])
        return tf.add_n([w * y**2 for w, y in zip(self.WEIGHTS, results, strict=True)])

    def first(self) -> np.ndarray:
        total = np.sum(self.X**3)
        return 2 * np.sum(self.WEIGHTS) * total * 3 * self.X**2

    def second(self) -> np.ndarray:
        """The gradient of the sum of the first gradients."""
        scale, total = 2 * np.sum(self.WEIGHTS), np.sum(self.X**3)
        squares = 3 * self.X**2
        return scale * (squares * np.sum(squares) + total * 6 * self.X)

    def tape(self, reduce: Any, own: Sequence[tf.Tensor]) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(own)
            with tf.GradientTape() as inner:
                inner.watch(own)
                loss = self.loss(own, reduce)
            first = inner.gradient(loss, own)
            total = tf.add_n(first)
        return first, outer.gradient(total, own)

    @parameterized.product(by_function=(False, True), traced=(False, True))
    def test_tape(self, by_function, traced):
        ops = nccl()
        reduce = functools.partial(one, ops=ops)
        body = functools.partial(self.tape, function(reduce) if by_function else reduce)
        step = function(body) if traced else body
        for _ in range(3):
            first, second = step([tf.constant([x], tf.float64) for x in self.X])
            self.assertAllClose(self.first()[:, None], first, rtol=1e-12)
            self.assertAllClose(self.second()[:, None], second, rtol=1e-12)

    def test_tf_gradients_in_a_function(self):
        def gradients() -> Any:
            own = [tf.constant([x], tf.float64) for x in self.X]
            first = tf.gradients(self.loss(own), own)
            return first, tf.gradients(tf.add_n(first), own)

        first, second = function(gradients)()
        self.assertAllClose(self.first()[:, None], first, rtol=1e-12)
        self.assertAllClose(self.second()[:, None], second, rtol=1e-12)

    def test_tf_gradients_in_a_session(self):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            own = [tf.compat.v1.placeholder(tf.float64, [1]) for _ in range(K)]
            fed = {tensor: [x] for tensor, x in zip(own, self.X, strict=True)}
            first = tf.gradients(self.loss(own), own)
            second = tf.gradients(tf.add_n(first), own)
            self.assertAllClose(self.first()[:, None], session.run(first, fed), rtol=1e-12)
            self.assertAllClose(self.second()[:, None], session.run(second, fed), rtol=1e-12)
            # One alone, of whose pack the others are nobody's concern.
            self.assertAllClose([self.second()[2]], session.run(second[2], fed), rtol=1e-12)

    @parameterized.parameters(False, True)
    def test_of_one_device_with_respect_to_one_device(self, traced):
        def gradient(own: Sequence[tf.Tensor]) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(own)
                result = one(*own)[1]
            return tape.gradient(result, own[3])

        step = function(gradient) if traced else gradient
        self.assertAllEqual([1.0], step(ranks()))

    @parameterized.parameters(False, True)
    def test_of_a_function_that_is_called_twice(self, noinline):
        inner = function(one, experimental_attributes={"_noinline": noinline})

        def gradients(first: Any, second: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                tape.watch([first, second])
                x, y = inner(*first), inner(*second)
                loss = 2 * x[0] + 3 * x[1] + 5 * y[2]
            return tape.gradient(loss, first), tape.gradient(loss, second)

        step = function(gradients)
        for _ in range(10):
            self.assertAllEqual([[[5.0]] * K] * 2, step(ranks(), ranks(3.0)))
        self.assertAllEqual([[[5.0]] * K] * 2, gradients(ranks(), ranks(3.0)))

    def test_through_a_loop(self):
        def gradients() -> Any:
            own = ranks()
            with tf.GradientTape() as tape:
                tape.watch(own)
                results = tf.while_loop(
                    lambda i, *_: i < 3, lambda i, *x: (i + 1, *[y / 2 for y in one(*x)]), [0, *own]
                )
                loss = tf.add_n(results[1:])
            return tape.gradient(loss, own)

        # Each round doubles the sum of the gradients of the four, and gives each a half of it.
        for _ in range(3):
            self.assertAllEqual([[8.0]] * K, function(gradients)())

    def test_through_a_branch(self):
        def gradients(which: tf.Tensor) -> Any:
            own = ranks()
            with tf.GradientTape() as tape:
                tape.watch(own)
                results = tf.cond(which, lambda: one(*own), lambda: [2 * x for x in own])
                loss = tf.add_n(results)
            return tape.gradient(loss, own)

        step = function(gradients)
        self.assertAllEqual([[4.0]] * K, step(tf.constant(True)))
        self.assertAllEqual([[2.0]] * K, step(tf.constant(False)))

    def test_float16_and_mean_and_packs(self):
        own = [[tf.ones([3], tf.float16) * rank for rank in range(K)], ranks()]
        with tf.GradientTape() as tape:
            tape.watch(own)
            halves, floats = all_reduce(nccl(2), *own, reduce_op=MEAN)
            loss = tf.cast(tf.reduce_sum(halves[1]), tf.float32) + 8 * floats[2]
        gradients = tape.gradient(loss, own)
        self.assertAllEqual([[0.25] * 3] * K, gradients[0])
        self.assertEqual(tf.float16, gradients[0][0].dtype)
        self.assertAllEqual([[2.0]] * K, gradients[1])

    def test_integers_have_none(self):
        own = [[tf.constant([rank]) for rank in range(K)], ranks()]
        with tf.GradientTape() as tape:
            tape.watch(own[1])
            integers, floats = all_reduce(nccl(), *own)
            loss = floats[0] * tf.cast(integers[0], tf.float32)
        self.assertAllEqual([[6.0]] * K, tape.gradient(loss, own[1]))


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


def _rounded(exact: np.ndarray, dtype: tf.DType) -> np.ndarray:
    return tu.exact(exact.astype(dtype.as_numpy_dtype))


if __name__ == "__main__":
    tf.test.main()
