"""NCCL by execution in functions that call functions, in loops, branches, sessions and gradients.

What would hang on GPUs is an error here: see `nccl_on_cpu`.
"""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl import logging
from absl.testing import parameterized
from nccl_on_cpu import (
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)
from nccl_testing import K, all_reduce, delayed, function, nccl, one, ranks
from testing_utils import MEAN

import tfcdo
from tfcdo import log


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


if __name__ == "__main__":
    tf.test.main()
