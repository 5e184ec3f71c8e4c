"""Execution: numerics, the interpreter of copy trees, packs, gathering, one device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo import topology
from tfcdo.execute import copy_trees
from tfcdo.execute import gather
from tfcdo.execute import numerics
from tfcdo.execute import one_device
from tfcdo.execute import packs
from tfcdo.plan import algorithms
from tfcdo.plan import batch_plan
from tfcdo.plan import packing
from tfcdo.plan.copy_tree import CopyTree

# Trees of every kind, of every size.
TREES = [
    tree
    for count in range(1, 9)
    for make in algorithms.CLASSICS.values()
    for tree in make(count)[:: max(1, count // 2)]
]


def held_by(count: int, shape: tuple[int, ...] = (3,)) -> list[tf.Tensor]:
    """One tensor per device, on it."""
    return [
        tu.place(tu.numbers(shape, tf.float32, rank), tu.device_name(rank)) for rank in range(count)
    ]


def crossed_by(graph: tf.Graph, names: Sequence[str]) -> set[tuple[int, ...]]:
    """The pairs of devices that a tensor goes between."""
    crossed = set()
    for op in graph.get_operations():
        for tensor in op.inputs:
            ends = (tensor.op.device, op.device)
            if tensor.op.type != "Placeholder" and all(ends) and ends[0] != ends[1]:
                crossed.add(tuple(map(names.index, ends)))
    return crossed


def both_ways(tree: CopyTree) -> set[tuple[int, ...]]:
    """The edges of a tree, up and down."""
    return {ends for child, parent in tree.edges for ends in ((child, parent), (parent, child))}


class AddTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(dtype=(tf.float16, tf.bfloat16), order=(1, -1))
    def test_16_bit_floats_are_added_in_32(self, dtype, order):
        # In 16 bits, 2048 + 1 (float16) and 256 + 1 (bfloat16) are 2048 and 256 again.
        large = 2048 if dtype == tf.float16 else 256
        values = [tf.constant(value, dtype) for value in [large, 1, 1, 1][::order]]
        total = numerics.add(values)
        self.assertEqual(tf.float32, total.dtype)
        self.assertEqual(large + 3, total.numpy())

    def test_partial_sums_join(self):
        partial = numerics.add([tf.constant(2048, tf.float16), tf.constant(1, tf.float16)])
        total = numerics.add([tf.constant(1, tf.float16), partial])
        self.assertEqual(2050.0, total.numpy())

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


class FinalOpTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (tf.float16, tf.float16),
        (tf.bfloat16, tf.bfloat16),
        (tf.float32, tf.float32),
        (tf.float64, tf.float64),
        (tf.complex64, tf.complex64),
        (tf.int8, tf.float32),
        (tf.int16, tf.float32),
        (tf.int32, tf.float64),
        (tf.int64, tf.float64),
        (tf.uint64, tf.float64),
    )
    def test_mean(self, dtype, expected):
        total = numerics.add([tf.constant(3, dtype), tf.constant(7, dtype)])
        mean = numerics.FinalOp(4)(total, dtype)
        self.assertEqual(expected, mean.dtype)
        self.assertEqual(2.5, mean.numpy())

    @parameterized.parameters(tf.float16, tf.bfloat16, tf.float32, tf.int32, tf.complex64)
    def test_sum(self, dtype):
        total = numerics.add([tf.constant(3, dtype), tf.constant(7, dtype)])
        result = numerics.FinalOp()(total, dtype)
        self.assertEqual(dtype, result.dtype)
        self.assertEqual(10, result.numpy())

    def test_16_bits_are_rounded_after_the_division(self):
        # The sum is beyond float16, the mean is not.
        values = [tf.constant(60000, tf.float16)] * 2
        self.assertEqual(np.inf, numerics.FinalOp()(numerics.add(values), tf.float16).numpy())
        self.assertAllClose(60000, numerics.FinalOp(2)(numerics.add(values), tf.float16))

    def test_mean_over_one_integer_is_a_float(self):
        self.assertEqual(tf.float64, numerics.FinalOp(1)(tf.constant(3), tf.int32).dtype)


class CopyTreesTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*[(tree,) for tree in TREES])
    def test_reduce_pack(self, tree):
        count = tree.num_devices
        held = [list(pair) for pair in zip(held_by(count), held_by(count, ()), strict=True)]
        results = copy_trees.reduce_pack(
            tree, held, tu.device_names(count), numerics.FinalOp(count)
        )
        self.assertLen(results, count)
        for rank, own in enumerate(results):
            for bundle, result in enumerate(own):
                self.assertEqual(tu.device_name(rank), result.device)
                values = [one[bundle] for one in held]
                self.assert_exact(result, tu.oracle(tu.MEAN, values), tf.float32)
        self.assert_bitwise_equal(results)

    @parameterized.parameters(*[(tree,) for tree in TREES])
    def test_travels_along_the_edges_only(self, tree):
        count = tree.num_devices
        names = tu.device_names(count)

        @tf.function(autograph=False)
        def reduce(*own):
            held = [[tu.place(value, name)] for value, name in zip(own, names, strict=True)]
            return copy_trees.reduce_pack(tree, held, names, numerics.FinalOp(count))

        graph = reduce.get_concrete_function(*held_by(count)).graph
        self.assertEqual(both_ways(tree), crossed_by(graph, names))
        sums = [op.device for op in graph.get_operations() if op.type == "AddN"]
        self.assertCountEqual([names[rank] for rank in range(count) if tree.children[rank]], sums)
        self.assertEqual(
            [names[tree.root]],
            [op.device for op in graph.get_operations() if op.type == "RealDiv"],
        )

    def test_what_meets_is_in_the_order_of_the_devices(self):
        # 0 and 2 send to 1, and 1 to 3.
        tree = CopyTree((1, 3, 1, None))
        scopes, names = [], []

        def combine(parts, name):
            scopes.append(tf.constant(0).device)
            names.append(name)
            return "(" + "+".join(parts) + ")"

        total = copy_trees.reduce_up(tree, list("abcd"), tu.device_names(4), combine)
        self.assertEqual("((a+b+c)+d)", total)
        self.assertEqual([tu.device_name(1), tu.device_name(3)], scopes)
        self.assertEqual(["reduce/0and2to1", "reduce/1to3"], names)

    def test_ops_in_a_graph_are_named_after_packs_and_edges(self):
        ops = tfcdo.HierarchicalCopyAllReduce(num_packs=2)
        dense = tu.per_replica([tf.ones([6])] * 3)
        rows = tu.per_replica([tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))] * 3)

        def twice():
            ops.batch_reduce(tu.SUM, [(dense, dense), (rows, rows)])
            ops.reduce(tu.SUM, dense, dense)

        names = {
            op.name: tf.DeviceSpec.from_string(op.device).device_index
            for op in tu.traced_ops(twice)
        }
        for scope in "tfcdo", "tfcdo_2":
            upward = [re.fullmatch(rf"{scope}/pack[01]/reduce/(.+)to\d", name) for name in names]
            children = [child for found in upward if found for child in found[1].split("and")]
            # Each of two packs has a tree of two edges.
            self.assertLen(children, 4)
        for name, device in names.items():
            if found := re.search(r"/(reduce|broadcast|gather)/[\dand]+to(\d)$", name):
                self.assertEqual(int(found[2]), device, name)
        downward = [name for name in names if name.startswith("tfcdo_1/rows0/broadcast/")]
        self.assertLen(downward, 2)

    def test_broadcast_down(self):
        for tree in TREES:
            names = tu.device_names(tree.num_devices)
            tensors = [tu.place([1.0, 2.0], names[tree.root]), tu.place(3, names[tree.root])]
            for name, own in zip(
                names, copy_trees.broadcast_down(tree, tensors, names), strict=True
            ):
                self.assertEqual([name] * 2, [one.device for one in own])
                self.assertAllEqual([1.0, 2.0], own[0])
                self.assertAllEqual(3, own[1])

    def test_nothing_to_copy(self):
        self.assertEqual([], copy_trees.copy([], "/cpu:1"))


class PacksTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    SHAPES = ((2, 3), (), (0, 4), (7,), (2, 3), (5, 1, 2), (1,), (7,))

    def plan(self, how: packing.PackingOptions, machine: str) -> batch_plan.BatchPlan:
        specs = tuple(batch_plan.ValueSpec("float32", 4, shape) for shape in self.SHAPES)
        return packing.plan_batch(specs, how, "ring", topology.preset(machine, 3))

    HOWS = (
        *(packing.PackingOptions(num_packs) for num_packs in (1, 2, 5, 100, 0, None)),
        packing.PackingOptions(0, agg_small_grads_max_bytes=24, agg_small_grads_max_group=3),
        packing.PackingOptions(1, bytes_per_pack=10),
    )

    @parameterized.product(how=HOWS, machine=("shared_memory", "nvswitch"), function=(0, 1))
    def test_what_is_loaded_is_unloaded(self, how, machine, function):
        plan = self.plan(how, machine)
        values = [
            tu.place(tu.numbers(shape, tf.float32, index), "/cpu:2")
            for index, shape in enumerate(self.SHAPES)
        ]

        def round_trip(*values: tf.Tensor) -> list[tf.Tensor]:
            loaded = packs.pack(plan, values, "/cpu:2")
            for pack, tensors in zip(plan.packs, loaded, strict=True):
                self.assertLen(tensors, len(pack.fused_tensors))
            back = packs.unpack(plan, loaded, values, "/cpu:2")
            for tensor, shape in zip(back, self.SHAPES, strict=True):
                self.assertEqual(shape, tensor.shape)
            return back

        call: Any = tf.function(round_trip, autograph=False) if function else round_trip
        for value, back in zip(values, call(*values), strict=True):
            self.assertAllEqual(value, back)

    @parameterized.product(how=HOWS, machine=("shared_memory", "nvswitch"))
    def test_each_pack_is_reduced_once(self, how, machine):
        plan = self.plan(how, machine)
        values = [
            [tu.place(tu.numbers(shape, tf.float32, 10 * rank + index), tu.device_name(rank))
             for index, shape in enumerate(self.SHAPES)]
            for rank in range(3)
        ]  # fmt: skip
        seen = []

        def largest(pack, held):
            seen.append(pack)
            self.assertLen(held, 3)
            return [[tf.reduce_max(tf.stack(own), 0) for own in zip(*held, strict=True)]] * 3

        results = packs.all_reduce(plan, values, tu.device_names(3), largest)
        self.assertEqual(list(range(len(plan.packs))), seen)
        for own in results:
            for result, *given in zip(own, *values, strict=True):
                self.assertAllEqual(np.max(given, axis=0), result)

    @parameterized.parameters("shared_memory", "nvswitch")
    def test_sizes_and_shapes_are_of_64_bits(self, machine):
        # TensorFlow 2.21 mixes up those of 32 bits where several threads run eager ops.
        plan = self.plan(packing.PackingOptions(2), machine)
        values = [tf.ones(shape) for shape in self.SHAPES]
        operations = tu.traced_ops(
            lambda: packs.unpack(plan, packs.pack(plan, values, "/cpu:0"), values, "/cpu:0")
        )
        sizes = [op.inputs[1] for op in operations if op.type in ("Reshape", "SplitV")]
        self.assertLen({size.op.type for size in sizes}, 1)
        self.assertEqual({tf.int64}, {size.dtype for size in sizes})

    def test_a_value_that_travels_alone_is_not_copied(self):
        value = tf.ones([2, 3])
        spec = (batch_plan.ValueSpec("float32", 4, (2, 3)),)
        plan = packing.plan_batch(
            spec, packing.PackingOptions(1), "ring", topology.preset("nvswitch", 3)
        )
        ((loaded,),) = packs.pack(plan, [value], "/cpu:0")
        self.assertIs(value, loaded)


class GatherTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*[(tree,) for tree in TREES[::3]])
    def test_all_gather(self, tree):
        count = tree.num_devices
        names = tu.device_names(count)
        values = [tu.place(np.full([rank % 3, 2], rank), names[rank]) for rank in range(count)]
        counts = [tu.place(tf.fill([rank], rank), names[rank]) for rank in range(count)]
        results = gather.all_gather(tree, list(zip(values, counts, strict=True)), names, 0)
        for name, result in zip(names, results, strict=True):
            for own, gathered in zip((values, counts), result, strict=True):
                self.assertEqual(name, gathered.device)
                self.assertAllEqual(np.concatenate(own), gathered)

    @parameterized.parameters(*[(tree,) for tree in TREES[::3]])
    def test_travels_along_the_edges_only(self, tree):
        names = tu.device_names(tree.num_devices)

        @tf.function(autograph=False)
        def run() -> Any:
            parts = [
                [tu.place(tf.fill([2, 3], float(rank)), name)] for rank, name in enumerate(names)
            ]
            return gather.all_gather(tree, parts, names, 0)

        graph = run.get_concrete_function().graph
        self.assertEqual(both_ways(tree), crossed_by(graph, names))


class OneDeviceTest(tf.test.TestCase):
    def test_reduce_on(self):
        values = held_by(3)
        seen = []

        def accumulate(parts):
            seen.append([part is value for part, value in zip(parts, values, strict=True)])
            return tf.add_n(parts)

        result = one_device.reduce_on(values, "/cpu:5", accumulate, numerics.FinalOp(3))
        self.assertEqual([[True] * 3], seen)
        self.assertEqual(tu.device_name(5), result.device)
        self.assertAllClose(tu.oracle(tu.MEAN, values), result)

    def test_copy_to(self):
        shape = tf.constant([4, 2])
        for value in tf.ones([2]), tf.IndexedSlices(tf.ones([1, 2]), tf.constant([3]), shape):
            copies = one_device.copy_to(value, ["/cpu:1", "/cpu:6"])
            for copy, index in zip(copies, (1, 6), strict=True):
                for given, part in zip(
                    tf.nest.flatten(value, True), tf.nest.flatten(copy, True), strict=True
                ):
                    self.assertEqual(tu.device_name(index), part.device)
                    self.assertAllEqual(given, part)


class OwnTreesTest(tf.test.TestCase):
    TREES = (CopyTree((1, None, 1, 2)), CopyTree((None, 3, 0, 0)))

    def test_packs_travel_along_the_callers_trees_in_turn(self):
        ops = tfcdo.AllReduceCrossDeviceOps(list(self.TREES), num_packs=3)
        value = tu.per_replica([np.arange(6.0) * rank for rank in range(1, 5)])
        self.assertAllEqual(
            [np.arange(6.0) * 10] * 4, ops.batch_reduce(tu.SUM, [(value, value)])[0].values
        )
        told = ops.explain(((6,),), devices=[f"/cpu:{i}" for i in range(4)])
        first, second = self.TREES
        self.assertEqual([first, second, first], [pack.tree for pack in told.packs])

    def test_trees_must_span_the_devices(self):
        value = tu.per_replica([1.0, 2.0, 3.0])
        with self.assertRaisesRegex(ValueError, "must span the 3 devices"):
            tfcdo.AllReduceCrossDeviceOps(self.TREES).batch_reduce(tu.SUM, [(value, value)])
        with self.assertRaisesRegex(ValueError, "does not use NCCL"):
            tfcdo.AllReduceCrossDeviceOps(self.TREES, require_nccl=True)


if __name__ == "__main__":
    tf.test.main()
