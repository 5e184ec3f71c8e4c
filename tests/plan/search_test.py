"""Packed trees: as fast as promised, bundled for known machines, searched for others."""

from __future__ import annotations

import dataclasses
import random
from unittest import mock

import bundle_plans
import plan_testing
from absl.testing import absltest
from absl.testing import parameterized

from tfcdo.plan import algorithms
from tfcdo.plan import annealing
from tfcdo.plan import bundled_plans
from tfcdo.plan import copy_tree
from tfcdo.plan import search
from tfcdo.plan import simulator
from tfcdo.plan.copy_tree import two_level
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.topology.isomorphism import symmetries
from tfcdo.topology.links import Resource
from tfcdo.topology.presets import preset

MB, GB = 10**6, 10**9
DGX1 = preset("dgx1")
# A machine that no plan comes with the package for.
UNKNOWN = preset("pcie", 5)


class RatiosTest(plan_testing.PlanTestCase):
    """Tests of what the project promises: robust times against the bound, with 10 us latency."""

    @parameterized.parameters((MB, 6.2), (25 * MB, 1.56), (100 * MB, 1.15), (GB, 1.04))
    def test_dgx1(self, num_bytes, ratio):
        schedule = algorithms.make_schedule("packed_trees", DGX1, num_bytes)
        bound = 14 / 48 * num_bytes / 25e9
        self.assertLessEqual(simulator.robust_seconds(schedule, DGX1) / bound, ratio)

    @parameterized.parameters(
        ("nvswitch", range(8), 2 * 7 / 8 / 300e9, 1.28, 1.06),
        ("pcie", range(4), 12.5e-3 / 100e6, 1.12, 1.12),
        ("dgx1", (0, 1, 2), 1 / 50e9, 1.18, 1.08),
        ("dgx1", (0, 1, 2, 3, 4), 1 / 50e9, 1.36, 1.14),
    )
    def test_elsewhere(self, name, devices, seconds_per_byte, at_100_mb, at_1_gb):
        machine = preset(name).subset(devices)
        for num_bytes, ratio in ((100 * MB, at_100_mb), (GB, at_1_gb)):
            schedule = algorithms.make_schedule("packed_trees", machine, num_bytes)
            seconds = simulator.robust_seconds(schedule, machine)
            self.assertLessEqual(seconds / (seconds_per_byte * num_bytes), ratio)

    @parameterized.product(
        machine=[("dgx1", (0, 1, 4, 5)), ("pcie", (0, 1, 2, 3, 4, 5))], num_bytes=[MB, 100 * MB]
    )
    def test_a_search_is_as_good_as_the_classics(self, machine, num_bytes):
        topology = preset(machine[0], 8).subset(machine[1])
        seconds = simulator.robust_seconds(search.packed_trees(topology, num_bytes), topology)
        for name in algorithms.CLASSICS:
            classic = algorithms.make_schedule(name, topology, num_bytes)
            # It is made for a size near this one.
            best = simulator.robust_seconds(classic, topology)
            self.assertLessEqual(seconds, 1.02 * best, name)


class SearchTest(plan_testing.PlanTestCase):
    def test_the_same_search_finds_the_same(self):
        found = [search.search(UNKNOWN, 30 * MB) for _ in range(2)]
        self.assertEqual(*found)

    def test_a_size_class_is_searched_once(self):
        with plan_testing.counted_work() as work:
            for num_bytes in (29 * MB, 30 * MB, 31 * MB, 30 * MB):
                schedule = algorithms.make_schedule("packed_trees", UNKNOWN, num_bytes)
                self.assertEqual(schedule.size, num_bytes)
            self.assertEqual(work["searches"], 1)
            algorithms.make_schedule("packed_trees", UNKNOWN, 300 * MB)
            algorithms.make_schedule("packed_trees", UNKNOWN, 30 * MB, num_packs=5)
            algorithms.make_schedule("packed_trees", preset("pcie", 6), 30 * MB)
        self.assertEqual(work["searches"], 4)

    def test_as_many_packs_as_are_asked_for_of_one_size(self):
        machine = DGX1.subset(range(4))  # Five equal packs are not what is fastest here.
        packing = search.search(machine, 25 * MB, num_packs=5)
        self.assertLen(packing.trees, 5)
        self.assertLen(set(packing.weights), 1)
        for topology in (DGX1, machine):
            packs = search.packed_trees(topology, 30 * MB, num_packs=7).packs
            self.assertLen(packs, 7)
            sizes = [pack.size for pack in packs]
            self.assertLessEqual(max(sizes) - min(sizes), 1)

    @parameterized.parameters((1, MB), (5, 0))
    def test_what_takes_no_time_needs_no_search(self, devices, num_bytes):
        with plan_testing.counted_work() as work:
            search.packed_trees(preset("pcie", devices), num_bytes)
        self.assertEmpty(work)

    def test_many_packs_are_searched_by_few(self):
        with plan_testing.counted_work() as work:
            schedule = search.packed_trees(UNKNOWN, 200 * MB, num_packs=1000)
        self.assertLen(schedule.packs, 1000)
        self.assertEqual(work["searches"], 1)
        self.assertLessEqual(work["longest"], 240 * 2 * 4)

    def test_fastest_rejects_empty_input(self):
        with self.assertRaisesRegex(ValueError, "packings must hold at least one"):
            search.fastest([], DGX1, MB)

    @parameterized.parameters(
        ({1: 1.0, 2: 0.995, 4: 1.0}, 1), ({1: 1.0, 2: 0.995, 4: 0.98}, 4), ({4: 0.5, 2: 1.0}, 4)
    )
    def test_more_packs_must_be_worth_it(self, seconds, expected):
        star = TreePacking((copy_tree.star(8),), (1.0,))

        def robust_seconds(schedule, *_, **__):
            return seconds[len(schedule.packs)]

        with mock.patch.object(simulator, "robust_seconds", robust_seconds):
            packings = [star.round_robin(count) for count in reversed(seconds)]
            self.assertLen(search.fastest(packings, DGX1, MB).trees, expected)


class BundledPlansTest(plan_testing.PlanTestCase):
    def test_known_machines_need_no_search(self):
        with plan_testing.counted_work() as work:
            for machine in {plan.machine() for plan in bundled_plans.read()}:
                shuffled = list(range(machine.num_devices))
                random.Random(0).shuffle(shuffled)
                for topology in (machine, machine.subset(shuffled)):
                    algorithms.make_schedule("packed_trees", topology, 7 * MB)
        self.assertEqual(work["searches"], 0)

    def test_a_machine_that_only_looks_like_a_preset_is_unknown(self):
        # The same speeds from each to each as nvswitch, but no ports that transfers would share.
        machine = preset("nvswitch")
        wires = tuple(Resource(f"{link.source}-{link.target}", 300e9) for link in machine.links)
        links = tuple(
            dataclasses.replace(link, resources=(index,))
            for index, link in enumerate(machine.links)
        )
        other = dataclasses.replace(machine, resources=wires, links=links)
        self.assertEqual(other.link_kinds, machine.link_kinds)
        self.assertEmpty(bundled_plans.find(other))
        self.assertNotEmpty(bundled_plans.find(machine))

    def test_renumbered_machines_are_as_fast(self):
        order = (5, 2, 7, 0, 3, 6, 1, 4)
        times = [
            simulator.robust_seconds(algorithms.make_schedule("packed_trees", m, 25 * MB), m)
            for m in (DGX1, DGX1.subset(order))
        ]
        self.assertAlmostEqual(times[0], times[1], delta=0.05 * times[0])

    def test_plans_are_what_they_say(self):
        for plan in bundled_plans.read():
            machine = plan.machine()
            packing = TreePacking.from_document(plan, machine.num_devices)
            schedule = packing.schedule(plan.num_bytes)
            robust = simulator.robust_seconds(schedule, machine)
            ratio = robust / lower_bound(machine, plan.num_bytes)
            self.assertAlmostEqual(ratio / plan.robust_ratio, 1, delta=0.01)

    def test_plans_can_be_made_again(self):
        machine = bundle_plans.Machine("nvswitch", 8)
        case = next(
            case
            for case in bundle_plans.EASY_CASES
            if case.machine == machine and case.num_bytes == MB
        )
        with mock.patch.object(annealing, "TASKS_PER_SEARCH", 60_000):
            (plan,) = bundle_plans.entries(case, bundle_plans.solve(case))
        self.assertIn(plan, bundled_plans.read())

    @parameterized.parameters(False, True)
    def test_hard_cases_improve_on_where_they_began(self, rings):
        case = bundle_plans.Case(
            bundle_plans.DGX1, 25 * MB, trees=2, rings=rings, symmetric=True, seeds=2, tasks=3000,
            temperature=0.02, polish_tasks=3000, larger=((GB, 2),),
        )  # fmt: skip
        (size, packing), (larger, copies) = bundle_plans.solve(case)
        self.assertEqual((size, larger), (25 * MB, GB))
        group = symmetries(DGX1)
        start = bundle_plans._start(case, DGX1, group, random.Random(0)).expanded(group)
        self.assertLess(annealing.cost(packing, DGX1, size), annealing.cost(start, DGX1, size))
        self.assertGreaterEqual(len(copies.trees), 8)


class CostTest(parameterized.TestCase):
    STARS = TreePacking(tuple(copy_tree.star(8, root) for root in range(4)), (1.0,) * 4)

    @parameterized.parameters(0.3, 0.6, 0.9, 1.0, 1.1, 2.0)
    def test_gives_up_only_what_costs_more(self, part):
        exact = annealing.cost(self.STARS, DGX1, 25 * MB)
        given_up = annealing.cost(self.STARS, DGX1, 25 * MB, cutoff=part * exact)
        if part >= 1:
            self.assertEqual(given_up, exact)
        else:
            self.assertGreater(given_up, part * exact)

    def test_smooth_is_the_mean_end_of_the_links(self):
        # One link up, and then one link down: the first ends half way.
        machine = preset("nvswitch", 2)
        packing = TreePacking((copy_tree.star(2),), (1.0,))
        whole = 2 * (1e-5 + MB / 300e9)
        for smoothness, part in ((0.0, 1.0), (0.5, 0.875), (1.0, 0.75)):
            own = annealing.cost(packing, machine, MB, robustness=0.0, smoothness=smoothness)
            self.assertAlmostEqual(own / whole, part)

    def test_symmetries_keep_the_links(self):
        found = symmetries(DGX1)
        self.assertLen(set(found), 4)
        for order in found:
            self.assertEqual(DGX1.subset(order).link_kinds, DGX1.link_kinds)

    def test_too_many_symmetries_are_none(self):
        identity = tuple(range(8))
        self.assertEqual(symmetries(preset("nvswitch")), (identity,))
        self.assertEqual(symmetries(DGX1, limit=3), (identity,))
        self.assertLen(symmetries(DGX1, limit=4), 4)


class ImproveTest(parameterized.TestCase):
    def test_one_device_has_nothing_to_improve(self):
        machine = preset("dgx1", 1)
        found = search.search(machine, MB, num_packs=1)
        self.assertEqual(found.trees, (copy_tree.star(1),))
        self.assertEqual(annealing.cost(found, machine, MB, smoothness=1.0), 0.0)

    def test_no_step_makes_more_packs_than_there_may_be(self):
        group = symmetries(DGX1)
        start = TreePacking((copy_tree.star(8),), (1.0,))
        most = 3 * len(group)
        with (
            mock.patch.object(annealing, "MAX_PACKS", most),
            # All steps are as good, so that all are taken.
            mock.patch.object(annealing, "cost", return_value=1.0) as cost,
        ):
            annealing.improve(start, DGX1, MB, group=group, tasks=500_000)
        tried = {len(call.args[0].trees) for call in cost.mock_calls}
        self.assertEqual(tried, {len(group), 2 * len(group), most})

    def test_improves_with_and_without_symmetry(self):
        start = TreePacking(tuple(two_level(8, r) for r in (0, 2)), (1.0, 1.0))
        for group in (None, symmetries(DGX1)):
            expanded = start.expanded(group) if group else start
            found = annealing.improve(start, DGX1, 25 * MB, group=group, tasks=10_000)
            if group:
                found = found.expanded(group)
            before, after = (annealing.cost(f, DGX1, 25 * MB) for f in (expanded, found))
            self.assertLess(after, 0.95 * before)

    def test_equal_weights_stay_equal(self):
        start = TreePacking(tuple(copy_tree.star(8, r) for r in range(5)), (1.0,) * 5)
        found = annealing.improve(start, DGX1, 25 * MB, tasks=5_000, equal_weights=True)
        self.assertEqual(found.weights, start.weights)
        self.assertNotEqual(found.trees, start.trees)

    def test_no_step_leaves_the_machine_s_own_links(self):
        start = TreePacking((two_level(8, 0),), (1.0,))
        found = annealing.improve(start, DGX1, MB, tasks=20_000, temperature=5.0)
        old = set(start.trees[0].edges)
        for tree in found.trees:
            for child, parent in set(tree.edges) - old:
                self.assertFalse(
                    DGX1.link_by_pair[child, parent].via_host and (parent, child) not in old
                )


if __name__ == "__main__":
    absltest.main()
