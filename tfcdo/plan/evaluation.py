"""Evaluates algorithms on a topology: the schedule, its simulated time and its busiest link."""

from __future__ import annotations

import dataclasses

from tfcdo.plan import algorithms
from tfcdo.plan import search
from tfcdo.plan import simulator
from tfcdo.plan.schedule import Schedule
from tfcdo.topology.topology import Topology

# A machine of so many devices takes half a minute.
MAX_DEVICES = 128


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The simulated behaviour of one algorithm's schedule on a topology.

    Attributes:
      algorithm: the name that was asked for.
      resolved: the same name, or for `auto` that of the algorithm it stands for.
      origin: where the trees are from, for people.
      schedule: the schedule, in bytes.
      seconds: its simulated time, see `tfcdo.plan.simulator.robust_seconds`.
      bottleneck: the name of the link that carries most bytes for its bandwidth; "" if none
        carries any.
      bottleneck_bytes: how many bytes it carries.
    """

    algorithm: str
    resolved: str
    origin: str
    schedule: Schedule
    seconds: float
    bottleneck: str
    bottleneck_bytes: int

    @property
    def depth(self) -> int:
        """Returns the depth of the deepest tree."""
        return max((pack.tree.depth for pack in self.schedule.packs), default=0)

    def ordered_seconds(self, topology: Topology) -> float:
        """Returns the time if no copy is disturbed and they go in order.

        Args:
          topology: the machine that the schedule was made for.
        """
        return simulator.ordered_seconds(self.schedule, topology)

    @property
    def label(self) -> str:
        """Returns the name for people: of `auto` also the algorithm that it stands for."""
        if self.algorithm == self.resolved:
            return self.algorithm
        return f"{self.algorithm}: {self.resolved}"


def evaluate(
    algorithm: str, topology: Topology, num_bytes: int, num_packs: int | None = None
) -> Evaluation:
    """Plans an all-reduce by one algorithm and simulates it.

    Args:
      algorithm: one of `algorithms.ALGORITHMS`.
      topology: the machine.
      num_bytes: how many bytes each device holds.
      num_packs: how many packs; None for as many as the algorithm asks for.

    Returns:
      The evaluation.

    Raises:
      ValueError, TypeError: as `algorithms.make_schedule`; also if the machine has more than
        `MAX_DEVICES` devices.

    Example:
      >>> from tfcdo.topology import preset
      >>> found = evaluate("hierarchical_copy", preset("dgx1"), 10**8)
      >>> found.depth, found.bottleneck_bytes, f"{found.seconds * 1e3:.2f} ms"
      (2, 50000000, '2.61 ms')
    """
    check_num_devices(topology.name, topology.num_devices)
    resolved = algorithm
    if algorithm == "auto":
        resolved = algorithms.fastest_algorithm(topology, num_bytes, num_packs)
    schedule = algorithms.make_schedule(resolved, topology, num_bytes, num_packs)
    origin = "the algorithm's own trees"
    if resolved == "packed_trees":
        origin = search.origin(topology, num_bytes, num_packs)
    seconds = simulator.robust_seconds(schedule, topology)
    bottleneck, bottleneck_bytes = simulator.bottleneck(schedule, topology)
    return Evaluation(algorithm, resolved, origin, schedule, seconds, bottleneck, bottleneck_bytes)


def evaluate_all(
    topology: Topology, num_bytes: int, num_packs: int | None = None
) -> list[Evaluation]:
    """Plans an all-reduce by each algorithm and simulates each schedule once.

    Args:
      topology: the machine.
      num_bytes: how many bytes each device holds.
      num_packs: see `evaluate`.

    Returns:
      One evaluation for each of `algorithms.ALGORITHMS`, in their order; the last one is `auto`'s,
      which is that of the algorithm that it stands for.

    Raises:
      ValueError, TypeError: as `evaluate`.
    """
    check_num_devices(topology.name, topology.num_devices)
    found = {
        name: evaluate(name, topology, num_bytes, num_packs)
        for name in algorithms.ALGORITHMS
        if name != "auto"
    }
    if topology.num_devices > algorithms.MAX_SIMULATED_DEVICES:
        fastest = algorithms.fastest_algorithm(topology, num_bytes, num_packs)
    else:
        # By the times that are here anyway; `auto` itself simulates once for sizes that differ
        # little from this one.
        fastest = algorithms.choose({name: one.seconds for name, one in found.items()})
    return [*found.values(), dataclasses.replace(found[fastest], algorithm="auto")]


def check_num_devices(name: str, num_devices: int) -> None:
    """Raises if a machine has too many devices for all algorithms to be simulated on it.

    Args:
      name: the machine's name.
      num_devices: how many devices it has.

    Raises:
      ValueError: if they are more than `MAX_DEVICES`.
    """
    if num_devices > MAX_DEVICES:
        raise ValueError(
            f"topology must have at most {MAX_DEVICES} devices to be simulated, which takes time "
            f"with the cube of their number; {name!r} has {num_devices}"
        )
