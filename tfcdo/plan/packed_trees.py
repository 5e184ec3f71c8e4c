"""Packed trees: the copy trees of a linear program, cut into packs, few of which are in flight.

For each number of packs the program has the latencies in its prices; a second one chooses few trees
with short ways. Each tree's part is cut into equal packs, and a window keeps packs of one tree from
waiting in each other's way. Small data has other candidates too. Simulated runs choose.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Sequence

from tfcdo import checks
from tfcdo.plan import copy_tree, simulator, streams, task_graph, tree_program
from tfcdo.plan import schedule as schedules
from tfcdo.plan.streams import Shape, Source, Stream, Streams, deal, equal
from tfcdo.topology.topology import Topology

# Numbers of packs to try, besides multiples of the number of devices.
_NUM_PACKS = (1, 2, 4, 12, 24, 40, 80, 160, 320)
MAX_PACKS = _NUM_PACKS[-1]
# Near the best one, relative to it.
_NEAR_COUNTS = (2 / 3, 5 / 6, 6 / 5, 3 / 2)
# See `Shape`; starts are a fill and `from_ends`, which are tried with each number of packs.
_SLACKS = (0.01, 0.06, 0.2)
_FILLS = (None, 1.5, 2.0, 3.0)
_STARTS = ((None, True), (3.0, True), (2.0, False))
# Seeds of the runs, from this one; none of those by which `robust_seconds` judges the outcome.
_FIRST_SEED = 501
_FINALISTS = 4
_CHANGED_FINALISTS = 2
# A changed plan is given up after a run that is so much slower than the best plan.
_WORSE = 1.1
_WORTH_MORE_PACKS = 0.99
# Numbers of packs beyond one that is so much slower than the best are not tried.
_HOPELESS = 1.15
# Limits on the simulated tasks of one search (a task takes longer on many devices), and on the
# tasks of small changes to its result.
_TASKS = 200_000
_TASKS_TIMES_DEVICES = 8_000_000
_TASKS_OF_CHANGES = 80_000
_MOST_TASKS_TO_CHANGE = 2_000
_TASKS_OF_FEWEST_RUNS = 300
# Fewer packs may have sizes of their own: small ones first and last keep links less idle.
_MOST_PACKS_OF_OWN_SIZE = 24


def packed_trees(
    topology: Topology, num_bytes: int, num_packs: int | None = None
) -> schedules.Schedule:
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
        return deal(_search(topology, schedules.size_class(num_bytes), None), num_bytes)
    num_packs = min(num_packs, num_bytes)  # A pack without a byte moves nothing.
    # Streams that are good for many packs are good for more: the links are busy anyway.
    planned = min(num_packs, MAX_PACKS)
    part = schedules.size_class(max(num_bytes * planned // num_packs, planned))
    return deal(equal(_search(topology, part, planned), num_packs), num_bytes)


@functools.lru_cache(maxsize=512)
def _search(topology: Topology, num_bytes: int, num_packs: int | None) -> Streams:
    """Returns the streams that are fastest in simulated runs, of nearly equal ones the fewest."""
    trial = _Trial(topology, num_bytes, num_packs)
    for simple in streams.simple_streams(topology, num_packs):
        trial.seconds(simple)
    _try_shapes(trial, Source.of_trees)
    rings = streams.rings_of(topology)
    if rings:
        _try_shapes(trial, functools.partial(Source.of_rings, rings=rings))
    finalists = trial.finalists()
    found = [_fewest_of_fast(finalists, topology, num_bytes)]
    tasks_of_pack = 2 * (topology.num_devices - 1)
    for start in list(dict.fromkeys((*found, *finalists)))[:_CHANGED_FINALISTS]:
        if sum(stream.num_packs for stream in start) * tasks_of_pack <= _MOST_TASKS_TO_CHANGE:
            found.append(_changed(start, topology, num_bytes, keep_sizes=num_packs is not None))
    return _fewest_of_fast(found, topology, num_bytes)


class _Trial:
    """Judges streams by a simulated run, as long as there is time."""

    def __init__(self, topology: Topology, num_bytes: int, num_packs: int | None) -> None:
        self.topology, self.num_bytes, self.num_packs = topology, num_bytes, num_packs
        self.left = min(_TASKS, _TASKS_TIMES_DEVICES // topology.num_devices)
        self._seconds: dict[Streams, float] = {}

    def seconds(self, found: Streams) -> float:
        """Returns the seconds of a run; infinity if all time is used up."""
        if self.num_packs is not None:
            found = equal(found, self.num_packs)
        if found not in self._seconds and (self.left > 0 or not self._seconds):
            graph = task_graph.build(deal(found, self.num_bytes), self.topology)
            # A task takes longer where many queues wait for a resource.
            queues = len(graph.resource_sets) / max(len(self.topology.resources), 1)
            self.left -= round(len(graph.names) * (1 + 0.1 * queues))
            self._seconds[found] = simulator.median_seconds(graph, _seeds(graph, 1, 3))
        return self._seconds.get(found, math.inf)

    def finalists(self) -> list[Streams]:
        """Returns the streams of the least seconds, which differ in the number of packs."""
        by_count: dict[int, Streams] = {}
        for found in sorted(self._seconds, key=self._seconds.__getitem__):
            by_count.setdefault(sum(stream.num_packs for stream in found), found)
        return list(by_count.values())[:_FINALISTS]


def _seeds(graph: task_graph.TaskGraph, fewest: int, most: int) -> range:
    """Returns seeds for runs of a graph: the smaller it is, the more its runs differ."""
    count = min(most, max(fewest, fewest * _TASKS_OF_FEWEST_RUNS // max(len(graph.names), 1)))
    return range(_FIRST_SEED, _FIRST_SEED + count)


def _fewest_of_fast(found: Sequence[Streams], topology: Topology, num_bytes: int) -> Streams:
    """Returns the streams of the least time; more packs cost ops, so they must be worth it."""
    best, least = found[0], math.inf
    for one in sorted(found, key=lambda one: sum(stream.num_packs for stream in one)):
        graph = task_graph.build(deal(one, num_bytes), topology)
        # Other seeds than those that found the streams.
        seeds = [seed + _FIRST_SEED for seed in _seeds(graph, 3, 12)]
        seconds = simulator.median_seconds(graph, seeds)
        if seconds < _WORTH_MORE_PACKS * least:
            best, least = one, seconds
    return best


def _try_shapes(trial: _Trial, make: Callable[[tree_program.Edges], Source | None]) -> None:
    """Tries numbers of packs, and with the best of them the other choices, one after another."""
    devices = trial.topology.num_devices
    tried: dict[Shape, float] = {}
    of_count: dict[int, Source | None] = {}

    def attempt(shape: Shape) -> float:
        if shape not in tried:
            if shape.num_packs not in of_count:
                edges = tree_program.Edges(trial.topology, shape.num_packs / trial.num_bytes)
                of_count[shape.num_packs] = make(edges)
            source = of_count[shape.num_packs]
            tried[shape] = trial.seconds(source.streams(shape)) if source else math.inf
        return tried[shape]

    counts = sorted({*_NUM_PACKS, devices, 2 * devices})
    if trial.num_packs is not None:
        counts = [trial.num_packs]
    # On small machines there is time for all of them.
    starts = [(fill, from_ends) for fill in _FILLS for from_ends in (True, False)]
    if len(starts) * sum(counts) * 2 * (devices - 1) > trial.left / 2:
        starts = list(_STARTS)
    misses = 0
    for count in counts:
        seconds = min(attempt(Shape(count, *start)) for start in starts)
        misses = misses + 1 if seconds > _HOPELESS * min(tried.values()) else 0
        if misses == 3 or trial.left <= 0 or seconds == math.inf:
            break
    while trial.left > 0:
        best = min(tried, key=tried.__getitem__)
        others = [dataclasses.replace(best, slack=slack) for slack in _SLACKS]
        others += [
            dataclasses.replace(best, fill=fill, from_ends=from_ends)
            for fill in _FILLS
            for from_ends in (True, False)
        ]
        if trial.num_packs is None:
            near = (round(factor * best.num_packs) or 1 for factor in _NEAR_COUNTS)
            others += [dataclasses.replace(best, num_packs=count) for count in near]
        if min(map(attempt, others)) >= tried[best]:
            break


def _changed(best: Streams, topology: Topology, num_bytes: int, *, keep_sizes: bool) -> Streams:
    """Returns streams after small changes, each of which made simulated runs faster."""
    rng = random.Random(0)  # The same arguments give the same streams.
    left = _TASKS_OF_CHANGES
    if sum(stream.num_packs for stream in best) <= _MOST_PACKS_OF_OWN_SIZE and not any(
        stream.window for stream in best
    ):
        best = tuple(
            dataclasses.replace(
                best[index], part=best[index].part / best[index].num_packs, num_packs=1
            )
            for _, index in streams.turns(best)
        )

    def mean_seconds(found: Streams, enough: float = math.inf) -> float:
        nonlocal left
        graph = task_graph.build(deal(found, num_bytes), topology)
        seconds: list[float] = []
        for seed in _seeds(graph, 2, 8):
            left -= len(graph.names)
            seconds.append(max(simulator.run(graph, 0.05, seed)[1]))
            if seconds[-1] > _WORSE * enough:
                return math.inf
        return sum(seconds) / len(seconds)

    least = mean_seconds(best)
    while left > 0:
        other = _one_change(best, topology, rng, keep_sizes=keep_sizes)
        seconds = mean_seconds(other, least)
        if seconds < least:
            best, least = other, seconds
    return best


def _one_change(
    before: Streams, topology: Topology, rng: random.Random, *, keep_sizes: bool
) -> Streams:
    """Changes a root, an edge, a size or a window of one stream."""
    changed = list(before)
    index = rng.randrange(len(changed))
    stream = changed[index]
    replace = functools.partial(dataclasses.replace, stream)
    kinds = ("root", "edge", "window") + ("part", "packs", "split", "drop") * (not keep_sizes)
    match rng.choice(kinds):
        case "root":
            root = rng.randrange(stream.tree.num_devices)
            changed[index] = replace(tree=copy_tree.rooted(stream.tree.edges, root))
        case "edge":
            changed[index] = replace(tree=_moved(stream.tree, topology, rng))
        case "window":
            window = (stream.window or stream.num_packs) + rng.choice((-1, 1))
            changed[index] = replace(window=window if 0 < window < stream.num_packs else None)
        case "part":
            factor = rng.choice((0.7, 0.85, 0.93, 1.07, 1.15, 1.4))
            changed[index] = replace(part=factor * stream.part)
        case "packs":
            changed[index] = replace(
                num_packs=max(1, stream.num_packs + rng.choice((-2, -1, 1, 2)))
            )
        case "split":
            changed[index] = replace(part=stream.part / 2)
            changed.insert(rng.randrange(len(changed) + 1), changed[index])
        case "drop" if len(changed) > 1:
            del changed[index]
    return tuple(changed)


def _moved(tree: copy_tree.CopyTree, topology: Topology, rng: random.Random) -> copy_tree.CopyTree:
    """Returns a tree one of whose devices has another parent, along a direct link."""
    device = rng.choice(tree.top_down[1:])
    below = {device}
    for other in tree.top_down:
        if tree.parents[other] in below:
            below.add(other)
    parents = list(tree.parents)
    others = [other for other in tree.top_down if other not in below]
    # For a few bytes the way through the host seems as good as a direct link, but is less certain.
    direct = {(link.source, link.target) for link in topology.direct_links}
    near = [other for other in others if {(device, other), (other, device)} <= direct]
    parents[device] = rng.choice(near or [parents[device]])
    return copy_tree.CopyTree(tuple(parents))
