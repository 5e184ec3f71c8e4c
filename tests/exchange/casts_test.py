"""Sums of shares between simulated hosts: within the bound, and bitwise the same on all hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from wire_bounds import block_error_bound, error_bound

from tfcdo.exchange import Rehearsal, rounding
from tfcdo.exchange.casts import BY_NAME

WIRES = ("bfloat16", "float16", "int8")
# Numbers of hosts, and sizes: aligned and not, smaller than a block, and larger.
CASES = (
    (3, 7, "float32"), (3, 129, "float64"), (2, 160, "float32"), (2, 1024, "float32"),
)  # fmt: skip


def _hosts(
    count: int, wire: str, dtype: str = "float32", size: int = 0, error_feedback: bool = False
) -> Rehearsal:
    exchange = dataclasses.replace(BY_NAME[wire], error_feedback=error_feedback)
    return Rehearsal(exchange, [(size,)], count, dtype)


def _step(hosts: Rehearsal, values: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    [total] = hosts.step([[one] for one in values])
    return total


def _exact(values: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    return np.asarray(np.sum(values, 0, np.float64))


class SharesTest(tf.test.TestCase, parameterized.TestCase):
    def check_bound(self, hosts: Rehearsal, wire: str, values: Sequence[np.ndarray]) -> np.ndarray:
        """Asserts the bound of the error; returns the errors as parts of it."""
        result = _step(hosts, values)
        flat = np.stack(values)
        if wire == "int8":
            _, block = BY_NAME[wire].layout(flat.shape[1], hosts.hosts)
            bound = block_error_bound(flat, hosts.hosts, block)
        else:
            magnitudes = np.sum(np.abs(flat), 0)
            bound = error_bound(magnitudes, 1, hosts.hosts, wire, tf.as_dtype(flat.dtype))
        error = np.abs(np.ravel(result) - _exact(flat)) / bound
        self.assertLessEqual(np.max(error), 1)
        return error

    @parameterized.parameters(*zip(WIRES, CASES), ("int8", CASES[0]), ("float16", CASES[3]))
    def test_within_the_bound_and_alike(self, wire, case):
        count, size, dtype = case
        hosts = _hosts(count, wire, dtype, size)
        generator = np.random.default_rng(count)
        values = [generator.normal(size=size).astype(dtype) for _ in range(count)]
        error = self.check_bound(hosts, wire, values)
        self.assertGreater(np.max(error), 0.1)  # It is cast, and the bound is not far away.

    @parameterized.parameters(1e-45, 1.2e-38, 1e-37, 3.3e38 / 3)
    def test_int8_of_tiny_and_huge_blocks(self, magnitude):
        generator = np.random.default_rng(0)
        drawn = generator.uniform(-1, 1, (3, 1000)) * magnitude
        # A large block beside it changes nothing.
        drawn[:, 600:] = generator.normal(size=(3, 400))
        hosts = _hosts(3, "int8", size=1000)
        values = list(drawn.astype(np.float32))
        self.check_bound(hosts, "int8", values)

    def test_int8_of_zeros_is_exact(self):
        values = [np.zeros(2000, np.float32)] * 2
        total = _step(_hosts(2, "int8", size=2000), values)
        self.assertAllEqual(total, values[0])

    @parameterized.parameters(np.nan, -np.inf)
    def test_int8_of_a_block_that_is_not_finite(self, number):
        values = [np.ones(4096, np.float32), np.ones(4096, np.float32)]
        values[1][2500] = number
        result = _step(_hosts(2, "int8", size=4096), values)
        start = 2500 // 256 * 256
        self.assertAllEqual(np.isnan(result), np.arange(4096) // 256 == 2500 // 256)
        finite = np.delete(result, np.arange(start, start + 256))
        self.assertAllClose(finite, np.full(4096 - 256, 2.0), rtol=1e-2)

    @parameterized.parameters(("bfloat16", 256.0), ("float16", 2048.0))
    def test_small_terms_are_not_swallowed(self, wire, large):
        """Added in 16 bits, a sum of this size stays what it is when 1 is added."""
        values = [np.full([9], one, np.float32) for one in (large, 1.0, 1.0, 1.0, 1.0)]
        total = _step(_hosts(5, wire, size=9), values)
        self.assertAllEqual(np.full([9], large + 4.0), total)


class FeedbackTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*[(wire, 900) for wire in WIRES], ("int8", 1))
    def test_what_casts_lose_comes_in_later_steps(self, wire, size):
        """Over all steps only what the last one has lost is missing, of both casts."""
        generator = np.random.default_rng(1)
        hosts = _hosts(3, wire, size=size, error_feedback=True)
        # Equal steps, so that without feedback each loses the same.
        steps = np.stack([generator.normal(size=(3, size)).astype(np.float32)] * 16)
        total = np.sum([_step(hosts, values) for values in steps], 0, np.float64)
        exact = np.sum(steps, (0, 1), np.float64)
        roundoff = rounding.ROUNDOFF[wire]
        largest = np.max(np.abs(steps), (0, 2)).sum()
        # Residuals of both casts, and float32's own rounding.
        bound = 2 * roundoff / (1 - roundoff) ** 2 * largest + 16 * 2.0**-22 * largest
        self.assertLessEqual(np.max(np.abs(total - exact)), bound)
        without = _hosts(3, wire, size=size)
        lost = np.sum([_step(without, values) for values in steps], 0, np.float64) - exact
        if size > 1:
            self.assertGreater(np.max(np.abs(lost)), bound)

    def test_a_step_that_is_not_finite_leaves_the_errors(self):
        hosts = _hosts(2, "int8", size=600, error_feedback=True)
        _step(hosts, np.random.default_rng(3).normal(size=(2, 600)).astype(np.float32))
        before = [dict(state) for state in hosts.states]
        _step(hosts, np.full((2, 600), np.nan, np.float32))
        for one, other in zip(before, hosts.states, strict=True):
            for name, kept in one.items():
                self.assertGreater(np.max(np.abs(kept)), 0)
                self.assertAllEqual(kept, other[name])


if __name__ == "__main__":
    tf.test.main()
