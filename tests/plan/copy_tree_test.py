"""Copy trees: spanning trees by construction, with networkx as the judge."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import networkx as nx
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tfcdo.plan.copy_tree import CopyTree, binomial, chain, path, rooted, star, two_level

SHAPES = (star, chain, binomial, two_level)
EVERY_SIZE = [(shape, devices) for shape in SHAPES for devices in (*range(1, 10), 16)]


def graph_of(parents: tuple[int | None, ...]) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(parents)))
    graph.add_edges_from(
        (parent, device) for device, parent in enumerate(parents) if parent is not None
    )
    return graph


class CopyTreeTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=300, deadline=None)
    @hypothesis.given(
        st.integers(1, 6).flatmap(
            lambda devices: st.tuples(
                *[st.none() | st.integers(0, devices - 1) for _ in range(devices)]
            )
        )
    )
    def test_exactly_the_spanning_trees_can_be_built(self, parents):
        graph = graph_of(parents)
        # To networkx, an edge from a device to itself is an edge; in a tree it is a cycle.
        if nx.is_arborescence(graph) and not list(nx.selfloop_edges(graph)):
            tree = CopyTree(parents)
            self.assertEqual(graph.in_degree(tree.root), 0)
        else:
            with self.assertRaisesRegex(ValueError, "parents"):
                CopyTree(parents)

    @parameterized.parameters(2, 5, 16)
    def test_the_same_edges_with_another_root(self, devices):
        graph = nx.random_labeled_tree(devices, seed=0)
        edges = list(graph.edges)
        for root in range(devices):
            tree = rooted(edges, root)
            self.assertEqual(tree.root, root)
            self.assertTrue(nx.utils.graphs_equal(graph_of(tree.parents).to_undirected(), graph))

    @parameterized.parameters(
        ((), "exactly one None"),
        ((None, None), "which has 2"),
        ((1, 0), "which has 0"),
        ((None, 2), r"parents\[1\] must be a device from 0 to 1; got 2"),
        ((None, -1), "got -1"),
        ((None, 2, 1), "reach every device"),
        ((None, 1), "reach every device"),
    )
    def test_what_is_no_tree_is_named(self, parents, message):
        with self.assertRaisesRegex(ValueError, message):
            CopyTree(parents)

    def test_a_list_could_not_be_a_key(self):
        parents: Any = [None, 0]
        with self.assertRaisesRegex(TypeError, r"parents must be a tuple; got \[None, 0\]"):
            CopyTree(parents)

    @parameterized.parameters(*SHAPES)
    def test_no_such_device(self, shape):
        for num_devices, root, error, message in (
            (4, 4, ValueError, "root must be from 0 to 3; got 4"),
            (4, -1, ValueError, "root must be from 0 to 3; got -1"),
            (0, 0, ValueError, "num_devices must be at least 1; got 0"),
            (4.0, 0, TypeError, "num_devices must be an int; got 4.0"),
            (4, None, TypeError, "root must be an int; got None"),
            (4, True, TypeError, "root must be an int; got True"),
        ):
            with self.assertRaisesRegex(error, message):
                shape(num_devices, root)

    @parameterized.parameters(EVERY_SIZE)
    def test_shapes(self, shape, devices):
        most = {
            star: 1,
            chain: devices - 1,
            binomial: math.ceil(math.log2(devices)),
            two_level: 2,
        }[shape]
        for root in range(devices):
            tree = shape(devices, root)
            graph = graph_of(tree.parents)
            self.assertTrue(nx.is_arborescence(graph))
            self.assertEqual((tree.num_devices, tree.root), (devices, root))
            self.assertEqual(tree.depth, max(nx.shortest_path_length(graph, root).values()))
            self.assertLessEqual(tree.depth, most)
            # Its views agree.
            self.assertCountEqual(
                tree.edges, [(d, p) for d, p in enumerate(tree.parents) if p is not None]
            )
            self.assertEqual(
                tree.children, tuple(tuple(sorted(graph.successors(d))) for d in range(devices))
            )
            place = {device: position for position, device in enumerate(tree.top_down)}
            self.assertTrue(all(place[parent] < place[child] for child, parent in tree.edges))
            self.assertEqual(tree.bottom_up, tuple(reversed(tree.top_down)))

    def test_two_level_is_the_tree_made_for_a_dgx1(self):
        # Pack 5: its group is a star around 5, the other one around 5's partner 1.
        self.assertEqual(two_level(8, 5).parents, (1, 5, 1, 1, 5, None, 5, 5))

    def test_a_path_rooted_in_its_middle_is_half_as_deep(self):
        order = (4, 2, 0, 1, 3)
        self.assertEqual(path(order, 4).depth, 4)
        tree = path(order, 0)
        self.assertEqual(tree.depth, 2)
        self.assertEqual(tree.parents, (None, 0, 0, 1, 2))

    @parameterized.parameters(
        ((0, 0, 1), 0, "order"), ((0, 2), 0, "order"), ((0, 1), 2, "root"), ((), 0, "root")
    )
    def test_path_of_nonsense(self, order, root, message):
        with self.assertRaisesRegex(ValueError, message):
            path(order, root)


if __name__ == "__main__":
    absltest.main()
