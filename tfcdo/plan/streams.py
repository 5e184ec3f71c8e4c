"""Streams: copy trees with parts of the data, and the packs and windows that are made of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from tfcdo.plan import copy_tree, tree_program
from tfcdo.plan import schedule as schedules
from tfcdo.topology.topology import Topology

# Between the cheapest trees (0) and the trees of the shortest ways from a root (1).
_NEARNESS = (0.05, 0.2, 0.5)
_MOST_RINGS = 100


@dataclasses.dataclass(frozen=True)
class Stream:
    """A copy tree, and the equal packs that are sent along it one after another.

    `part` is its part of the data, relative to the other streams; at most `window` packs are in
    flight.
    """

    tree: copy_tree.CopyTree
    part: float
    num_packs: int = 1
    window: int | None = None


Streams: TypeAlias = "tuple[Stream, ...]"


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


class Source:
    """Copy trees that fill the links together, by a linear program for about so many packs.

    Each column of the program is one tree, or the paths along a Hamiltonian ring, one for each edge
    that a path can leave out: together they load all edges of the ring alike.

    References:
      Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
      2009 (ring all-reduce, here with more than one ring and from the middle or both ends).
    """

    def __init__(self, solved: tree_program.Solved) -> None:
        self.solved, self._columns = solved, tuple(solved.program.trees)
        self._rates: dict[float, tree_program.Floats] = {}
        self._rooted: dict[int, list[tuple[tree_program.Tree, tuple[tuple[int, float], ...]]]] = {}
        # Rings have as many edges each, so none is preferred: the fewer there are, the better.
        self.ways = np.ones(len(self._columns))
        for index, column in enumerate(self._columns):
            if len(column) < solved.program.edges.num_devices:
                self.ways[index] = self._paths(index)[0][1][0][1]

    def _paths(self, index: int) -> list[tuple[tree_program.Tree, tuple[tuple[int, float], ...]]]:
        """Returns a column's trees, each with its center and its ends as roots, and their ways."""
        if index not in self._rooted:
            edges, column = self.solved.program.edges, self._columns[index]
            trees = [column]
            if len(column) == edges.num_devices:  # A ring.
                trees = [tuple(edge for edge in column if edge != left) for left in column]
            self._rooted[index] = [(tree, edges.roots(tree)) for tree in trees]
        return self._rooted[index]

    @classmethod
    def of_trees(cls, edges: tree_program.Edges) -> Source | None:
        """Returns the trees of the best rates, and others with short ways; None if all are free."""
        solved = tree_program.solve(edges)
        if solved is None:
            return None
        program = solved.program
        # Edges without a price get a little one, so that short ways win among them.
        little = 1e-3 * edges.prices(np.ones(edges.num_resources)) * solved.prices.mean()
        prices = edges.prices(solved.prices) + little
        for root in range(edges.num_devices):
            for nearness in _NEARNESS:
                program.add(edges.tree(prices, root, nearness))
        return cls(solved)

    @classmethod
    def of_rings(cls, edges: tree_program.Edges, rings: Sequence[tuple[int, ...]]) -> Source | None:
        """Returns the paths along rings, with rates of their own program; None if one is free."""
        numbers = [
            tuple(sorted(int(edges.number[pair]) for pair in itertools.pairwise((*ring, ring[0]))))
            for ring in rings
        ]
        unit = min(float(edges.load(ring).max()) for ring in numbers)
        if not unit:
            return None
        program = tree_program.TreeProgram(edges, unit)
        for ring in numbers:
            program.add(ring)
        return cls(tree_program.Solved(program, *program.solve(), 0.0))

    def streams(self, shape: Shape) -> Streams:
        """Returns the streams of few trees with short ways."""
        if shape.slack not in self._rates:
            found = tree_program.shallow_rates(self.solved, self.ways, shape.slack)
            self._rates[shape.slack] = found
        rates, program = self._rates[shape.slack], self.solved.program
        used = np.flatnonzero(rates > 1e-3 * rates.sum())
        # The longer a tree's part takes along its way, the more packs it is cut into.
        busy = float((rates * self.ways)[used].sum())
        streams = []
        for index in map(int, used):
            paths = self._paths(index)
            for edges, all_roots in paths:
                # Rooted at both ends, each link begins with copies up one of two trees.
                roots = all_roots[1:] if shape.from_ends else all_roots[:1]
                rate = float(rates[index]) / len(paths) / len(roots)
                count = max(1, round(shape.num_packs * rate * float(self.ways[index]) / busy))
                for root, way in roots:
                    pairs = [program.edges.pairs[edge] for edge in edges]
                    window = shape.fill and max(
                        1, math.ceil(shape.fill * rate * way / program.unit)
                    )
                    window = window if window and window < count else None
                    streams.append(Stream(copy_tree.rooted(pairs, root), rate, count, window))
        return tuple(streams)


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


def deal(streams: Sequence[Stream], num_bytes: int) -> schedules.Schedule:
    """Returns the schedule of streams, whose packs are in turn."""
    order = turns(streams)
    total = sum(stream.part for stream in streams)
    packs: list[schedules.Pack] = []
    of_stream: list[list[int]] = [[] for _ in streams]
    end, start = 0.0, 0
    for position, (_, index) in enumerate(order):
        stream, earlier = streams[index], of_stream[index]
        end += stream.part / stream.num_packs / total
        # The last byte of very many is no float.
        stop = num_bytes if position == len(order) - 1 else min(round(num_bytes * end), num_bytes)
        if stop > start:
            waits = stream.window is not None and len(earlier) >= stream.window
            after = earlier[-stream.window] if waits and stream.window else None
            earlier.append(len(packs))
            packs.append(schedules.Pack(start, stop, stream.tree, after))
            start = stop
    return schedules.Schedule(streams[0].tree.num_devices, num_bytes, tuple(packs))


def turns(streams: Sequence[Stream]) -> list[tuple[float, int]]:
    """Returns the order of the packs: when each is sent, and the index of its stream."""
    return sorted(
        ((number + 0.5) / stream.num_packs, index)
        for index, stream in enumerate(streams)
        for number in range(stream.num_packs)
    )


def equal(streams: Streams, num_packs: int) -> Streams:
    """Returns the streams with so many equal packs in all, as near to their parts as can be."""
    total = sum(stream.part for stream in streams)
    counts = [math.floor(num_packs * stream.part / total) for stream in streams]
    lacking = [num_packs * stream.part / total - count for stream, count in zip(streams, counts)]
    largest_first = sorted(range(len(streams)), key=lambda index: (-lacking[index], index))
    for index in largest_first[: num_packs - sum(counts)]:
        counts[index] += 1
    return tuple(
        dataclasses.replace(stream, part=float(count), num_packs=count)
        for stream, count in zip(streams, counts, strict=True)
        if count
    )
