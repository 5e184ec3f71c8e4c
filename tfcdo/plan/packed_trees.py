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
from tfcdo.plan import copy_tree, simulator, size_class, stream_sources, task_graph, tree_program
from tfcdo.plan import schedule as schedules
from tfcdo.plan.streams import Stream, Streams, deal, equal, turns
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
_WORTH_MORE_PACKS = 0.99
# Numbers of packs beyond one that is so much slower than the best are not tried.
_HOPELESS = 1.15
# Simulated tasks of one search, of which those of many devices take longer; and tasks of small
# changes to what it found.
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

    Sizes that differ by less than an eighth share a plan, which is kept for the process. Packs have
    equal sizes if their number is given.

    References:
      Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020.
      Zhao et al., "ForestColl", arXiv 2402.06787 (spanning trees by linear programming).

    Example:
      >>> from tfcdo.plan import lower_bound, simulator
      >>> from tfcdo.topology import preset
      >>> machine = preset("pcie")
      >>> seconds = simulator.robust_seconds(packed_trees(machine, 10**9), machine)
      >>> seconds < 1.08 * lower_bound.lower_bound_seconds(machine, 10**9)
      True
    """
    checks.check_sizes(num_bytes, num_packs)
    if topology.num_devices == 1 or not num_bytes:
        star = Stream(copy_tree.star(topology.num_devices), 1.0)
        return deal(equal((star,), min(num_packs or 1, max(num_bytes, 1))), num_bytes)
    if num_packs is None:
        return deal(_search(topology, size_class.size_class(num_bytes), None), num_bytes)
    num_packs = min(num_packs, num_bytes)  # A pack without a byte moves nothing.
    # Streams that are good for many packs are good for more: the links are busy anyway.
    planned = min(num_packs, MAX_PACKS)
    part = size_class.size_class(max(num_bytes * planned // num_packs, planned))
    return deal(equal(_search(topology, part, planned), num_packs), num_bytes)


@functools.lru_cache(maxsize=512)
def _search(topology: Topology, num_bytes: int, num_packs: int | None) -> Streams:
    """Returns the streams that are fastest in simulated runs, of nearly equal ones the fewest."""
    trial = _Trial(topology, num_bytes, num_packs)
    for streams in stream_sources.simple_streams(topology, num_packs):
        trial.seconds(streams)
    _try_shapes(trial, functools.partial(stream_sources.Trees, topology, num_bytes), num_packs)
    rings = stream_sources.rings_of(topology)
    if rings and tree_program.seconds_per_byte(topology):
        make = functools.partial(stream_sources.RingPaths, topology, num_bytes, rings)
        _try_shapes(trial, make, num_packs)
    finalists = trial.finalists()
    best = _fewest_of_fast(finalists, topology, num_bytes)
    found = [best]
    tasks_of_pack = 2 * (topology.num_devices - 1)
    for start in list(dict.fromkeys((best, *finalists)))[:_CHANGED_FINALISTS]:
        if sum(one.num_packs for one in start) * tasks_of_pack <= _MOST_TASKS_TO_CHANGE:
            found.append(_changed(start, topology, num_bytes, keep_sizes=num_packs is not None))
    return _fewest_of_fast(found, topology, num_bytes)


class _Trial:
    """Judges streams by a simulated run, as long as there is time."""

    def __init__(self, topology: Topology, num_bytes: int, num_packs: int | None) -> None:
        self.topology, self.num_bytes, self.num_packs = topology, num_bytes, num_packs
        self.left = min(_TASKS, _TASKS_TIMES_DEVICES // topology.num_devices)
        self._seconds: dict[Streams, float] = {}

    def seconds(self, streams: Streams) -> float:
        """Returns the seconds of a run; infinity if all time is used up."""
        if self.num_packs is not None:
            streams = equal(streams, self.num_packs)
        if streams not in self._seconds and (self.left > 0 or not self._seconds):
            graph = task_graph.build(deal(streams, self.num_bytes), self.topology)
            # A task takes longer where many queues wait for a resource.
            queues = len(graph.resource_sets) / max(len(self.topology.resources), 1)
            self.left -= round(len(graph.names) * (1 + 0.1 * queues))
            self._seconds[streams] = simulator.median_seconds(graph, _seeds(graph, 1, 3))
        return self._seconds.get(streams, math.inf)

    def finalists(self) -> list[Streams]:
        """Returns the streams of the least seconds."""
        return sorted(self._seconds, key=self._seconds.__getitem__)[:_FINALISTS]


def _seeds(graph: task_graph.TaskGraph, fewest: int, most: int) -> range:
    """Returns seeds for runs of a graph: the smaller it is, the more its runs differ."""
    count = min(most, max(fewest, fewest * _TASKS_OF_FEWEST_RUNS // max(len(graph.names), 1)))
    return range(_FIRST_SEED, _FIRST_SEED + count)


def _fewest_of_fast(found: Sequence[Streams], topology: Topology, num_bytes: int) -> Streams:
    """Returns the streams of the least time; more packs cost ops, so they must be worth it."""
    best, least = found[0], math.inf
    for streams in sorted(found, key=lambda streams: sum(one.num_packs for one in streams)):
        graph = task_graph.build(deal(streams, num_bytes), topology)
        seconds = simulator.median_seconds(graph, _seeds(graph, 3, 12))
        if seconds < _WORTH_MORE_PACKS * least:
            best, least = streams, seconds
    return best


def _try_shapes(
    trial: _Trial,
    make: Callable[[int], stream_sources.Trees | stream_sources.RingPaths],
    num_packs: int | None,
) -> None:
    """Tries numbers of packs, and with the best of them the other choices, one after another."""
    devices = trial.topology.num_devices
    tried: dict[stream_sources.Shape, float] = {}
    of_count: dict[int, stream_sources.Trees | stream_sources.RingPaths] = {}

    def attempt(shape: stream_sources.Shape) -> float:
        if shape not in tried:
            if shape.num_packs not in of_count:
                of_count[shape.num_packs] = make(shape.num_packs)
            tried[shape] = trial.seconds(of_count[shape.num_packs].streams(shape))
        return tried[shape]

    counts = sorted({*_NUM_PACKS, devices, 2 * devices} if num_packs is None else {num_packs})
    # On small machines there is time for all of them.
    starts = [(fill, from_ends) for fill in _FILLS for from_ends in (True, False)]
    if len(starts) * sum(counts) * 2 * (devices - 1) > trial.left / 2:
        starts = list(_STARTS)
    misses = 0
    for count in counts:
        seconds = min(attempt(stream_sources.Shape(count, *start)) for start in starts)
        misses = misses + 1 if seconds > _HOPELESS * min(tried.values()) else 0
        if misses == 3 or trial.left <= 0:
            break
    while trial.left > 0:
        best = min(tried, key=tried.__getitem__)
        others = [dataclasses.replace(best, slack=slack) for slack in _SLACKS]
        others += [
            dataclasses.replace(best, fill=fill, from_ends=from_ends)
            for fill in _FILLS
            for from_ends in (True, False)
        ]
        if num_packs is None:
            near = (round(factor * best.num_packs) or 1 for factor in _NEAR_COUNTS)
            others += [dataclasses.replace(best, num_packs=count) for count in near]
        if min(map(attempt, others)) >= tried[best]:
            break


def _changed(streams: Streams, topology: Topology, num_bytes: int, *, keep_sizes: bool) -> Streams:
    """Returns streams after small changes, each of which made simulated runs faster."""
    rng = random.Random(0)  # The same arguments give the same streams.
    left = _TASKS_OF_CHANGES
    if sum(stream.num_packs for stream in streams) <= _MOST_PACKS_OF_OWN_SIZE and not any(
        stream.window for stream in streams
    ):
        streams = tuple(
            dataclasses.replace(
                streams[index], part=streams[index].part / streams[index].num_packs, num_packs=1
            )
            for _, index in turns(streams)
        )

    def mean_seconds(streams: Streams) -> tuple[float, int]:
        graph = task_graph.build(deal(streams, num_bytes), topology)
        seeds = _seeds(graph, 2, 6)
        runs = [max(simulator.run(graph, 0.05, seed)[1]) for seed in seeds]
        return sum(runs) / len(runs), len(graph.names) * len(runs)

    least, used = mean_seconds(streams)
    while left > 0:
        left -= used
        other = _one_change(streams, topology, rng, keep_sizes=keep_sizes)
        seconds, used = mean_seconds(other)
        if seconds < least:
            streams, least = other, seconds
    return streams


def _one_change(
    streams: Streams, topology: Topology, rng: random.Random, *, keep_sizes: bool
) -> Streams:
    """Changes a root, an edge, a size or a window of one stream."""
    changed = list(streams)
    index = rng.randrange(len(changed))
    stream = changed[index]
    kinds = ("root", "edge", "window") + ("part", "packs", "split", "drop") * (not keep_sizes)
    match rng.choice(kinds):
        case "root":
            root = rng.randrange(stream.tree.num_devices)
            changed[index] = dataclasses.replace(
                stream, tree=copy_tree.rooted(stream.tree.edges, root)
            )
        case "edge":
            changed[index] = dataclasses.replace(stream, tree=_moved(stream.tree, topology, rng))
        case "window":
            window = (stream.window or stream.num_packs) + rng.choice((-1, 1))
            changed[index] = dataclasses.replace(
                stream, window=window if 0 < window < stream.num_packs else None
            )
        case "part":
            part = stream.part * rng.choice((0.7, 0.85, 0.93, 1.07, 1.15, 1.4))
            changed[index] = dataclasses.replace(stream, part=part)
        case "packs":
            count = max(1, stream.num_packs + rng.choice((-2, -1, 1, 2)))
            changed[index] = dataclasses.replace(stream, num_packs=count)
        case "split":
            changed[index] = dataclasses.replace(stream, part=stream.part / 2)
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
