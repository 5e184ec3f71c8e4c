"""Batches of every kind, run: results in order, plans as they were made, and what objects say."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo import topology
from tfcdo.execute import batch
from tfcdo.execute.config import AllReduceConfig
from tfcdo.execute.reduction import check_pairs
from tfcdo.plan import algorithms
from tfcdo.plan import packing
from tfcdo.plan.batch_plan import ValueSpec
from tfcdo.plan.copy_tree import chain
from tfcdo.plan.copy_tree import two_level

DEVICES = 8
MACHINES = ("dgx1", "dgx1_p100", "nvswitch", "pcie", "shared_memory")


class BatchTest(tu.ValuesMixin, tf.test.TestCase):
    CONFIG = AllReduceConfig("hierarchical_copy", packing.PackingOptions(1))

    def test_results_keep_the_order_of_the_batch(self):
        """Values that are done together are not neighbours in the batch."""
        arrays = [[np.float32(10 * index + rank) for rank in range(3)] for index in range(6)]
        values = [tu.per_replica(own) for own in arrays]
        elsewhere = tu.per_replica(arrays[5], tu.ALL_DEVICES[4:7])
        row = tu.per_replica(
            [
                tf.IndexedSlices(tf.fill([1, 1], float(rank)), tf.constant([rank]))
                for rank in range(3)
            ]
        )
        pairs: list[Any] = [
            (values[0], values[0]),
            (row, row),
            (values[1], "/cpu:7"),
            (values[2], values[2]),
            (elsewhere, elsewhere),
            (row, "/cpu:6"),
            (values[3], values[3]),
            (values[4], elsewhere),
        ]
        results = batch.reduce(tu.SUM, check_pairs(pairs), [self.CONFIG] * len(pairs))
        self.assertLen(results, len(pairs))
        dense = {0: 0, 2: 1, 3: 2, 4: 5, 6: 3, 7: 4}
        for index, source in dense.items():
            (result,) = tu.call(tu.EAGER, lambda: results[index])  # noqa: B023
            self.assert_exact(result.value, tu.oracle(tu.SUM, arrays[source]), tf.float32)
        for index in 1, 5:
            (result,) = tu.call(tu.EAGER, lambda: results[index])  # noqa: B023
            self.assertAllEqual([0, 1, 2], result.value.indices)

    def test_a_topology_must_fit(self):
        ops = tfcdo.AllReduceCrossDeviceOps("ring", topology=topology.preset("nvswitch", 4))
        with tf.Graph().as_default() as graph:
            own = tu.per_replica([tf.ones([2], tf.int32)] * 2)
            # The first is no all-reduce, so its topology does not matter.
            before = len(graph.get_operations())
            with self.assertRaisesRegex(ValueError, "topology must have .*2; 'nvswitch' has 4"):
                ops.batch_reduce(tu.MEAN, [(own, "/cpu:0"), (own, own)])
            self.assertLen(graph.get_operations(), before)


class SharedValueTest(tf.test.TestCase, parameterized.TestCase):
    """A value that is one and the same object on all replicas counts once for each of them."""

    @parameterized.product(
        make=(tfcdo.HierarchicalCopyAllReduce, tfcdo.ReductionToOneDevice), count=(1, 3, 4)
    )
    def test_a_captured_tensor(self, make, count):
        strategy = tf.distribute.MirroredStrategy(tu.device_names(count), cross_device_ops=make())
        shared = tf.constant([1.0, 2.0])

        def reduce(op: tf.distribute.ReduceOp) -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce(op, shared)

        for op, expected in ((tu.SUM, [1.0 * count, 2.0 * count]), (tu.MEAN, [1.0, 2.0])):
            run = tf.function(lambda op=op: strategy.run(reduce, (op,)))
            for result in strategy.experimental_local_results(run()):
                self.assertAllEqual(expected, result)

    @parameterized.product(
        make=(tfcdo.HierarchicalCopyAllReduce, tfcdo.ReductionToOneDevice), count=(1, 3)
    )
    def test_an_argument_of_a_traced_function(self, make, count):
        devices = tu.device_names(count)
        strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=make())
        seen = []

        def reduce(x: tf.Tensor) -> tf.Tensor:
            total = tf.distribute.get_replica_context().all_reduce(tu.SUM, x)
            seen.append(total.device)
            return total

        run = tf.function(lambda x: strategy.run(reduce, (x,)), autograph=False)
        for result in strategy.experimental_local_results(run(tf.constant([1.0, 2.0]))):
            self.assertAllEqual([1.0 * count, 2.0 * count], result)
        self.assertCountEqual(devices, seen)

    @parameterized.parameters(tfcdo.HierarchicalCopyAllReduce, tfcdo.ReductionToOneDevice)
    def test_counts_once_outside_a_strategy(self, make):
        shared, ops = tf.constant([1.0, 2.0]), make()
        self.assertAllEqual([1.0, 2.0], ops.reduce(tu.SUM, shared, "/cpu:0"))
        with tf.distribute.MirroredStrategy(tu.device_names(3)).scope():
            self.assertAllEqual([3.0, 6.0], ops.reduce(tu.SUM, shared, "/cpu:0"))
            self.assertAllEqual([1.0, 2.0], ops.reduce(tu.MEAN, shared, "/cpu:0"))


class SlicesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        make=(tfcdo.HierarchicalCopyAllReduce, tfcdo.ReductionToOneDevice),
        shape=((3,), [3], np.array([3])),
        traced=(False, True),
    )
    def test_a_dense_shape_that_is_not_a_tensor(self, make, shape, traced):
        strategy = tf.distribute.MirroredStrategy(tu.device_names(2), cross_device_ops=make())

        def reduce() -> tf.IndexedSlices:
            slices = tf.IndexedSlices(tf.ones([2]), tf.constant([0, 1]), dense_shape=shape)
            total = tf.distribute.get_replica_context().all_reduce(tu.SUM, slices)
            self.assertTrue(tf.is_tensor(total.dense_shape))
            return tf.convert_to_tensor(total)

        run = (
            (lambda: strategy.run(reduce))
            if not traced
            else tf.function(lambda: strategy.run(reduce), autograph=False)
        )
        for result in strategy.experimental_local_results(run()):
            self.assertAllEqual([2.0, 2.0, 0.0], result)


class ArgumentsTest(tf.test.TestCase, parameterized.TestCase):
    """Tests of arguments left out, and of what an object says about itself."""

    @parameterized.parameters(
        ("nccl", 1), ("hierarchical_copy", 1), ("ring", None), ("shuffle", None), ("auto", None)
    )
    def test_num_packs_left_out(self, algorithm, expected):
        place = topology.preset("dgx1")
        default = tfcdo.AllReduceCrossDeviceOps(algorithm, topology=place)
        given = tfcdo.AllReduceCrossDeviceOps(algorithm, expected, topology=place)
        self.assertEqual(repr(given), repr(default))
        shapes = [(40_000_000,)]
        self.assertEqual(
            given.explain(shapes, devices=tu.ALL_DEVICES),
            default.explain(shapes, devices=tu.ALL_DEVICES),
        )

    def test_auto_is_auto_all_reduce_and_a_ring_is_a_ring(self):
        place, shapes = topology.preset("dgx1"), [(25_000_000,)]
        auto = tfcdo.AllReduceCrossDeviceOps("auto", topology=place).explain(
            shapes, devices=tu.ALL_DEVICES
        )
        same = tfcdo.AutoAllReduce(topology=place).explain(shapes, devices=tu.ALL_DEVICES)
        self.assertEqual(same.packs, auto.packs)
        self.assertGreater(auto.num_packs, 1)
        ring = tfcdo.AllReduceCrossDeviceOps("ring").explain([(800,)], devices=tu.ALL_DEVICES)
        self.assertEqual([chain(8, root) for root in range(8)], [p.tree for p in ring.packs])
        # Each device but one sends each of the 8 packs once up and once down, to its neighbours.
        self.assertLen(ring.bytes_by_link, 16)
        self.assertEqual({400 * 7}, set(ring.bytes_by_link.values()))

    @parameterized.parameters("hierarchical_copy", "ring", "auto")
    def test_nccl_is_required_of_nccl_only(self, algorithm):
        with self.assertRaisesRegex(ValueError, f"require_nccl must .*{algorithm}"):
            tfcdo.AllReduceCrossDeviceOps(algorithm, require_nccl=True)

    @parameterized.parameters(
        (
            lambda: tfcdo.HierarchicalCopyAllReduce(2),
            "HierarchicalCopyAllReduce(num_packs=2, topology=None)",
        ),
        (
            lambda: tfcdo.NcclAllReduce(0),
            "NcclAllReduce(num_packs=0, topology=None, require_nccl=False)",
        ),
        (
            lambda: tfcdo.AutoAllReduce(topology=topology.preset("dgx1")),
            "AutoAllReduce(topology='dgx1', plan=None, nccl=True)",
        ),
        (
            lambda: tfcdo.ReductionToOneDevice("/cpu:1"),
            "ReductionToOneDevice(reduce_to_device='/cpu:1', accumulation_fn=None)",
        ),
        (
            lambda: tfcdo.AllReduceCrossDeviceOps("ring", agg_small_grads_max_bytes=7),
            "AllReduceCrossDeviceOps(all_reduce_alg='ring', num_packs=None, "
            "agg_small_grads_max_bytes=7, agg_small_grads_max_group=10, topology=None, "
            "require_nccl=False)",
        ),
    )
    def test_repr(self, make, expected):
        self.assertEqual(expected, repr(make()))


class ExplainTest(tf.test.TestCase, parameterized.TestCase):
    SHAPES = ((100,), (5, 10), ())

    def explain(self, ops: Any, count: int = 3, **kwargs: Any) -> Any:
        return ops.explain(self.SHAPES, devices=[f"/cpu:{i}" for i in range(count)], **kwargs)

    def test_copy_trees(self):
        told = self.explain(tfcdo.HierarchicalCopyAllReduce(num_packs=2), dtype=tf.float64)
        self.assertEqual(tu.device_names(3), told.devices)
        self.assertEqual("hierarchical_copy", told.algorithm)
        self.assertEqual([600, 608], [pack.num_bytes for pack in told.packs])
        self.assertEqual([two_level(3, 0), two_level(3, 1)], [pack.tree for pack in told.packs])
        # Up and down: 600 bytes between 0 and each of the others, 608 between 1 and each of them.
        expected = {(0, 1): 1208, (1, 0): 1208, (0, 2): 600, (2, 0): 600, (1, 2): 608, (2, 1): 608}
        self.assertEqual(expected, told.bytes_by_link)
        text = str(told)
        for part in (
            "HierarchicalCopyAllReduce(num_packs=2, topology=None) on 3 devices",
            "because it was asked for; the topology 'shared_memory' was detected",
            "pack 1: 608 bytes of 3 values in 1 tensor along 1(0, 2)",
            "1,208 bytes on each of 2 links: 0 -> 1, 1 -> 0",
            "2 AddN",
        ):
            self.assertIn(part, text)
        self.assertTrue(text.isascii())

    @parameterized.parameters(
        tfcdo.HierarchicalCopyAllReduce,
        tfcdo.AutoAllReduce,
        tfcdo.ReductionToOneDevice,
        lambda: tfcdo.ReductionToOneDevice("/cpu:5"),
        lambda: tfcdo.AllReduceCrossDeviceOps("shuffle"),
    )
    def test_counts_the_ops_of_the_graph(self, make):
        ops = make()
        told = self.explain(ops)

        @tf.function(autograph=False)
        def reduce() -> list[tf.Tensor]:
            values = [tu.per_replica([tf.zeros(shape)] * 3) for shape in self.SHAPES]
            before.extend(tf.compat.v1.get_default_graph().get_operations())
            results = ops.batch_reduce(tu.SUM, [(value, value) for value in values])
            after.extend(tf.compat.v1.get_default_graph().get_operations())
            return [result.values[0] for result in results]

        before: list[tf.Operation] = []
        after: list[tf.Operation] = []
        reduce.get_concrete_function()
        self.assertLen(after[len(before) :], told.num_graph_ops)
        self.assertIn(f"{told.num_graph_ops:,} graph ops", str(told))

    def test_reasons(self):
        for ops, algorithm, reason in (
            (tfcdo.AutoAllReduce(), "one_device", "auto found it fastest for 604 bytes"),
            (tfcdo.ReductionToOneDevice("/cpu:1"), "one_device", "summed on .*CPU:1"),
            (tfcdo.ReductionToOneDevice("/cpu:7"), "one device", "reduce_to_device is .*CPU:7"),
            (tfcdo.ReductionToOneDevice(None, tf.add_n), "one device", "accumulation_fn .*CPU:0"),
        ):
            told = self.explain(ops)
            self.assertEqual(algorithm, told.algorithm)
            self.assertRegex(told.reason, reason)
        with tu.kernels_for():
            told = self.explain(tfcdo.NcclAllReduce())
            self.assertEqual("hierarchical_copy", told.algorithm)
            self.assertRegex(told.reason, "NCCL cannot run: no NcclAllReduce kernel")
            with self.assertRaisesRegex(RuntimeError, "require_nccl"):
                self.explain(tfcdo.NcclAllReduce(require_nccl=True))
        with tu.kernels_for("CPU"):
            told = self.explain(tfcdo.NcclAllReduce(3))
            self.assertEqual("NCCL", told.algorithm)
            self.assertEqual([None] * 3, [pack.tree for pack in told.packs])
            self.assertEqual(9, told.num_ops["NcclAllReduce"])
            self.assertEmpty(told.bytes_by_link)

    @parameterized.parameters((15_000, 1), (18_000, 3))
    def test_what_costs_more_to_concatenate_than_an_op_travels_alone(self, size, num_tensors):
        # On a CPU, an op costs what it takes to pass over 65 kB.
        told = tfcdo.HierarchicalCopyAllReduce().explain([(size,)] * 3, devices=tu.device_names(2))
        (pack,) = told.packs
        self.assertEqual(num_tensors, pack.num_tensors)
        self.assertEqual(num_tensors, told.num_ops["AddN"])

    def test_the_strategy_s_devices_by_default(self):
        ops = tfcdo.HierarchicalCopyAllReduce()
        with tf.distribute.MirroredStrategy(["/cpu:1", "/cpu:4"], cross_device_ops=ops).scope():
            told = ops.explain([(2,)])
        self.assertEqual((tu.device_name(1), tu.device_name(4)), told.devices)
        # Another test file of this process may have asked for more devices than this one.
        every_device = tu.device_names(len(tf.config.list_logical_devices("CPU")))
        self.assertEqual(every_device, ops.explain([(2,)]).devices)

    def test_bad_input(self):
        ops = tfcdo.HierarchicalCopyAllReduce()
        with self.assertRaisesRegex(ValueError, r"shapes\[1\] must be fully known; got \(None,"):
            ops.explain([(2,), (None, 3)])
        with self.assertRaisesRegex(TypeError, "shapes must be a list .* of each value; got 100"):
            ops.explain(cast(Any, 100))
        with self.assertRaisesRegex(ValueError, "devices must be a list"):
            ops.explain([(2,)], devices=[])
        with self.assertRaisesRegex(ValueError, "each of devices must .*nonsense"):
            ops.explain([(2,)], devices=["/cpu:0", "nonsense"])
        with self.assertRaisesRegex(ValueError, "adds; got string"):
            ops.explain([(2,)], tf.string, ["/cpu:0", "/cpu:1"])
        self.assertEqual("nothing", ops.explain([]).algorithm)


class PlanExecutionTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    """Schedules for real machines: right, the same bits everywhere, and no copy too many."""

    @parameterized.parameters(
        *itertools.product(MACHINES, ("packed_trees", "auto")),
        # Their trees are the same on every machine.
        *itertools.product(MACHINES[:1], algorithms.CLASSICS),
    )
    def test_sums_on_eight_devices(self, machine, algorithm):
        own = [tu.numbers((61, 7), tf.float32, rank) for rank in range(DEVICES)]
        other = [tu.numbers((5,), tf.int64, rank) for rank in range(DEVICES)]
        ops = tfcdo.AllReduceCrossDeviceOps(
            algorithm, num_packs=11, topology=topology.preset(machine, DEVICES)
        )
        values = [tu.per_replica(own), tu.per_replica(other)]
        for mode in (tu.EAGER, tu.FUNCTION):
            results = tu.all_reduce(ops, tu.SUM, values, mode)
            for arrays, result in zip((own, other), results, strict=True):
                self.assert_exact(
                    result.value, tu.oracle(tu.SUM, arrays), tf.as_dtype(arrays[0].dtype)
                )
                self.assert_bitwise_equal(result.values)

    @parameterized.parameters("dgx1", "nvswitch", "pcie")
    def test_auto_all_reduce_runs_the_schedule_of_its_topology(self, machine):
        place = topology.preset(machine, DEVICES)
        own = [tu.numbers((4096,), tf.float32, rank) for rank in range(DEVICES)]
        graph = self._graph(tfcdo.AutoAllReduce(topology=place), own)
        schedule = algorithms.make_schedule("auto", place, 4 * 4096)
        # One sum is formed on each device that has children, and that is all that is ever added.
        inner = sum(sum(map(bool, pack.tree.children)) for pack in schedule.packs)
        self.assertEqual(inner, sum(op.type == "AddN" for op in graph.get_operations()))

    @parameterized.parameters(
        *itertools.product(MACHINES, ("packed_trees",)),
        *itertools.product(MACHINES[:1], ("hierarchical_copy", "ring")),
    )
    def test_copies_of_a_pack_are_the_edges_of_its_tree(self, machine, algorithm):
        place = topology.preset(machine, DEVICES)
        own = [tu.numbers((4096,), tf.float32, rank) for rank in range(DEVICES)]
        num_packs = 5
        ops = tfcdo.AllReduceCrossDeviceOps(algorithm, num_packs=num_packs, topology=place)
        graph = self._graph(ops, own)
        spec = ValueSpec("float32", 4, (4096,))
        plan = packing.plan_batch((spec,), packing.PackingOptions(num_packs), algorithm, place)
        edges = sorted((child, parent) for pack in plan.packs for child, parent in pack.tree.edges)
        up, down = self._copies(graph)
        self.assertEqual(edges, up)
        self.assertEqual(sorted((parent, child) for child, parent in edges), down)
        self.assertLen(up, num_packs * (DEVICES - 1))

    def _graph(self, ops: tf.distribute.CrossDeviceOps, own: list[np.ndarray]) -> tf.Graph:
        """The graph of an all-reduce, its values made on their devices."""

        @tf.function(autograph=False)
        def reduce() -> list[tf.Tensor]:
            value = tu.per_replica(own)
            return list(ops.batch_reduce(tu.SUM, [(value, value)])[0].values)

        for result in reduce():
            np.testing.assert_array_equal(tu.oracle(tu.SUM, own), result)
        return reduce.get_concrete_function().graph

    def _copies(self, graph: tf.Graph) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The pairs of devices that a tensor goes between: into a sum, and of a result."""
        index = {name: rank for rank, name in enumerate(tu.ALL_DEVICES)}
        up: list[tuple[int, int]] = []
        down: list[tuple[int, int]] = []
        for op in graph.get_operations():
            for tensor in op.inputs:
                source, target = index.get(tensor.device), index.get(op.device)
                if source is not None and target is not None and source != target:
                    (up if op.type == "AddN" else down).append((source, target))
        return sorted(up), sorted(down)


if __name__ == "__main__":
    tf.test.main()
