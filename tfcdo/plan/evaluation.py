"""Evaluates algorithms on a topology: the schedule, its simulated time and its busiest link."""

from __future__ import annotations

import dataclasses
import math

from tfcdo.plan import algorithms, lower_bound, simulator
from tfcdo.plan.schedule import Schedule
from tfcdo.plan.task_graph import Hosts
from tfcdo.topology.topology import Topology

# A machine with so many devices takes half a minute.
MAX_DEVICES = 128
# The packs of MultiWorkerMirroredStrategy.
_BYTES_PER_PACK_BETWEEN_HOSTS = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The simulated behaviour of one algorithm's schedule on a topology.

    Attributes:
      algorithm: the name that was asked for.
      resolved: the same name, or for `auto` the algorithm that it stands for.
      schedule: the schedule, in bytes.
      seconds: its simulated time, see `tfcdo.plan.robust_seconds`.
      ordered_seconds: its time if no copy is disturbed and they go in order.
      bound: see `tfcdo.plan.lower_bound_seconds`.
      bottleneck: the name of the link that is busy longest; "" if none is.
      bottleneck_bytes: how many bytes it carries.
    """

    algorithm: str
    resolved: str
    schedule: Schedule
    seconds: float
    ordered_seconds: float
    bound: float
    bottleneck: str
    bottleneck_bytes: int

    @property
    def ratio(self) -> float:
        """Returns the time over the bound, at least 1; infinity where the bound is 0."""
        return max(self.seconds / self.bound, 1.0) if self.bound else math.inf

    @property
    def depth(self) -> int:
        """Returns the depth of the deepest tree."""
        return max((pack.tree.depth for pack in self.schedule.packs), default=0)

    @property
    def label(self) -> str:
        """Returns the name for people: of `auto` also the algorithm that it stands for."""
        if self.algorithm == self.resolved:
            return self.algorithm
        return f"{self.algorithm}: {self.resolved}"


def evaluate(
    algorithm: str,
    topology: Topology,
    num_bytes: int,
    num_packs: int | None = None,
    hosts: Hosts | None = None,
) -> Evaluation:
    """Plans an all-reduce by one algorithm and simulates it, alone or with hosts like this one.

    With several hosts and no number of packs, packs have at most 4 MiB.

    Example:
      >>> from tfcdo.topology import preset
      >>> found = evaluate("hierarchical_copy", preset("dgx1"), 10**8)
      >>> found.depth, found.bottleneck_bytes, f"{found.seconds * 1e3:.2f} ms"
      (2, 50000000, '2.61 ms')
    """
    check_num_devices(topology.name, topology.num_devices)
    if hosts is not None and num_packs is None:
        num_packs = max(1, math.ceil(num_bytes / _BYTES_PER_PACK_BETWEEN_HOSTS))
    resolved = algorithm
    if algorithm == "auto":
        resolved = algorithms.fastest_algorithm(topology, num_bytes, num_packs)
    schedule = algorithms.make_schedule(resolved, topology, num_bytes, num_packs)
    seconds = simulator.robust_seconds(schedule, topology, hosts=hosts)
    ordered = simulator.simulate(schedule, topology, hosts=hosts).seconds
    bound = lower_bound.lower_bound_seconds(topology, num_bytes)
    if hosts is not None:
        bound = max(bound, hosts.bytes_sent(num_bytes) / hosts.bandwidth)
    busiest = simulator.bottleneck(schedule, topology)
    return Evaluation(algorithm, resolved, schedule, seconds, ordered, bound, *busiest)


def evaluate_all(
    topology: Topology, num_bytes: int, num_packs: int | None = None, hosts: Hosts | None = None
) -> list[Evaluation]:
    """Returns the evaluation of each of `ALGORITHMS`; `auto` has the one that it stands for."""
    check_num_devices(topology.name, topology.num_devices)
    names = [name for name in algorithms.ALGORITHMS if name != "auto"]
    found = {name: evaluate(name, topology, num_bytes, num_packs, hosts) for name in names}
    if topology.num_devices > algorithms.MAX_SIMULATED_DEVICES:
        fastest = algorithms.fastest_algorithm(topology, num_bytes, num_packs)
    else:
        # `auto` itself simulates once for sizes that differ little from this one.
        fastest = algorithms.choose({name: one.seconds for name, one in found.items()})
    return [*found.values(), dataclasses.replace(found[fastest], algorithm="auto")]


def check_num_devices(name: str, num_devices: int) -> None:
    """Raises `ValueError` if a machine has too many devices for all algorithms to be simulated."""
    if num_devices > MAX_DEVICES:
        raise ValueError(
            f"topology must have at most {MAX_DEVICES} devices to be simulated, which takes time "
            f"with the cube of their number; {name!r} has {num_devices}"
        )
