"""Tests of the casts to 16 bits: every number that they hold, and the edges of wider floats."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from testing_utils import EAGER, FUNCTION
from wire_bounds import roundoff

from tfcdo.exchange import dtypes, rounding
from tfcdo.execute import copy_trees

WIRES = ("bfloat16", "float16")
DTYPES = (tf.float32, tf.float64)
_MODES = (EAGER, FUNCTION)
# What is larger is nearer to infinity than to a number with so few bits.
_MOST_32 = float(np.finfo(np.float32).max) * (1 - 2.0**-8)
_MOST_64 = float(np.finfo(np.float64).max) * (1 - 2.0**-8)


def _there_and_back(
    values: np.ndarray, wire_dtype: str, mode: str = EAGER, num_terms: int = 1
) -> tuple[np.ndarray, np.ndarray, float]:
    """The encoded values, the decoded ones, and the scale; 1 where there is none."""

    def both() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        tensor = tf.constant(values)
        largest = rounding.largest_magnitude([tensor])
        scaled = dtypes.needs_scale(wire_dtype, tensor.dtype.name)
        scale = rounding.scale_for(largest, wire_dtype, num_terms) if scaled else None
        sent = copy_trees.encode(tensor, wire_dtype, scale)
        return (
            sent,
            copy_trees.decode(sent, tensor.dtype, scale),
            tf.constant(1.0) if scale is None else scale,
        )

    sent, arrived, scale = tf.function(both)() if mode == FUNCTION else both()
    return sent.numpy(), arrived.numpy(), float(scale)


def _all_finite(wire_dtype: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # Some are NaN.
        bits = (
            np.arange(1 << 16, dtype=np.uint16)
            .view(tf.as_dtype(wire_dtype).as_numpy_dtype)
            .astype(float)
        )
    # TensorFlow's CPU kernels may take float32 that are not normal for 0.
    return bits[np.isfinite(bits) & ((np.abs(bits) >= 2.0**-126) | (bits == 0))]


class CastTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(wire_dtype=WIRES, dtype=DTYPES, mode=_MODES)
    def test_all_numbers_of_the_wire_dtype_arrive_exactly(self, wire_dtype, dtype, mode):
        values = _all_finite(wire_dtype).astype(dtype.as_numpy_dtype)
        _, arrived, _ = _there_and_back(values, wire_dtype, mode)
        self.assertEqual(arrived.dtype, values.dtype)
        np.testing.assert_array_equal(arrived, values)

    @parameterized.parameters(
        *[(wire, DTYPES[(i + j) % 2], exponent)
          for i, wire in enumerate(WIRES) for j, exponent in enumerate((-100, 0, 16, 100))]
    )  # fmt: skip
    def test_the_nearest_numbers_are_sent(self, wire_dtype, dtype, exponent):
        drawn = np.random.default_rng(exponent + 200).standard_normal(1000)
        values = (drawn * 2.0**exponent).astype(dtype.as_numpy_dtype)
        sent, arrived, scale = _there_and_back(values, wire_dtype)
        self.assertEqual(sent.dtype, tf.as_dtype(wire_dtype).as_numpy_dtype)
        np.testing.assert_array_equal(arrived.astype(np.float64) * scale, sent.astype(np.float64))
        error = np.abs(arrived - values.astype(np.float64))
        lost = 2.0**-126 + 2.0**-39 * np.max(np.abs(values)) * (wire_dtype == "float16")
        self.assertAllLessEqual(error - roundoff(wire_dtype, dtype) * np.abs(values), lost)
        self.assertGreater(np.max(error / np.abs(values)), 0.9 * roundoff(wire_dtype))

    @parameterized.parameters(*zip(WIRES, DTYPES, _MODES))
    def test_nan_and_infinity_stay_and_change_nothing_else(self, wire_dtype, dtype, mode):
        values = np.array([np.nan, 3.0, np.inf, -np.inf, 0.1, 70000.0], dtype.as_numpy_dtype)
        _, arrived, _ = _there_and_back(values, wire_dtype, mode)
        np.testing.assert_array_equal(arrived[:4], values[:4])
        np.testing.assert_allclose(arrived[4:], values[4:], rtol=roundoff(wire_dtype))

    @parameterized.product(
        case=(
            ("float16", tf.float32, _MOST_32),
            ("float16", tf.float32, 65519.0),
            ("float16", tf.float32, 65536.0),
            ("float16", tf.float32, 1e-40),
            ("float16", tf.float64, _MOST_64),
            ("bfloat16", tf.float64, _MOST_64),
            ("bfloat16", tf.float64, 3.4e38),
            ("float16", tf.float64, 1e-300),
            ("bfloat16", tf.float32, 3.38e38),
        )
    )
    def test_the_largest_and_the_smallest(self, case):
        wire_dtype, dtype, number = case
        values = np.array([number, -number, number / 3], dtype.as_numpy_dtype)
        _, arrived, scale = _there_and_back(values, wire_dtype)
        self.assertEqual(np.frexp(scale)[0], 0.5)
        np.testing.assert_allclose(
            arrived.astype(np.float64),
            values.astype(np.float64),
            rtol=roundoff(wire_dtype, dtype),
            atol=2.0**-126 if dtype == tf.float32 else 0,
        )

    def test_terms_that_are_added_in_the_wire_dtype_fit(self):
        for num_terms in (1, 2, 3, 8):
            for number in (65504.0, 65519.0, 1e30, 3e-7):
                sent, _, _ = _there_and_back(
                    np.array([number], np.float32), "float16", num_terms=num_terms
                )
                self.assertTrue(np.isfinite(np.sum(np.repeat(sent, num_terms), dtype=np.float16)))
                # A scale of half the size would do for twice as many.
                self.assertGreater(float(sent[0]) * num_terms, 65504 / 4)

    @parameterized.product(shape=((0,), (), (2, 0, 3)), wire_dtype=WIRES)
    def test_nothing_and_zero(self, shape, wire_dtype):
        _, arrived, scale = _there_and_back(np.zeros(shape, np.float32), wire_dtype)
        self.assertAllEqual(arrived, np.zeros(shape))
        self.assertTrue(np.isfinite(scale))


if __name__ == "__main__":
    tf.test.main()
