"""Forests: how data is shared out among copy trees, and the forests that suit many machines."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import networkx as nx

from tfcdo import checks
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.copy_tree import binomial
from tfcdo.plan.copy_tree import chain
from tfcdo.plan.copy_tree import path
from tfcdo.plan.copy_tree import star
from tfcdo.plan.copy_tree import two_level
from tfcdo.plan.schedule import Pack
from tfcdo.plan.schedule import Schedule
from tfcdo.topology.topology import Topology

# No more packs than this: each costs 2 (K-1) ops.
MAX_PACKS = 64
_MAX_RINGS = 100

Permutation = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TreePacking:
    """Copy trees, and the share of the data that travels along each.

    Attributes:
      trees: the trees.
      shares: a positive number for each tree; only their ratios count.

    Raises:
      ValueError: if there are no trees, or not as many shares, or a share or their sum is no
        positive number, or the trees span different devices.
    """

    trees: tuple[CopyTree, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.trees) != len(self.shares) or not self.trees:
            raise ValueError(
                f"a forest needs as many shares as trees, at least one; got {len(self.shares)} "
                f"shares for {len(self.trees)} trees"
            )
        if not all(share > 0 and math.isfinite(share) for share in self.shares):
            raise ValueError(f"shares must be positive numbers; got {self.shares}")
        if not math.isfinite(sum(self.shares)):
            raise ValueError(f"shares must have a sum that is a number; got {self.shares}")
        if len({tree.num_devices for tree in self.trees}) != 1:
            raise ValueError("the trees of a forest must span the same devices")

    def schedule(self, num_bytes: int) -> Schedule:
        """One pack for each tree, of its share of the data.

        Args:
          num_bytes: how many bytes each device holds.

        Returns:
          A schedule of `num_bytes` bytes; a tree whose share is below one byte may get none.
        """
        ends = list(itertools.accumulate(self.shares))
        # The ratio first: a large share of many bytes may be too large for a float. And no float is
        # the last byte of more than 2**53.
        stops = [min(round(num_bytes * (end / ends[-1])), num_bytes) for end in ends[:-1]]
        stops.append(num_bytes)
        packs = (
            Pack(start, stop, tree)
            for start, stop, tree in zip([0, *stops], stops, self.trees, strict=False)
            if stop > start
        )
        return Schedule(self.trees[0].num_devices, num_bytes, tuple(packs))

    def rounded(self) -> TreePacking:
        """This forest with shares of six digits: fine enough, and short to write down."""
        return TreePacking(self.trees, tuple(float(f"{share:.6g}") for share in self.shares))

    def dealt(self, num_packs: int) -> TreePacking:
        """Equal shares, with these trees in turn.

        Args:
          num_packs: how many shares, at least 1.

        Returns:
          A forest of `num_packs` trees.

        Raises:
          ValueError: if `num_packs` is below 1.
        """
        checks.check_int("num_packs", num_packs, at_least=1)
        trees = itertools.islice(itertools.cycle(self.trees), num_packs)
        return TreePacking(tuple(trees), (1.0,) * num_packs)

    def expanded(self, group: Iterable[Permutation]) -> TreePacking:
        """The images of all trees under permutations of the devices.

        Args:
          group: the permutations, at least one; `permutation[d]` is what device `d` becomes.

        Returns:
          A forest of all images of all trees, each with the share of its tree.

        Raises:
          ValueError: if there are no permutations.
        """
        group = tuple(group)
        return TreePacking(
            tuple(_image(tree, permutation) for permutation in group for tree in self.trees),
            self.shares * len(group),
        )


def _image(tree: CopyTree, permutation: Permutation) -> CopyTree:
    parents: list[int | None] = [None] * tree.num_devices
    for device, parent in enumerate(tree.parents):
        parents[permutation[device]] = None if parent is None else permutation[parent]
    return CopyTree(tuple(parents))


def initial_candidates(topology: Topology) -> list[TreePacking]:
    """Forests that are good on one machine or another.

    Args:
      topology: the machine.

    Returns:
      The classic algorithms' trees dealt out to various numbers of packs, paths along rings, and
      trees packed greedily; none of more than `MAX_PACKS` trees where fewer make sense.
    """
    devices = topology.num_devices
    counts = sorted({1, 2, 4, 8, 16, 32, MAX_PACKS, devices, 2 * devices, 3 * devices})
    classics = [
        [make(devices, root) for root in range(devices)]
        for make in (star, chain, binomial, two_level)
    ]
    forests: list[TreePacking | None] = [
        TreePacking(tuple(own), (1.0,) * len(own)).dealt(count)
        for own in classics
        for count in counts
    ]
    forests += [ring_paths(topology, copies) for copies in (1, 2, 3, 4)]
    forests += [packed(topology, count) for count in (2, 4, 8, 16, 32)]
    unique = dict.fromkeys(forest for forest in forests if forest is not None)
    return [forest for forest in unique if len(forest.trees) <= max(MAX_PACKS, devices)]


def ring_paths(topology: Topology, copies: int = 1) -> TreePacking | None:
    """Paths along Hamiltonian rings, one for each edge that a path can leave out of its ring.

    Together the paths load all edges of a ring alike. Several rings get the shares that load all
    links of the machine as evenly as they can; on a DGX-1, the ring of the double links twice that
    of the single ones, which fills every link. Rooted in its middle, a path is only half as deep.

    Args:
      topology: the machine.
      copies: into how many packs to split each path; their roots alternate between its middles.

    Returns:
      The forest, or None if the machine has no Hamiltonian ring of direct links.

    References:
      Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
      2009 (ring all-reduce, here with more than one ring and from the middle).

    Example:
      >>> from tfcdo.topology import preset
      >>> forest = ring_paths(preset("dgx1"))
      >>> len(forest.trees), forest.trees[0].depth, sorted(set(forest.shares))
      (16, 4, [1.0, 2.0])
    """
    devices = topology.num_devices
    rings = _rings(topology)
    if not rings:
        return None
    counts = _evenly(topology, [list(itertools.pairwise((*ring, ring[0]))) for ring in rings])
    trees, shares = [], []
    for copy in range(copies):
        for cut in range(devices):
            for ring, count in zip(rings, counts, strict=True):
                if count:
                    order = ring[cut:] + ring[:cut]
                    trees.append(path(order, order[(devices - copy % 2) // 2]))
                    shares.append(float(count))
    return TreePacking(tuple(trees), tuple(shares))


def _rings(topology: Topology) -> list[tuple[int, ...]]:
    """Hamiltonian rings of direct links, at most `_MAX_RINGS`; none of fewer than 3 devices."""
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
    """The devices that each device is joined to directly.

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


@functools.lru_cache(maxsize=64)
def _edge_loads(
    topology: Topology,
) -> dict[tuple[int, int], tuple[tuple[int, float], ...]]:
    """What one byte up and down an edge costs: `(resource, seconds)` of each resource held."""
    loads = {}
    for source, target in topology.link_by_pair:
        held: dict[int, float] = {}
        for way in ((source, target), (target, source)):
            for resource in topology.link_by_pair[way].resources:
                held[resource] = held.get(resource, 0.0) + 1 / topology.bandwidth(*way)
        loads[source, target] = tuple(held.items())
    return loads


def _evenly(topology: Topology, candidates: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """How often to take each set of edges, so that the fullest resource is as empty as it can be.

    Takes one set after another, always the one that fills least, and stops where the load of the
    fullest resource was smallest in proportion to the number of sets.
    """
    edge_loads = _edge_loads(topology)
    columns = []
    for edges in candidates:
        column = [0.0] * len(topology.resources)
        for edge in edges:
            for resource, seconds in edge_loads[edge]:
                column[resource] += seconds
        columns.append(column)
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


def packed(topology: Topology, count: int) -> TreePacking:
    """Spanning trees packed into the links: each avoids what the earlier ones have filled.

    Args:
      topology: the machine.
      count: how many trees.

    Returns:
      A forest of `count` equal shares, each tree rooted where it is shallowest.

    References:
      Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020.

    Example:
      >>> from tfcdo.topology import preset
      >>> packed(preset("dgx1"), 2).trees[0].num_devices
      8
    """
    edge_loads = _edge_loads(topology)
    load = [0.0] * len(topology.resources)
    roots = [0] * topology.num_devices
    joined = {
        (min(link.source, link.target), max(link.source, link.target))
        for link in topology.direct_links
    }
    trees = []
    for _ in range(count):
        graph = nx.Graph()
        graph.add_nodes_from(range(topology.num_devices))
        for edge in sorted(joined):
            # The rise of the sum of the fourth powers of all loads, dominated by the fullest.
            rise = sum((load[r] + seconds) ** 4 - load[r] ** 4 for r, seconds in edge_loads[edge])
            graph.add_edge(*edge, rise=rise)
        spanning = nx.minimum_spanning_tree(graph, weight="rise")
        for source, target in spanning.edges:
            for resource, seconds in edge_loads[source, target]:
                load[resource] += seconds
        tree = min(
            (_rooted(spanning, root) for root in range(topology.num_devices)),
            key=lambda tree: (tree.depth, roots[tree.root]),
        )
        roots[tree.root] += 1
        trees.append(tree)
    return TreePacking(tuple(trees), (1.0,) * count)


def _rooted(spanning: nx.Graph, root: int) -> CopyTree:
    parent = nx.predecessor(spanning, root)
    return CopyTree(
        tuple(parent[device][0] if parent[device] else None for device in range(len(parent)))
    )
