"""Dealing: the linear program's trees in packs, near the bound without any order."""

from __future__ import annotations

import collections

import plan_testing
from absl.testing import absltest
from absl.testing import parameterized
from drawn_machines import draw_machine

from tfcdo.plan import copy_tree
from tfcdo.plan import dealing
from tfcdo.plan import search
from tfcdo.plan import simulator
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.copy_tree import chain
from tfcdo.plan.copy_tree import star
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.topology.links import Resource
from tfcdo.topology.links import link_name
from tfcdo.topology.links import ordered_pairs
from tfcdo.topology.presets import preset
from tfcdo.topology.routes import Route
from tfcdo.topology.topology import Topology

MB, GB = 10**6, 10**9


class DealTest(parameterized.TestCase):
    def test_longer_ways_get_more_packs(self):
        machine = preset("fully_connected", 4)
        packing = TreePacking((star(4, 0), chain(4, 3)), (1.0, 1.0))
        dealt = dealing.deal(packing, machine, 40)
        # Two copies one after another, and six.
        self.assertEqual(collections.Counter(dealt.trees), {star(4, 0): 10, chain(4, 3): 30})
        carried: dict[CopyTree, float] = dict.fromkeys(packing.trees, 0.0)
        for tree, weight in zip(dealt.trees, dealt.weights, strict=True):
            carried[tree] += weight
        self.assertAlmostEqual(carried[star(4, 0)], 1.0)
        self.assertAlmostEqual(carried[chain(4, 3)], 1.0)
        # They take turns: no part of the packs is of one tree alone.
        self.assertLen(set(dealt.trees[:4]), 2)
        self.assertLen(set(dealt.trees[-4:]), 2)

    def test_each_tree_gets_a_pack(self):
        packing = TreePacking((star(4, 0), star(4, 1)), (1.0, 1e-6))
        for machine in (preset("pcie"), preset("shared_memory", 4)):
            self.assertLen(set(dealing.deal(packing, machine, 5).trees), 2)

    def test_equal_packs_in_proportion(self):
        packing = TreePacking((star(3, 0), star(3, 1), star(3, 2)), (5.0, 3.0, 2.0))
        dealt = dealing.deal_equally(packing, 20)
        self.assertEqual(set(dealt.weights), {1.0})
        counts = [dealt.trees.count(tree) for tree in packing.trees]
        self.assertEqual(counts, [10, 6, 4])
        self.assertLen(dealing.deal_equally(packing, 1).trees, 1)


class MixedTest(absltest.TestCase):
    def test_trees_carry_the_sum_of_their_parts(self):
        first = TreePacking((star(3, 0), star(3, 1)), (0.25, 0.75))
        second = TreePacking((star(3, 1), star(3, 2)), (0.5, 0.5))
        mixed = dealing._mixed([first, second, second])
        self.assertEqual(mixed.trees, (star(3, 0), star(3, 1), star(3, 2)))
        self.assertEqual(mixed.weights, (0.25, 1.75, 1.0))
        few = dealing._mixed([first, second, second], least_part=0.1)
        self.assertEqual(few.trees, (star(3, 1), star(3, 2)))
        self.assertLen(dealing._mixed([first], least_part=2.0).trees, 1)


class SpreadTreesTest(plan_testing.PlanTestCase):
    def ratio(self, machine: Topology, num_bytes: int) -> float:
        seconds = simulator.robust_seconds(search.packed_trees(machine, num_bytes), machine)
        return seconds / lower_bound(machine, num_bytes)

    @parameterized.parameters(((0, 2, 4, 7), 1.12), ((1, 3, 5), 1.08), ((0, 1, 2, 3, 4, 5), 1.4))
    def test_parts_of_a_dgx1(self, devices, ratio):
        self.assertLess(self.ratio(preset("dgx1").subset(devices), GB), ratio)

    @parameterized.parameters((3, 0, 1.1), (5, 0, 1.15), (9, 1, 1.4), (16, 102, 1.5))
    def test_drawn_machines(self, devices, seed, ratio):
        self.assertLess(self.ratio(draw_machine(devices, seed), GB), ratio)

    def test_links_of_long_latency_carry_little(self):
        # All are as fast, but what goes by one of them comes a millisecond later.
        routes = [
            Route(*pair, [Resource(link_name(*pair), 100e9)], latency=1e-3 if 1 not in pair else 0)
            for pair in ordered_pairs(3)
        ]
        found = dealing.spread_trees(Topology.from_routes("triangle", 3, routes), 0)
        assert found is not None
        late = [
            weight
            for tree, weight in zip(found.trees, found.weights, strict=True)
            if any(1 not in edge for edge in tree.edges)
        ]
        self.assertLess(sum(late), 0.3 * sum(found.weights))

    def test_changes_make_it_faster(self):
        machine = preset("dgx1").subset((0, 1, 2, 4))
        judged = []
        for tasks in (0, 40_000):
            found = dealing.spread_trees(machine, tasks)
            assert found is not None
            judged.append(dealing._judged_seconds(found, machine, GB))
        self.assertLess(judged[1], 0.995 * judged[0])

    def test_sizes_share_trees(self):
        machine = draw_machine(4, 1)
        with plan_testing.counted_work() as work:
            search._trees(machine)
            self.assertGreater(work["tasks"], 0)
            search.packed_trees(machine, 100 * MB)
            search.packed_trees(machine, GB)
            again = work["tasks"]
            search._trees(machine)
            self.assertEqual(work["tasks"], again)

    def test_where_copies_take_no_time_there_is_nothing_to_spread(self):
        for devices in (1, 3):
            self.assertIsNone(dealing.spread_trees(preset("shared_memory", devices), 1000))
            self.assertIsNone(dealing.quick_trees(preset("shared_memory", devices)))

    def test_many_devices_root_their_trees_in_the_middle(self):
        machine = preset("pcie", 20)
        found = dealing.quick_trees(machine)
        assert found is not None
        for tree in found.trees:
            longest = max(
                chain_.depth
                for chain_ in (copy_tree.rooted(tree.edges, root) for root in range(20))
            )
            self.assertEqual(tree.depth, (longest + 1) // 2)


if __name__ == "__main__":
    absltest.main()
