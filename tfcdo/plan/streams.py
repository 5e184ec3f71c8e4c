"""Streams: copy trees with parts of the data, and the packs and windows that are made of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from tfcdo.plan import copy_tree, tree_program
from tfcdo.plan.plan import Plan, plan_of_bytes
from tfcdo.topology.topology import Topology

# Between the cheapest trees (0) and the trees of the shortest ways from a root (1).
_NEARNESS = (0.05, 0.2, 0.5)
_MOST_RINGS = 100
_STEPS_TO_RINGS = 50_000


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


class Source:
    """Copy trees that fill the links together, by a linear program for about so many packs.

    Each column of the program is one tree, or the paths along a Hamiltonian ring, one for each edge
    that a path can leave out: together they load all edges of the ring alike.

    References:
      Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
      2009 (ring all-reduce, here with more than one ring and from the middle or both ends).
    """

    def __init__(self, solved: tree_program.Solved, ways: tree_program.Floats) -> None:
        self._solved, self._ways = solved, ways
        self._rates: dict[float, tree_program.Floats] = {}

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
        return cls(solved, np.array([edges.roots(tree)[0][1] for tree in program.trees]))

    @classmethod
    def of_rings(
        cls, edges: tree_program.Edges, rings: Sequence[tree_program.Tree]
    ) -> Source | None:
        """Returns the paths along rings, with rates of their own program; None if one is free."""
        unit = min((float(edges.load(ring).max()) for ring in rings), default=0.0)
        if not unit:
            return None
        program = tree_program.TreeProgram(edges, unit)
        for ring in rings:
            program.add(ring)
        # Rings have as many edges each, so none is preferred: the fewer there are, the better.
        return cls(tree_program.Solved(program, *program.solve(), 0.0), np.ones(len(rings)))

    def least_seconds(self, num_bytes: int) -> float:
        """Returns the time of the busiest link, with the latencies of about the number of packs."""
        return num_bytes * self._solved.program.unit / float(self._solved.rates.sum())

    def streams(self, num_packs: int, slack: float, fill: float | None, from_ends: bool) -> Streams:
        """Returns the streams of few trees with short ways.

        Args:
          num_packs: about how many packs there are.
          slack: how much longer the busiest link may be busy than it must, so that fewer trees are
            needed.
          fill: how many packs are in flight along a tree, relative to the number that are on their
            way if none waits; None for no windows.
          from_ends: whether each tree is used with both ends of its longest path as roots, rather
            than with its center.
        """
        if slack not in self._rates:
            self._rates[slack] = tree_program.shallow_rates(self._solved, self._ways, slack)
        program, rates = self._solved.program, self._rates[slack]
        columns = [
            (column, float(rate), float(way))
            for column, rate, way in zip(program.trees, rates, self._ways, strict=True)
            if rate > 1e-3 * rates.sum()
        ]
        # The longer a tree's part takes along its way, the more packs it is cut into.
        busy = sum(rate * way for _, rate, way in columns)
        streams = []
        for column, rate_of_all, column_way in columns:
            trees = [column]
            if len(column) == program.edges.num_devices:  # A ring.
                trees = [tuple(edge for edge in column if edge != left) for left in column]
            # Rooted at both ends, each link begins with copies up one of two trees.
            rate = rate_of_all / len(trees) / (2 if from_ends else 1)
            count = max(1, round(num_packs * rate * column_way / busy))
            for tree in trees:
                center, *ends = program.edges.roots(tree)
                for root, way in ends if from_ends else [center]:
                    window = fill and max(1, math.ceil(fill * rate * way / program.unit))
                    pairs = [program.edges.pairs[edge] for edge in tree]
                    streams.append(
                        Stream(
                            copy_tree.rooted(pairs, root),
                            rate,
                            count,
                            window if window and window < count else None,
                        )
                    )
        return tuple(streams)


def rings_of(topology: Topology) -> list[tree_program.Tree]:
    """Finds Hamiltonian rings of direct links; returns the numbers of their edges."""
    devices = topology.num_devices
    direct = {(link.source, link.target) for link in topology.direct_links}
    near = [
        [
            other
            for _, other in sorted(
                (-topology.bandwidth(device, other), other)
                for other in range(devices)
                if {(device, other), (other, device)} <= direct
            )
        ]
        for device in range(devices)
    ]
    number = tree_program.Edges(topology).number
    rings: list[tree_program.Tree] = []
    paths: list[tuple[int, ...]] = [(0,)]
    # A machine may have no ring or hide it well; no search of this kind is worth more steps.
    for _ in range(_STEPS_TO_RINGS):
        if not paths or len(rings) == _MOST_RINGS:
            break
        path = paths.pop()
        if len(path) < devices:
            paths += [(*path, device) for device in reversed(near[path[-1]]) if device not in path]
        # Each ring is found in both directions; one is enough.
        elif path[0] in near[path[-1]] and path[1] < path[-1]:
            edges = zip(path, (*path[1:], path[0]), strict=True)
            rings.append(tuple(sorted(int(number[edge]) for edge in edges)))
    return rings


def num_packs(streams: Sequence[Stream]) -> int:
    """Returns the number of packs of all streams."""
    return sum(stream.num_packs for stream in streams)


def deal(streams: Sequence[Stream], num_bytes: int) -> Plan:
    """Returns the plan of streams, whose packs are in turn."""
    order = turns(streams)
    total = sum(stream.part for stream in streams)
    packs: list[tuple[int, copy_tree.CopyTree, int | None]] = []
    of_stream: list[list[int]] = [[] for _ in streams]
    end, start = 0.0, 0
    for position, (_, index) in enumerate(order):
        stream, earlier = streams[index], of_stream[index]
        end += stream.part / stream.num_packs / total
        # The last byte of very many is no float.
        stop = num_bytes if position == len(order) - 1 else min(round(num_bytes * end), num_bytes)
        if stop > start:
            after = None
            if stream.window is not None and len(earlier) >= stream.window:
                after = earlier[-stream.window]
            earlier.append(len(packs))
            packs.append((stop - start, stream.tree, after))
            start = stop
    return plan_of_bytes(streams[0].tree.num_devices, packs)


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
