"""The simulator: how long a schedule takes on a topology, and the bound of its direct links."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
import random
from collections.abc import Sequence

import networkx as nx

from tfcdo import checks
from tfcdo.plan.schedule import Schedule
from tfcdo.topology.topology import Topology

# Two events this close (seconds) happen at the same time; far below any latency, far above the
# rounding of sums of times.
_SAME_TIME = 1e-12


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
    """What happened in a simulation.

    Attributes:
      seconds: when the last task ended.
      tasks: all copies, and all additions if they take time, in the order of their start.
    """

    seconds: float
    tasks: tuple[Task, ...]

    @property
    def copies(self) -> tuple[Task, ...]:
        """The copies alone."""
        return tuple(task for task in self.tasks if task.kind != "add")


def simulate(
    schedule: Schedule,
    topology: Topology,
    *,
    jitter: float = 0.0,
    seed: int | None = None,
) -> Timeline:
    """Runs a schedule on a topology, as the executor's ops would.

    The model, "store and forward by op": each edge of each copy tree is one copy up and one down. A
    device sends its partial sum up once all its children's have arrived and been added, one after
    another; it sends the result on once it has it. A copy holds all resources of its link for
    `latency + bytes / bandwidth`; a resource carries one copy at a time. Where copies wait, the one
    that has waited longest goes first (of those that have waited equally long, the one of the
    earlier pack), or the one that comes first in `schedule.order`; one whose way is not all
    free lets others pass.

    Args:
      schedule: what to run, in bytes.
      topology: what to run it on.
      jitter: each task takes `1 + jitter * u` times as long, `u` uniform between -1 and 1; from 0
        to 1, so that no task takes less than no time.
      seed: draws the jitter, and, in a schedule without `order`, which of the copies that have
        waited equally long goes first. None for no randomness.

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
    if schedule.num_devices != topology.num_devices:
        raise ValueError(
            f"the schedule is for {schedule.num_devices} devices, topology {topology.name!r} has "
            f"{topology.num_devices}"
        )
    if jitter and seed is None:
        raise ValueError(f"jitter {jitter} needs a seed")
    network = prepare(schedule, topology)
    if schedule.order is not None:
        # An addition is ranked like the copy that brought its operand; they share no resource.
        place = {copy: float(position) for position, copy in enumerate(schedule.order)}
        durations = _jittered(network.durations, jitter, random.Random(seed))
        ranks = [place[name[1:]] for name in network.names]
        starts, ends = _run(network, durations, ranks, first_come=False)
    elif seed is not None:
        starts, ends = shuffled_run(network, jitter, seed)
    else:
        starts, ends = _run(network, network.durations, range(len(network.names)), first_come=True)
    tasks = [
        Task(kind, pack, source, target, start, end)
        for (kind, pack, source, target), start, end in zip(
            network.names, starts, ends, strict=True
        )
    ]
    tasks.sort(key=lambda task: (task.start, task.end, task.pack))
    return Timeline(max(ends, default=0.0), tuple(tasks))


def longest_path_first(schedule: Schedule, topology: Topology) -> Schedule:
    """Fixes the order in which links serve copies: those with the longest way to go first.

    The way to go is the time from the copy's start until the last device has its pack, if the pack
    had the machine to itself.

    Args:
      schedule: what to run, in bytes; its own order is ignored.
      topology: what to run it on.

    Returns:
      The schedule with the order in which the copies began when links served them by this rule.

    Example:
      >>> from tfcdo.plan.schedule import verify
      >>> from tfcdo.topology import preset
      >>> from tfcdo.plan import algorithms
      >>> machine = preset("pcie")
      >>> schedule = algorithms.make_schedule("ring", machine, 10**6)
      >>> ordered = longest_path_first(schedule, machine)
      >>> verify(ordered)
      >>> len(ordered.order)
      24
    """
    network = prepare(schedule, topology)
    ranks = [-seconds for seconds in network.to_go()]
    starts, _ = _run(network, network.durations, ranks, first_come=False)
    begun = sorted(range(len(starts)), key=lambda task: (starts[task], ranks[task], task))
    order = tuple(network.names[task][1:] for task in begun if network.names[task][0] != "add")
    return dataclasses.replace(schedule, order=order)


def robust_seconds(
    schedule: Schedule,
    topology: Topology,
    *,
    jitter: float = 0.05,
    num_seeds: int = 20,
) -> float:
    """The time of a schedule where nothing keeps an order and no copy takes as long as it should.

    Args:
      schedule: what to run, in bytes; its own order is ignored.
      topology: what to run it on.
      jitter: see `simulate`.
      num_seeds: how many runs to take the median of.

    Returns:
      The median time, in seconds, of first come, first served with ties shuffled.

    Raises:
      ValueError: if `num_seeds` is below 1 or `jitter` is not from 0 to 1.
      TypeError: if `num_seeds` is no int.
    """
    checks.check_int("num_seeds", num_seeds, at_least=1)
    network = prepare(schedule, topology)
    times = sorted(
        max(shuffled_run(network, jitter, seed)[1], default=0.0) for seed in range(num_seeds)
    )
    return (times[(num_seeds - 1) // 2] + times[num_seeds // 2]) / 2


def bytes_by_resource(schedule: Schedule, topology: Topology) -> dict[str, int]:
    """How much each wire, port or bridge carries.

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


def fullest(schedule: Schedule, topology: Topology) -> tuple[str, int]:
    """The resource that is busy longest with its bytes.

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


def bound(topology: Topology, num_bytes: int) -> float:
    """A time that no copy trees along direct links beat, however many packs there are.

    The largest of three bounds, all without latencies:

    * A tree over K devices has K-1 edges, so `2 (K-1)` times the data must cross the links, in as
      much time as all links together need. On a DGX-1 this is 14/48 of the time that one NVLink
      needs for the data.
    * All data must cross every cut of the machine both ways, at the rate of a maximum flow.
    * `K-1` times the data is added, by K devices unless they share one adder.

    Detours through the host are left out of the first two, as long as the other links join all
    devices. A schedule that uses them as well may beat the bound, by what they add to the links'
    bandwidth: 3 % on a whole DGX-1, more on a part of one that has few links.

    Args:
      topology: the machine.
      num_bytes: how many bytes each device holds.

    Returns:
      The time in seconds.

    References:
      Cai et al., "Synthesizing Optimal Collective Algorithms", PPoPP 2021 (bounds of a DGX-1).
      Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020 (packing).

    Example:
      >>> from tfcdo.topology import preset
      >>> machine = preset("dgx1")
      >>> f"{1e3 * bound(machine, 10**8):.3f} ms"
      '1.167 ms'

      Device 1 has direct links to 3 and 5, which have none to each other: many packs on the star
      along them come close to the bound, and with trees that also go through the host beat it.

      >>> from tfcdo.plan.copy_tree import CopyTree, star
      >>> from tfcdo.plan.schedule import assign, cut
      >>> corner = machine.subset((1, 3, 5))
      >>> trees = [star(3), star(3, 1), CopyTree((2, 0, None))]
      >>> schedule = assign(10**8, cut(10**8, 16), trees)
      >>> f"{simulate(schedule, corner).seconds / bound(corner, 10**8):.3f}"
      '0.953'
    """
    return num_bytes * _bound_per_byte(topology)


@functools.lru_cache(maxsize=256)
def _bound_per_byte(topology: Topology) -> float:
    devices = topology.num_devices
    if devices == 1:
        return 0.0
    all_links = 2 * (devices - 1) / _flow(topology, range(devices), range(devices))
    cuts = max(
        1 / _flow(topology, [source], [target])
        for other in range(1, devices)
        for source, target in ((0, other), (other, 0))
    )
    adders = 1 if topology.serial_reduction else devices
    additions = (devices - 1) / adders / topology.addition_bandwidth
    return max(all_links, cuts, additions)


def _flow(topology: Topology, sources: Sequence[int], targets: Sequence[int]) -> float:
    """Bytes per second from sources to targets; on the way through other devices or single links.

    A link becomes a path through its resources, each an edge of the resource's bandwidth. Between
    one source and one target a flow may pass through the other devices; if all devices send to all,
    each device only sends and receives, so that the flow counts every link once.
    """
    graph = nx.DiGraph()
    graph.add_edges_from(("from", ("sends", device)) for device in sources)
    graph.add_edges_from((("receives", device), "to") for device in targets)
    if len(sources) == 1:
        graph.add_edges_from(
            (("receives", device), ("sends", device)) for device in range(topology.num_devices)
        )
    for link in topology.direct_links:
        ends = [(end, index) for index in link.resources for end in ("in", "out")]
        nx.add_path(graph, [("sends", link.source), *ends, ("receives", link.target)])
    for index, resource in enumerate(topology.resources):
        # To networkx, an edge without a capacity carries any amount.
        if resource.bandwidth != math.inf and graph.has_edge(("in", index), ("out", index)):
            graph.edges[("in", index), ("out", index)]["capacity"] = resource.bandwidth
    try:
        return float(nx.maximum_flow_value(graph, "from", "to"))
    except nx.NetworkXUnbounded:
        return math.inf


@dataclasses.dataclass(frozen=True)
class TaskGraph:
    """The tasks of a schedule on a topology, numbered so that each comes after all it waits for.

    Attributes:
      names: `(kind, pack, source, target)` of each task.
      durations: seconds of each task.
      lanes: the lane of each task; the tasks of a lane hold the same resources.
      lane_holds: the resources that the tasks of each lane hold, adders included.
      waits: how many tasks must end before each can begin.
      frees: the tasks that wait for each task.
    """

    names: list[tuple[str, int, int, int]]
    durations: list[float]
    lanes: list[int]
    lane_holds: list[tuple[int, ...]]
    waits: list[int]
    frees: list[list[int]]

    def to_go(self) -> list[float]:
        """Seconds from each task's start to the end of all that follows, without contention."""
        to_go = [0.0] * len(self.durations)
        for task in range(len(to_go) - 1, -1, -1):
            later = max((to_go[after] for after in self.frees[task]), default=0.0)
            to_go[task] = self.durations[task] + later
        return to_go


def prepare(schedule: Schedule, topology: Topology) -> TaskGraph:
    """Lists the tasks of a schedule, for those who run the same ones several times.

    Args:
      schedule: what to run, in bytes.
      topology: what to run it on.

    Returns:
      The tasks, pack by pack: up the tree, then down.
    """
    costs = _link_costs(topology)
    seconds_per_addition = 1 / topology.addition_bandwidth
    network = TaskGraph([], [], [], [], [], [])
    lane_of: dict[tuple[int, ...], int] = {}

    def add_task(
        name: tuple[str, int, int, int], duration: float, holds: tuple[int, ...], after: list[int]
    ) -> int:
        task = len(network.names)
        network.names.append(name)
        network.durations.append(duration)
        if holds not in lane_of:
            lane_of[holds] = len(network.lane_holds)
            network.lane_holds.append(holds)
        network.lanes.append(lane_of[holds])
        network.waits.append(len(after))
        network.frees.append([])
        for earlier in after:
            network.frees[earlier].append(task)
        return task

    for index, pack in enumerate(schedule.packs):
        size, tree = pack.size, pack.tree
        # What must have ended before a device holds the sum over its subtree; over all devices.
        partial: list[list[int]] = [[] for _ in tree.parents]
        for child, parent in reversed(tree.edges):
            latency, seconds_per_byte, holds = costs[child, parent]
            duration = latency + size * seconds_per_byte
            task = add_task(("reduce", index, child, parent), duration, holds, partial[child])
            if seconds_per_addition:
                adder = (len(topology.resources) + (0 if topology.serial_reduction else parent),)
                duration = size * seconds_per_addition
                task = add_task(("add", index, child, parent), duration, adder, [task])
            partial[parent].append(task)
        arrived = {tree.root: partial[tree.root]}
        for child, parent in tree.edges:
            latency, seconds_per_byte, holds = costs[parent, child]
            duration = latency + size * seconds_per_byte
            task = add_task(("broadcast", index, parent, child), duration, holds, arrived[parent])
            arrived[child] = [task]
    return network


@functools.lru_cache(maxsize=64)
def _link_costs(
    topology: Topology,
) -> dict[tuple[int, int], tuple[float, float, tuple[int, ...]]]:
    """Latency, seconds per byte and held resources of each pair's link."""
    return {
        pair: (link.latency, 1 / topology.bandwidth(*pair), link.resources)
        for pair, link in topology.link_by_pair.items()
    }


def ordered_run(network: TaskGraph) -> tuple[list[float], list[float]]:
    """Runs the tasks with the longest way to go first.

    Args:
      network: the tasks.

    Returns:
      The start and the end of each task.
    """
    ranks = [-seconds for seconds in network.to_go()]
    return _run(network, network.durations, ranks, first_come=False)


def shuffled_run(network: TaskGraph, jitter: float, seed: int) -> tuple[list[float], list[float]]:
    """Runs the tasks first come, first served, with random ties and durations.

    Args:
      network: the tasks.
      jitter: see `simulate`.
      seed: draws the ties and the durations.

    Returns:
      The start and the end of each task.

    Raises:
      ValueError: if `jitter` is not from 0 to 1.
    """
    rng = random.Random(seed)
    ties = list(range(len(network.names)))
    rng.shuffle(ties)
    durations = _jittered(network.durations, jitter, rng)
    return _run(network, durations, ties, first_come=True)


def _jittered(durations: Sequence[float], jitter: float, rng: random.Random) -> Sequence[float]:
    if not 0 <= jitter <= 1:
        raise ValueError(f"jitter must be from 0 to 1; got {jitter}")
    if not jitter:
        return durations
    return [seconds * (1 + jitter * (2 * rng.random() - 1)) for seconds in durations]


def _run(
    network: TaskGraph, durations: Sequence[float], ranks: Sequence[float], *, first_come: bool
) -> tuple[list[float], list[float]]:
    """Starts every task as soon as its resources are free, in order of rank.

    Args:
      network: the tasks.
      durations: seconds of each task.
      ranks: of tasks that could start at the same time, the one of lowest rank starts first.
      first_come: whether the time since when a task has waited counts before its rank.

    Returns:
      The start and the end of each task.
    """
    count = len(durations)
    lanes, lane_holds, frees = network.lanes, network.lane_holds, network.frees
    waits = list(network.waits)
    starts, ends = [0.0] * count, [0.0] * count
    # Sets of resources are the bits of a number: the inner loop asks most often whether two meet.
    masks = [sum(1 << resource for resource in held) for held in lane_holds]
    lanes_over: dict[int, list[int]] = {}
    for lane, held in enumerate(lane_holds):
        for resource in held:
            lanes_over.setdefault(resource, []).append(lane)
    busy = 0
    # Of the tasks of a lane only the first in line can start: the others need the same resources.
    queues: list[list[tuple[float, float, int]]] = [[] for _ in lane_holds]
    running: list[tuple[float, int]] = []
    ready = [task for task in range(count) if not waits[task]]
    changed: set[int] = set()
    now = 0.0
    while True:
        since = now if first_come else 0.0
        for task in ready:
            heapq.heappush(queues[lanes[task]], (since, ranks[task], task))
            changed.add(lanes[task])
        first_in_line = [
            queues[lane][0] for lane in changed if queues[lane] and not masks[lane] & busy
        ]
        for _, _, task in sorted(first_in_line):
            lane = lanes[task]
            if masks[lane] & busy:
                continue
            busy |= masks[lane]
            heapq.heappop(queues[lane])
            starts[task], ends[task] = now, now + durations[task]
            heapq.heappush(running, (ends[task], task))
        if not running:
            return starts, ends
        now = running[0][0]
        ready, changed = [], set()
        while running and running[0][0] <= now + _SAME_TIME:
            _, task = heapq.heappop(running)
            lane = lanes[task]
            busy ^= masks[lane]
            for resource in lane_holds[lane]:
                changed.update(lanes_over[resource])
            for after in frees[task]:
                waits[after] -= 1
                if not waits[after]:
                    ready.append(after)
