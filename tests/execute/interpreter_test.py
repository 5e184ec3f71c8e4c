"""The interpreter: copies along the edges of a plan's trees and no others."""

from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo import topology
from tfcdo.execute import interpreter
from tfcdo.plan.copy_tree import CopyTree, binomial, chain, star, two_level
from tfcdo.plan.plan import FusedTensor, Pack, Plan, Slice, ValueSpec


def values_on(count: int, *shapes: tuple[int, ...]) -> list[Any]:
    return [
        tu.per_replica([tu.numbers(shape, tf.float32, 10 * i + rank) for rank in range(count)])
        for i, shape in enumerate(shapes)
    ]


class CopiesTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(star(3, 2), chain(3, 1), binomial(8, 3), two_level(8, 5))
    def test_gathered_values_rows_and_tables_follow_the_edges(self, tree):
        ops = tfcdo.AllReduceCrossDeviceOps([tree], sum_equal_rows=True)
        names = tu.device_names(tree.num_devices)
        edges = {ends for edge in tree.edges for ends in (edge, edge[::-1])}

        def gather() -> Any:
            value = tu.per_replica([tf.fill([rank % 3 + 1, 2], rank) for rank in range(len(names))])
            return ops._gather(value, value, 0).values

        def add_rows(count: int) -> Any:
            # A table of 6 rows has fewer bytes than 20 rows, and more than 2.
            rows = tf.IndexedSlices(tf.ones([count, 2]), tf.range(count) % 6, tf.constant([6, 2]))
            value = tu.per_replica([rows] * len(names))
            both = ops.batch_reduce(tu.SUM, [(value, value)] * 2)
            return [own for result in both for own in result.values]

        for body, as_tables in (
            (gather, False),
            (lambda: add_rows(2), False),
            (lambda: add_rows(20), True),
        ):
            operations = tu.traced_ops(body)
            self.assertEqual(edges, set(tu.copied_bytes(operations, names)))
            self.assertEqual(as_tables, "UnsortedSegmentSum" in {op.type for op in operations})
            self.assertLen([op for op in operations if "broadcast/" in op.name], len(tree.edges))

    def test_a_sum_for_another_device_goes_nowhere_else(self):
        def reduce() -> tf.Tensor:
            [value] = values_on(3, (5,))
            return tfcdo.HierarchicalCopyAllReduce().reduce(tu.SUM, value, "/cpu:3")

        copied = tu.copied_bytes(tu.traced_ops(reduce), tu.device_names(4))
        self.assertEqual({(0, 3), (1, 3), (2, 3)}, set(copied))

    def test_a_window_makes_leaves_wait_for_an_earlier_result(self):
        def pack(index: int, after: int | None) -> Pack:
            part = Slice(0, 3 * index, 3 * index + 3)
            return Pack("sum", (FusedTensor((part,)),), "float32", chain(3), after=after)

        packs = (pack(0, None), pack(1, None), pack(2, 0))
        plan = Plan(("CPU:0", "CPU:1", "CPU:2"), 3, 1, (ValueSpec("float32", (9,)),), packs)
        [value] = values_on(3, (9,))
        run = tu.function(
            lambda: interpreter.run(plan, [value.values], tu.device_names(3), interpreter.Runtime())
        )
        [result] = run()
        self.assert_exact(result[0], tu.oracle(tu.SUM, value.values), tf.float32)
        waiting = {
            (op.device, tuple(one.name for one in op.control_inputs))
            for op in run.get_concrete_function().graph.get_operations()
            if op.control_inputs
        }
        # Only the leaf, device 2, and only its part of the last pack.
        self.assertEqual({(tu.device_name(2), ("tfcdo/pack0/broadcast/1to2",))}, waiting)

    def test_given_trees_are_used_in_turn(self):
        first, second = CopyTree((1, None, 1, 2)), CopyTree((None, 3, 0, 0))
        ops = tfcdo.AllReduceCrossDeviceOps([first, second], num_packs=3)
        value = tu.per_replica([np.arange(6.0) * rank for rank in range(1, 5)])
        self.assertAllEqual([np.arange(6.0) * 10] * 4, ops.reduce(tu.SUM, value, value).values)
        told = ops.explain(((6,),), devices=[f"/cpu:{i}" for i in range(4)])
        self.assertEqual([first, second, first], [pack.tree for pack in told.packs])

    def test_packing(self):
        """One value is not copied; TensorFlow 2.21 mixes up sizes of 32 bits in eager threads."""
        machine = topology.preset("nvswitch", 3)

        def ops_of(num_packs: int, *shapes: tuple[int, ...]) -> list[tf.Operation]:
            values = values_on(3, *shapes)
            ops = tfcdo.AllReduceCrossDeviceOps("ring", num_packs, topology=machine)
            return tu.traced_ops(lambda: ops.batch_reduce(tu.SUM, [(v, v) for v in values]))

        types = {op.type for op in ops_of(1, (20, 30))}
        self.assertEqual({"AddN", "Identity", "Placeholder"}, types)
        packed = ops_of(2, (2, 3), (), (0, 4), (7,), (5, 1, 2))
        sizes = {op.inputs[1].dtype for op in packed if op.type in ("Reshape", "SplitV")}
        self.assertEqual({tf.int64}, sizes)


class SharedValueTest(tf.test.TestCase, parameterized.TestCase):
    """A value that is one and the same object on all replicas counts once for each of them."""

    @parameterized.parameters((tfcdo.HierarchicalCopyAllReduce, 3), (tfcdo.ReductionToOneDevice, 1))
    def test_an_argument_and_a_captured_tensor_of_a_traced_function(self, make, count):
        devices, shared = tu.device_names(count), tf.constant([1.0, 2.0])
        strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=make())
        seen = []

        def reduce(x: tf.Tensor) -> Any:
            context = tf.distribute.get_replica_context()
            total = context.all_reduce(tu.SUM, x)
            seen.append(total.device)
            return total, context.all_reduce(tu.SUM, shared), context.all_reduce(tu.MEAN, shared)

        run = tf.function(lambda x: strategy.run(reduce, (x,)), autograph=False)
        for result in zip(*map(strategy.experimental_local_results, run(shared)), strict=True):
            self.assertAllEqual([[count, 2 * count], [count, 2 * count], [1, 2]], result)
        self.assertCountEqual(devices, seen)

    def test_counts_once_outside_a_strategy(self):
        shared, ops = tf.constant([1.0, 2.0]), tfcdo.HierarchicalCopyAllReduce()
        self.assertAllEqual([1.0, 2.0], ops.reduce(tu.SUM, shared, "/cpu:0"))
        result = ops.reduce(tu.SUM, shared, tu.per_replica([0] * 3))
        self.assertAllEqual([[1.0, 2.0]] * 3, result.values)
        with tf.distribute.MirroredStrategy(tu.device_names(3)).scope():
            self.assertAllEqual([3.0, 6.0], ops.reduce(tu.SUM, shared, "/cpu:0"))
            self.assertAllEqual([1.0, 2.0], ops.reduce(tu.MEAN, shared, "/cpu:0"))


if __name__ == "__main__":
    tf.test.main()
