"""Packed trees: the copy trees of a linear program, cut into packs, few of which are in flight.

For each number of packs the program has the latencies in its prices; a second one chooses few trees
with short ways. Each tree's part is cut into equal packs, and a window keeps packs of one tree from
waiting in each other's way. Small data has simple trees too, and trees chosen one by one. Simulated
runs decide.
"""

from __future__ import annotations

import functools
import itertools
import math

from tfcdo import checks
from tfcdo.plan import copy_tree, simulator, streams, task_graph, tree_program
from tfcdo.plan.plan import Plan, size_class
from tfcdo.plan.streams import Source, Stream, Streams, deal, equal
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
# Small data: as many trees are chosen one by one, from so many that are fastest alone.
_FEW, _FASTEST_ALONE = 24, 40
# Where the best plan has more packs than this, so few trees would be slower.
_PACKS_OF_SMALL_DATA = 32
# Limit on the simulated tasks of one search.
_TASKS = 200_000
# So many plans, and of many tasks fewer, are judged thoroughly.
_FINALISTS, _TASKS_OF_FINALISTS = 8, 3_000
# The seeds of a search's runs; none of those by which `robust_seconds` judges the outcome.
_SEEDS = (501, 502, 503)
_TASKS_OF_ONE_RUN = 300


def packed_trees(topology: Topology, num_bytes: int, num_packs: int | None = None) -> Plan:
    """Plans packs sized and routed so that they fill all links of the machine at once.

    Sizes that differ little share a plan, which is kept for the process. Packs have equal sizes if
    their number is given.

    References:
      Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020.
      Zhao et al., "ForestColl", arXiv 2402.06787 (spanning trees by linear programming).
    """
    checks.check_sizes(num_bytes, num_packs)
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
    tasks = 2 * (topology.num_devices - 1) * streams.num_packs(finalists[0])
    finalists = finalists[: max(2, min(_FINALISTS, _TASKS_OF_FINALISTS // tasks))]
    finalists.sort(key=streams.num_packs)
    return simulator.first_of_fastest(
        {found: simulator.robust_seconds(deal(found, num_bytes), topology) for found in finalists}
    )


class _Trial:
    """Tries streams by simulated runs, as long as there is time."""

    def __init__(self, topology: Topology, num_bytes: int, num_packs: int | None) -> None:
        self.topology, self.num_bytes, self.num_packs = topology, num_bytes, num_packs
        self.left, self.least = _TASKS, math.inf
        self.tried: dict[Streams, float] = {}

    def seconds(self, found: Streams) -> float:
        """Returns the median seconds of a few runs; infinity if all time is used up."""
        if self.num_packs is not None:
            found = equal(found, self.num_packs)
        if found not in self.tried and (self.left > 0 or not self.tried):
            graph = task_graph.build(deal(found, self.num_bytes), self.topology)
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
    rings = streams.rings_of(trial.topology)
    ways = tuple(itertools.product(_FILLS, (True, False)))
    tried: dict[int, float] = {}

    def attempt(count: int) -> float:
        if count in tried:
            return tried[count]
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
        return tried[count]

    counts = sorted({*_NUM_PACKS, devices, 2 * devices})
    for count in counts if trial.num_packs is None else [trial.num_packs]:
        if trial.left > 0 or not tried:
            attempt(count)
    best = min(tried, key=tried.__getitem__)
    if trial.num_packs is None:
        for factor in _NEAR_COUNTS:
            if trial.left > 0:
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
