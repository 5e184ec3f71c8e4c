"""Copy trees: spanning trees by construction, with networkx as the judge."""

import itertools
import math

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
    graph = nx.DiGraph((parent, i) for i, parent in enumerate(parents) if parent is not None)
    graph.add_nodes_from(range(len(parents)))
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
                self.assertRaisesRegex(ValueError, "parents", CopyTree, parents)

    @parameterized.product(shape=tuple(SHAPES), devices=(1, 2, 3, 5, 8, 9))
    def test_shapes(self, shape, devices):
        for root in range(devices):
            tree = shape(devices, root)
            graph = graph_of(tree.parents)
            self.assertTrue(nx.is_arborescence(graph))
            self.assertEqual((tree.num_devices, tree.root), (devices, root))
            self.assertEqual(tree.depth, max(nx.shortest_path_length(graph, root).values()))
            self.assertLessEqual(tree.depth, SHAPES[shape](devices))
            self.assertCountEqual(tree.edges, [edge[::-1] for edge in graph.edges])
            children = [tuple(sorted(graph.successors(device))) for device in range(devices)]
            self.assertEqual(tree.children, tuple(children))
            place = {device: position for position, device in enumerate(tree.top_down)}
            self.assertTrue(all(place[parent] < place[child] for child, parent in tree.edges))
            again = rooted([*graph.edges], 0)
            self.assertEqual(again.root, 0)
            self.assertEqual({*map(frozenset, again.edges)}, {*map(frozenset, graph.edges)})

    def test_by_hand(self):
        # On a DGX-1, for pack 5: its group is a star around 5, the other one around 5's partner 1.
        self.assertEqual(two_level(8, 5).parents, (1, 5, 1, 1, 5, None, 5, 5))
        self.assertEqual(two_level(3).parents, (None, 0, 0))
        self.assertEqual(binomial(8).parents, (None, 0, 0, 2, 0, 4, 4, 6))
        self.assertEqual(chain(4, 1).parents, (3, None, 1, 2))
        self.assertEqual(path((4, 2, 0, 1, 3), 0).parents, (None, 0, 0, 1, 2))

    @parameterized.parameters(
        (CopyTree, [()], "exactly one None"),
        (CopyTree, [(None, None)], "which has 2"),
        (CopyTree, [(None, 2)], r"parents\[1\] must be from 0 to 1; got 2"),
        (CopyTree, [(None, 0.0)], r"parents\[1\] must be an int; got 0.0", TypeError),
        (CopyTree, [(None, 2, 1)], "reach every device"),
        (CopyTree, [[None, 0]], r"parents must be a tuple; got \[None, 0\]", TypeError),
        (path, [(0, 0, 1), 0], "order"),
        (path, [(0, 1.0), 0], r"order must be a list .* ints; got \(0, 1.0\)", TypeError),
        (path, [2, 0], "order must be a list .* ints; got 2", TypeError),
        (path, [(0, 1), 2], "root"),
        *((shape, [4, 4], "root must be from 0 to 3; got 4") for shape in SHAPES),
        *((shape, [0, 0], "num_devices must be at least 1; got 0") for shape in SHAPES),
        (star, [4, True], "root must be an int; got True", TypeError),
    )
    def test_wrong_arguments(self, make, arguments, message, error=ValueError):
        self.assertRaisesRegex(error, message, make, *arguments)


if __name__ == "__main__":
    absltest.main()
