"""Packed trees, as fast as promised on known and drawn machines, and the lower bound of times."""

import itertools
import os
import sys
from unittest import mock

import highspy
import hypothesis
import networkx as nx
import numpy as np
import plan_testing
import scipy.optimize
import testing_utils as tu
import warm_python
from absl.testing import absltest, parameterized
from drawn_machines import draw_buses, draw_machine, draw_slow_link
from planner_table import bandwidth_bound

from tfcdo.plan import algorithms, copy_tree, packed_trees, simulator
from tfcdo.plan.packed_trees import Stream, deal, rings_of
from tfcdo.plan.plan import cut, in_turn
from tfcdo.plan.tree_program import lower_bound_seconds
from tfcdo.topology.links import Resource, Route, ordered_pairs
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

MB, GB = 10**6, 10**9
DGX1 = preset("dgx1")
_PRINT_PLAN = """
from drawn_machines import draw_machine
from tfcdo.plan import packed_trees
packed_trees._TASKS = 500
print(packed_trees.packed_trees(draw_machine(5, 1), 10**8))
"""


class RatiosTest(plan_testing.PlanTestCase):
    tasks_per_search = packed_trees._TASKS

    @parameterized.parameters(
        # Rings; windows and many trees on shared buses; ways between cheapest and shortest.
        (DGX1, {100 * MB: 1.2}),
        (draw_buses(4, 52), {GB: 1.08}),
        (draw_slow_link(4, 52), {GB: 1.07}),
        *tu.nightly(
            (preset("pcie"), {100 * MB: 1.12}),
            (draw_machine(3, 52), {GB: 1.12}),
            (DGX1, {MB: 6.8}),
            (DGX1.subset((5, 2, 7, 0, 3, 6, 1, 4)), {GB: 1.1}),
            (DGX1.subset((0, 1, 2)), {100 * MB: 1.18, GB: 1.08}),
            (preset("nvswitch"), {100 * MB: 1.28}),
            (draw_machine(9, 2), {GB: 1.15}),
            (DGX1.subset((0, 4, 5, 6, 1)), {GB: 1.19}),
        ),
    )
    def test_ratio(self, machine, most):
        for num_bytes, ratio in most.items():
            with plan_testing.counted_work() as work:
                schedule = packed_trees.packed_trees(machine, num_bytes)
            seconds = simulator.robust_seconds(schedule, machine)
            self.assertLessEqual(seconds / bandwidth_bound(machine, num_bytes), ratio, num_bytes)
            self.assertEqual(work["searches"], 1)
            self.assertLessEqual(work["tasks"], 2 * packed_trees._TASKS)
            most_tasks = 2 * packed_trees.MAX_PACKS * 2 * (machine.num_devices - 1)
            self.assertLessEqual(work["longest"], most_tasks)


class SearchTest(plan_testing.PlanTestCase):
    tasks_per_search = 500

    def test_another_process_makes_the_same_plan(self):
        with mock.patch.dict(os.environ, PYTHONHASHSEED="1", PYTHONPATH=os.pathsep.join(sys.path)):
            printed = warm_python.run_cold("-c", _PRINT_PLAN)
        schedule = packed_trees.packed_trees(draw_machine(5, 1), 100 * MB)
        self.assertEqual(printed.stdout.strip(), str(schedule), printed.stderr)

    @parameterized.parameters("packed_trees", "auto")
    def test_a_size_class_is_planned_once(self, algorithm):
        algorithms.make_plan(algorithm, preset("pcie", 3), 32 * MB)
        with plan_testing.counted_work() as work:
            for num_bytes in (31 * MB, 32 * MB, 33 * MB):
                schedule = algorithms.make_plan(algorithm, preset("pcie", 3), num_bytes)
                self.assertEqual(schedule.num_sent_bytes, num_bytes)
            self.assertEqual(work["tasks"], 0)
            algorithms.make_plan(algorithm, preset("pcie", 3), 300 * MB)
            algorithms.make_plan(algorithm, preset("pcie", 3), 32 * MB, num_packs=5)
            algorithms.make_plan(algorithm, preset("pcie", 4), 32 * MB)
        self.assertEqual(work["searches"], 3)

    def test_small_data_gets_trees_chosen_one_by_one(self):
        # Two packs along two trees beat any number of packs along one, and all simple trees.
        trial = packed_trees._Trial(DGX1.subset((0, 1, 3, 7)), MB, None)
        trial.left = 2_000
        packed_trees._try_simple_trees(trial)
        simple = trial.least
        packed_trees._try_few(trial)
        self.assertLess(trial.least, 0.9 * simple)


class StreamsTest(absltest.TestCase):
    def test_rings_are_found_once_in_either_direction(self):
        # All orders of four devices that begin with device 0, and half of them are reversed others.
        edges = rings_of(preset("fully_connected", 4))
        self.assertLen(set(edges), 3)
        self.assertLen(edges, 3)
        self.assertEqual(rings_of(preset("fully_connected", 2)), [])
        # Device 7 has one direct link in this part, so that no ring passes it.
        self.assertEqual(rings_of(DGX1.subset((0, 1, 3, 7))), [])

    def test_windows_count_packs_in_flight(self):
        machine, star = preset("fully_connected", 2), copy_tree.star(2)
        after, seconds = [], []
        for window in (None, 2, 1):
            schedule = deal([Stream(star, 1.0, 4, window)], 4 * MB)
            after.append([pack.after for pack in schedule.packs])
            seconds.append(simulator.simulate(schedule, machine).seconds / 50e-6)
        self.assertEqual(after, [[None] * 4, [None, None, 0, 1], [None, 0, 1, 2]])
        # Up and down, 10 us + 1 MB / 25 GB/s each: two in flight are as fast as all.
        np.testing.assert_allclose(seconds, [5, 5, 8])
        streams = [Stream(star, 1.0, 2, 1), Stream(copy_tree.star(2, 1), 3.0, 4)]
        packs = deal(streams, 800).packs
        self.assertEqual([pack.size for pack in packs], [150, 100, 150, 150, 100, 150])
        self.assertEqual([pack.after for pack in packs], [None, None, None, None, 1, None])
        self.assertEqual([pack.tree.root for pack in packs if pack.tree], [1, 0, 1, 1, 0, 1])
        self.assertEqual(deal(streams, 3).num_sent_bytes, 3)  # Packs without a byte are left out.


def seconds_on_resources(topology: Topology, edges) -> np.ndarray:
    """What a byte up and down these edges costs each resource, added up as plainly as can be."""
    busy = np.zeros(len(topology.resources))
    for pair in (*edges, *(edge[::-1] for edge in edges)):
        busy[[*topology.link_by_pair[pair].resources]] += 1 / topology.bandwidth(*pair)
    return busy


def bound_over_all_trees(topology: Topology) -> float:
    """Seconds per byte, by one linear program that has every spanning tree of the machine."""
    devices = topology.num_devices
    trees = (
        [(0, 1)] if devices == 2 else nx.from_prufer_sequence(list(code)).edges
        for code in itertools.product(range(devices), repeat=devices - 2)
    )
    columns = np.array([seconds_on_resources(topology, tree) for tree in trees]).T * 1e9
    solved = scipy.optimize.linprog(-np.ones(columns.shape[1]), columns, np.ones(len(columns)))
    return -1 / solved.fun / 1e9


class BoundTest(plan_testing.PlanTestCase):
    tasks_per_search = 500

    @parameterized.parameters(
        # Without the links via the host this would be 14/48.
        ("dgx1", range(8), 14 / 48.8 / 25e9),
        ("dgx1", [0], 0.0),
        ("nvswitch", range(40), 2 * 39 / 40 / 300e9),
        ("shared_memory", range(4), 3 / 10e9),
    )
    def test_known_bounds(self, name, devices, per_byte):
        machine = preset(name, None if name == "dgx1" else len(devices)).subset(devices)
        self.assertAlmostEqual(bandwidth_bound(machine, GB) / GB, per_byte, delta=1e-6 * per_byte)

    def test_is_that_of_a_program_over_all_trees(self):
        parts = [DGX1.subset(part) for part in ((1, 3, 5), (0, 2, 4, 7, 5))]
        drawn = [draw_machine(devices, seed) for devices in (2, 3, 4) for seed in range(3)]
        for machine in (*parts, *drawn, preset("pcie", 5)):
            expected = bound_over_all_trees(machine)
            found = bandwidth_bound(machine, GB) / GB
            self.assertAlmostEqual(found / expected, 1, delta=1e-6, msg=machine.name)

    @parameterized.parameters(
        (4, 1e6, lambda pair: set(pair) == {0, 1}),  # One link is slow,
        (4, 1e15, lambda pair: 0 in pair),  # all of one device,
        (2, 1e15, lambda pair: True),
        (4, 1e6, lambda pair: set(pair) != {0, 1}),  # or most.
    )
    def test_very_unlike_links(self, devices, ratio, is_slow):
        speeds = {pair: 1e11 / ratio if is_slow(pair) else 1e11 for pair in ordered_pairs(devices)}
        routes = [Route(*pair, [Resource(f"{pair}", speed)]) for pair, speed in speeds.items()]
        machine = Topology.from_routes("unlike", devices, routes)
        bound = lower_bound_seconds(machine, 100 * MB)
        self.assertGreater(bound, 0.0)
        schedule = algorithms.make_plan("packed_trees", machine, 100 * MB)
        self.assertBetween(simulator.robust_seconds(schedule, machine) / bound, 1 - 1e-6, 2.5)

    def test_a_program_that_is_not_solved_is_an_error(self):
        with (
            mock.patch.object(highspy.Highs, "getModelStatus", return_value="unknown"),
            self.assertRaisesRegex(ArithmeticError, "HiGHS .* 'pcie': it says unknown"),
        ):
            bandwidth_bound(preset("pcie", 4), 12345)


class TightBoundTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=12, deadline=None)
    @hypothesis.given(plan_testing.any_plans())
    def test_no_plan_beats_it(self, drawn):
        plan, machine = drawn
        own = simulator.robust_seconds(plan, machine, num_seeds=3)
        self.assertGreaterEqual(own * (1 + 1e-9), lower_bound_seconds(machine, plan.num_sent_bytes))

    def test_by_hand(self):
        # One way up and one down: 10 us + bytes / 25 GB/s each, for all bytes in one pack; in more
        # packs, copies up and down are at the same time, but each pays 10 us.
        machine = preset("fully_connected", 2)
        self.assertAlmostEqual(lower_bound_seconds(machine, 1), 20e-6, delta=0.01 * 20e-6)
        self.assertEqual(lower_bound_seconds(machine, 0), 0.0)
        star = in_turn(cut(MB, 8), [copy_tree.star(2), copy_tree.star(2, 1)])
        reached = simulator.simulate(star, machine).seconds
        self.assertBetween(lower_bound_seconds(machine, MB) / reached, 0.4, 1.0)
        # The root is the device that all others reach soonest.
        routes = [
            Route(*pair, [Resource(f"{pair}", 25e9)], latency=1e-6 if 1 in pair else 1e-3)
            for pair in ordered_pairs(3)
        ]
        machine = Topology.from_routes("line", 3, routes)
        self.assertAlmostEqual(lower_bound_seconds(machine, 1), 2e-6, delta=0.01 * 2e-6)


if __name__ == "__main__":
    absltest.main()
