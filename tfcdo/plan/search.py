"""The search for packed trees: which trees, and how much of the data along each.

For much data, the trees and rates of a linear program are dealt out (see `tfcdo.plan.dealing`): one
search for a machine, whatever the size. For little data, in which latencies count, some tree
packings suit many machines (see `tfcdo.plan.candidates`); the fastest of them is improved by
annealing (see `tfcdo.plan.annealing`). All are judged at the size at hand. For some machines trees
come with the package.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from tfcdo import checks
from tfcdo.plan import annealing
from tfcdo.plan import bundled_plans
from tfcdo.plan import copy_tree
from tfcdo.plan import dealing
from tfcdo.plan import simulator
from tfcdo.plan.candidates import initial_candidates
from tfcdo.plan.schedule import Schedule
from tfcdo.plan.schedule import assign
from tfcdo.plan.schedule import cut
from tfcdo.plan.size_class import size_class
from tfcdo.plan.tree_packing import MAX_PACKS
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.topology.topology import Topology

# Into how many packs the trees of a machine are dealt out, to choose from.
_DEALT_PACKS = (12, 30, 80, 200)
# On more devices than this there is no search: a step costs as many simulated tasks as there are
# devices, and more of them are needed.
MAX_SEARCHED_DEVICES = 16
_WORTH_MORE_PACKS = 0.99
# A machine's trees serve all sizes, so they are worth more than one annealing.
_TASKS_FOR_TREES = 6
# Where trees are from, for people.
_SEARCHED = "searched for this machine"


def packed_trees(topology: Topology, num_bytes: int, num_packs: int | None = None) -> Schedule:
    """Plans packs sized and routed so that they fill all links of the machine at once.

    Takes a tree packing that comes with the package for this machine, or else searches for one: for
    the first size on a machine, which takes up to some seconds, and for the first size of a size
    class (a factor of two), which takes one. On more than `MAX_SEARCHED_DEVICES` devices it takes
    the linear program's trees as they are. Searches are not kept for later processes: save a plan.

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
      >>> from tfcdo.plan.lower_bound import lower_bound
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
    chosen = _best_packing(topology, size_class(num_bytes), num_packs).packing
    if num_packs is None:
        return chosen.schedule(num_bytes)
    return assign(num_bytes, cut(num_bytes, num_packs), chosen.trees)


def origin(topology: Topology, num_bytes: int, num_packs: int | None = None) -> str:
    """Returns where `packed_trees` has its trees from, for people.

    Args:
      topology: the machine.
      num_bytes: how many bytes each device holds.
      num_packs: how many packs; None for as many as are fast.

    Example:
      >>> from tfcdo.topology import preset
      >>> origin(preset("dgx1"), 10**9)
      'bundled with tfcdo'
    """
    return _best_packing(topology, size_class(num_bytes), num_packs).origin


@dataclasses.dataclass(frozen=True)
class _Known:
    """Holds a tree packing, and where it is from."""

    packing: TreePacking
    origin: str


@functools.lru_cache(maxsize=512)
def _best_packing(topology: Topology, num_bytes: int, num_packs: int | None) -> _Known:
    """Returns the tree packing of `packed_trees` for a size; known or searched."""
    if topology.num_devices == 1 or not num_bytes:
        star = TreePacking((copy_tree.star(topology.num_devices),), (1.0,))
        return _Known(star.round_robin(num_packs or 1), "a star")
    if num_packs is not None and num_packs > MAX_PACKS:
        # Trees that are good for some of the packs are good for all: the links are busy anyhow.
        part = max(num_bytes * MAX_PACKS // num_packs, 1)
        few = _best_packing(topology, part, MAX_PACKS)
        return _Known(few.packing.round_robin(num_packs), few.origin)
    if topology.num_devices > MAX_SEARCHED_DEVICES:
        return _Known(_unsearched(topology, num_packs), "a linear program for this machine")
    bundled = _with(num_packs, bundled_plans.find(topology))
    if bundled:
        return _Known(fastest(bundled, topology, num_bytes), "bundled with tfcdo")
    searched = _searched(topology, size_class(num_bytes, per_doubling=1), num_packs)
    trees = _trees(topology)
    packings = dealt(topology, num_packs or _DEALT_PACKS)
    best = fastest([searched.packing, *packings], topology, num_bytes)
    return _Known(best, trees.origin if trees and best in packings else searched.origin)


def _unsearched(topology: Topology, num_packs: int | None) -> TreePacking:
    """Returns a packing for a machine on which each takes long to simulate."""
    trees = dealing.quick_trees(topology)
    if trees is None:
        trees = TreePacking((copy_tree.star(topology.num_devices),), (1.0,))
    (packing,) = _dealt(trees, topology, num_packs or (topology.num_devices,))
    return packing


def dealt(topology: Topology, num_packs: int | Sequence[int] = _DEALT_PACKS) -> list[TreePacking]:
    """Deals out the trees of the linear program, without looking at packings that are bundled.

    Args:
      topology: the machine.
      num_packs: into so many equal packs, or into about so many of any size.

    Returns:
      A packing for each number of packs; none if copies take no time.
    """
    trees = _trees(topology)
    return _dealt(trees.packing, topology, num_packs) if trees else []


def _dealt(
    trees: TreePacking, topology: Topology, num_packs: int | Sequence[int]
) -> list[TreePacking]:
    if isinstance(num_packs, int):
        return [dealing.deal_equally(trees, num_packs)]
    return [dealing.deal(trees, topology, count) for count in num_packs]


@functools.lru_cache(maxsize=64)
def _trees(topology: Topology) -> _Known | None:
    """Returns the trees that fill the links of a machine, whatever the size."""
    trees = dealing.spread_trees(topology, _TASKS_FOR_TREES * annealing.TASKS_PER_SEARCH)
    return _Known(trees, _SEARCHED) if trees else None


def _with(num_packs: int | None, packings: Sequence[TreePacking]) -> list[TreePacking]:
    """Returns the different packings, with so many packs each if a number is given."""
    if num_packs is not None:
        packings = [packing.round_robin(num_packs) for packing in packings]
    return list(dict.fromkeys(packings))


@functools.lru_cache(maxsize=512)
def _searched(topology: Topology, num_bytes: int, num_packs: int | None) -> _Known:
    """Returns the result of a search for a size."""
    return _Known(search(topology, num_bytes, num_packs), _SEARCHED)


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
    equal_weights = num_packs is not None
    found = annealing.improve(start, topology, num_bytes, equal_weights=equal_weights).rounded()
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
