"""Rows: one after the other, or added by index as rows or tables; numpy in float64 agrees."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo import log

OPS = (tfcdo.HierarchicalCopyAllReduce, tfcdo.ReductionToOneDevice)


def rows_on_each(rows: Any, indices: Sequence[Any], table: Any = None) -> Any:
    return tu.per_replica(
        [
            tf.IndexedSlices(tf.constant(own, tf.float32, [len(own), 1]), each, table)
            for own, each in zip(rows, indices, strict=True)
        ]
    )


def reduce(ops: Any, value: Any) -> Any:
    return tu.all_reduce(ops, tu.SUM, [value])[0].values[-1]


class RowsTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    def test_order_of_the_additions(self):
        """Rows of equal index are added in the order in which they are given, to the last bit."""
        values = np.random.default_rng(0).standard_normal((3, 40), np.float32)
        expected = np.float32(0)
        for number in values.flat:
            expected += number
        value = rows_on_each(values, [tf.zeros(40, tf.int64)] * 3)
        total = reduce(tfcdo.HierarchicalCopyAllReduce(sum_equal_rows=True), value)
        self.assertAllEqual([[expected]], total.values)

    @parameterized.parameters((OPS[0], None), (OPS[1], (4, 1)), (OPS[0], (1000, 1)))
    def test_graphs_of_tensorflow_1(self, make, dense_shape):
        """Where `==` and `!=` of tensors compare Python's objects."""
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            table = None if dense_shape is None else tf.constant(dense_shape)
            indices = [tf.constant([3, 1, 3])] * 3
            value = rows_on_each([[1, 2, rank] for rank in range(3)], indices, table)
            total = reduce(make(sum_equal_rows=True), value)
            found = session.run([total.indices, total.values])
        self.assertAllEqual([1, 3], found[0])
        self.assertAllEqual([[6.0], [6.0]], found[1])

    @parameterized.parameters(
        (tf.float32, tf.int32, True), (tf.bfloat16, tf.int64, False), (tf.int32, tf.int64, True)
    )
    def test_rows_or_tables_as_chosen_when_the_step_runs(self, dtype, index_dtype, knows_shape):
        specs = [tf.TensorSpec([None, 2], dtype), tf.TensorSpec([None], index_dtype)]
        ops = tfcdo.HierarchicalCopyAllReduce(sum_equal_rows=True)

        @tf.function(input_signature=[*specs * 3, tf.TensorSpec([2], tf.int64)], autograph=False)
        def step(*tensors):
            table = tf.constant([6, 2]) if knows_shape else tensors[-1]
            parts = zip(tensors[:-1:2], tensors[1:-1:2], strict=True)
            return reduce(ops, tu.per_replica([tf.IndexedSlices(*part, table) for part in parts]))

        for counts in ((0, 0, 0), (1, 0, 2), (20, 20, 20), (0, 20, 3)):
            rows = [tu.numbers((n, 2), dtype, rank, limit=3) for rank, n in enumerate(counts)]
            indices = [np.random.default_rng(n).integers(0, 6, n) for n in counts]
            parts = [
                each
                for own in zip(rows, indices, strict=True)
                for each in map(tf.constant, own, (dtype, index_dtype))
            ]
            total = step(*parts, tf.constant([6, 2], tf.int64))
            self.assertEqual((dtype, index_dtype), (total.values.dtype, total.indices.dtype))
            self.assertAllEqual(np.unique(np.concatenate(indices)), total.indices)
            everything = tf.IndexedSlices(np.concatenate(rows), np.concatenate(indices))
            self.assertAllEqual(tu.dense(everything, 6), tu.dense(total, 6))

    @parameterized.parameters((OPS[0], 0), (OPS[1], 2))
    def test_indices_of_64_bits_beside_32(self, make, wide):
        indices = [
            tf.constant([2**33, 5], tf.int64) if rank == wide else tf.constant([rank, 5])
            for rank in range(3)
        ]
        value = rows_on_each([[rank, 10] for rank in range(3)], indices)
        (result,) = tu.all_reduce(make(sum_equal_rows=True), tu.SUM, [value])
        expected = {5: 30.0, 2**33: float(wide), **{r: float(r) for r in range(3) if r != wide}}
        for one in result.values:
            self.assertEqual(tf.int64, one.indices.dtype)
            rows = dict(zip(one.indices.numpy().tolist(), one.values.numpy()[:, 0], strict=True))
            self.assertEqual(expected, rows)

    def test_indices_outside_of_the_table(self):
        """Rows keep them, for the optimizer to refuse or ignore; a table has no place for them."""

        def indices_of(indices, sum_equal):
            rows, table = [[1.0] * len(indices)], tf.constant([5, 1])
            value = rows_on_each(rows, [tf.constant(indices)], table)
            return reduce(tfcdo.AutoAllReduce(sum_equal_rows=sum_equal), value).indices

        self.assertAllEqual([7, -1, 0, 0, 0], indices_of([7, -1, 0, 0, 0], False))
        self.assertAllEqual([-1, 7], indices_of([7, -1], True))
        self.assertAllEqual([0], indices_of([-1, -1, -1, -1, 0], True))
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "is out of range"):
            indices_of([7, -1, 0, 0, 0], True)

    def test_rows_that_cannot_become_dense_are_warned_of(self):
        log.warn_once.cache_clear()
        value = rows_on_each([[1.0]] * 2, [tf.constant([2])] * 2)
        with self.assertLogs(level="WARNING") as logs:
            total = reduce(tfcdo.AutoAllReduce(sparse_as_dense=True), value)
        self.assertIn("sparse_as_dense=True", logs.output[0])
        self.assertAllEqual([2, 2], total.indices)

    @parameterized.parameters(False, True)
    def test_only_rows_are_sent(self, sum_equal):
        """A table of a terabyte: dense, it would not fit into memory."""
        shape = tf.constant([2**38, 1], tf.int64)
        value = rows_on_each([[1.0]] * 3, [tf.constant([rank]) for rank in range(3)], shape)
        ops = tfcdo.HierarchicalCopyAllReduce(sum_equal_rows=sum_equal)
        self.assertAllEqual([0, 1, 2], reduce(ops, value).indices)

    @parameterized.parameters(
        (tfcdo.ReductionToOneDevice, {"sum_equal_rows": True}, 4),
        (tfcdo.HierarchicalCopyAllReduce, {"sum_equal_rows": True}, 40),
        (tfcdo.HierarchicalCopyAllReduce, {}, 40),
        (tfcdo.AutoAllReduce, {"sparse_as_dense": True}, 4),
    )
    def test_gradient(self, make, options, most):
        ops, random = make(**options), np.random.default_rng(5)
        indices = [random.integers(0, 6, random.integers(1, most + 1)) for _ in range(3)]
        given = [tf.ones([len(own), 2]) for own in indices]
        weights = [tu.numbers((6, 2), tf.float32, rank) for rank in range(3)]

        @tf.function(autograph=False)
        def gradients(*values):
            parts = [
                tf.IndexedSlices(value, tf.constant(own), tf.constant([6, 2]))
                for value, own in zip(values, indices, strict=True)
            ]
            with tf.GradientTape() as tape:
                tape.watch(values)
                slices = tu.per_replica(parts)
                [results] = ops.batch_reduce(tu.MEAN, [(slices, slices)])
                losses = [
                    tf.reduce_sum(tf.convert_to_tensor(result) * weight)
                    for result, weight in zip(results.values, weights, strict=True)
                ]
            return tape.gradient(losses, values)

        for own, gradient in zip(indices, gradients(*given), strict=True):
            expected = np.asarray(np.sum(weights, 0, np.float64))[own] / 3
            self.assertAllClose(expected, tf.convert_to_tensor(gradient), rtol=1e-6)


if __name__ == "__main__":
    tf.test.main()
