"""The search for packed trees: which trees, and how much of the data along each.

For much data, the trees and rates of a linear program are dealt out (see `tfcdo.plan.dealing`): one
search for a machine, whatever the size. For little data, in which latencies count, some tree
packings suit many machines (see `tfcdo.plan.candidates`); the fastest of them is improved by
annealing, each step of which changes a tree or a weight. All are judged at the size at hand. What
was found is kept; for some machines it comes with the package.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence

from tfcdo import checks
from tfcdo.plan import bundled_plans
from tfcdo.plan import copy_tree
from tfcdo.plan import dealing
from tfcdo.plan import plan_cache
from tfcdo.plan import simulator
from tfcdo.plan import task_graph
from tfcdo.plan.candidates import initial_candidates
from tfcdo.plan.candidates import neighbours_of
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.schedule import Schedule
from tfcdo.plan.schedule import assign
from tfcdo.plan.schedule import cut
from tfcdo.plan.size_class import size_class
from tfcdo.plan.tree_packing import MAX_PACKS
from tfcdo.plan.tree_packing import Permutation
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.topology.isomorphism import isomorphisms
from tfcdo.topology.topology import Topology

# Into how many packs the trees of a machine are dealt out, to choose from.
_DEALT_PACKS = (12, 30, 80, 200)
# On more devices than this there is no search: a step costs as many simulated tasks as there are
# devices, and more of them are needed.
MAX_SEARCHED_DEVICES = 16
# Seeds of the disorderly runs; not those by which `robust_seconds` judges the outcome.
_SEEDS = (101, 102, 103)
_JITTER = 0.05
# A packing this close to the bound is not worth improving. The bound is that of the direct links,
# along which trees are improved; that links via the host might beat it on a few machines is let go.
_GOOD_ENOUGH = 1.002
_WORTH_MORE_PACKS = 0.99
# Searches are bounded by the number of simulated tasks, not by a clock, so that they repeat; this
# many take about a second.
_TASKS_PER_SEARCH = 60_000
# A machine's trees serve all sizes, so they are worth more.
_TASKS_FOR_TREES = 5
# What a step costs on top of its tasks, in tasks.
_TASKS_PER_STEP = 20


def packed_trees(topology: Topology, num_bytes: int, num_packs: int | None = None) -> Schedule:
    """Plans packs sized and routed so that they fill all links of the machine at once.

    Takes a tree packing that comes with the package for this machine, or that an earlier call has
    found, and else searches for one: for the first size on a machine, which takes up to three
    seconds, and for the first size of a size class (a factor of two), which takes one. On more than
    `MAX_SEARCHED_DEVICES` devices it takes the linear program's trees as they are.

    Args:
      topology: the machine.
      num_bytes: how many bytes each device holds.
      num_packs: how many packs, then of equal sizes; by default as many as are fast.

    Returns:
      A schedule in bytes. The same arguments give the same schedule.

    Raises:
      ValueError: if `num_bytes` is negative or `num_packs` is below 1.
      TypeError: if one of them is not an int.

    References:
      Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020.
      Cai et al., "Synthesizing Optimal Collective Algorithms", PPoPP 2021.

    Example:
      >>> from tfcdo.topology import preset
      >>> machine = preset("dgx1")
      >>> schedule = packed_trees(machine, 10**9)
      >>> seconds = simulator.robust_seconds(schedule, machine)
      >>> bool(seconds < 1.05 * lower_bound(machine, 10**9))
      True
    """
    checks.check_sizes(num_bytes, num_packs)
    if num_packs is not None:
        num_packs = min(num_packs, max(num_bytes, 1))  # A pack without a byte moves nothing.
    chosen = _best_packing(topology, size_class(num_bytes), num_packs)
    if num_packs is None:
        return chosen.schedule(num_bytes)
    return assign(num_bytes, cut(num_bytes, num_packs), chosen.trees)


@functools.lru_cache(maxsize=512)
def _best_packing(topology: Topology, num_bytes: int, num_packs: int | None) -> TreePacking:
    """Returns the tree packing of `packed_trees` for a size; known or searched."""
    if topology.num_devices == 1 or not num_bytes:
        star = TreePacking((copy_tree.star(topology.num_devices),), (1.0,))
        return star.round_robin(num_packs or 1)
    if num_packs is not None and num_packs > MAX_PACKS:
        # Trees that are good for some of the packs are good for all: the links are busy anyhow.
        part = max(num_bytes * MAX_PACKS // num_packs, 1)
        return _best_packing(topology, part, MAX_PACKS).round_robin(num_packs)
    if topology.num_devices > MAX_SEARCHED_DEVICES:
        return _unsearched(topology, num_packs)
    known = _with(num_packs, bundled_plans.find(topology))
    if not known:
        searched = _searched(topology, size_class(num_bytes, per_doubling=1), num_packs)
        known = [searched, *_dealt(_trees(topology), topology, num_packs or _DEALT_PACKS)]
    return fastest(known, topology, num_bytes)


def _unsearched(topology: Topology, num_packs: int | None) -> TreePacking:
    """Returns a packing for a machine on which each takes long to simulate."""
    trees = dealing.quick_trees(topology)
    if trees is None:
        trees = TreePacking((copy_tree.star(topology.num_devices),), (1.0,))
    (packing,) = _dealt(trees, topology, num_packs or (topology.num_devices,))
    return packing


def _dealt(
    trees: TreePacking | None, topology: Topology, num_packs: int | Sequence[int]
) -> list[TreePacking]:
    """Returns packings of some trees: in so many equal packs, or in about so many of any size."""
    if trees is None:
        return []
    if isinstance(num_packs, int):
        return [dealing.deal_equally(trees, num_packs)]
    return [dealing.deal(trees, topology, count) for count in num_packs]


@functools.lru_cache(maxsize=64)
def _trees(topology: Topology) -> TreePacking | None:
    """Returns the trees that fill the links of a machine, whatever the size."""
    trees = plan_cache.load(topology, "trees")
    if trees is None:
        trees = dealing.spread_trees(topology, _TASKS_FOR_TREES * _TASKS_PER_SEARCH)
        if trees is not None:
            plan_cache.save(topology, "trees", trees)
    return trees


def _with(num_packs: int | None, packings: Sequence[TreePacking]) -> list[TreePacking]:
    """Returns the different packings, with so many packs each if a number is given."""
    if num_packs is not None:
        packings = [packing.round_robin(num_packs) for packing in packings]
    return list(dict.fromkeys(packings))


@functools.lru_cache(maxsize=512)
def _searched(topology: Topology, num_bytes: int, num_packs: int | None) -> TreePacking:
    key = f"{num_bytes}-{num_packs or 'any'}"
    packing = plan_cache.load(topology, key)
    if packing is not None and num_packs in (None, len(packing.trees)):
        return packing
    packing = search(topology, num_bytes, num_packs)
    plan_cache.save(topology, key, packing)
    return packing


def search(topology: Topology, num_bytes: int, num_packs: int | None = None) -> TreePacking:
    """Searches a tree packing, without looking at any that is known.

    Args:
      topology: the machine.
      num_bytes: how many bytes each device holds.
      num_packs: how many trees, then of equal weights; by default as many as are fast.

    Returns:
      The best packing found. The same arguments give the same packing.
    """
    start = fastest(_with(num_packs, initial_candidates(topology)), topology, num_bytes)
    found = improve(start, topology, num_bytes, equal_weights=num_packs is not None).rounded()
    # What guides the search is not quite the time that counts.
    return fastest([start, found], topology, num_bytes)


def fastest(packings: Sequence[TreePacking], topology: Topology, num_bytes: int) -> TreePacking:
    """Returns the packing of the least robust time, of several the one with the fewest trees.

    Args:
      packings: the packings to choose from.
      topology: the machine.
      num_bytes: how many bytes each device holds.

    Returns:
      One of `packings`.

    Raises:
      ValueError: if there are no packings.
    """
    if not packings:
        raise ValueError(f"packings must hold at least one tree packing; got {packings!r}")
    chosen, least = packings[0], math.inf
    for packing in sorted(packings, key=lambda packing: len(packing.trees)):
        seconds = simulator.robust_seconds(packing.schedule(num_bytes), topology, cutoff=least)
        # Packs cost ops, which the simulator does not count: more of them must be worth it.
        if seconds < least * _WORTH_MORE_PACKS:
            chosen, least = packing, seconds
    return chosen


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


def symmetries(topology: Topology, limit: int = 16) -> tuple[Permutation, ...]:
    """Returns the permutations of the devices that change no link's bandwidth and latency.

    Args:
      topology: the machine.
      limit: a machine with more symmetries than this has too many to be of use in a search.

    Returns:
      All of them, the identity first, or the identity alone if there are more than `limit`.

    Example:
      >>> from tfcdo.topology import preset
      >>> symmetries(preset("dgx1"))[1]
      (2, 3, 0, 1, 6, 7, 4, 5)
    """
    found = tuple(isomorphisms(topology, topology, limit + 1))
    return found if len(found) <= limit else (tuple(range(topology.num_devices)),)


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
    """
    tasks = _TASKS_PER_SEARCH if tasks is None else tasks
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
