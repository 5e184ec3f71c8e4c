"""The simulator: how long a schedule takes on a topology."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
import random
from collections.abc import Sequence

from tfcdo import checks
from tfcdo.plan import task_graph
from tfcdo.plan.schedule import Schedule
from tfcdo.plan.task_graph import TaskGraph
from tfcdo.topology.topology import Topology

# Two events this close (seconds) happen at the same time; far below any latency, far above the
# rounding of sums of times.
_SAME_TIME = 1e-12
# The runs of `robust_seconds`: at most, at least, and in all (some seconds).
_MOST_RUNS = 20
_FEWEST_RUNS = 3
_TASKS_IN_ALL_RUNS = 25_000
# A schedule whose first runs are all this much slower than the cutoff is not run again.
_HOPELESS = 1.1


@dataclasses.dataclass(frozen=True)
class Task:
    """Something that holds resources for a while.

    Attributes:
      kind: "reduce" for a copy towards the root, "broadcast" for one away from it, "add" for adding
        what a child sent.
      pack: the pack's index.
      source: the sending device; the child for an addition.
      target: the receiving device; the device that adds.
      start: when it begins, in seconds.
      end: when it ends, in seconds.
    """

    kind: str
    pack: int
    source: int
    target: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The events of a simulation.

    Attributes:
      seconds: when the last task ended.
      tasks: all copies, and all additions if they take time, in the order of their start.
    """

    seconds: float
    tasks: tuple[Task, ...]

    @property
    def copies(self) -> tuple[Task, ...]:
        """Returns the copies alone."""
        return tuple(task for task in self.tasks if task.kind != "add")


def simulate(
    schedule: Schedule,
    topology: Topology,
    *,
    jitter: float = 0.0,
    seed: int | None = None,
) -> Timeline:
    """Runs a schedule on a topology once, as the executor's ops would.

    The model, "store and forward by op": each edge of each copy tree is one copy up and one down. A
    device sends its partial sum up once all its children's have arrived and been added, one after
    another; it sends the result on once it has it. A copy holds all resources of its link for
    `latency + bytes / bandwidth`; a resource carries one copy at a time. Where copies wait, the one
    that has waited longest goes first (of those that have waited equally long, the one of the
    earlier pack). A blocked copy does not block later ones.

    Args:
      schedule: what to run, in bytes.
      topology: what to run it on.
      jitter: each task takes `1 + jitter * u` times as long, `u` uniform between -1 and 1; from 0
        to 1, so that no task takes less than no time.
      seed: draws the jitter, and which of the copies that have waited equally long goes first. None
        for no randomness.

    Returns:
      When each copy ran, and the time of the whole.

    Raises:
      ValueError: if the schedule and the topology differ in the number of devices, or a jitter is
        asked for without a seed, or is not from 0 to 1.

    References:
      Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
      MPICH", 2005 (the latency-bandwidth cost model).

    Example:
      >>> from tfcdo.topology import preset
      >>> from tfcdo.plan import algorithms
      >>> machine = preset("dgx1")
      >>> one_pack = algorithms.make_schedule("hierarchical_copy", machine, 10**8, num_packs=1)
      >>> f"{1e3 * simulate(one_pack, machine).seconds:.2f} ms"
      '12.04 ms'
    """
    if jitter and seed is None:
        raise ValueError(f"jitter {jitter} needs a seed")
    graph = task_graph.build(schedule, topology)
    if seed is None:
        starts, ends = _run_in_order(graph)
    else:
        starts, ends = run_shuffled(graph, jitter, seed)
    tasks = [
        Task(kind, pack, source, target, start, end)
        for (kind, pack, source, target), start, end in zip(graph.names, starts, ends, strict=True)
    ]
    tasks.sort(key=lambda task: (task.start, task.end, task.pack))
    return Timeline(max(ends, default=0.0), tuple(tasks))


# `auto` has the schedule of another algorithm, whose time is then known.
@functools.lru_cache(maxsize=16)
def ordered_seconds(schedule: Schedule, topology: Topology) -> float:
    """Returns the time of a schedule where each copy takes exactly as long as it should.

    Args:
      schedule: what to run, in bytes.
      topology: what to run it on.

    Returns:
      The time in seconds, as `simulate` finds it without a seed.

    Raises:
      ValueError: as `simulate`.

    Example:
      >>> from tfcdo.topology import preset
      >>> from tfcdo.plan import algorithms
      >>> machine = preset("nvswitch", 4)
      >>> shuffle = algorithms.make_schedule("shuffle", machine, 10**8)
      >>> ordered_seconds(shuffle, machine) == simulate(shuffle, machine).seconds
      True
    """
    graph = task_graph.build(schedule, topology)
    return max(_run_in_order(graph)[1], default=0.0)


def robust_seconds(
    schedule: Schedule,
    topology: Topology,
    *,
    jitter: float = 0.05,
    num_seeds: int | None = None,
    cutoff: float = math.inf,
) -> float:
    """Returns the time of a schedule where no copy takes exactly as long as it should.

    Nothing keeps the executor's copies in an order, so a schedule that is only fast if all of them
    begin and end on time is not fast.

    Args:
      schedule: what to run, in bytes.
      topology: what to run it on.
      jitter: see `simulate`.
      num_seeds: how many runs to take the median of; by default 20, and fewer, down to 3, of
        schedules of thousands of copies.
      cutoff: a time that is of no interest; where the first runs show that the schedule takes
        longer, they are all.

    Returns:
      The median time, in seconds, of first come, first served with ties shuffled.

    Raises:
      ValueError: if `num_seeds` is below 1 or `jitter` is not from 0 to 1.
      TypeError: if `num_seeds` is not an int.
    """
    graph = task_graph.build(schedule, topology)
    if num_seeds is None:
        affordable = _TASKS_IN_ALL_RUNS // max(len(graph.names), 1)
        num_seeds = min(_MOST_RUNS, max(_FEWEST_RUNS, affordable))
    checks.check_int("num_seeds", num_seeds, at_least=1)
    times: list[float] = []
    for seed in range(num_seeds):
        times.append(max(run_shuffled(graph, jitter, seed)[1], default=0.0))
        if len(times) == _FEWEST_RUNS and min(times) > _HOPELESS * cutoff:
            break
    times.sort()
    return (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2


def bytes_by_resource(schedule: Schedule, topology: Topology) -> dict[str, int]:
    """Returns how much each wire, port or bridge carries.

    Args:
      schedule: what is run, in bytes.
      topology: what it is run on.

    Returns:
      The bytes of each of the topology's resources, by name.
    """
    carried = [0] * len(topology.resources)
    for pack in schedule.packs:
        for child, parent in pack.tree.edges:
            for source, target in ((child, parent), (parent, child)):
                for resource in topology.link_by_pair[source, target].resources:
                    carried[resource] += pack.size
    return {resource.name: load for resource, load in zip(topology.resources, carried, strict=True)}


def bottleneck(schedule: Schedule, topology: Topology) -> tuple[str, int]:
    """Returns the resource that is busy longest with its bytes.

    Args:
      schedule: what is run, in bytes.
      topology: what it is run on.

    Returns:
      Its name and the bytes it carries; `("", 0)` on one device.
    """
    carried = bytes_by_resource(schedule, topology)
    bandwidth = {resource.name: resource.bandwidth for resource in topology.resources}
    return max(
        carried.items(),
        key=lambda item: (item[1] / bandwidth[item[0]], item[1]),
        default=("", 0),
    )


def run_shuffled(graph: TaskGraph, jitter: float, seed: int) -> tuple[list[float], list[float]]:
    """Runs the tasks first come, first served, with random ties and durations.

    Args:
      graph: the tasks.
      jitter: see `simulate`.
      seed: draws the ties and the durations.

    Returns:
      The start and the end of each task.

    Raises:
      ValueError: if `jitter` is not from 0 to 1.
    """
    if not 0 <= jitter <= 1:
        raise ValueError(f"jitter must be from 0 to 1; got {jitter}")
    rng = random.Random(seed)
    ties = list(range(len(graph.names)))
    rng.shuffle(ties)
    durations: Sequence[float] = graph.durations
    if jitter:
        durations = [seconds * (1 + jitter * (2 * rng.random() - 1)) for seconds in durations]
    return _run(graph, durations, ties, first_come=True)


def _run_in_order(graph: TaskGraph) -> tuple[list[float], list[float]]:
    """Runs the tasks first come, first served, of several the one of the earlier pack."""
    return _run(graph, graph.durations, range(len(graph.names)), first_come=True)


def run_longest_path_first(graph: TaskGraph) -> tuple[list[float], list[float]]:
    """Runs the tasks with the longest critical path first, which no executor does for certain.

    Its time changes less abruptly from one schedule to a similar one than that of other runs, so a
    search is guided by it.

    Args:
      graph: the tasks.

    Returns:
      The start and the end of each task.
    """
    ranks = [-seconds for seconds in graph.critical_path]
    return _run(graph, graph.durations, ranks, first_come=False)


def _run(
    graph: TaskGraph, durations: Sequence[float], ranks: Sequence[float], *, first_come: bool
) -> tuple[list[float], list[float]]:
    """Starts every task as soon as its resources are free, in order of rank.

    Args:
      graph: the tasks.
      durations: seconds of each task.
      ranks: of tasks that could start at the same time, the one of lowest rank starts first.
      first_come: whether the time since when a task has waited counts before its rank.

    Returns:
      The start and the end of each task.
    """
    count = len(durations)
    set_of, dependents = graph.resource_set_of, graph.dependents
    # Sets of resources are the bits of a number: the inner loop asks most often whether two meet.
    masks, sets = graph.masks, graph.resource_sets
    waiting_for = list(graph.num_dependencies)
    starts, ends = [0.0] * count, [0.0] * count
    busy = 0
    # Of the tasks that hold the same resources only the first in line can start.
    queues: list[list[tuple[float, float, int]]] = [[] for _ in masks]
    # Of each resource the sets with it in whose line somebody waits: of many sets, mostly a few.
    lines: list[set[int]] = [set() for _ in range(graph.num_resources)]
    running: list[tuple[float, int]] = []
    ready = [task for task in range(count) if not waiting_for[task]]
    changed: set[int] = set()
    now = 0.0
    while True:
        since = now if first_come else 0.0
        for task in ready:
            index = set_of[task]
            if not queues[index]:
                for resource in sets[index]:
                    lines[resource].add(index)
            heapq.heappush(queues[index], (since, ranks[task], task))
            changed.add(index)
        first_in_line = [
            queues[index][0] for index in changed if queues[index] and not masks[index] & busy
        ]
        for _, _, task in sorted(first_in_line):
            index = set_of[task]
            if masks[index] & busy:
                continue
            busy |= masks[index]
            heapq.heappop(queues[index])
            if not queues[index]:
                for resource in sets[index]:
                    lines[resource].discard(index)
            starts[task], ends[task] = now, now + durations[task]
            heapq.heappush(running, (ends[task], task))
        if not running:
            return starts, ends
        now = running[0][0]
        ready, changed = [], set()
        while running and running[0][0] <= now + _SAME_TIME:
            _, task = heapq.heappop(running)
            index = set_of[task]
            busy ^= masks[index]
            for resource in sets[index]:
                changed.update(lines[resource])
            for after in dependents[task]:
                waiting_for[after] -= 1
                if not waiting_for[after]:
                    ready.append(after)
