"""Sources of streams: trees of the linear program, paths along rings, and simple algorithms."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from tfcdo.plan import copy_tree, tree_program
from tfcdo.plan.streams import Stream, Streams
from tfcdo.topology.topology import Topology

# Between the cheapest trees (0) and the trees of the shortest ways from a root (1).
_NEARNESS = (0.05, 0.2, 0.5)
_MOST_RINGS = 100


@dataclasses.dataclass(frozen=True)
class Shape:
    """How data is cut and sent.

    Attributes:
      num_packs: about how many packs there are.
      fill: how many packs are in flight along a tree, relative to the number that are on their way
        if none waits; None for no windows.
      from_ends: whether each tree is used with both ends of its longest path as roots, rather than
        with its center.
      slack: how much longer the busiest link may be busy than it must, so that fewer trees are
        needed.
    """

    num_packs: int
    fill: float | None
    from_ends: bool
    slack: float = 0.06


class Trees:
    """The trees of the linear program for about so many packs."""

    def __init__(self, topology: Topology, num_bytes: int, num_packs: int) -> None:
        edges = tree_program.Edges(topology, num_packs / num_bytes)
        self.edges, self.solved = edges, tree_program.solve(edges)
        if self.solved is None:
            # Copies along some trees take no time: the one with the shortest ways.
            prices = edges.prices(np.ones(edges.num_resources))
            self.tree = edges.tree(prices + 1e-6 * (prices.max() or 1.0), nearness=1.0)
            return
        program = self.solved.program
        # Edges without a price get a little one, so that short ways win among them.
        little = 1e-3 * edges.prices(np.ones(edges.num_resources)) * self.solved.prices.mean()
        prices = edges.prices(self.solved.prices) + little
        for root in range(edges.num_devices):
            for nearness in _NEARNESS:
                program.add(edges.tree(prices, root, nearness))
        self.trees = tuple(program.trees)
        self.roots = [edges.roots(tree) for tree in self.trees]
        self.ways = np.array([roots[0][1] for roots in self.roots]) / program.unit
        self._rates: dict[float, tree_program.Floats] = {}

    def streams(self, shape: Shape) -> Streams:
        """Returns the streams of few trees with short ways."""
        if self.solved is None:
            return (Stream(copy_tree.rooted(self._pairs(self.tree), 0), 1.0),)
        if shape.slack not in self._rates:
            found = tree_program.shallow_rates(self.solved, self.ways, shape.slack)
            self._rates[shape.slack] = found
        rates = self._rates[shape.slack]
        used = np.flatnonzero(rates > 1e-4 * rates.sum())
        # The longer a tree's part takes along its way, the more packs it is cut into.
        busy = float((rates * self.ways)[used].sum())
        streams = []
        for index in used:
            # Rooted at both ends, each link begins with copies up one of two trees.
            roots = self.roots[index][1:] if shape.from_ends else self.roots[index][:1]
            rate = float(rates[index]) / len(roots)
            count = max(1, round(shape.num_packs * rate * float(self.ways[index]) / busy))
            for root, way in roots:
                filled = rate * way / self.solved.program.unit
                window = shape.fill and max(1, math.ceil(shape.fill * filled))
                tree = copy_tree.rooted(self._pairs(self.trees[index]), root)
                streams.append(
                    Stream(tree, rate, count, window if window and window < count else None)
                )
        return tuple(streams)

    def _pairs(self, tree: tree_program.Tree) -> list[tuple[int, int]]:
        return [self.edges.pairs[edge] for edge in tree]


class RingPaths:
    """Paths along Hamiltonian rings, one for each edge that a path can leave out of its ring.

    Together they load all edges of a ring alike. Several rings get the rates of a linear program.

    References:
      Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
      2009 (ring all-reduce, here with more than one ring and from the middle or both ends).
    """

    def __init__(
        self, topology: Topology, num_bytes: int, rings: Sequence[tuple[int, ...]], num_packs: int
    ) -> None:
        edges = tree_program.Edges(topology, num_packs / num_bytes)
        numbers = [
            tuple(sorted(int(edges.number[pair]) for pair in itertools.pairwise((*ring, ring[0]))))
            for ring in rings
        ]
        fastest = min(float(edges.load(ring).max()) for ring in numbers)
        program = tree_program.TreeProgram(edges, fastest)
        for ring in numbers:
            program.add(ring)
        rates, prices = program.solve()
        self._rings, self._solved = rings, tree_program.Solved(program, rates, prices, 0.0)

    def streams(self, shape: Shape) -> Streams:
        """Returns the streams along few rings, which have equal numbers of packs."""
        # All rings have as many edges: none is preferred.
        rates = tree_program.shallow_rates(self._solved, np.ones(len(self._rings)), shape.slack)
        streams = []
        for index in map(int, np.flatnonzero(rates > 1e-3 * rates.sum())):
            ring, rate = self._rings[index], float(rates[index])
            for cut in range(len(ring)):
                order = ring[cut:] + ring[:cut]
                roots = (order[0], order[-1]) if shape.from_ends else (order[len(order) // 2],)
                streams += [Stream(copy_tree.path(order, root), rate) for root in roots]
        count = max(1, round(shape.num_packs / len(streams)))
        window = shape.fill and math.ceil(shape.fill)
        window = window if window and window < count else None
        return tuple(dataclasses.replace(one, num_packs=count, window=window) for one in streams)


@functools.lru_cache(maxsize=64)
def rings_of(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Finds Hamiltonian rings of direct links."""
    devices = topology.num_devices
    joined = {(link.source, link.target) for link in topology.direct_links}
    near = [
        [
            other
            for _, other in sorted(
                (-topology.bandwidth(device, other), other)
                for other in range(devices)
                if {(device, other), (other, device)} <= joined
            )
        ]
        for device in range(devices)
    ]
    # A machine may have no ring or hide it well; no search of this kind is worth more steps.
    steps = itertools.islice(itertools.count(), 50_000)

    def extend(ring: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(ring) == devices:
            # Each ring is found in both directions; one is enough.
            if ring[0] in near[ring[-1]] and ring[1] < ring[-1]:
                yield ring
            return
        for device in near[ring[-1]]:
            if device not in ring and next(steps, None) is not None:
                yield from extend((*ring, device))

    return tuple(itertools.islice(extend((0,)), _MOST_RINGS)) if devices > 2 else ()


def simple_streams(topology: Topology, num_packs: int | None) -> Iterator[Streams]:
    """Yields the trees of simple algorithms in turn, which are good for small data."""
    devices = topology.num_devices
    counts = {1, 2, 3, 4, 6, 8, devices, 2 * devices} if num_packs is None else {num_packs}
    for count in sorted(counts):
        for make in (copy_tree.star, copy_tree.chain, copy_tree.binomial, copy_tree.two_level):
            of_root = [len(range(root, count, devices)) for root in range(devices)]
            yield tuple(
                Stream(make(devices, root), float(packs), packs)
                for root, packs in enumerate(of_root)
                if packs
            )
