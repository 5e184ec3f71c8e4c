"""Rooted trees by linear programming: which roots keep the links busy on the ways up and down.

All packs set out at once, and where copies wait, the one that has waited longest goes first: so
nearly all ways up come before nearly all ways down. A link that is only on ways down is idle at
first, and one that is only on ways up is idle in the end. What counts is thus not only how long all
copies keep a resource busy, but also how long those up do, and how long those down.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import highspy
import numpy as np

from tfcdo.plan import copy_tree
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.edge_loads import Edge
from tfcdo.plan.edge_loads import Floats
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.topology.topology import Topology

# More rooted trees than these make solutions little better and take long.
_MOST_TREES = 1000
# Trees that carry less than this part of the data cost more packs than they are worth.
_LEAST_PART = 0.003
# By how much trees are worth less at random, for solutions that differ.
_NOISE = 0.05


def solutions(
    topology: Topology, trees: Sequence[tuple[Edge, ...]], seconds_per_byte: float, count: int
) -> Iterator[TreePacking]:
    """Finds roots and parts of trees that make the ways up and the ways down take little time.

    Minimises the sum of three times: how long the busiest resource is busy, how long the one is
    that is busiest with copies up, and how long the one that is busiest with copies down.

    Args:
      topology: the machine.
      trees: the edges of each tree, those first that should be taken if there are too many. Each
        may be rooted at any of its leaves, where no two streams of packs meet.
      seconds_per_byte: about how long the whole takes.
      count: how many solutions, all of which weigh the trees a little differently.

    Yields:
      The solutions, whose weights are parts of the data.

    Example:
      >>> from tfcdo.topology import preset
      >>> machine = preset("fully_connected", 3)
      >>> (found,) = solutions(machine, [((0, 1), (0, 2)), ((0, 1), (1, 2))], 1e-11, 1)
      >>> sorted(tree.root for tree in found.trees)
      [0, 2]
    """
    rooted = list(
        dict.fromkeys(
            copy_tree.rooted(edges, leaf) for edges in trees for leaf in copy_tree.leaves(edges)
        )
    )[:_MOST_TREES]
    ways = np.zeros((topology.num_devices,) * 2 + (len(topology.resources),))
    for link in topology.links:
        seconds = 1 / topology.bandwidth(link.source, link.target)
        ways[link.source, link.target, list(link.resources)] = seconds / seconds_per_byte
    solver = _solver(rooted, ways)
    rng = random.Random(0)
    for _ in range(count):
        for index in range(len(rooted)):
            solver.changeColCost(index, _NOISE * rng.random())
        solver.run()
        parts = np.array(solver.getSolution().col_value)[: len(rooted)]
        used = np.flatnonzero(parts > _LEAST_PART)
        yield TreePacking(
            tuple(rooted[index] for index in used), tuple(float(parts[index]) for index in used)
        )


def _solver(trees: Sequence[CopyTree], ways: Floats) -> highspy.Highs:
    """Returns the linear program: the columns are the parts of the trees, then the three times."""
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    resources = ways.shape[-1]
    no_index, no_value = np.array([], np.int32), np.array([])
    for _ in range(3 * resources):
        solver.addRow(-highspy.kHighsInf, 0.0, 0, no_index, no_value)
    # All the data is carried.
    solver.addRow(1.0, 1.0, 0, no_index, no_value)
    for tree in trees:
        children, parents = zip(*tree.edges, strict=True)
        up, down = ways[children, parents].sum(0), ways[parents, children].sum(0)
        busy = np.concatenate([up + down, up, down, [1.0]])
        rows = np.flatnonzero(busy).astype(np.int32)
        solver.addCol(0.0, 0.0, highspy.kHighsInf, len(rows), rows, busy[rows])
    for first in range(0, 3 * resources, resources):
        rows = np.arange(first, first + resources, dtype=np.int32)
        solver.addCol(1.0, 0.0, highspy.kHighsInf, resources, rows, -np.ones(resources))
    return solver
