"""Numerics: sums in 32 bits or more, and the last ops on them at the root."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

from tfcdo.execute import numerics


class NumericsTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(dtype=(tf.float16, tf.bfloat16), order=(1, -1))
    def test_16_bit_floats_are_added_in_32(self, dtype, order):
        # In 16 bits, 2048 + 1 (float16) and 256 + 1 (bfloat16) are 2048 and 256 again.
        large = 2048 if dtype == tf.float16 else 256
        values = [tf.constant(value, dtype) for value in [large, 1, 1, 1][::order]]
        total = numerics.add(values)
        self.assertEqual(tf.float32, total.dtype)
        self.assertEqual(large + 3, total.numpy())
        self.assertEqual(large + 4, numerics.add([tf.constant(1, dtype), total]).numpy())

    @parameterized.parameters(
        tf.float32, tf.float64, tf.int8, tf.uint8, tf.int32, tf.int64, tf.complex64, tf.complex128
    )
    def test_other_dtypes_stay(self, dtype):
        values = [tu.numbers((4,), dtype, seed, limit=40) for seed in range(3)]
        total = numerics.add([tf.constant(value) for value in values])
        self.assert_exact(total, tu.oracle(tu.SUM, values), dtype)

    def test_integers_wrap_around_as_in_tensorflow(self):
        value = tf.constant(2**31 - 1)
        self.assertEqual(-2, numerics.add([value, value]).numpy())

    def test_one_value_is_that_value(self):
        value = tf.constant([1.0], tf.float16)
        self.assertIs(value, numerics.add([value]))

    def test_shapes_must_be_equal(self):
        with self.assertRaises((ValueError, tf.errors.InvalidArgumentError)):
            numerics.add([tf.ones([1]), tf.ones([4])])

    @parameterized.parameters(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64)
    def test_finish(self, dtype):
        total = numerics.add([tf.constant(3, dtype), tf.constant(7, dtype)])
        for divide, expected in ((4, 2.5), (None, 10)):
            result = numerics.finish(total, divide, dtype)
            self.assertEqual(dtype, result.dtype)
            self.assertEqual(expected, result.numpy())

    def test_16_bits_are_rounded_after_the_division(self):
        # The sum is beyond float16, the mean is not.
        total = numerics.add([tf.constant(60000, tf.float16)] * 2)
        self.assertEqual(np.inf, numerics.finish(total, None, tf.float16).numpy())
        self.assertAllClose(60000, numerics.finish(total, 2, tf.float16))


if __name__ == "__main__":
    tf.test.main()
