"""Packed trees: the copy trees of a linear program, cut into packs; few packs are in flight.

For each number of packs the program has the latencies in its prices; a second one chooses few trees
with short ways. Each tree's part is cut into equal packs, and a window keeps packs of one tree from
waiting in each other's way. Small data has simple trees too, and trees chosen one by one. Simulated
runs decide.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from tfcdo.plan import copy_tree, simulator, tree_program
from tfcdo.plan.plan import Plan, plan_of_bytes, size_class
from tfcdo.topology.topology import Topology

# Numbers of packs to try, besides multiples of the number of devices, and near the best of them.
_NUM_PACKS = (1, 2, 4, 12, 24, 40, 80, 160, 320)
_NEAR_COUNTS = (2 / 3, 5 / 6, 6 / 5, 3 / 2)
MAX_PACKS = _NUM_PACKS[-1]
# How much longer the busiest link may be busy than it must, so that fewer trees are needed.
_SLACKS, _SLACKS_OF_SMALL_DATA = (0.06, 0.01, 0.2), (0.06, 0.01, 0.2, 0.3)
# How many packs are in flight along a tree, relative to the number that are on their way if none
# waits; None for no windows.
_FILLS = (None, 1.5, 2.0, 3.0)
# Small data: the number of trees that are chosen one by one, and of the candidates.
_FEW, _FASTEST_ALONE = 24, 40
# Where the best plan has more packs than this, so few trees would be slower.
_PACKS_OF_SMALL_DATA = 32
# Limit on the simulated tasks of one search.
_TASKS = 200_000
# Finalists to simulate fully; fewer for large task graphs.
_FINALISTS, _TASKS_OF_FINALISTS = 8, 3_000
# The seeds of a search's runs; `robust_seconds`, which judges the outcome, has other seeds.
_SEEDS = (501, 502, 503)
_TASKS_OF_ONE_RUN = 300
# Between the cheapest trees (0) and the trees of the shortest ways from a root (1).
_NEARNESS = (0.05, 0.2, 0.5)
_MOST_RINGS = 100
_STEPS_TO_RINGS = 50_000


def packed_trees(topology: Topology, num_bytes: int, num_packs: int | None = None) -> Plan:
    """Plans packs sized and routed so that they fill all links of the machine at once.

    Sizes that differ little share a plan, which is kept for the process. Packs have equal sizes if
    their number is given.

    References:
      Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020.
      Zhao et al., "ForestColl", arXiv 2402.06787 (spanning trees by linear programming).
    """
    if topology.num_devices == 1 or not num_bytes:
        star = Stream(copy_tree.star(topology.num_devices), 1.0)
        return deal(equal((star,), min(num_packs or 1, max(num_bytes, 1))), num_bytes)
    if num_packs is None:
        return deal(_search(topology, size_class(num_bytes), None), num_bytes)
    num_packs = min(num_packs, num_bytes)  # A pack without a byte moves nothing.
    # Streams that are good for many packs are good for more: the links are busy anyway.
    planned = min(num_packs, MAX_PACKS)
    part = size_class(max(num_bytes * planned // num_packs, planned))
    return deal(equal(_search(topology, part, planned), num_packs), num_bytes)


@functools.lru_cache(maxsize=512)
def _search(topology: Topology, num_bytes: int, num_packs: int | None) -> Streams:
    """Returns the streams that are fastest in simulated runs, of nearly equal ones the fewest."""
    trial = _Trial(topology, num_bytes, num_packs)
    _try_simple_trees(trial)
    if _try_counts(trial) <= _PACKS_OF_SMALL_DATA:
        _try_few(trial)
    finalists = sorted(trial.tried, key=trial.tried.__getitem__)
    tasks = 2 * (topology.num_devices - 1) * _num_packs(finalists[0])
    finalists = finalists[: max(2, min(_FINALISTS, _TASKS_OF_FINALISTS // tasks))]
    finalists.sort(key=_num_packs)
    return simulator.first_of_fastest(
        {found: simulator.robust_seconds(deal(found, num_bytes), topology) for found in finalists}
    )


class _Trial:
    """Tries streams by simulated runs, within a limit on tasks."""

    def __init__(self, topology: Topology, num_bytes: int, num_packs: int | None) -> None:
        self.topology, self.num_bytes, self.num_packs = topology, num_bytes, num_packs
        self.left, self.least = _TASKS, math.inf
        self.tried: dict[Streams, float] = {}

    def seconds(self, found: Streams) -> float:
        """Returns the median seconds of a few runs; infinity if all time is used up."""
        if self.num_packs is not None:
            found = equal(found, self.num_packs)
        if found not in self.tried and (self.left > 0 or not self.tried):
            graph = simulator.task_graph(deal(found, self.num_bytes), self.topology)
            # A task takes longer where many queues wait for a resource.
            queues = len(graph.resource_sets) / max(len(self.topology.resources), 1)
            self.left -= round(len(graph.names) * (1 + 0.2 * queues))
            # The smaller a graph is, the more its runs differ.
            seeds = _SEEDS[: max(1, _TASKS_OF_ONE_RUN // max(len(graph.names), 1))]
            self.tried[found] = simulator.median_seconds(graph, seeds)
            self.least = min(self.least, self.tried[found])
        return self.tried.get(found, math.inf)


def _try_counts(trial: _Trial) -> int:
    """Tries numbers of packs along trees and along rings; returns the best number."""
    devices = trial.topology.num_devices
    rings = rings_of(trial.topology)
    ways = tuple(itertools.product(_FILLS, (True, False)))
    tried: dict[int, float] = {}

    def attempt(count: int) -> None:
        if count in tried or (tried and trial.left <= 0):
            return
        tried[count] = math.inf
        edges = tree_program.Edges(trial.topology, count / trial.num_bytes)
        for source in (Source.of_trees(edges), Source.of_rings(edges, rings)):
            if source and source.least_seconds(trial.num_bytes) < trial.least:
                trees = functools.partial(source.streams, count)
                way = min(ways, key=lambda way: trial.seconds(trees(_SLACKS[0], *way)))
                slacks = _SLACKS_OF_SMALL_DATA if count <= _PACKS_OF_SMALL_DATA else _SLACKS
                slack = min(slacks, key=lambda slack: trial.seconds(trees(slack, *way)))
                tried[count] = min(
                    tried[count], *(trial.seconds(trees(slack, *way)) for way in ways)
                )

    counts = sorted({*_NUM_PACKS, devices, 2 * devices})
    for count in counts if trial.num_packs is None else [trial.num_packs]:
        attempt(count)
    best = min(tried, key=tried.__getitem__)
    for factor in _NEAR_COUNTS if trial.num_packs is None else ():
        attempt(round(factor * best) or 1)
    return min(tried, key=tried.__getitem__)


def _try_simple_trees(trial: _Trial) -> None:
    """Tries the trees of simple algorithms from a few roots, which are good for small data."""
    devices = trial.topology.num_devices
    shapes = (copy_tree.star, copy_tree.chain, copy_tree.binomial, copy_tree.two_level)
    for shape, count in itertools.product(shapes, (1, 2, 4, 8)):
        roots = range(min(count, devices))
        trial.seconds(tuple(Stream(shape(devices, root), 1.0) for root in roots))


def _try_few(trial: _Trial) -> None:
    """Tries known trees chosen one by one, each the one that makes a run shortest."""
    trees = dict.fromkeys(stream.tree for found in trial.tried for stream in found)
    alone = sorted(((Stream(tree, 1.0),) for tree in trees), key=trial.seconds)
    chosen: Streams = ()
    for _ in range(_FEW):
        chosen = min(((*chosen, *one) for one in alone[:_FASTEST_ALONE]), key=trial.seconds)


@dataclasses.dataclass(frozen=True)
class Stream:
    """A copy tree, and the equal packs that are sent along it one after another."""

    tree: copy_tree.CopyTree
    part: float  # Its part of the data, relative to the other streams.
    num_packs: int = 1
    window: int | None = None  # The most packs in flight; None for no limit.


Streams: TypeAlias = "tuple[Stream, ...]"


class Source:
    """Copy trees that fill the links together, by a linear program for about a number of packs.

    Each column of the program is one tree, or the paths along a Hamiltonian ring, one for each edge
    that a path can leave out: together they load all edges of the ring equally.
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
        # Rings have equal numbers of edges, so none is preferred: fewer rings are better.
        return cls(tree_program.Solved(program, *program.solve(), 0.0), np.ones(len(rings)))

    def least_seconds(self, num_bytes: int) -> float:
        """Returns the time of the busiest link, with the latencies of about the number of packs."""
        return num_bytes * self._solved.program.unit / float(self._solved.rates.sum())

    def streams(self, num_packs: int, slack: float, fill: float | None, from_ends: bool) -> Streams:
        """Returns the streams of few trees with short ways; see `_SLACKS` and `_FILLS`."""
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
            # Each tree is rooted at its center, or used twice, from both ends of its longest path:
            # then each link begins with copies up one of two trees.
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
    near = [  # The fastest links first.
        sorted(
            (other for other in range(devices) if {(device, other), (other, device)} <= direct),
            key=lambda other: -topology.bandwidth(device, other),
        )
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


def _num_packs(streams: Sequence[Stream]) -> int:
    return sum(stream.num_packs for stream in streams)


def deal(streams: Sequence[Stream], num_bytes: int) -> Plan:
    """Returns the plan of streams, whose packs are in turn."""
    # When each pack is sent, and the index of its stream.
    order = sorted(
        ((number + 0.5) / stream.num_packs, index)
        for index, stream in enumerate(streams)
        for number in range(stream.num_packs)
    )
    total = sum(stream.part for stream in streams)
    packs: list[tuple[int, copy_tree.CopyTree, int | None]] = []
    of_stream: list[list[int]] = [[] for _ in streams]
    end, start = 0.0, 0
    for position, (_, index) in enumerate(order):
        stream, earlier = streams[index], of_stream[index]
        end += stream.part / stream.num_packs / total
        # A float does not hold the last byte of very many.
        stop = num_bytes if position == len(order) - 1 else min(round(num_bytes * end), num_bytes)
        if stop > start:
            after = None
            if stream.window is not None and len(earlier) >= stream.window:
                after = earlier[-stream.window]
            earlier.append(len(packs))
            packs.append((stop - start, stream.tree, after))
            start = stop
    return plan_of_bytes(streams[0].tree.num_devices, packs)


def equal(streams: Streams, num_packs: int) -> Streams:
    """Returns the streams in a number of equal packs, as near to their parts as possible."""
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
