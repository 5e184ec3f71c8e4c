"""Sums of shares between simulated hosts: within the bound, and bitwise the same on all hosts."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from wire_bounds import block_error_bound, error_bound

from tfcdo.execute import codec, shares
from tfcdo.execute.codec import PackCodec
from tfcdo.execute.feedback import Residuals
from tfcdo.plan.decide import codec_for

WIRES = ("bfloat16", "float16", "int8")
# Numbers of hosts, and shapes: aligned and not, smaller than a block, and larger.
CASES = (
    (3, (7,), "float32"), (3, (129,), "float64"), (2, (5, 32), "float32"), (2, (4, 256), "float32"),
)  # fmt: skip
_SECONDS = 60.0


class _Hosts:
    """Hosts that are threads of this process.

    Args:
      count: their number.
      wire: the dtype that they send.
      dtype: the dtype of their values.
      error_feedback: whether they keep rounding errors.
    """

    def __init__(
        self, count: int, wire: str, dtype: str = "float32", error_feedback: bool = False
    ) -> None:
        self.count, self._wire, self._dtype = count, wire, dtype
        self.residuals = [Residuals(["/cpu:0"], lambda *tracked: None) for _ in range(count)]
        self.codecs = [
            PackCodec(
                codec_for(wire, dtype, error_feedback),
                tf.as_dtype(dtype),
                own if error_feedback else None,
            )
            for own in self.residuals
        ]
        self.row_bytes: set[int] = set()

    def sum(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns what each host gets for the sum of the values that all hold."""
        results: list[np.ndarray] = [np.zeros(0)] * self.count
        given: list[np.ndarray] = [np.zeros(0)] * self.count
        barrier, errors = threading.Barrier(self.count), []

        def exchange(host: int, rows: np.ndarray) -> list[np.ndarray]:
            given[host] = rows
            self.row_bytes.add(rows[0].nbytes)
            barrier.wait(_SECONDS)
            everybody = list(given)
            barrier.wait(_SECONDS)
            return everybody

        def run(host: int) -> None:
            def all_to_all(rows: tf.Tensor) -> tf.Tensor:
                return tf.constant(np.stack([own[host] for own in exchange(host, rows.numpy())]))

            def gather(row: tf.Tensor) -> tf.Tensor:
                return tf.constant(np.concatenate(exchange(host, row.numpy())))

            try:
                tensor = tf.constant(values[host])
                total = shares.all_reduce(
                    tensor, self.codecs[host], 0, host, self.count, all_to_all, gather
                )
                results[host] = total.numpy()
            except Exception as error:
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=run, args=(host,)) for host in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for other in results[1:]:
            assert other.tobytes() == results[0].tobytes(), (results[0], other)
        assert results[0].shape == values[0].shape
        return results

    def block(self, size: int) -> int:
        """Returns how many values share a scale."""
        return int(self.codecs[0].codec.share_layout(size, self.count)[1])


def _exact(values: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    return np.asarray(np.sum(values, 0, np.float64))


class SharesTest(tf.test.TestCase, parameterized.TestCase):
    def check_bound(self, hosts: _Hosts, wire: str, values: Sequence[np.ndarray]) -> np.ndarray:
        """Asserts the bound of the error; returns the errors as parts of it."""
        [result, *_] = hosts.sum(values)
        flat = np.stack([np.ravel(one) for one in values])
        if wire == "int8":
            bound = block_error_bound(flat, hosts.count, hosts.block(flat.shape[1]))
        else:
            magnitudes = np.sum(np.abs(flat), 0)
            bound = error_bound(magnitudes, 1, hosts.count, wire, tf.as_dtype(flat.dtype))
        error = np.abs(np.ravel(result) - _exact(flat)) / bound
        self.assertLessEqual(np.max(error), 1)
        return error

    @parameterized.product(case=CASES, wire=WIRES)
    def test_within_the_bound_and_alike(self, case, wire):
        count, shape, dtype = case
        hosts = _Hosts(count, wire, dtype)
        generator = np.random.default_rng(count)
        values = [generator.normal(size=shape).astype(dtype) for _ in range(count)]
        error = self.check_bound(hosts, wire, values)
        self.assertGreater(np.max(error), 0.1)  # It is cast, and the bound is not far away.
        spec = hosts.codecs[0].codec
        [num_bytes] = hosts.row_bytes
        self.assertEqual(num_bytes, spec.share_bytes(values[0].size, count, dtype))

    @parameterized.parameters(1e-45, 1.2e-38, 1e-37, 3.3e38 / 3)
    def test_int8_of_tiny_and_huge_blocks(self, magnitude):
        generator = np.random.default_rng(0)
        drawn = generator.uniform(-1, 1, (3, 1000)) * magnitude
        # A large block beside it changes nothing.
        drawn[:, 600:] = generator.normal(size=(3, 400))
        hosts = _Hosts(3, "int8")
        values = list(drawn.astype(np.float32))
        self.check_bound(hosts, "int8", values)

    def test_int8_of_zeros_is_exact(self):
        values = [np.zeros(2000, np.float32)] * 2
        self.assertAllEqual(_Hosts(2, "int8").sum(values)[0], values[0])

    @parameterized.parameters(np.nan, -np.inf)
    def test_int8_of_a_block_that_is_not_finite(self, number):
        values = [np.ones(4096, np.float32), np.ones(4096, np.float32)]
        values[1][2500] = number
        [result, _] = _Hosts(2, "int8").sum(values)
        start = 2500 // 256 * 256
        self.assertAllEqual(np.isnan(result), np.arange(4096) // 256 == 2500 // 256)
        finite = np.delete(result, np.arange(start, start + 256))
        self.assertAllClose(finite, np.full(4096 - 256, 2.0), rtol=1e-2)

    @parameterized.parameters(("bfloat16", 256.0), ("float16", 2048.0))
    def test_small_terms_are_not_swallowed(self, wire, large):
        """Added in 16 bits, a sum of this size stays what it is when 1 is added."""
        values = [np.full([9], one, np.float32) for one in (large, 1.0, 1.0, 1.0, 1.0)]
        for total in _Hosts(5, wire).sum(values):
            self.assertAllEqual(np.full([9], large + 4.0), total)

    @parameterized.product(wire=WIRES, kind=((0, tf.float32), (700, tf.float64)))
    def test_sizes_that_are_not_known(self, wire, kind):
        """One may be 0 when the step runs: something has to be sent."""
        size, dtype = kind
        sent: list[tf.Tensor] = []

        def all_to_all(rows: tf.Tensor) -> tf.Tensor:
            sent.append(rows)
            return rows

        def gather(row: tf.Tensor) -> tf.Tensor:
            sent.append(row)
            return tf.concat([row, row], 0)

        own = PackCodec(codec_for(wire, dtype.name), dtype)

        @tf.function(input_signature=[tf.TensorSpec([None, 1], dtype)], autograph=False)
        def reduce(tensor: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
            return shares.all_reduce(tensor, own, 0, 0, 2, all_to_all, gather), sent

        value = np.random.default_rng(0).normal(size=(size, 1))
        total, rows = reduce(tf.constant(value, dtype))
        self.assertEqual(total.shape, [size, 1])
        # This host has sent itself the other's share, and takes its own sum for the other's.
        share = math.prod(own.codec.share_layout(max(size, 1), 2))
        summed = np.pad(value[:, 0], (0, 2 * share - size)).reshape(2, share).sum(0)
        self.assertAllClose(total[:, 0], np.tile(summed, 2)[:size], rtol=0, atol=0.08)
        for row in rows:
            num_bytes = own.codec.share_bytes(max(size, 1), 2, dtype.name)
            self.assertEqual(row.numpy().nbytes, len(row) * num_bytes)


class FeedbackTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*[(wire, 900) for wire in WIRES], ("int8", 1))
    def test_what_casts_lose_comes_in_later_steps(self, wire, size):
        """Over all steps only what the last one has lost is missing, of both casts."""
        generator = np.random.default_rng(1)
        hosts = _Hosts(3, wire, error_feedback=True)
        # Equal steps, so that without feedback each loses the same.
        steps = np.stack([generator.normal(size=(3, size)).astype(np.float32)] * 30)
        total = np.sum([hosts.sum(list(values))[0] for values in steps], 0, np.float64)
        exact = np.sum(steps, (0, 1), np.float64)
        roundoff = codec.ROUNDOFF[wire]
        largest = np.max(np.abs(steps), (0, 2)).sum()
        # Residuals of both casts, and float32's own rounding.
        bound = 2 * roundoff / (1 - roundoff) ** 2 * largest + 30 * 2.0**-22 * largest
        self.assertLessEqual(np.max(np.abs(total - exact)), bound)
        without = _Hosts(3, wire)
        lost = np.sum([without.sum(list(values))[0] for values in steps], 0, np.float64) - exact
        if size > 1:
            self.assertGreater(np.max(np.abs(lost)), bound)

    def test_a_step_that_is_not_finite_leaves_the_errors(self):
        hosts = _Hosts(2, "int8", error_feedback=True)
        values = list(np.random.default_rng(3).normal(size=(2, 600)).astype(np.float32))
        hosts.sum(values)
        before = [kept.numpy() for own in hosts.residuals for kept in own.variables]
        hosts.sum([np.full(600, np.nan, np.float32)] * 2)
        after = [kept.numpy() for own in hosts.residuals for kept in own.variables]
        for one, other in zip(before, after, strict=True):
            self.assertGreater(np.max(np.abs(one)), 0)
            self.assertAllEqual(one, other)


if __name__ == "__main__":
    tf.test.main()
