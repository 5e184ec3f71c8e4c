"""Annealing: improves a tree packing step by step, each of which changes a tree or a weight."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tfcdo.plan import simulator
from tfcdo.plan import task_graph
from tfcdo.plan.candidates import neighbours_of
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.tree_packing import MAX_PACKS
from tfcdo.plan.tree_packing import Permutation
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.topology.topology import Topology

# Searches are bounded by the number of simulated tasks, not by a clock, so that they repeat; this
# many take about a second.
TASKS_PER_SEARCH = 60_000
# What a step costs on top of its tasks, in tasks.
_TASKS_PER_STEP = 20
# Seeds of the disorderly runs; not those by which `robust_seconds` judges the outcome.
_SEEDS = (101, 102, 103)
_JITTER = 0.05
# A packing this close to the bound is not worth improving. The bound is that of the direct links,
# along which trees are improved; that links via the host might beat it on a few machines is let go.
_GOOD_ENOUGH = 1.002


def cost(
    packing: TreePacking,
    topology: Topology,
    num_bytes: int,
    *,
    cutoff: float = math.inf,
    robustness: float = 0.5,
    smoothness: float = 0.0,
) -> float:
    """Returns what the search minimises: a time that guides it well, and also one that counts.

    Args:
      packing: the trees and weights.
      topology: the machine.
      num_bytes: how many bytes each device holds.
      cutoff: a cost that is of no interest; if it is certain to be exceeded, the rest is not run.
      robustness: how much the time with jitter counts beside the time of a run in good order.
      smoothness: how much the mean time at which the links end counts, from 0 to 1. The time of the
        whole does not show whether a step has relieved one of several links that end last.

    Returns:
      A weighted mean of two times in seconds: of a run in which links serve the longest path first,
      and the median of runs with shuffled ties and jitter; or something above `cutoff`.
    """
    graph = task_graph.build(packing.schedule(num_bytes), topology)
    _, ends = simulator.run_longest_path_first(graph)
    ordered = max(ends, default=0.0)
    if smoothness and ends:
        last: dict[tuple[int, int], float] = {}
        for (_, _, source, target), end in zip(graph.names, ends, strict=True):
            last[source, target] = max(end, last.get((source, target), 0.0))
        ordered += smoothness * (sum(last.values()) / len(last) - ordered)
    # Disorder rarely helps by more than the jitter does.
    if not robustness or ordered * (1 - _JITTER) > cutoff:
        return ordered
    times = sorted(
        max(simulator.run_shuffled(graph, _JITTER, seed)[1], default=0.0) for seed in _SEEDS
    )
    return (ordered + robustness * times[len(times) // 2]) / (1 + robustness)


def improve(
    start: TreePacking,
    topology: Topology,
    num_bytes: int,
    *,
    group: Sequence[Permutation] | None = None,
    tasks: int | None = None,
    seed: int = 0,
    temperature: float = 0.02,
    robustness: float = 0.5,
    equal_weights: bool = False,
) -> TreePacking:
    """Improves a tree packing by simulated annealing.

    Each step hangs a device and what is below it on another parent, moves a root along an edge, or
    changes a weight. With a symmetric machine's `group`, the search changes representatives only
    and tries them with all their images: far fewer choices, and evenly filled links.

    Args:
      start: where to begin; representatives if there is a group.
      topology: the machine.
      num_bytes: the size to improve it for.
      group: permutations of the devices; the packing has the images of the trees under each.
      tasks: about how many tasks to simulate before stopping; by default what takes a second.
      seed: draws the steps.
      temperature: how much worse a step may be to be taken at first, about, relative to the bound.
      robustness: see `cost`.
      equal_weights: leave the weights and the number of trees as they are.

    Returns:
      The best packing found, with a group its representatives; never worse than the one it began
      with. The same arguments give the same packing.

    References:
      Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing", 1983.

    Example:
      >>> from tfcdo.plan.copy_tree import star
      >>> from tfcdo.topology import preset
      >>> machine = preset("dgx1")
      >>> start = TreePacking((star(8, 0), star(8, 1)), (1.0, 1.0))
      >>> found = improve(start, machine, 10**8, tasks=2000)
      >>> cost(found, machine, 10**8) < cost(start, machine, 10**8)
      True
    """
    tasks = TASKS_PER_SEARCH if tasks is None else tasks
    rng = random.Random(seed)
    group = tuple(group or (tuple(range(topology.num_devices)),))
    neighbours = neighbours_of(topology)
    max_trees = MAX_PACKS // len(group)
    unit = lower_bound(topology, num_bytes)
    if not unit:
        return start  # Nothing travels, so no packing is better than another.

    def judge(packing: TreePacking, cutoff: float = math.inf) -> float:
        return (
            cost(
                packing.expanded(group),
                topology,
                num_bytes,
                cutoff=cutoff * unit,
                robustness=robustness,
                smoothness=0.1,
            )
            / unit
        )

    current, current_cost = start, judge(start)
    best, best_cost = current, current_cost
    spent = 0
    while spent < tasks and best_cost > _GOOD_ENOUGH:
        heat = temperature * (1 - spent / tasks) ** 2
        # The Metropolis rule, with its random number drawn first so that `judge` can stop early.
        accepted = current_cost - heat * math.log(1 - rng.random())
        candidate = _changed(current, neighbours, rng, equal_weights, max_trees)
        candidate_cost = judge(candidate, accepted)
        runs = 1 if candidate_cost > accepted or not robustness else 1 + len(_SEEDS)
        copies = len(candidate.trees) * len(group) * 2 * (topology.num_devices - 1)
        spent += runs * copies + _TASKS_PER_STEP
        if candidate_cost <= accepted:
            current, current_cost = candidate, candidate_cost
            if current_cost < best_cost:
                best, best_cost = current, current_cost
    return best


def _changed(
    packing: TreePacking,
    neighbours: Sequence[Sequence[int]],
    rng: random.Random,
    equal_weights: bool,
    max_trees: int,
) -> TreePacking:
    """Returns a packing that differs from another one in a little."""
    trees, weights = list(packing.trees), list(packing.weights)
    index = rng.randrange(len(trees))
    kind = rng.random()
    if kind < 0.2 and not equal_weights:
        # Mostly a little, now and then by half.
        weights[index] *= 2 ** (rng.uniform(-1, 1) * rng.random() ** 2)
    elif kind < 0.22 and not equal_weights and len(trees) > 1:
        del trees[index], weights[index]
    elif kind < 0.24 and not equal_weights and len(trees) < max_trees:
        weights[index] /= 2
        trees.append(_root_moved(trees[index], rng))
        weights.append(weights[index])
    elif kind < 0.4:
        trees[index] = _root_moved(trees[index], rng)
    else:
        for _ in range(rng.choice((1, 1, 2))):
            trees[index] = _rehung(trees[index], neighbours, rng)
    return TreePacking(tuple(trees), tuple(weights))


def _root_moved(tree: CopyTree, rng: random.Random) -> CopyTree:
    """Returns the same edges, rooted at one of the root's children."""
    new_root = rng.choice(tree.children[tree.root])
    parents = list(tree.parents)
    parents[tree.root], parents[new_root] = new_root, None
    return CopyTree(tuple(parents))


def _rehung(tree: CopyTree, neighbours: Sequence[Sequence[int]], rng: random.Random) -> CopyTree:
    """Hangs one device, with all below it, under another parent, if it has a link to one."""
    device = rng.randrange(tree.num_devices)
    below = {device}
    for child, parent in tree.edges:
        if parent in below:
            below.add(child)
    others = [other for other in neighbours[device] if other not in below | {tree.parents[device]}]
    if device == tree.root or not others:
        return tree
    parents = list(tree.parents)
    parents[device] = rng.choice(others)
    return CopyTree(tuple(parents))
