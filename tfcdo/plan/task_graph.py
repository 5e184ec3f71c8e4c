"""Task graphs: a plan on a topology as copies and additions that wait for one another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from tfcdo.plan.plan import Plan
from tfcdo.topology.topology import Topology


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Hosts that are alike, each of which sums the packs of its devices before the exchange.

    Attributes:
      count: the number of hosts.
      bandwidth: the bytes per second that a host can send while it receives as many.
      latency: the seconds of a message on top of its bytes.
    """

    count: int
    bandwidth: float
    latency: float = 20e-6


@dataclasses.dataclass(frozen=True)
class TaskGraph:
    """The tasks of a plan on a topology: lists, with an entry for each task.

    `names` are as in `tfcdo.plan.simulator.Task`; a task holds one of the `resource_sets`, which
    include adders, and begins when its dependencies have ended.
    """

    names: list[tuple[str, int, int, int]] = dataclasses.field(default_factory=list)
    durations: list[float] = dataclasses.field(default_factory=list)
    resource_set_of: list[int] = dataclasses.field(default_factory=list)
    resource_sets: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    num_dependencies: list[int] = dataclasses.field(default_factory=list)
    dependents: list[list[int]] = dataclasses.field(default_factory=list)

    def add(
        self,
        name: tuple[str, int, int, int],
        duration: float,
        resources: tuple[int, ...],
        after: Iterable[int],
    ) -> int:
        """Adds a task that holds some resources after other tasks; returns its number."""
        task = len(self.names)
        self.names.append(name)
        self.durations.append(duration)
        self.resource_set_of.append(
            self.resource_sets.setdefault(resources, len(self.resource_sets))
        )
        self.dependents.append([])
        count = 0
        for other in after:
            self.dependents[other].append(task)
            count += 1
        self.num_dependencies.append(count)
        return task

    @functools.cached_property
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


def build(plan: Plan, topology: Topology, hosts: Hosts | None = None) -> TaskGraph:
    """Returns the tasks of a plan, pack by pack: up the tree, between hosts, down.

    A pack with a window leaves each leaf once the leaf holds the result of the pack that it waits
    for.
    """
    if len(plan.nodes) != topology.num_devices:
        raise ValueError(
            f"plan must be for the {topology.num_devices} devices of {topology.name!r}; got one "
            f"for {len(plan.nodes)}"
        )
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
def _link_costs(
    topology: Topology,
) -> dict[tuple[int, int], tuple[float, float, tuple[int, ...]]]:
    """Returns latency, seconds per byte and held resources of each pair's link."""
    return {
        pair: (link.latency, 1 / topology.bandwidth(*pair), link.resources)
        for pair, link in topology.link_by_pair.items()
    }
