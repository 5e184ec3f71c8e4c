"""The interpreter: plans of every kind run, along the edges of their trees and no others."""

from __future__ import annotations

from typing import Any

import graph_testing
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from graph_testing import TREES, edges_both_ways, one_pack

import tfcdo
from tfcdo import topology
from tfcdo.execute import copy_trees, interpreter
from tfcdo.plan.copy_tree import CopyTree, chain, star
from tfcdo.plan.plan import FusedTensor, Pack, Plan, RootStep, Slice, ValueSpec


def values_on(count: int, *shapes: tuple[int, ...]) -> list[list[tf.Tensor]]:
    """One value per shape, on each device: `[value][device]`."""
    return [
        list(tu.per_replica([tu.numbers(s, tf.float32, 10 * i + r) for r in range(count)]).values)
        for i, s in enumerate(shapes)
    ]


class TreesTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    """Each pack is reduced up its tree, takes the root step, and is broadcast down."""

    def run_both_ways(self, plan: Plan, values: Any) -> tuple[tf.Graph, Any]:
        """Runs a plan eagerly and in a function; returns the graph, and the eager results."""
        names = tu.device_names(len(plan.nodes))

        @tf.function(autograph=False)
        def run(*flat: tf.Tensor) -> Any:
            own = [[tu.place(v, name) for v, name in zip(value, names)] for value in flat]
            return interpreter.run(plan, own, names, interpreter.Runtime())

        results = interpreter.run(plan, values, names, interpreter.Runtime())
        for name, per_node in zip(names, zip(*results, strict=True), strict=True):
            self.assertContainsSubset({r.device for r in per_node if r is not None}, {name})
        traced = run(*values)
        for mine, other in zip(tf.nest.flatten(results), tf.nest.flatten(traced), strict=True):
            self.assertAllEqual(mine, other)
        return run.get_concrete_function(*values).graph, results

    @parameterized.parameters(*TREES)
    def test_means(self, tree):
        count = tree.num_devices
        values = values_on(count, (3,), ())
        specs = [ValueSpec("float32", shape) for shape in ((3,), ())]
        plan = one_pack(tree, *specs, root=RootStep(divide=count))
        graph, results = self.run_both_ways(plan, values)
        for own, result in zip(values, results, strict=True):
            self.assert_exact(result[0], tu.oracle(tu.MEAN, own), tf.float32)
            self.assert_bitwise_equal(result)
        names = tu.device_names(count)
        copied = graph_testing.copied_bytes(graph, names)
        self.assertEqual(dict.fromkeys(edges_both_ways(tree), 16), copied)
        ops = [(op.type, op.device) for op in graph.get_operations()]
        adding = [("AddN", names[node]) for node in range(count) if tree.children[node]]
        expected = 2 * [*adding, ("RealDiv", names[tree.root])]
        self.assertCountEqual(expected, [op for op in ops if op[0] in ("AddN", "RealDiv")])

    @parameterized.parameters(*TREES[1:])
    def test_gathers(self, tree):
        count = tree.num_devices
        values = [
            [tf.fill([rank % 3, *shape], rank) for rank in range(count)] for shape in ((2,), ())
        ]
        specs = [ValueSpec("int32", (None, 2)), ValueSpec("int32", (None,))]
        graph, results = self.run_both_ways(one_pack(tree, *specs, kind="concat"), values)
        for own, result in zip(values, results, strict=True):
            for gathered in result:
                self.assertAllEqual(np.concatenate(own), gathered)
        copied = graph_testing.copied_bytes(graph, tu.device_names(count))
        self.assertEqual(edges_both_ways(tree), set(copied))

    @parameterized.parameters(
        # Node 3 has no value. A copy goes only to nodes that get the result, or on the way to them.
        (star(4, 3), {(0, 3), (1, 3), (2, 3)}),
        (chain(4), {(2, 1), (1, 0), (0, 1), (1, 2), (2, 3)}),
        (star(4, 0), {(1, 0), (2, 0), (0, 3)}),
        (CopyTree((None, 0, 1, 0)), {(2, 1), (1, 0), (0, 3)}),
    )
    def test_sums_to_another_device(self, tree, expected):
        values = values_on(3, (5,))
        plan = one_pack(tree, ValueSpec("float32", (5,)), replicas=3, to=(3,))
        names = tu.device_names(4)
        graph, ([*_, result],) = self.run_both_ways(plan, values)
        self.assert_exact(result, tu.oracle(tu.SUM, values[0]), tf.float32)
        self.assertEqual(expected, set(graph_testing.copied_bytes(graph, names)))

    def test_a_window_makes_leaves_wait_for_an_earlier_result(self):
        packs = [
            Pack(
                "sum",
                (FusedTensor((Slice(0, 3 * index, 3 * index + 3),)),),
                "float32",
                chain(3),
                after=after,
            )
            for index, after in enumerate((None, None, 0))
        ]
        plan = Plan(("CPU:0", "CPU:1", "CPU:2"), 3, 1, (ValueSpec("float32", (9,)),), (*packs,))
        values = values_on(3, (9,))
        graph, (result,) = self.run_both_ways(plan, values)
        self.assert_exact(result[0], tu.oracle(tu.SUM, values[0]), tf.float32)
        waiting = {
            (op.device, tuple(one.name for one in op.control_inputs))
            for op in graph.get_operations()
            if op.control_inputs
        }
        # Only the leaf, device 2, and only its part of the last pack.
        self.assertEqual({(tu.device_name(2), ("tfcdo/pack0/broadcast/1to2",))}, waiting)

    def test_parts_are_combined_in_the_order_of_the_devices(self):
        # 0 and 2 send to 1, and 1 to 3.
        tree = CopyTree((1, 3, 1, None))
        scopes, names = [], []

        def combine(parts, name):
            scopes.append(tf.constant(0).device)
            names.append(name)
            return "(" + "+".join(parts) + ")"

        total = copy_trees.reduce_up(tree, [[x] for x in "abcd"], tu.device_names(4), combine)
        self.assertEqual(["((a+b+c)+d)"], total)
        self.assertEqual([tu.device_name(1), tu.device_name(3)], scopes)
        self.assertEqual(["reduce/0and2to1", "reduce/1to3"], names)


class PackingTest(tf.test.TestCase):
    def ops_of(self, num_packs: int, *values: Any) -> list[tf.Operation]:
        """What a batch adds to a graph."""
        machine = topology.preset("nvswitch", 3)
        ops = tfcdo.AllReduceCrossDeviceOps("ring", num_packs, topology=machine)
        return tu.traced_ops(lambda: ops.batch_reduce(tu.SUM, [(v, v) for v in values]))

    def test_sizes_and_shapes_are_of_64_bits(self):
        # TensorFlow 2.21 mixes up values of 32 bits where several threads run eager ops.
        shapes = ((2, 3), (), (0, 4), (7,), (5, 1, 2))
        operations = self.ops_of(2, *map(tu.per_replica, values_on(3, *shapes)))
        sizes = [op.inputs[1] for op in operations if op.type in ("Reshape", "SplitV")]
        self.assertLen({size.op.type for size in sizes}, 1)
        self.assertEqual({tf.int64}, {size.dtype for size in sizes})

    def test_a_value_that_is_sent_alone_is_not_copied(self):
        operations = self.ops_of(1, tu.per_replica([tf.ones([20, 30])] * 3))
        self.assertEqual({"AddN", "Identity", "Placeholder"}, {op.type for op in operations})


class BatchTest(tf.test.TestCase):
    def test_given_trees_are_used_in_turn(self):
        first, second = CopyTree((1, None, 1, 2)), CopyTree((None, 3, 0, 0))
        ops = tfcdo.AllReduceCrossDeviceOps([first, second], num_packs=3)
        value = tu.per_replica([np.arange(6.0) * rank for rank in range(1, 5)])
        self.assertAllEqual([np.arange(6.0) * 10] * 4, ops.reduce(tu.SUM, value, value).values)
        told = ops.explain(((6,),), devices=[f"/cpu:{i}" for i in range(4)])
        self.assertEqual([first, second, first], [pack.tree for pack in told.packs])
        three = tu.per_replica([1.0, 2.0, 3.0])
        with self.assertRaisesRegex(ValueError, "must span the 3 devices"):
            ops.batch_reduce(tu.SUM, [(three, three)])


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

    @parameterized.parameters(tfcdo.HierarchicalCopyAllReduce, tfcdo.ReductionToOneDevice)
    def test_counts_once_outside_a_strategy(self, make):
        shared, ops = tf.constant([1.0, 2.0]), make()
        self.assertAllEqual([1.0, 2.0], ops.reduce(tu.SUM, shared, "/cpu:0"))
        (result,) = tu.call(tu.EAGER, lambda: ops.reduce(tu.SUM, shared, tu.per_replica([0] * 3)))
        self.assertAllEqual([[1.0, 2.0]] * 3, result.values)
        with tf.distribute.MirroredStrategy(tu.device_names(3)).scope():
            self.assertAllEqual([3.0, 6.0], ops.reduce(tu.SUM, shared, "/cpu:0"))
            self.assertAllEqual([1.0, 2.0], ops.reduce(tu.MEAN, shared, "/cpu:0"))


if __name__ == "__main__":
    tf.test.main()
