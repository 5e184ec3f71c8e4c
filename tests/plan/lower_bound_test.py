"""The lower bound: known values, what a linear program over all trees gives, and nothing below."""

from __future__ import annotations

import itertools
from unittest import mock

import highspy
import hypothesis
import networkx as nx
import numpy as np
import plan_testing
import scipy.optimize
from absl.testing import absltest, parameterized
from drawn_machines import draw_machine
from planner_table import bandwidth_bound

from tfcdo.plan import algorithms, copy_tree, simulator
from tfcdo.plan.plan import cut, in_turn
from tfcdo.plan.tree_program import lower_bound_seconds
from tfcdo.topology.links import Resource, Route, ordered_pairs
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

MB, GB = 10**6, 10**9
DGX1 = preset("dgx1")


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
