"""Candidates: tree packings that suit many machines, for a search to choose from and begin with."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from tfcdo.plan.copy_tree import binomial
from tfcdo.plan.copy_tree import chain
from tfcdo.plan.copy_tree import path
from tfcdo.plan.copy_tree import star
from tfcdo.plan.copy_tree import two_level
from tfcdo.plan.edge_loads import EdgeLoads
from tfcdo.plan.tree_packing import MAX_PACKS
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.topology.topology import Topology

_MAX_RINGS = 100


def initial_candidates(topology: Topology) -> list[TreePacking]:
    """Returns tree packings that are good on one machine or another.

    Args:
      topology: the machine.

    Returns:
      The classic algorithms' trees in turn for various numbers of packs, and paths along rings;
      none of more than `MAX_PACKS` trees where fewer make sense.
    """
    devices = topology.num_devices
    counts = sorted({1, 2, 4, 8, 16, 32, MAX_PACKS, devices, 2 * devices, 3 * devices})
    classics = [
        TreePacking(tuple(make(devices, root) for root in range(devices)), (1.0,) * devices)
        for make in (star, chain, binomial, two_level)
    ]
    candidates: list[TreePacking | None] = [
        classic.round_robin(count) for classic in classics for count in counts
    ]
    candidates += [ring_paths(topology, copies) for copies in (1, 2, 3, 4)]
    return _small(topology, candidates)


def _small(topology: Topology, candidates: Sequence[TreePacking | None]) -> list[TreePacking]:
    """Returns the different candidates that do not have more packs than make sense."""
    unique = dict.fromkeys(candidate for candidate in candidates if candidate is not None)
    return [one for one in unique if len(one.trees) <= max(MAX_PACKS, topology.num_devices)]


def ring_paths(topology: Topology, copies: int = 1) -> TreePacking | None:
    """Makes paths along Hamiltonian rings, one for each edge that a path can leave out of its ring.

    Together the paths load all edges of a ring alike. Several rings get the weights that load all
    links of the machine as evenly as they can; on a DGX-1, the ring of the double links twice that
    of the single ones, which fills every link. Rooted in its middle, a path is only half as deep.

    Args:
      topology: the machine.
      copies: into how many packs to split each path; their roots alternate between its middles.

    Returns:
      The packing, or None if the machine has no Hamiltonian ring of direct links.

    References:
      Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
      2009 (ring all-reduce, here with more than one ring and from the middle).

    Example:
      >>> from tfcdo.topology import preset
      >>> packing = ring_paths(preset("dgx1"))
      >>> len(packing.trees), packing.trees[0].depth, sorted(set(packing.weights))
      (16, 4, [1.0, 2.0])
    """
    devices = topology.num_devices
    rings = _rings(topology)
    if not rings:
        return None
    counts = _evenly(topology, rings)
    trees, weights = [], []
    for copy in range(copies):
        for cut in range(devices):
            for ring, count in zip(rings, counts, strict=True):
                if count:
                    order = ring[cut:] + ring[:cut]
                    trees.append(path(order, order[(devices - copy % 2) // 2]))
                    weights.append(float(count))
    return TreePacking(tuple(trees), tuple(weights))


@functools.lru_cache(maxsize=64)
def _rings(topology: Topology) -> list[tuple[int, ...]]:
    """Finds Hamiltonian rings of direct links, not more than `_MAX_RINGS`."""
    neighbours = neighbours_of(topology)
    # A machine may have no ring or hide it well; no search of this kind is worth more steps.
    steps = itertools.islice(itertools.count(), 50_000)

    def extend(ring: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(ring) == topology.num_devices:
            # Each ring is found in both directions; one is enough.
            if ring[0] in neighbours[ring[-1]] and ring[1] < ring[-1]:
                yield ring
            return
        for device in neighbours[ring[-1]]:
            if device not in ring and next(steps, None) is not None:
                yield from extend((*ring, device))

    if topology.num_devices < 3:
        return []
    return list(itertools.islice(extend((0,)), _MAX_RINGS))


def neighbours_of(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Returns the devices that each device is joined to directly.

    Args:
      topology: the machine.

    Returns:
      For each device its neighbours, those on the fastest links first.
    """
    joined = {(link.source, link.target) for link in topology.direct_links}
    both_ways = sorted(
        (pair for pair in joined if pair[::-1] in joined),
        key=lambda pair: (-topology.bandwidth(*pair), pair),
    )
    return tuple(
        tuple(target for source, target in both_ways if source == device)
        for device in range(topology.num_devices)
    )


def _evenly(topology: Topology, rings: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns how often to take each ring so that the load of the bottleneck is smallest.

    Takes one ring after another, always the one that loads least, and stops where the load of the
    bottleneck was smallest in proportion to the number of rings.
    """
    loads = EdgeLoads(topology)
    columns = [
        loads.load(loads.numbers(itertools.pairwise((*ring, ring[0])))).tolist() for ring in rings
    ]
    counts = [0] * len(columns)
    load = [0.0] * len(topology.resources)
    best: tuple[float, list[int]] = (math.inf, counts)
    for taken in range(1, 13):
        sums = [[a + b for a, b in zip(load, column, strict=True)] for column in columns]
        chosen = min(
            range(len(columns)),
            key=lambda index: (max(sums[index]), sum(x * x for x in sums[index])),
        )
        load = sums[chosen]
        counts[chosen] += 1
        if max(load) / taken < best[0] * (1 - 1e-9):
            best = (max(load) / taken, list(counts))
    return best[1]
