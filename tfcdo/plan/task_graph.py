"""Task graphs: a schedule on a topology as copies and additions that wait for one another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from tfcdo.plan.schedule import Pack
from tfcdo.plan.schedule import Schedule
from tfcdo.topology.topology import Topology


@dataclasses.dataclass(frozen=True)
class TaskGraph:
    """The tasks of a schedule on a topology, numbered so that each comes after all it waits for.

    Attributes:
      names: `(kind, pack, source, target)` of each task, as in `tfcdo.plan.simulator.Task`.
      durations: seconds of each task.
      resource_set_of: the index in `resource_sets` of what each task holds.
      resource_sets: the sets of resources, adders included, that tasks hold.
      num_dependencies: how many tasks must end before each can begin.
      dependents: the tasks that wait for each task.
    """

    names: tuple[tuple[str, int, int, int], ...]
    durations: tuple[float, ...]
    resource_set_of: tuple[int, ...]
    resource_sets: tuple[tuple[int, ...], ...]
    num_dependencies: tuple[int, ...]
    dependents: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def masks(self) -> tuple[int, ...]:
        """Returns each set of resources as the bits of a number."""
        return tuple(sum(1 << resource for resource in held) for held in self.resource_sets)

    @functools.cached_property
    def num_resources(self) -> int:
        """Returns how many resources there are: one more than the largest that a task holds."""
        return 1 + max(map(max, self.resource_sets), default=-1)

    @functools.cached_property
    def first_tasks(self) -> Mapping[int, Sequence[int]]:
        """Returns, by pack, the tasks that wait for nothing."""
        found: dict[int, list[int]] = {}
        for task, (_, pack, _, _) in enumerate(self.names):
            if not self.num_dependencies[task]:
                found.setdefault(pack, []).append(task)
        return found

    @functools.cached_property
    def critical_path(self) -> tuple[float, ...]:
        """Returns the seconds from each task's start to the end of all after it, if none waits."""
        critical_path = [0.0] * len(self.durations)
        for task in range(len(critical_path) - 1, -1, -1):
            later = max((critical_path[after] for after in self.dependents[task]), default=0.0)
            critical_path[task] = self.durations[task] + later
        return tuple(critical_path)


# A schedule is mostly run with jitter, and then without.
@functools.lru_cache(maxsize=8)
def build(schedule: Schedule, topology: Topology) -> TaskGraph:
    """Lists the tasks of a schedule, for those who run the same ones several times.

    Args:
      schedule: what to run, in bytes.
      topology: what to run it on.

    Returns:
      The tasks, pack by pack: up the tree, then down.

    Raises:
      ValueError: if the schedule and the topology differ in the number of devices.

    Example:
      >>> from tfcdo.plan.copy_tree import star
      >>> from tfcdo.plan.schedule import assign
      >>> from tfcdo.topology import preset
      >>> graph = build(assign(100, [(0, 100)], [star(2)]), preset("nvswitch", 2))
      >>> graph.names
      (('reduce', 0, 1, 0), ('broadcast', 0, 0, 1))
    """
    if schedule.num_devices != topology.num_devices:
        raise ValueError(
            f"the schedule is for {schedule.num_devices} devices, topology {topology.name!r} has "
            f"{topology.num_devices}"
        )
    builder = TaskGraphBuilder()
    for index, pack in enumerate(schedule.packs):
        _add_pack(builder, index, pack, topology)
    return builder.graph()


class TaskGraphBuilder:
    """Collects tasks, what each holds and what it waits for.

    Args:
      graph: the tasks to begin with; None for none.
    """

    def __init__(self, graph: TaskGraph | None = None) -> None:
        self._names = list(graph.names) if graph else []
        self._durations = list(graph.durations) if graph else []
        self._resource_set_of = list(graph.resource_set_of) if graph else []
        resource_sets = graph.resource_sets if graph else ()
        self._resource_sets = {found: index for index, found in enumerate(resource_sets)}
        self._num_dependencies = list(graph.num_dependencies) if graph else []
        self._dependents = [list(found) for found in graph.dependents] if graph else []

    def add(
        self,
        name: tuple[str, int, int, int],
        duration: float,
        resources: tuple[int, ...],
        after: Iterable[int] = (),
    ) -> int:
        """Adds a task.

        Args:
          name: its kind, pack, source and target.
          duration: its seconds.
          resources: what it holds.
          after: the tasks that it waits for.

        Returns:
          Its number.
        """
        task = len(self._names)
        self._names.append(name)
        self._durations.append(duration)
        self._resource_set_of.append(
            self._resource_sets.setdefault(resources, len(self._resource_sets))
        )
        self._dependents.append([])
        earlier = tuple(after)
        self._num_dependencies.append(len(earlier))
        for other in earlier:
            self._dependents[other].append(task)
        return task

    def depend(self, task: int, on: int) -> None:
        """Makes a task wait for another one."""
        self._dependents[on].append(task)
        self._num_dependencies[task] += 1

    def wait_for_gradients(self, graph: TaskGraph, pack: int, seconds: float, resource: int) -> int:
        """Makes the first tasks of a pack wait until a backward pass has made its gradients.

        Args:
          graph: the tasks that the builder began with.
          pack: the index of the pack.
          seconds: when its gradients are there.
          resource: what the wait holds; nothing else may hold it.

        Returns:
          The number of the task that is the wait.
        """
        ready = self.add(("gradients", pack, 0, 0), seconds, (resource,))
        for task in graph.first_tasks.get(pack, ()):
            self.depend(task, ready)
        return ready

    def graph(self) -> TaskGraph:
        """Returns the graph of all tasks so far."""
        return TaskGraph(
            tuple(self._names),
            tuple(self._durations),
            tuple(self._resource_set_of),
            tuple(self._resource_sets),
            tuple(self._num_dependencies),
            tuple(map(tuple, self._dependents)),
        )


def _add_pack(builder: TaskGraphBuilder, index: int, pack: Pack, topology: Topology) -> None:
    """Adds the tasks of one pack: up its tree, then down."""
    tree, costs = pack.tree, _link_costs(topology)
    seconds_per_addition = 1 / topology.addition_bandwidth
    # An adder is numbered after the topology's resources.
    first_adder = len(topology.resources)

    def add_copy(kind: str, source: int, target: int, after: Iterable[int]) -> int:
        latency, seconds_per_byte, resources = costs[source, target]
        seconds = latency + pack.size * seconds_per_byte
        return builder.add((kind, index, source, target), seconds, resources, after)

    # What must have ended before a device holds the sum over its subtree; over all devices.
    summed: list[list[int]] = [[] for _ in tree.parents]
    for child, parent in reversed(tree.edges):
        task = add_copy("reduce", child, parent, summed[child])
        if seconds_per_addition:
            task = builder.add(
                ("add", index, child, parent),
                pack.size * seconds_per_addition,
                (first_adder + (0 if topology.serial_reduction else parent),),
                [task],
            )
        summed[parent].append(task)
    arrived = {tree.root: summed[tree.root]}
    for child, parent in tree.edges:
        arrived[child] = [add_copy("broadcast", parent, child, arrived[parent])]


@functools.lru_cache(maxsize=64)
def _link_costs(
    topology: Topology,
) -> dict[tuple[int, int], tuple[float, float, tuple[int, ...]]]:
    """Returns latency, seconds per byte and held resources of each pair's link."""
    return {
        pair: (link.latency, 1 / topology.bandwidth(*pair), link.resources)
        for pair, link in topology.link_by_pair.items()
    }
