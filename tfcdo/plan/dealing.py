"""Dealing: the linear program's trees and rates made into packs that are fast in no order.

Solutions of the program differ in how well their packs get past one another: a copy is sent on only
when it has arrived, and nothing keeps the copies in an order. Mixed, they serve better than alone,
as each link then has some copies early and some late. Simulated runs show which to take.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from collections.abc import Sequence

from tfcdo.plan import rooted_trees_lp
from tfcdo.plan import simulator
from tfcdo.plan import spanning_trees_lp
from tfcdo.plan import task_graph
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.copy_tree import rooted
from tfcdo.plan.edge_loads import Edge
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.topology.topology import Topology

# Into how many packs trees are dealt out to be judged. Long trees need many packs, of short ones
# many are slower than some: the better of the two counts, as it does where packs are planned.
_JUDGED_PACKS = (80, 200)
# Trees that carry less than this part of the data cost more packs than they are worth.
_LEAST_PART = 0.01
# Solutions are made of trees of few leaves, of many and of very many; the latter trees are not
# deep: so many of each.
_PRICES_OF_LEAF = (0.02, -0.05, -0.3)
_SOLUTIONS = 4
# The first steps mix up to so many solutions, the others change the best mix.
_MIXES = 30
_MOST_MIXED = 8
# Many trees keep links evenly busy, but each costs a pack at least: fast machines want few.
_LEAST_PARTS = (0.0, 0.01, 0.02)
_STEPS = 100
_JITTER = 0.05
# Seed of the runs; not one of those by which `robust_seconds` judges the outcome.
_SEED = 101
# Trees serve all sizes. They are judged at what takes this many seconds, beside which latencies are
# small, not nothing; on fast machines at the gradients of a large model, beside which they are not.
_JUDGED_SECONDS = 0.05
_MOST_JUDGED_BYTES = 10**9
# The size of the packs for which latencies are added to what bytes cost.
_PACK_BYTES = 10**7


def spread_trees(topology: Topology, tasks: int) -> TreePacking | None:
    """Finds rooted trees, and what part of the data along each, that fill the links of a machine.

    Mixes several solutions in various ways, and changes roots and parts of the best mix at random.
    What makes simulated runs faster is kept.

    Args:
      topology: the machine.
      tasks: about how many tasks to simulate for that.

    Returns:
      The trees and their parts, to be dealt out by `deal`; None if copies take no time. The same
      arguments give the same trees.

    Example:
      >>> from tfcdo.topology import preset
      >>> sorted(tree.root for tree in spread_trees(preset("fully_connected", 2), 1000).trees)
      [0, 1]
    """
    seconds_per_byte = spanning_trees_lp.seconds_per_byte(topology)
    if not seconds_per_byte:
        return None
    in_time = math.ceil(_JUDGED_SECONDS / seconds_per_byte)
    num_bytes = min(in_time, _MOST_JUDGED_BYTES)
    machine = _with_latencies_in_bandwidths(topology)
    solutions = [
        solution
        for trees in spanning_trees_lp.trees_near_the_best(machine, _PRICES_OF_LEAF)
        for solution in rooted_trees_lp.solutions(machine, trees, seconds_per_byte, _SOLUTIONS)
    ]
    rng = random.Random(0)
    best = _mixed(solutions)
    least = _judged_seconds(best, topology, num_bytes)
    for step in range(min(_STEPS, tasks // _num_tasks(topology))):
        if step < _MIXES:
            chosen = rng.choices(solutions, k=rng.randint(1, _MOST_MIXED))
            changed = _mixed(chosen, rng.choice(_LEAST_PARTS))
        else:
            changed = _changed(best, rng)
        seconds = _judged_seconds(changed, topology, num_bytes)
        if seconds < least:
            least, best = seconds, changed
    return best.rounded()


def quick_trees(topology: Topology) -> TreePacking | None:
    """Returns the linear program's trees as they are, rooted in their middles, without simulating.

    Args:
      topology: the machine, of more devices than a search is for.

    Returns:
      The trees and their parts; None if copies take no time.
    """
    rates = spanning_trees_lp.best_rates(topology)
    if rates is None:
        return None
    rooted_trees = tuple(map(_rooted_in_the_middle, rates.trees))
    return _mixed([TreePacking(rooted_trees, rates.rates)], _LEAST_PART)


def deal(packing: TreePacking, topology: Topology, num_packs: int) -> TreePacking:
    """Cuts the part of each tree into packs.

    A pack travels from the leaves of its tree to the root and back, and all the while the tree's
    other packs keep the links behind it and before it busy: the longer a tree's part takes along
    its longest way, the more packs it is cut into.

    Args:
      packing: the trees and their parts.
      topology: the machine.
      num_packs: about how many packs; each tree gets at least one.

    Returns:
      The packs of all trees in turn, those of each tree alike.

    Example:
      >>> from tfcdo.plan.copy_tree import star
      >>> from tfcdo.topology import preset
      >>> packing = TreePacking((star(4, 0), star(4, 2)), (3.0, 1.0))
      >>> deal(packing, preset("nvswitch", 4), 4).weights
      (1.0, 1.0, 1.0, 1.0)
    """
    seconds = [
        weight * _seconds_through(tree, topology)
        for tree, weight in zip(packing.trees, packing.weights, strict=True)
    ]
    per_second = num_packs / sum(seconds) if any(seconds) else 0.0
    counts = [max(1, round(per_second * each)) for each in seconds]
    turns = sorted(
        ((turn + 0.5) / count, index) for index, count in enumerate(counts) for turn in range(count)
    )
    return TreePacking(
        tuple(packing.trees[index] for _, index in turns),
        tuple(packing.weights[index] / counts[index] for _, index in turns),
    )


def deal_equally(packing: TreePacking, num_packs: int) -> TreePacking:
    """Gives packs of equal sizes to the trees, in proportion to their parts.

    Args:
      packing: the trees and their parts.
      num_packs: how many packs.

    Returns:
      A packing of `num_packs` equal weights, in which the trees take turns.

    Example:
      >>> from tfcdo.plan.copy_tree import star
      >>> packing = TreePacking((star(4, 0), star(4, 2)), (3.0, 1.0))
      >>> [tree.root for tree in deal_equally(packing, 4).trees]
      [0, 0, 2, 0]
    """
    parts = [weight / sum(packing.weights) for weight in packing.weights]
    given = [0] * len(parts)
    trees = []
    for turn in range(1, num_packs + 1):
        # Whichever tree is furthest behind its part of the packs so far.
        index = max(range(len(parts)), key=lambda index: parts[index] * turn - given[index])
        given[index] += 1
        trees.append(packing.trees[index])
    return TreePacking(tuple(trees), (1.0,) * num_packs)


def _num_tasks(topology: Topology) -> int:
    """Returns about how many tasks the runs of one judgement simulate."""
    return sum(_JUDGED_PACKS) * 2 * (topology.num_devices - 1)


def _judged_seconds(packing: TreePacking, topology: Topology, num_bytes: int) -> float:
    schedules = (deal(packing, topology, count).schedule(num_bytes) for count in _JUDGED_PACKS)
    graphs = (task_graph.build(schedule, topology) for schedule in schedules)
    return min(max(simulator.run_shuffled(graph, _JITTER, _SEED)[1]) for graph in graphs)


def _with_latencies_in_bandwidths(topology: Topology) -> Topology:
    """Returns a machine without latencies on which packs of `_PACK_BYTES` take as long.

    The linear program knows no latencies, which cost fast links the largest part of their speed.
    """
    latency = [0.0] * len(topology.resources)
    for link in topology.links:
        for index in link.resources:
            latency[index] = max(latency[index], link.latency)
    resources = []
    for resource, seconds in zip(topology.resources, latency, strict=True):
        per_byte = 1 / resource.bandwidth + seconds / _PACK_BYTES
        bandwidth = 1 / per_byte if per_byte else math.inf
        resources.append(dataclasses.replace(resource, bandwidth=bandwidth))
    return dataclasses.replace(topology, resources=tuple(resources))


def _rooted_in_the_middle(edges: tuple[Edge, ...]) -> CopyTree:
    """Roots a tree in the middle of a longest path."""
    end = rooted(edges, 0).top_down[-1]
    tree = rooted(edges, end)
    middle = tree.top_down[-1]
    for _ in range(tree.depth // 2):
        parent = tree.parents[middle]
        assert parent is not None  # The root is further away than that.
        middle = parent
    return rooted(edges, middle)


def _mixed(packings: Sequence[TreePacking], least_part: float = 0.0) -> TreePacking:
    """Gives each tree the sum of its parts, and leaves out those below a part of the whole."""
    parts: collections.Counter[CopyTree] = collections.Counter()
    for packing in packings:
        parts.update(dict(zip(packing.trees, packing.weights, strict=True)))
    least = min(least_part * parts.total(), max(parts.values()))
    kept = {tree: part for tree, part in parts.items() if part >= least}
    return TreePacking(tuple(kept), tuple(kept.values()))


def _seconds_through(tree: CopyTree, topology: Topology) -> float:
    """Returns the seconds that a byte takes from the furthest leaf to the root and to a leaf."""
    up, down = [0.0] * tree.num_devices, [0.0] * tree.num_devices
    for child, parent in reversed(tree.edges):
        up[parent] = max(up[parent], up[child] + 1 / topology.bandwidth(child, parent))
        down[parent] = max(down[parent], down[child] + 1 / topology.bandwidth(parent, child))
    return up[tree.root] + down[tree.root]


def _changed(packing: TreePacking, rng: random.Random) -> TreePacking:
    """Returns the same trees, of which one has another root or another part."""
    trees, weights = list(packing.trees), list(packing.weights)
    index = rng.randrange(len(trees))
    if rng.random() < 0.6:
        trees[index] = rooted(trees[index].edges, rng.randrange(trees[index].num_devices))
    else:
        weights[index] *= 2 ** rng.uniform(-1, 1)
    return TreePacking(tuple(trees), tuple(weights))
