"""Rows: one after the other, or added by index as rows or tables; numpy in float64 agrees."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import graph_testing
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from graph_testing import TREES, one_pack

import tfcdo
from tfcdo import log
from tfcdo.execute import interpreter, numerics, rows
from tfcdo.plan.copy_tree import CopyTree, star, two_level
from tfcdo.plan.plan import RootStep, ValueSpec

DTYPES = (
    tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.uint8, tf.int32, tf.int64,
    tf.complex64,
)  # fmt: skip
OPS = (tfcdo.HierarchicalCopyAllReduce, tfcdo.ReductionToOneDevice)


def slices(
    count: int,
    seed: int,
    dtype: tf.DType = tf.float32,
    index_dtype: tf.DType = tf.int64,
    indices: Any = range(6),
) -> tf.IndexedSlices:
    """So many rows of 2 numbers, whose sums are exact, of a table with 6 rows."""
    return tf.IndexedSlices(
        tf.constant(tu.numbers((count, 2), dtype, seed, limit=3)),
        tf.constant(np.random.default_rng(seed).choice(indices, count), index_dtype),
        tf.constant([6, 2], tf.int64),
    )


def slices_on(tree: CopyTree, seed: int = 0, most: int = 4) -> list[tf.IndexedSlices]:
    """Slices on each device of a tree."""
    counts = np.random.default_rng(seed).integers(0, most + 1, tree.num_devices)
    return list(tu.per_replica([slices(n, seed + i) for i, n in enumerate(counts)]).values)


def summed(parts: Sequence[tf.IndexedSlices]) -> tuple[np.ndarray, np.ndarray]:
    """Each index once, sorted, and the exact sum of its rows."""
    indices = np.concatenate([part.indices for part in parts])
    values = np.concatenate([tu.exact(part.values) for part in parts])
    found = np.unique(indices)
    return found, np.array([np.sum(values[indices == each], 0) for each in found]).reshape(-1, 2)


def all_reduce(
    tree: CopyTree,
    values: Sequence[Sequence[tf.IndexedSlices]],
    divide: int | None = None,
    sum_equal: bool = True,
) -> list[list[tf.IndexedSlices]]:
    """Runs a plan with one pack of all values: `[value][device]`."""
    specs = [ValueSpec(own[0].dtype.name, (None, 2), rows=True) for own in values]
    plan = one_pack(
        tree, *specs, kind="rows", root=RootStep(divide=divide), sum_equal_rows=sum_equal
    )
    return interpreter.run(plan, values, tu.device_names(tree.num_devices), interpreter.Runtime())


class AddTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*zip(DTYPES, itertools.cycle((tf.int32, tf.int64))))
    def test_as_numpy(self, dtype, index_dtype):
        far = [-(2**31), -1, 0, 1, 7, 2**31 - 1]
        parts = [slices(n, i, dtype, index_dtype, far) for i, n in enumerate((4, 0, 6, 1))]
        for given in parts, parts[1:2]:
            total = rows.add(given, "/cpu:0")
            indices, expected = summed(given)
            self.assertEqual(index_dtype, total.indices.dtype)
            self.assertEqual(numerics.upcast_dtype(dtype), total.values.dtype)
            self.assertAllEqual(indices, total.indices)
            self.assertAllEqual(expected, tu.exact(total.values))

    def test_order_of_the_additions(self):
        """Rows of equal index are added in the order in which they are given, to the last bit."""
        values = np.random.default_rng(0).standard_normal((3, 40, 1), np.float32)
        slices = [tf.IndexedSlices(tf.constant(own), tf.zeros(40, tf.int64)) for own in values]
        expected = np.float32(0)
        for value in values.flat:
            expected += value
        self.assertAllEqual([[expected]], rows.add(slices, "/cpu:0").values)


def rows_on_each(rows: Sequence[Any], indices: Sequence[Any], table: Any = None) -> Any:
    """A value of `tf.IndexedSlices`, each of some rows of one number."""
    return tu.per_replica(
        [
            tf.IndexedSlices(tf.constant(own, tf.float32, [len(own), 1]), each, table)
            for own, each in zip(rows, indices, strict=True)
        ]
    )


class GraphsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((OPS[0], None), (OPS[1], (4, 1)), (OPS[0], (1000, 1)))
    def test_of_tensorflow_1(self, make, dense_shape):
        """Where `==` and `!=` of tensors compare Python's objects."""
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            table = None if dense_shape is None else tf.constant(dense_shape)
            indices = [tf.constant([3, 1, 3])] * 3
            value = rows_on_each([[1, 2, rank] for rank in range(3)], indices, table)
            ops = make(sum_equal_rows=True)
            total = ops.batch_reduce(tu.SUM, [(value, value)])[0].values[2]
            found = session.run([total.indices, total.values])
        self.assertAllEqual([1, 3], found[0])
        self.assertAllEqual([[6.0], [6.0]], found[1])


class AllReduceTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*zip(TREES[::2], (True, False, True)))
    def test_means_of_several_tables(self, tree, as_tables):
        names = tu.device_names(tree.num_devices)
        # A table of 6 rows has fewer bytes than 20 rows, and more than 2.
        given = [slices_on(tree, seed, most=40 if as_tables else 2) for seed in (1, 2, 3)]
        choices = [rows.table_is_smaller(parts, names) for parts in given]
        self.assertEqual([as_tables] * 3, choices)
        results = all_reduce(tree, given, len(names))
        for parts, result in zip(given, results, strict=True):
            indices, total = summed(parts)
            self.assert_bitwise_equal(result)
            for name, part in zip(names, result, strict=True):
                self.assertEqual([name] * 2, [part.values.device, part.indices.device])
                self.assertAllEqual(indices, part.indices)
                self.assertAllClose(total / len(names), part.values, rtol=1e-6, atol=1e-6)

    @parameterized.parameters(
        (tf.float32, tf.int32, True), (tf.bfloat16, tf.int64, False), (tf.int32, tf.int64, True)
    )
    def test_chosen_when_the_step_runs(self, dtype, index_dtype, knows_shape):
        tree, names = star(3), tu.device_names(3)
        specs = [tf.TensorSpec([None, 2], dtype), tf.TensorSpec([None], index_dtype)]

        @tf.function(input_signature=[*specs * 3, tf.TensorSpec([2], tf.int64)], autograph=False)
        def reduce(*tensors):
            table = tf.constant([6, 2]) if knows_shape else tensors[-1]
            given = [
                tf.IndexedSlices(*tensors[2 * rank : 2 * rank + 2], table) for rank in range(3)
            ]
            self.assertTrue(tf.is_tensor(rows.table_is_smaller(given, names)))
            return all_reduce(tree, [given])[0]

        for counts in ((0, 0, 0), (1, 0, 2), (20, 20, 20), (0, 20, 3)):
            parts = [slices(n, rank, dtype, index_dtype) for rank, n in enumerate(counts)]
            results = reduce(*rows.to_tensors(parts), parts[0].dense_shape)
            indices, expected = summed(parts)
            for result in results:
                self.assertEqual(dtype, result.values.dtype)
                self.assertAllEqual(indices, result.indices)
                self.assertAllEqual(expected, tu.exact(result.values))

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

        def reduce(indices, sum_equal):
            own = tf.IndexedSlices(
                tf.ones([len(indices), 2]), tf.constant(indices), tf.constant([3, 2])
            )
            return all_reduce(two_level(1), [[own]], sum_equal=sum_equal)[0][0]

        self.assertAllEqual([7, -1, 0, 0, 0], reduce([7, -1, 0, 0, 0], False).indices)
        self.assertAllEqual([-1, 7], reduce([7, -1], True).indices)
        self.assertAllEqual([0], reduce([-1, -1, 0, 0, 0], True).indices)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "is out of range"):
            reduce([7, -1, 0, 0, 0], True)

    def test_one_replica_keeps_the_value_itself(self):
        [given] = slices_on(star(1), most=9)
        [[result]] = all_reduce(star(1), [[given]], sum_equal=False)
        self.assertIs(given.values, result.values)

    def test_dense_on_demand(self):
        """As in Horovod; slices without a shape stay rows, and a warning says so."""
        ops = tfcdo.AutoAllReduce(sparse_as_dense=True)
        shaped = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([2, 2]), tf.constant([3, 2]))
        shapeless = tf.IndexedSlices(shaped.values, shaped.indices)
        values = [tu.per_replica([one] * 2) for one in (shaped, shapeless)]
        log.warn_once.cache_clear()
        with self.assertLogs(level="WARNING") as logs:
            dense, sparse = ops.batch_reduce(tu.MEAN, [(value, value) for value in values])
        self.assertIn("sparse_as_dense=True", logs.output[0])
        self.assertAllEqual([[[0, 0], [0, 0], [2, 2]]] * 2, dense.values)
        self.assertAllEqual([2] * 4, sparse.values[0].indices)

    @parameterized.parameters(*zip(TREES[1:4], (2, 40, 2)))
    def test_rows_are_copied_along_the_edges_only(self, tree, most):
        @tf.function(autograph=False)
        def run() -> Any:
            return all_reduce(tree, [slices_on(tree, seed, most) for seed in (1, 2)])

        graph = run.get_concrete_function().graph
        copied = graph_testing.copied_bytes(graph, tu.device_names(tree.num_devices))
        self.assertEqual(graph_testing.edges_both_ways(tree), set(copied))
        # All values go down with one op an edge.
        down = [op for op in graph.get_operations() if "broadcast/" in op.name]
        self.assertLen(down, len(tree.edges))

    def test_only_rows_are_sent(self):
        """A table of a terabyte: dense, it would not fit into memory."""
        shape = tf.constant([2**30, 256], tf.int64)
        own = [tf.IndexedSlices(tf.ones([1, 256]), tf.constant([rank]), shape) for rank in range(3)]
        for sum_equal in (False, True):
            [results] = all_reduce(two_level(3), [own], sum_equal=sum_equal)
            self.assertAllEqual([0, 1, 2], results[2].indices)

    @parameterized.parameters(
        (tfcdo.ReductionToOneDevice, {"sum_equal_rows": True}, 4),
        (tfcdo.HierarchicalCopyAllReduce, {"sum_equal_rows": True}, 40),
        (tfcdo.HierarchicalCopyAllReduce, {}, 40),
        (tfcdo.AutoAllReduce, {"sparse_as_dense": True}, 4),
    )
    def test_gradient(self, make, options, most):
        """Each row gets what all devices' results send back to its index."""
        ops = make(**options)
        given = slices_on(two_level(3), 5, most)
        weights = [tu.numbers((6, 2), tf.float32, rank) for rank in range(len(given))]

        @tf.function(autograph=False)
        def gradients(*values):
            parts = [
                tf.IndexedSlices(value, part.indices, part.dense_shape)
                for value, part in zip(values, given, strict=True)
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

        for part, gradient in zip(given, gradients(*[p.values for p in given]), strict=True):
            expected = np.asarray(np.sum(weights, 0, np.float64))[part.indices.numpy()] / len(given)
            self.assertAllClose(expected, tf.convert_to_tensor(gradient), rtol=1e-6)


if __name__ == "__main__":
    tf.test.main()
