"""Sums of shares between simulated hosts: within the bound, and bitwise the same on all hosts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from wire_bounds import error_bound

from tfcdo.execute import shares
from tfcdo.plan.decide import codec_for

WIRES = ("bfloat16", "float16")
# Numbers of hosts, and shapes: of one tensor and of several, aligned and not, some of them empty.
CASES = ((3, ((7,),)), (2, ((64,),)), (3, ((3, 5), (), (129,), (0, 2))), (1, ((32, 3), (96,))))


def _sums(
    values: Sequence[Sequence[np.ndarray]], wire_dtype: str, knows_shapes: bool
) -> tuple[list[list[np.ndarray]], set[int]]:
    """Sums what hosts hold; returns what each gets, and how many bytes the rows had.

    The hosts run one after the other, as often as there are collectives and once more: each time
    all of them have given what they put into one collective more.
    """
    num_hosts = len(values)
    arrived: list[np.ndarray] = []  # By host; also what all of them gather.
    gathered: list[np.ndarray] = []
    for _ in range(3):
        results, shared, totalled = [], [], []
        for host, own in enumerate(values):
            totals, rows, row = _run(
                own, num_hosts, wire_dtype, knows_shapes, arrived[host:][:1], gathered
            )
            results.append(totals)
            shared.append(rows)
            totalled.append(row)
        arrived = [np.stack([rows[host] for rows in shared]) for host in range(num_hosts)]
        gathered = [np.concatenate(totalled)]
    return results, {rows[0].nbytes for rows in (*shared, *totalled)}


def _run(
    own: Sequence[np.ndarray],
    num_hosts: int,
    wire_dtype: str,
    knows_shapes: bool,
    arrived: Sequence[np.ndarray],
    gathered: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Runs one host; returns its results, and what it puts into the two collectives."""
    sent: list[tf.Tensor] = []

    def collective(known: Sequence[np.ndarray], rows: tf.Tensor) -> tf.Tensor:
        sent.append(rows)
        if not known:
            return tf.zeros([num_hosts, tf.shape(rows)[1]], rows.dtype)
        shape = known[0].shape if knows_shapes else [num_hosts, None]
        return tf.raw_ops.PlaceholderWithDefault(input=tf.constant(known[0]), shape=shape)

    specs = [
        tf.TensorSpec(one.shape if knows_shapes else [None] * one.ndim, one.dtype) for one in own
    ]

    @tf.function(input_signature=specs, autograph=False)
    def reduce(*tensors):
        totals = shares.all_reduce(
            tensors,
            codec_for(wire_dtype, tensors[0].dtype.name),
            num_hosts,
            functools.partial(collective, arrived),
            functools.partial(collective, gathered),
        )
        for total, tensor in zip(totals, tensors, strict=True):
            assert total.shape.as_list() == tensor.shape.as_list(), (total, tensor)
        return totals, sent

    totals, (rows, row) = reduce(*map(tf.constant, own))
    return [total.numpy() for total in totals], rows.numpy(), row.numpy()


class SharesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *[(case, WIRES[i % 2], i < 2) for i, case in enumerate(CASES)],
        (CASES[2], "float16", False),
        (CASES[0], "bfloat16", False),
    )
    def test_within_the_bound_and_alike(self, case, wire_dtype, knows_shapes):
        num_hosts, shapes = case
        dtype = tf.float64 if len(shapes) == 1 else tf.float32
        generator = np.random.default_rng(num_hosts)
        values = [
            [generator.normal(size=shape).astype(dtype.as_numpy_dtype) for shape in shapes]
            for _ in range(num_hosts)
        ]
        results, row_bytes = _sums(values, wire_dtype, knows_shapes)
        for other in results[1:]:
            for one, own in zip(results[0], other, strict=True):
                self.assertEqual(one.tobytes(), own.tobytes())
        exact = [np.sum(parts, 0, np.float64) for parts in zip(*values, strict=True)]
        magnitudes = [np.sum(np.abs(parts), 0) for parts in zip(*values, strict=True)]
        # The scale is that of the pack.
        flat = np.concatenate([np.ravel(one) for one in magnitudes])
        bound = error_bound(flat, 1, num_hosts, wire_dtype, dtype)
        error = np.concatenate(
            [np.ravel(own - one) for own, one in zip(results[0], exact, strict=True)]
        )
        self.assertTrue(np.all(np.abs(error) <= bound), np.max(np.abs(error) / bound))
        if not codec_for(wire_dtype, dtype.name).scale:
            self.assertEqual([0], [size % 64 for size in row_bytes])

    @parameterized.product(wire_dtype=WIRES)
    def test_nothing_at_all(self, wire_dtype):
        """A size that is known only when the step runs may be 0: something has to be sent."""
        empty = [[np.zeros([0], np.float32)]] * 2
        results, row_bytes = _sums(empty, wire_dtype, knows_shapes=False)
        self.assertEqual([(0,)] * 2, [own.shape for [own] in results])
        self.assertGreater(min(row_bytes), 0)


if __name__ == "__main__":
    tf.test.main()
