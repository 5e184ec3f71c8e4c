"""NCCL by execution: the ops that GPUs would run, on virtual CPU devices, by a kernel for tests.

What would hang on GPUs is an error here: see `nccl_on_cpu`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent import futures
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
from nccl_testing import DTYPES, K, all_reduce, function, nccl, one, packs_of, ranks
from testing_utils import EAGER, FUNCTION, MEAN, SUM

import tfcdo
from tfcdo import log


class EmittedOpsTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    """Tests of what can only be seen in the graph."""

    def trace(self, ops: Any, *values: Sequence[Any]) -> dict[bytes, list[Any]]:
        return packs_of(function(lambda: all_reduce(ops, *values)).get_concrete_function().graph)

    def check_packs(self, packs: dict[bytes, list[Any]], count: int) -> None:
        for nodes in packs.values():
            self.assertCountEqual(tu.device_names(count), [node.device for node in nodes])
            for node in nodes:
                self.assertEqual(b"sum", node.attr["reduction"].s)
                self.assertEqual(count, node.attr["num_devices"].i)
            self.assertLen({node.attr["T"].type for node in nodes}, 1)

    @parameterized.product(count=tuple(range(2, 9)), num_packs=(1, 3))
    def test_one_op_per_device_and_pack(self, count, num_packs):
        packs = self.trace(nccl(num_packs), [tf.ones([5])] * count, [tf.ones([7, 2])] * count)
        self.assertLen(packs, num_packs)
        self.check_packs(packs, count)

    def test_a_pack_is_one_tensor_however_large(self):
        # Along copy trees, values this large would travel alone.
        packs = self.trace(nccl(1), [tf.ones([20_000])] * 3, [tf.ones([30_000])] * 3)
        self.assertLen(packs, 1)
        self.check_packs(packs, 3)

    def test_one_pack_per_value(self):
        packs = self.trace(nccl(0), *[[tf.ones([size])] * 3 for size in (1, 5, 2, 9)])
        self.assertLen(packs, 4)
        self.check_packs(packs, 3)

    def test_packs_of_one_dtype(self):
        packs = self.trace(nccl(), *[[tf.ones([3], dtype)] * 3 for dtype in [*DTYPES, *DTYPES]])
        self.check_packs(packs, 3)
        types = [tf.as_dtype(nodes[0].attr["T"].type) for nodes in packs.values()]
        # 16-bit floats are summed as 32-bit ones.
        expected = [tf.float32, tf.float32, tf.float64, tf.int32, tf.int64]
        self.assertCountEqual(expected, types)

    def test_no_name_is_used_twice(self):
        names: list[bytes] = []
        lock = threading.Lock()
        instances = [nccl(2), nccl(2), tfcdo.AllReduceCrossDeviceOps("nccl", 2, require_nccl=True)]

        def trace(instance: Any) -> None:
            for size in (4, 6):
                packs = self.trace(instance, [tf.ones([size])] * 3, [tf.ones([size])] * 3)
                with lock:
                    names.extend(packs)

        with futures.ThreadPoolExecutor(6) as pool:
            list(pool.map(trace, 4 * instances))
        self.assertLen(names, 12 * 2 * 2)
        self.assertLen(set(names), len(names))

    def test_no_name_is_used_twice_by_retraces_and_repeated_calls(self):
        ops = nccl()
        step = function(lambda own: all_reduce(ops, own) + all_reduce(ops, own))
        names: list[bytes] = []
        for size in (2, 3, 4):
            names += packs_of(step.get_concrete_function([tf.ones([size])] * 3).graph)
        self.assertLen(names, 6)
        self.assertLen(set(names), 6)

    def test_no_name_is_used_twice_in_gradients(self):
        def gradients() -> Any:
            with tf.GradientTape() as outer:
                own = ranks()
                outer.watch(own)
                with tf.GradientTape() as inner:
                    inner.watch(own)
                    loss = tf.add_n([y**2 for y in one(*own)])
                total = tf.add_n(inner.gradient(loss, own))
            return outer.gradient(total, own)

        packs = packs_of(function(gradients).get_concrete_function().graph)
        self.assertGreaterEqual(len(packs), 3)
        self.check_packs(packs, K)

    def test_sums_stay_on_their_devices(self):
        # What TensorFlow runs in the end, seen where it has taken the graph apart by device.
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            own = [tf.compat.v1.placeholder(tf.float32, [3]) for _ in range(K)]
            doubled = []
            for rank, tensor in enumerate(own):
                with tf.device(tu.device_name(rank)):
                    doubled.append(2 * tensor)
            results = []
            for rank, total in enumerate(one(*doubled)):
                with tf.device(tu.device_name(rank)):
                    results.append(tf.reduce_sum(total) > 0)  # Only this leaves the device.
            metadata = tf.compat.v1.RunMetadata()
            session.run(
                results,
                {tensor: np.ones([3]) for tensor in own},
                tf.compat.v1.RunOptions(output_partition_graphs=True),
                metadata,
            )
        nodes = [node for graph in metadata.partition_graphs for node in graph.node]
        self.assertLen([node for node in nodes if node.op == "NcclAllReduce"], K)
        sent = {node.input[0] for node in nodes if node.op == "_Send"}
        fed = {tensor.op.name for tensor in own}
        returned = {tensor.op.name for tensor in results}
        # The rest says no more than that an op has run.
        others = [name for name in sent if "/ctrl/" not in name and not name.startswith("_")]
        self.assertContainsSubset(others, fed | returned)

    @parameterized.parameters(1, 2)
    def test_eager_results_are_where_they_say(self, num_packs):
        (results,) = all_reduce(nccl(num_packs), ranks())
        for rank, result in enumerate(results):
            self.assertEqual(tu.device_name(rank), result.device)
            self.assertEqual(tu.device_name(rank), result.backing_device)


class ResultsTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(count=(2, 3, 8), mode=(EAGER, FUNCTION), reduce_op=(SUM, MEAN))
    def test_every_dtype_on_few_and_many_devices(self, count, mode, reduce_op):
        batch = [
            [tu.numbers(shape, dtype, 10 * index + rank) for rank in range(count)]
            for index, (dtype, shape) in enumerate(
                (dtype, shape) for dtype in DTYPES for shape in ((), (3, 2), (0,))
            )
        ]
        values = [tu.per_replica(own) for own in batch]
        results = tu.all_reduce(nccl(), reduce_op, values, mode)
        for result, own in zip(results, batch, strict=True):
            dtype = tu.result_dtype(reduce_op, tf.as_dtype(own[0].dtype))
            for value in result.values:
                self.assertEqual(dtype, value.dtype)
                # TensorFlow may multiply by the reciprocal of the number of devices.
                tolerance = 0 if reduce_op == SUM else 2.002 * tu.unit_roundoff(dtype)
                np.testing.assert_allclose(
                    tu.exact(value), _rounded(tu.oracle(reduce_op, own), dtype), rtol=tolerance
                )
            self.assert_bitwise_equal(result.values)

    @parameterized.parameters(EAGER, FUNCTION)
    def test_float16_is_summed_in_32_bits_and_rounded_once(self, mode):
        # From 2048 on, float16 has the even numbers only: each 1 would be lost, 7 of them are not.
        own = [np.array([value, -value], np.float16) for value in [2048.0] + 7 * [1.0]]
        (result,) = tu.all_reduce(nccl(), SUM, [tu.per_replica(own)], mode)
        for value in result.values:
            self.assertEqual(tf.float16, value.dtype)
            self.assertAllEqual([2056.0, -2056.0], value)  # 2055, rounded to even.

    @parameterized.product(num_packs=(0, 1, 3, 8), mode=(EAGER, FUNCTION))
    def test_packs_do_not_change_values(self, num_packs, mode):
        shapes = ((5,), (), (2, 3), (40,), (0,), (1,))
        batch = [
            [tu.numbers(shape, dtype, 100 * index + rank) for rank in range(5)]
            for index, shape in enumerate(shapes)
            for dtype in (tf.float32, tf.int64)
        ]
        values = [tu.per_replica(own) for own in batch]
        for result, own in zip(
            tu.all_reduce(nccl(num_packs), SUM, values, mode), batch, strict=True
        ):
            for value in result.values:
                self.assertAllEqual(tu.oracle(SUM, own), tu.exact(value))

    @parameterized.parameters(tf.bfloat16, tf.complex64, tf.int8, tf.uint16)
    def test_other_dtypes_go_by_copy_trees(self, dtype):
        own = [tu.numbers((5,), dtype, rank) % 7 if dtype.is_integer else
               tu.numbers((5,), dtype, rank) for rank in range(3)]  # fmt: skip
        values = [tu.per_replica(own), tu.per_replica([tf.ones([2])] * 3)]
        log.warn_once.cache_clear()
        with mock.patch.object(logging, "warning") as warning:
            for _ in range(3):
                results = tu.all_reduce(tfcdo.NcclAllReduce(), SUM, values)
        self.assert_exact(results[0].value, tu.oracle(SUM, own), dtype)
        self.assertAllEqual([3.0, 3.0], results[1].value)
        warning.assert_called_once()
        self.assertRegex(warning.call_args.args[0] % warning.call_args.args[1:], dtype.name)
        with self.assertRaisesRegex(RuntimeError, f"(?s)require_nccl.*{dtype.name}.*float32"):
            tu.all_reduce(nccl(), SUM, values)

    @parameterized.parameters(EAGER, FUNCTION)
    def test_slices_among_dense_values(self, mode):
        dense = [tu.numbers((4,), tf.float32, rank) for rank in range(3)]
        rows = [
            tf.IndexedSlices(tf.ones([rank + 1, 2]), tf.range(rank + 1), tf.constant([5, 2]))
            for rank in range(3)
        ]
        values = [tu.per_replica(own) for own in (rows, dense, rows, dense)]
        results = tu.all_reduce(nccl(), SUM, values, mode)
        for result in results[0], results[2]:
            for value in result.values:
                self.assertAllEqual([0, 1, 2], value.indices)
                self.assertAllEqual([3, 2, 1, 0, 0], tu.dense(value, 5)[:, 0])
        for result in results[1], results[3]:
            for value in result.values:
                self.assertAllEqual(tu.oracle(SUM, dense), value)

    def test_only_slices(self):
        rows = [tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank])) for rank in range(3)]
        (result,) = tu.all_reduce(nccl(), SUM, [tu.per_replica(rows)])
        self.assertAllEqual([0, 1, 2], result.value.indices)

    def test_shapes_unknown_while_traced(self):
        step = function(
            lambda *own: all_reduce(nccl(3), own, ranks(count=3)),
            input_signature=[tf.TensorSpec([None])] * 3,
        )
        for size in (0, 1, 6):
            results, known = step(*[tf.fill([size], float(rank)) for rank in range(3)])
            for result in results:
                self.assertAllEqual(np.full([size], 3.0), result)
            self.assertAllEqual([[6.0]] * 3, known)

    def test_devices_that_are_not_the_first_and_not_in_order(self):
        devices = [tu.device_name(index) for index in (6, 2, 7)]
        value = tu.per_replica([[1.0], [2.0], [4.0]], devices)
        (result,) = tu.all_reduce(nccl(), SUM, [value])
        self.assert_on(result, devices)
        self.assertAllEqual([[7.0]] * 3, result.values)


def _rounded(exact: np.ndarray, dtype: tf.DType) -> np.ndarray:
    return tu.exact(exact.astype(dtype.as_numpy_dtype))


if __name__ == "__main__":
    tf.test.main()
