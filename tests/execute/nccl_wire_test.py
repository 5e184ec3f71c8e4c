"""NCCL in 16 bits, by execution on virtual CPU devices; see `nccl_on_cpu`."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from nccl_on_cpu import (
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)
from testing_utils import EAGER, FUNCTION, MEAN, SUM
from wire_bounds import roundoff

import tfcdo

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
        # Of 2 and 1 + tiny, nothing is rounded in additions: only the cast loses tiny.
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
