"""Roots and parts of trees: as good as scipy finds them, and links that serve both ways."""

from __future__ import annotations

import numpy as np
import scipy.optimize
from absl.testing import absltest
from absl.testing import parameterized
from drawn_machines import draw_machine

from tfcdo.plan import copy_tree
from tfcdo.plan import rooted_trees_lp
from tfcdo.plan import spanning_trees_lp
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.topology.links import Resource
from tfcdo.topology.links import ordered_pairs
from tfcdo.topology.routes import Route
from tfcdo.topology.topology import Topology


def seconds(topology: Topology, tree: copy_tree.CopyTree) -> np.ndarray:
    """What a byte costs each resource in all, up and down, added up as plainly as can be."""
    busy = np.zeros((3, len(topology.resources)))
    for child, parent in tree.edges:
        for way, pair in ((1, (child, parent)), (2, (parent, child))):
            held = topology.link_by_pair[pair].resources
            for resource in held:
                busy[way, resource] += 1 / min(topology.resources[r].bandwidth for r in held)
    busy[0] = busy[1] + busy[2]
    return busy


def sum_of_three_times(topology: Topology, packing: TreePacking) -> float:
    busy = sum(
        weight / sum(packing.weights) * seconds(topology, tree)
        for tree, weight in zip(packing.trees, packing.weights, strict=True)
    )
    return float(np.asarray(busy).max(1).sum())


def least_sum(topology: Topology, trees: list[copy_tree.CopyTree]) -> float:
    """The least sum of the three times, by scipy."""
    busy = np.array([seconds(topology, tree).ravel() for tree in trees]).T * 1e9
    times = -np.kron(np.eye(3), np.ones((len(topology.resources), 1)))
    solved = scipy.optimize.linprog(
        np.concatenate([np.zeros(len(trees)), np.ones(3)]),
        np.concatenate([busy, times], 1),
        np.zeros(len(busy)),
        np.concatenate([np.ones(len(trees)), np.zeros(3)])[None],
        [1.0],
    )
    return solved.fun / 1e9


class SolutionsTest(parameterized.TestCase):
    @parameterized.parameters((4, 0), (7, 3), (9, 1))
    def test_are_nearly_the_best(self, devices, seed):
        machine = draw_machine(devices, seed)
        bound = spanning_trees_lp.seconds_per_byte(machine)
        (trees,) = spanning_trees_lp.trees_near_the_best(machine, [0.02])
        rooted = [
            copy_tree.rooted(edges, root)
            for edges in trees
            for root in range(devices)
            if sum(root in edge for edge in edges) == 1
        ]
        expected = least_sum(machine, rooted)
        found = list(rooted_trees_lp.solutions(machine, trees, bound, 3))
        self.assertLen(found, 3)
        for packing in found:
            self.assertContainsSubset(packing.trees, rooted)
            # Trees are worth less at random, and what carries next to nothing is left out.
            self.assertBetween(sum_of_three_times(machine, packing) / expected, 1 - 1e-6, 1.1)

    def test_differ(self):
        machine = draw_machine(9, 1)
        bound = spanning_trees_lp.seconds_per_byte(machine)
        (trees,) = spanning_trees_lp.trees_near_the_best(machine, [0.02])
        self.assertLen(set(rooted_trees_lp.solutions(machine, trees, bound, 3)), 3)

    def test_each_link_serves_both_ways_alike(self):
        routes = [Route(*pair, [Resource(f"{pair}", 1e9)]) for pair in ordered_pairs(3)]
        machine = Topology.from_routes("line", 3, routes)
        (found,) = rooted_trees_lp.solutions(machine, [((0, 1), (1, 2))], 2e-9, 1)
        # All packs rooted at one end would go up one link all the time, and down the other.
        self.assertEqual({tree.root for tree in found.trees}, {0, 2})
        np.testing.assert_allclose(found.weights, 0.5, atol=1e-6)


if __name__ == "__main__":
    absltest.main()
