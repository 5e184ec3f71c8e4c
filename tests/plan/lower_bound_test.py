"""The lower bound: known values, what a linear program over all trees gives, and nothing below."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random

import networkx as nx
import numpy as np
import scipy.optimize
from absl.testing import absltest
from absl.testing import parameterized
from drawn_machines import draw_machine

from tfcdo.plan import copy_tree
from tfcdo.plan import simulator
from tfcdo.plan import spanning_trees_lp
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.schedule import Pack
from tfcdo.plan.schedule import Schedule
from tfcdo.plan.schedule import assign
from tfcdo.plan.schedule import cut
from tfcdo.topology.links import Resource
from tfcdo.topology.links import ordered_pairs
from tfcdo.topology.presets import preset
from tfcdo.topology.routes import Route
from tfcdo.topology.topology import Topology

MB, GB = 10**6, 10**9
DGX1 = preset("dgx1")


def seconds_on_resources(topology: Topology, edges) -> np.ndarray:
    """What a byte up and down these edges costs each resource, added up as plainly as can be."""
    busy = np.zeros(len(topology.resources))
    for one, other in edges:
        for pair in ((one, other), (other, one)):
            held = topology.link_by_pair[pair].resources
            for resource in held:
                busy[resource] += 1 / min(topology.resources[r].bandwidth for r in held)
    return busy


def bound_over_all_trees(topology: Topology) -> float:
    """Seconds per byte, by one linear program that has every spanning tree of the machine."""
    devices = topology.num_devices
    trees = (
        [(0, 1)] if devices == 2 else nx.from_prufer_sequence(list(code)).edges
        for code in itertools.product(range(devices), repeat=devices - 2)
    )
    return seconds_by_trees(topology, trees)


def seconds_by_trees(topology: Topology, trees) -> float:
    """Seconds per byte, by one linear program over some trees."""
    columns = np.array([seconds_on_resources(topology, tree) for tree in trees]).T * 1e9
    solved = scipy.optimize.linprog(-np.ones(columns.shape[1]), columns, np.ones(len(columns)))
    return -1 / solved.fun / 1e9


def random_schedule(topology: Topology, rng: random.Random) -> Schedule:
    """Packs of any size on any trees, along direct links and others."""
    packs, position = [], 0
    for _ in range(rng.choice([1, 3, 20])):
        order = list(range(topology.num_devices))
        rng.shuffle(order)
        parents: list[int | None] = [None] * len(order)
        for place, device in enumerate(order[1:], 1):
            parents[device] = order[rng.randrange(place)]
        size = rng.choice([MB, 30 * MB])
        packs.append(Pack(position, position + size, CopyTree(tuple(parents))))
        position += size
    return Schedule(topology.num_devices, position, tuple(packs))


class BoundTest(parameterized.TestCase):
    @parameterized.parameters(
        ("dgx1", range(8), 14 / 48 / 25e9),
        ("dgx1", [0, 1, 2], 1 / 2 / 25e9),
        ("dgx1", [0, 1, 2, 3, 4], 1 / 2 / 25e9),
        ("dgx1", [0, 5], 1 / 10e9),
        ("dgx1", [0], 0.0),
        ("nvswitch", range(8), 2 * 7 / 8 / 300e9),
        ("nvswitch", range(64), 2 * 63 / 64 / 300e9),
        # A tree over both pairs loads a port with 1/12 s/GB for an edge in a pair, else with 1/10:
        # eight ports share twice two edges of the former kind, and twice one of the latter.
        ("pcie", range(4), (2 * 4 / 12e9 + 4 / 10e9) / 8),
        ("fully_connected", range(4), 1 / 2 / 25e9),
        ("shared_memory", range(4), 3 / 10e9),
    )
    def test_known_bounds_of_direct_links(self, name, devices, per_byte):
        machine = preset(name, None if name == "dgx1" else len(devices)).subset(devices)
        found = lower_bound(machine, GB, direct=True) / GB
        self.assertAlmostEqual(found, per_byte, delta=1e-6 * per_byte)

    def test_is_that_of_a_program_over_all_trees(self):
        parts = [DGX1.subset(part) for part in ((1, 3, 5), (0, 2, 4, 7), (0, 1, 2, 3, 4, 5))]
        drawn = [draw_machine(devices, seed) for devices in (2, 3, 4, 5) for seed in range(6)]
        for machine in (*parts, *drawn, preset("nvswitch", 5), preset("pcie", 5)):
            expected = bound_over_all_trees(machine)
            found = lower_bound(machine, GB) / GB
            self.assertAlmostEqual(found / expected, 1, delta=1e-6, msg=machine.name)

    def test_rates_reach_the_bound_and_overload_nothing(self):
        for devices, seed in ((4, 0), (9, 0), (12, 1), (16, 0)):
            machine = draw_machine(devices, seed)
            bound = spanning_trees_lp.seconds_per_byte(machine)
            best = spanning_trees_lp.best_rates(machine)
            assert best is not None
            busy = np.zeros(len(machine.resources))
            for tree, rate in zip(best.trees, best.rates, strict=True):
                busy += rate * seconds_on_resources(machine, tree)
            self.assertLess(busy.max(), 1 + 1e-6)
            self.assertBetween(sum(best.rates) * bound, 1 - 1e-6, 1 + 1e-6)

    def test_trees_of_few_and_of_many_leaves_reach_nearly_the_bound(self):
        for devices, seed in ((4, 0), (9, 0), (12, 1), (16, 0)):
            machine = draw_machine(devices, seed)
            bound = spanning_trees_lp.seconds_per_byte(machine)
            leaves = []
            for trees in spanning_trees_lp.trees_near_the_best(machine, [0.02, -0.05]):
                # As many of the best as may be used together, and some more.
                best = trees[: 2 * len(machine.resources)]
                self.assertLess(seconds_by_trees(machine, best) / bound, 1.05)
                ends = [itertools.chain(*tree) for tree in trees[: len(machine.resources) // 4]]
                counts = [list(collections.Counter(each).values()).count(1) for each in ends]
                leaves.append(sum(counts) / len(counts))
            self.assertLessEqual(leaves[0], leaves[1])

    def test_a_slow_way_back_counts(self):
        # All data must go into device 2 and come out of it: one of both takes 1 GB / 2 GB/s.
        for slow in ({(0, 2), (1, 2)}, {(2, 0), (2, 1)}):
            routes = [
                Route(*pair, [Resource(f"{pair}", 1e9 if pair in slow else 50e9)])
                for pair in ordered_pairs(3)
            ]
            machine = Topology.from_routes("slow", 3, routes)
            self.assertAlmostEqual(lower_bound(machine, GB), 0.5)

    def test_detours_may_beat_the_bound_of_the_direct_links_alone(self):
        machine = DGX1.subset((1, 3, 5))
        trees = [copy_tree.star(3), copy_tree.star(3, 1), CopyTree((2, 0, None))]
        schedule = assign(100 * MB, cut(100 * MB, 16), trees)
        # The second star has an edge from device 5 to 3.
        self.assertTrue(machine.link_by_pair[2, 1].via_host)
        own = simulator.simulate(schedule, machine).seconds
        self.assertAlmostEqual(own / lower_bound(machine, 100 * MB, direct=True), 0.9525)
        self.assertGreater(own, lower_bound(machine, 100 * MB))

    def test_no_schedule_beats_the_bound(self):
        rng = random.Random(0)
        for devices, seed in itertools.product(range(2, 17, 2), range(4)):
            machine = draw_machine(devices, seed)
            if seed % 2:
                machine = dataclasses.replace(
                    machine, addition_bandwidth=2e10, serial_reduction=rng.random() < 0.5
                )
            schedule = random_schedule(machine, rng)
            own = simulator.simulate(schedule, machine).seconds
            self.assertGreaterEqual(own, lower_bound(machine, schedule.size))


if __name__ == "__main__":
    absltest.main()
