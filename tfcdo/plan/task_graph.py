"""Task graphs: a schedule on a topology as copies and additions that wait for one another."""

from __future__ import annotations

import dataclasses
import functools

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
    def critical_path(self) -> tuple[float, ...]:
        """Seconds from each task's start to the end of all that follows, without contention."""
        critical_path = [0.0] * len(self.durations)
        for task in range(len(critical_path) - 1, -1, -1):
            later = max((critical_path[after] for after in self.dependents[task]), default=0.0)
            critical_path[task] = self.durations[task] + later
        return tuple(critical_path)


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
    tasks = _Tasks(topology)
    for index, pack in enumerate(schedule.packs):
        tasks.add_pack(index, pack)
    return tasks.graph()


class _Tasks:
    """Collects the tasks of one pack after another."""

    def __init__(self, topology: Topology) -> None:
        self._costs = _link_costs(topology)
        self._seconds_per_addition = 1 / topology.addition_bandwidth
        # An adder is numbered after the topology's resources.
        self._first_adder = len(topology.resources)
        self._one_adder = topology.serial_reduction
        self._names: list[tuple[str, int, int, int]] = []
        self._durations: list[float] = []
        self._resource_set_of: list[int] = []
        self._resource_sets: dict[tuple[int, ...], int] = {}
        self._num_dependencies: list[int] = []
        self._dependents: list[list[int]] = []

    def add_pack(self, index: int, pack: Pack) -> None:
        tree = pack.tree
        # What must have ended before a device holds the sum over its subtree; over all devices.
        summed: list[list[int]] = [[] for _ in tree.parents]
        for child, parent in reversed(tree.edges):
            task = self._add_copy(("reduce", index, child, parent), pack.size, summed[child])
            if self._seconds_per_addition:
                task = self._add(
                    ("add", index, child, parent),
                    pack.size * self._seconds_per_addition,
                    (self._first_adder + (0 if self._one_adder else parent),),
                    [task],
                )
            summed[parent].append(task)
        arrived = {tree.root: summed[tree.root]}
        for child, parent in tree.edges:
            task = self._add_copy(("broadcast", index, parent, child), pack.size, arrived[parent])
            arrived[child] = [task]

    def _add_copy(self, name: tuple[str, int, int, int], size: int, after: list[int]) -> int:
        latency, seconds_per_byte, resources = self._costs[name[2:]]
        return self._add(name, latency + size * seconds_per_byte, resources, after)

    def _add(
        self,
        name: tuple[str, int, int, int],
        duration: float,
        resources: tuple[int, ...],
        after: list[int],
    ) -> int:
        task = len(self._names)
        self._names.append(name)
        self._durations.append(duration)
        self._resource_set_of.append(
            self._resource_sets.setdefault(resources, len(self._resource_sets))
        )
        self._num_dependencies.append(len(after))
        self._dependents.append([])
        for earlier in after:
            self._dependents[earlier].append(task)
        return task

    def graph(self) -> TaskGraph:
        return TaskGraph(
            tuple(self._names),
            tuple(self._durations),
            tuple(self._resource_set_of),
            tuple(self._resource_sets),
            tuple(self._num_dependencies),
            tuple(map(tuple, self._dependents)),
        )


@functools.lru_cache(maxsize=64)
def _link_costs(
    topology: Topology,
) -> dict[tuple[int, int], tuple[float, float, tuple[int, ...]]]:
    """Returns latency, seconds per byte and held resources of each pair's link."""
    return {
        pair: (link.latency, 1 / topology.bandwidth(*pair), link.resources)
        for pair, link in topology.link_by_pair.items()
    }
