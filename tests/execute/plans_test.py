"""Schedules for real machines, executed: right, the same bits everywhere, and no copy too many."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo import topology
from tfcdo.plan import algorithms
from tfcdo.plan import batch_plan
from tfcdo.plan import packing

DEVICES = 8
FEW = ("hierarchical_copy", "packed_trees", "ring")
MACHINES = ("dgx1", "dgx1_p100", "nvswitch", "pcie", "shared_memory")


class PlanExecutionTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(machine=MACHINES, algorithm=algorithms.ALGORITHMS)
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

    @parameterized.product(
        machine=MACHINES, algorithm=("hierarchical_copy", "packed_trees", "ring")
    )
    def test_copies_of_a_pack_are_the_edges_of_its_tree(self, machine, algorithm):
        place = topology.preset(machine, DEVICES)
        own = [tu.numbers((4096,), tf.float32, rank) for rank in range(DEVICES)]
        num_packs = 5
        ops = tfcdo.AllReduceCrossDeviceOps(algorithm, num_packs=num_packs, topology=place)
        graph = self._graph(ops, own)
        spec = batch_plan.ValueSpec("float32", 4, (4096,))
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
