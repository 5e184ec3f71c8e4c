"""The simulator: how long a plan takes on a topology.

A plan becomes a graph of tasks, copies and additions, which wait for one another and for the links.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tfcdo import checks
from tfcdo.plan.plan import Plan
from tfcdo.topology.topology import Topology, check_topology

_T = TypeVar("_T")

# More packs cost ops, which the simulator does not count: they must be worth it.
NEARLY_AS_FAST = 1.01
# Two events this close (seconds) happen at the same time; far below any latency, far above the
# rounding of sums of times.
_SAME_TIME = 1e-12
# The runs of `robust_seconds`: at most, at least, and tasks in all of them (some seconds).
_MOST_RUNS = 20
_FEWEST_RUNS = 3
_TASKS_IN_ALL_RUNS = 25_000
# A plan whose first run is so much slower than the cutoff is not run again.
_HOPELESS = 1.2


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Equal hosts; each sums the packs of its devices before the exchange."""

    count: int
    bandwidth: float  # The bytes per second that a host can send while it receives as many.
    latency: float = 20e-6  # The seconds of a message on top of its bytes.


@dataclasses.dataclass(frozen=True)
class Task:
    """Something that holds resources for a while, in seconds."""

    # "reduce" for a copy towards the root, "broadcast" for one away from it, "add" for adding a
    # child's copy; "network" and "latency" for the exchange with other hosts.
    kind: str
    pack: int  # Its index.
    source: int  # The sending device; the child for an addition.
    target: int  # The receiving device; the device that adds.
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The events of a simulation."""

    seconds: float  # When the last task ended.
    tasks: tuple[Task, ...]  # In the order of their start; additions only if they take time.

    @property
    def copies(self) -> tuple[Task, ...]:
        """Returns the copies between devices alone."""
        return tuple(task for task in self.tasks if task.kind in ("reduce", "broadcast"))


def simulate(
    plan: Plan,
    topology: Topology,
    *,
    jitter: float = 0.0,
    seed: int | None = None,
    hosts: Hosts | None = None,
) -> Timeline:
    """Runs a plan on a topology once, as the executor's ops would.

    The model, "store and forward by op": each edge of each copy tree is one copy up and one down. A
    device sends its partial sum up once all its children's have arrived and been added, one after
    another; it sends the result on once it has it. A copy holds all resources of its link for
    `latency + bytes / bandwidth`; a resource carries one copy at a time. Where copies wait, the one
    that has waited longest goes first (of those that have waited equally long, the one of the
    earlier pack). A blocked copy does not block later ones. A leaf sends a pack that has a window
    once it holds the result of the pack that is waited for.

    Args:
      plan: the plan; all packs have a tree and a known size.
      topology: the machine.
      jitter: each task takes `1 + jitter * u` times as long, `u` uniform between -1 and 1; from 0
        to 1, so that no task takes less than no time.
      seed: draws the jitter, and which of the copies that have waited equally long goes first. None
        for no randomness.
      hosts: `simulator.Hosts` like this one, which exchange each pack's sum; None for one host.

    Returns:
      When each copy ran, and the time of the whole.

    Raises:
      ValueError: if the plan and the topology differ in the number of devices, or a jitter is
        asked for without a seed, or is not from 0 to 1; or a size is not known.
      TypeError: if an argument is of another type.

    References:
      Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
      MPICH", 2005 (the latency-bandwidth cost model).

    Example:
      >>> from tfcdo import plan
      >>> from tfcdo.topology import preset
      >>> machine = preset("dgx1")
      >>> one_pack = plan.make_plan("hierarchical_copy", machine, 10**8, num_packs=1)
      >>> f"{1e3 * simulate(one_pack, machine).seconds:.2f} ms"
      '12.04 ms'
    """
    if jitter and seed is None:
        raise ValueError(f"seed must be a number for a jitter of {jitter}; got None")
    graph = task_graph(plan, topology, hosts)
    starts, ends = run(graph, jitter, seed)
    times = zip(graph.names, starts, ends, strict=True)
    tasks = [Task(*name, start, end) for name, start, end in times]
    tasks.sort(key=lambda task: (task.start, task.end, task.pack))
    return Timeline(max(ends, default=0.0), tuple(tasks))


def robust_seconds(
    plan: Plan,
    topology: Topology,
    *,
    jitter: float = 0.05,
    num_seeds: int | None = None,
    hosts: Hosts | None = None,
    cutoff: float = math.inf,
) -> float:
    """Returns the time of a plan where no copy takes exactly as long as it should.

    Nothing keeps the executor's copies in an order, so a plan that is only fast if all of them
    begin and end on time is not fast. Jitter makes no plan faster than its busiest link and its
    longest way allow without jitter, so no time is below `tfcdo.plan.lower_bound_seconds`.

    Args:
      plan: the plan; all packs have a tree and a known size.
      topology: the machine.
      jitter: see `simulate`.
      num_seeds: how many runs to take the median of; by default 20, and fewer, down to 3, of
        plans of thousands of copies.
      hosts: see `simulate`.
      cutoff: a time beyond which another plan is taken anyway; a plan whose first run takes
        much longer is not run again.

    Returns:
      The median time, in seconds, of first come, first served with ties shuffled.

    Raises:
      ValueError: if `num_seeds` is not from 1 to 10,000, or as `simulate`.
      TypeError: if an argument is of another type.

    Example:
      >>> from tfcdo import plan
      >>> from tfcdo.topology import preset
      >>> machine = preset("pcie")
      >>> ring = plan.make_plan("ring", machine, 10**8)
      >>> robust_seconds(ring, machine) >= plan.lower_bound_seconds(machine, 10**8)
      True
    """
    graph = task_graph(plan, topology, hosts)
    if num_seeds is None:
        affordable = _TASKS_IN_ALL_RUNS // max(len(graph.names), 1)
        num_seeds = min(_MOST_RUNS, max(_FEWEST_RUNS, affordable))
    checks.check_int("num_seeds", num_seeds, at_least=1, at_most=10_000)
    checks.check_number("cutoff", cutoff)
    median = median_seconds(graph, range(num_seeds), jitter, cutoff)
    return max(median, graph.least_seconds)


@dataclasses.dataclass(frozen=True)
class TaskGraph:
    """The tasks of a plan on a topology: lists, with an entry for each task, named as in `Task`."""

    names: list[tuple[str, int, int, int]] = dataclasses.field(default_factory=list)
    durations: list[float] = dataclasses.field(default_factory=list)
    # The number of the one of the `resource_sets` that a task holds.
    resource_set_of: list[int] = dataclasses.field(default_factory=list)
    resource_sets: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    num_dependencies: list[int] = dataclasses.field(default_factory=list)
    dependents: list[list[int]] = dataclasses.field(default_factory=list)

    def add(
        self,
        name: tuple[str, int, int, int],
        duration: float,
        resources: tuple[int, ...],
        after: Sequence[int],
    ) -> int:
        """Adds a task that holds some resources after other tasks; returns its number."""
        task = len(self.names)
        self.names.append(name)
        self.durations.append(duration)
        self.resource_set_of.append(
            self.resource_sets.setdefault(resources, len(self.resource_sets))
        )
        self.dependents.append([])
        for other in after:
            self.dependents[other].append(task)
        self.num_dependencies.append(len(after))
        return task

    @property
    def least_seconds(self) -> float:
        """Returns the longest of the ways through the graph and of the resources' busy times."""
        longest = [0.0] * len(self.names)
        # Each task comes after all that it waits for.
        for task in range(len(longest) - 1, -1, -1):
            later = max((longest[after] for after in self.dependents[task]), default=0.0)
            longest[task] = self.durations[task] + later
        busy: dict[int, float] = {}
        sets = list(self.resource_sets)
        for task, seconds in enumerate(self.durations):
            for resource in sets[self.resource_set_of[task]]:
                busy[resource] = busy.get(resource, 0.0) + seconds
        return max((*longest, *busy.values()), default=0.0)


def check_plan(plan: Plan, topology: Topology) -> None:
    """Raises an error unless the arguments are a plan and a topology of as many devices."""
    checks.check_type("plan", plan, Plan, "tfcdo.plan.make_plan")
    check_topology(topology)
    if len(plan.nodes) != topology.num_devices:
        raise ValueError(
            f"plan must be for the {topology.num_devices} devices of {topology.name!r}; got one "
            f"for {len(plan.nodes)}"
        )


def task_graph(plan: Plan, topology: Topology, hosts: Hosts | None = None) -> TaskGraph:
    """Returns the tasks of a plan, pack by pack: up the tree, between hosts, down."""
    check_plan(plan, topology)
    if hosts is not None:
        checks.check_type("hosts", hosts, Hosts)
    graph, costs = TaskGraph(), _link_costs(topology)
    seconds_per_addition = 1 / topology.addition_bandwidth
    # Adders and the host's way out are numbered after the topology's resources.
    first_adder = len(topology.resources)
    way_out = first_adder + topology.num_devices
    # The tasks after which each device holds the result of each pack.
    arrived: list[dict[int, tuple[int, ...]]] = []
    for index, pack in enumerate(plan.packs):
        tree, size = pack.tree, pack.num_sent_bytes
        if tree is None or not size:
            raise ValueError(f"plan must have a tree and a known size for each pack; got {pack}")
        results = arrived[pack.after] if pack.after is not None else {}
        # The tasks after which a device holds the sum over its subtree.
        summed: list[list[int]] = [[] for _ in tree.parents]
        for child, parent in reversed(tree.edges):
            latency, seconds_per_byte, resources = costs[child, parent]
            task = graph.add(
                ("reduce", index, child, parent),
                latency + size * seconds_per_byte,
                resources,
                summed[child] or results.get(child, ()),
            )
            if seconds_per_addition:
                adder = first_adder + (0 if topology.serial_reduction else parent)
                name = ("add", index, child, parent)
                task = graph.add(name, size * seconds_per_addition, (adder,), (task,))
            summed[parent].append(task)
        root_ready = tuple(summed[tree.root])
        if hosts is not None:
            sent = plan.pack_bytes_between_hosts(pack) / hosts.bandwidth
            task = graph.add(("network", index, 0, 0), sent, (way_out,), root_ready)
            # Messages of different packs wait for each other's bytes, not for their latencies.
            waited = 2 * (hosts.count - 1) * hosts.latency
            root_ready = (
                graph.add(("latency", index, 0, 0), waited, (way_out + 1 + index,), (task,)),
            )
        here = {tree.root: root_ready}
        for child, parent in tree.edges:
            latency, seconds_per_byte, resources = costs[parent, child]
            name = ("broadcast", index, parent, child)
            seconds = latency + size * seconds_per_byte
            here[child] = (graph.add(name, seconds, resources, here[parent]),)
        arrived.append(here)
    return graph


@functools.lru_cache(maxsize=64)
def _link_costs(topology: Topology) -> dict[tuple[int, int], tuple[float, float, tuple[int, ...]]]:
    """Returns latency, seconds per byte and held resources of each pair's link."""
    return {
        pair: (link.latency, 1 / topology.bandwidth(*pair), link.resources)
        for pair, link in topology.link_by_pair.items()
    }


def median_seconds(
    graph: TaskGraph, seeds: Sequence[int], jitter: float = 0.05, cutoff: float = math.inf
) -> float:
    """Returns the median time of runs with these seeds; of the first if that one is hopeless."""
    times: list[float] = []
    for seed in seeds:
        times.append(max(run(graph, jitter, seed)[1], default=0.0))
        if times[0] > _HOPELESS * cutoff:
            break
    return statistics.median(times)


def first_of_fastest(seconds: Mapping[_T, float]) -> _T:
    """Returns the first of those that take nearly as little time as any."""
    enough = NEARLY_AS_FAST * min(seconds.values())
    return next(one for one, each in seconds.items() if each <= enough)


def bottleneck(plan: Plan, topology: Topology) -> tuple[str, int]:
    """Returns name and bytes of the resource that is busy longest; `("", 0)` on one device."""
    carried = [0] * len(topology.resources)
    for pack, tree in zip(plan.packs, plan.trees, strict=True):
        for child, parent in tree.edges:
            for pair in ((child, parent), (parent, child)):
                for resource in topology.link_by_pair[pair].resources:
                    carried[resource] += pack.num_sent_bytes
    busiest = max(
        zip(topology.resources, carried, strict=True),
        key=lambda load: (load[1] / load[0].bandwidth, load[1]),
        default=None,
    )
    return (busiest[0].name, busiest[1]) if busiest else ("", 0)


def run(graph: TaskGraph, jitter: float, seed: int | None) -> tuple[list[float], list[float]]:
    """Runs tasks first come, first served; returns the start and the end of each.

    A seed draws durations and ties; without one, of equals the task of the earlier pack is first.
    """
    checks.check_number("jitter", jitter)
    if not 0 <= jitter <= 1:
        raise ValueError(f"jitter must be from 0 to 1; got {jitter}")
    count = len(graph.names)
    ranks: Sequence[int] = range(count)
    durations: Sequence[float] = graph.durations
    if seed is not None:
        rng = random.Random(seed)
        ranks = list(ranks)
        rng.shuffle(ranks)
        if jitter:
            durations = [seconds * (1 + jitter * (2 * rng.random() - 1)) for seconds in durations]
    sets, set_of, dependents = list(graph.resource_sets), graph.resource_set_of, graph.dependents
    # Sets of resources are the bits of a number: the inner loop asks most often whether two meet.
    masks = [sum(1 << resource for resource in held) for held in sets]
    waiting_for = list(graph.num_dependencies)
    starts, ends = [0.0] * count, [0.0] * count
    busy = 0
    # Only the first in line can start of the tasks that hold the same resources.
    queues: list[list[tuple[float, int, int]]] = [[] for _ in sets]
    # For each resource, the sets with queued tasks; usually few.
    lines: list[set[int]] = [set() for _ in range(1 + max(map(max, sets), default=-1))]
    running: list[tuple[float, int]] = []
    ready = [task for task in range(count) if not waiting_for[task]]
    changed: set[int] = set()
    now = 0.0
    while True:
        for task in ready:
            index = set_of[task]
            if not queues[index]:
                for resource in sets[index]:
                    lines[resource].add(index)
            heapq.heappush(queues[index], (now, ranks[task], task))
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
