"""Copy trees: spanning trees by construction, with networkx as the judge."""

from __future__ import annotations

import itertools
import math
from typing import Any

import networkx as nx
from absl.testing import absltest, parameterized

from tfcdo.plan.copy_tree import CopyTree, binomial, chain, path, rooted, star, two_level

# The most edges from the root to a device.
SHAPES = {
    star: lambda devices: 1,
    chain: lambda devices: devices - 1,
    binomial: lambda devices: math.ceil(math.log2(devices)),
    two_level: lambda devices: 2,
}


def graph_of(parents: tuple[int | None, ...]) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(parents)))
    graph.add_edges_from(
        (parent, device) for device, parent in enumerate(parents) if parent is not None
    )
    return graph


class CopyTreeTest(parameterized.TestCase):
    @parameterized.parameters(1, 2, 3, 4)
    def test_exactly_the_spanning_trees_can_be_built(self, devices):
        for parents in itertools.product((None, *range(devices)), repeat=devices):
            graph = graph_of(parents)
            # To networkx, an edge from a device to itself is an edge; in a tree it is a cycle.
            if nx.is_arborescence(graph) and not any(nx.selfloop_edges(graph)):
                self.assertEqual(graph.in_degree(CopyTree(parents).root), 0)
            else:
                with self.assertRaisesRegex(ValueError, "parents"):
                    CopyTree(parents)

    @parameterized.parameters(
        ((), ValueError, "exactly one None"),
        ((None, None), ValueError, "which has 2"),
        ((None, 2), ValueError, r"parents\[1\] must be a device from 0 to 1; got 2"),
        ((None, -1), ValueError, "got -1"),
        ((None, 2, 1), ValueError, "reach every device"),
        ([None, 0], TypeError, r"parents must be a tuple; got \[None, 0\]"),
    )
    def test_what_is_no_tree_is_named(self, parents: Any, error, message):
        with self.assertRaisesRegex(error, message):
            CopyTree(parents)

    @parameterized.product(shape=tuple(SHAPES), devices=(1, 2, 3, 5, 8, 9))
    def test_shapes(self, shape, devices):
        for root in range(devices):
            tree = shape(devices, root)
            graph = graph_of(tree.parents)
            self.assertTrue(nx.is_arborescence(graph))
            self.assertEqual((tree.num_devices, tree.root), (devices, root))
            self.assertEqual(tree.depth, max(nx.shortest_path_length(graph, root).values()))
            self.assertLessEqual(tree.depth, SHAPES[shape](devices))
            # Its views agree.
            edges = [(d, p) for d, p in enumerate(tree.parents) if p is not None]
            self.assertCountEqual(tree.edges, edges)
            children = [tuple(sorted(graph.successors(device))) for device in range(devices)]
            self.assertEqual(tree.children, tuple(children))
            place = {device: position for position, device in enumerate(tree.top_down)}
            self.assertTrue(all(place[parent] < place[child] for child, parent in tree.edges))
            self.assertEqual(tree.bottom_up, tuple(reversed(tree.top_down)))
            again = rooted([edge[::-1] for edge in edges], 0)
            self.assertEqual(again.root, 0)
            self.assertEqual({*map(frozenset, again.edges)}, {*map(frozenset, edges)})

    @parameterized.parameters(*SHAPES)
    def test_no_such_device(self, shape):
        for num_devices, root, error, message in (
            (4, 4, ValueError, "root must be from 0 to 3; got 4"),
            (0, 0, ValueError, "num_devices must be at least 1; got 0"),
            (4.0, 0, TypeError, "num_devices must be an int; got 4.0"),
            (4, True, TypeError, "root must be an int; got True"),
        ):
            with self.assertRaisesRegex(error, message):
                shape(num_devices, root)

    def test_by_hand(self):
        # Of a DGX-1, for pack 5: its group is a star around 5, the other one around 5's partner 1.
        self.assertEqual(two_level(8, 5).parents, (1, 5, 1, 1, 5, None, 5, 5))
        self.assertEqual(two_level(3).parents, (None, 0, 0))
        self.assertEqual(binomial(8).parents, (None, 0, 0, 2, 0, 4, 4, 6))
        self.assertEqual(chain(4, 1).parents, (3, None, 1, 2))
        # A path that is rooted in its middle is half as deep.
        self.assertEqual(path((4, 2, 0, 1, 3), 0).parents, (None, 0, 0, 1, 2))

    @parameterized.parameters(
        ((0, 0, 1), 0, "order"), ((0, 2), 0, "order"), ((0, 1), 2, "root"), ((), 0, "root")
    )
    def test_path_of_nonsense(self, order, root, message):
        with self.assertRaisesRegex(ValueError, message):
            path(order, root)


if __name__ == "__main__":
    absltest.main()
