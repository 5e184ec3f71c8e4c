"""NCCL's gradients and casts, by execution on virtual CPU devices; see `nccl_on_cpu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from nccl_on_cpu import (
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)
from nccl_testing import K, all_reduce, function, nccl, one, ranks
from testing_utils import EAGER, FUNCTION, MEAN, SUM
from wire_bounds import roundoff

import tfcdo


class GradientTest(tf.test.TestCase, parameterized.TestCase):
    """Against the derivatives written out: y_d = sum_i x_i^3 on each device d."""

    WEIGHTS = np.array([2.0, 3.0, 5.0, 7.0])
    X = np.arange(1.0, K + 1)

    def loss(self, own: Sequence[tf.Tensor], reduce: Any = one) -> tf.Tensor:
        results = reduce(*[x**3 for x in own])
        return tf.add_n([w * y**2 for w, y in zip(self.WEIGHTS, results, strict=True)])

    def check(self, first: Any, second: Any) -> None:
        """Compares with the gradient, and with the gradient of the gradients' sum."""
        scale, total, squares = 2 * np.sum(self.WEIGHTS), np.sum(self.X**3), 3 * self.X**2
        self.assertAllClose((scale * total * squares)[:, None], first, rtol=1e-12)
        expected = scale * (squares * np.sum(squares) + total * 6 * self.X)
        self.assertAllClose(expected[:, None], second, rtol=1e-12)

    @parameterized.parameters((False, True), (True, False))
    def test_tape(self, by_function, traced):
        reduce = function(one) if by_function else one

        def body(own: Any) -> Any:
            with tf.GradientTape() as outer:
                outer.watch(own)
                with tf.GradientTape() as inner:
                    inner.watch(own)
                    loss = self.loss(own, reduce)
                first = inner.gradient(loss, own)
                total = tf.add_n(first)
            return first, outer.gradient(total, own)

        step = function(body) if traced else body
        for _ in range(3):
            self.check(*step([tf.constant([x], tf.float64) for x in self.X]))

    def test_tf_gradients(self):
        """In a function, and in a session; one alone, too, of whose pack nobody asks the others."""

        def gradients(own: Any) -> Any:
            first = tf.gradients(self.loss(own), own)
            return first, tf.gradients(tf.add_n(first), own)

        constants = [tf.constant([x], tf.float64) for x in self.X]
        self.check(*function(lambda: gradients([tf.identity(x) for x in constants]))())
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            own = [tf.compat.v1.placeholder(tf.float64, [1]) for _ in range(K)]
            fed = {tensor: [x] for tensor, x in zip(own, self.X, strict=True)}
            fetches = gradients(own)
            results = session.run(fetches, fed)
            self.check(*results)
            self.assertAllEqual(results[1][2], session.run(fetches[1][2], fed))

    def test_through_a_loop_and_a_branch(self):
        @function
        def gradients(which: tf.Tensor) -> Any:
            own = ranks()
            with tf.GradientTape() as tape:
                tape.watch(own)
                branch = tf.cond(which, lambda: one(*own), lambda: [2 * x for x in own])
                results = tf.while_loop(
                    lambda i, *_: i < 2,
                    lambda i, *x: (i + 1, *[y / 2 for y in one(*x)]),
                    [0, *branch],
                )
                loss = tf.add_n(results[1:])
            return tape.gradient(loss, own)

        # Each round doubles the sum of the gradients of the four, and gives each a half of it.
        self.assertAllEqual([[16.0]] * K, gradients(tf.constant(True)))
        self.assertAllEqual([[8.0]] * K, gradients(tf.constant(False)))

    def test_of_several_dtypes(self):
        integers = [tf.constant([rank]) for rank in range(K)]
        own = [[tf.ones([3], tf.float16) * rank for rank in range(K)], ranks()]
        with tf.GradientTape() as tape:
            tape.watch(own)
            halves, floats, counts = all_reduce(nccl(2), *own, integers, reduce_op=MEAN)
            loss = tf.cast(tf.reduce_sum(halves[1]), tf.float32) + 8 * floats[2]
            loss *= tf.cast(counts[0], tf.float32)
        gradients = tape.gradient(loss, own)
        self.assertAllEqual([[0.375] * 3] * K, gradients[0])
        self.assertEqual(tf.float16, gradients[0][0].dtype)
        self.assertAllEqual([[3.0]] * K, gradients[1])


ROUNDOFF = roundoff("float16")


class NcclWireTest(tf.test.TestCase, parameterized.TestCase):
    def make(self, error_feedback: bool = False) -> tfcdo.NcclAllReduce:
        return tfcdo.NcclAllReduce(
            2, require_nccl=True, wire_dtype="float16", error_feedback=error_feedback
        )

    @parameterized.parameters((EAGER, tf.float32, MEAN), (FUNCTION, tf.float64, SUM))
    def test_sums_are_within_the_bound_of_k_roundings(self, mode, dtype, op):
        generator = np.random.default_rng(0)
        arrays = [
            (generator.uniform(-0.2, 1, 50) * 1e5).astype(dtype.as_numpy_dtype) for _ in range(4)
        ]
        (result,) = tu.all_reduce(self.make(), op, [tu.per_replica(arrays)], mode)
        # One rounding of each value, and K - 1 of partial sums.
        bound = ((1 + ROUNDOFF) ** 4 * (1 + 2.0**-20) - 1) * tu.oracle(op, [*map(np.abs, arrays)])
        for component in result.values:
            self.assertEqual(dtype, component.dtype)
            self.assertAllEqual(result.value, component)
        self.assertAllLessEqual(np.abs(tu.exact(result.value) - tu.oracle(op, arrays)) - bound, 0)
        self.assertNotAllEqual(tu.oracle(op, arrays), tu.exact(result.value))

    def test_all_devices_have_one_scale_and_nothing_overflows(self):
        values = [np.array([rank * 6e4, np.nan, -6e4, np.inf], np.float32) for rank in range(4)]
        (result,) = tu.all_reduce(self.make(), SUM, [tu.per_replica(values)], FUNCTION)
        expected = [36e4, np.nan, -24e4, np.inf]
        np.testing.assert_allclose(result.value, expected, rtol=4 * ROUNDOFF)

    def test_only_16_bits_are_all_reduced(self):
        value = tu.per_replica([tf.ones([64])] * 3)
        ops = [
            op
            for op in tu.traced_ops(lambda: self.make().batch_reduce(SUM, [(value, value)]))
            if op.type == "NcclAllReduce"
        ]
        kinds = {(op.get_attr("reduction"), op.get_attr("T")) for op in ops}
        self.assertEqual({(b"sum", tf.float16), (b"max", tf.float32)}, kinds)

    def test_error_feedback_hands_on_what_casts_lose(self):
        # Additions round nothing of 2 and 1 + tiny: only the cast loses tiny.
        ops, tiny = self.make(error_feedback=True), 0.3 * 2.0**-10
        value = tu.per_replica([np.array([1 + tiny] * 2, np.float32), np.zeros(2, np.float32)])

        @tf.function
        def reduce() -> tf.Tensor:
            return ops.batch_reduce(SUM, [(value, value)])[0].values[0]

        total = np.sum([reduce().numpy()[0] for _ in range(50)], dtype=np.float64)
        self.assertLess(abs(total - 50 * (1 + tiny)), 2.0**-9)

    def test_bfloat16_is_what_the_op_does_not_take(self):
        value = tu.per_replica([[1.0, 2.0]] * 2)
        ops = tfcdo.NcclAllReduce(require_nccl=True, wire_dtype="bfloat16")
        with self.assertRaisesRegex(RuntimeError, "NcclAllReduce does not take bfloat16"):
            ops.batch_reduce(SUM, [(value, value)])
        [result] = tfcdo.NcclAllReduce(wire_dtype="bfloat16").batch_reduce(SUM, [(value, value)])
        self.assertAllEqual([2.0, 4.0], result.values[1])


if __name__ == "__main__":
    tf.test.main()
