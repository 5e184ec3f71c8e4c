"""Sets the simulated times of copy trees beside those that a clock shows."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from tfcdo.bench import implementations
from tfcdo.bench import measure
from tfcdo.bench import tracking
from tfcdo.bench import workloads
from tfcdo.bench.devices import Devices
from tfcdo.plan import algorithms
from tfcdo.plan.device_work import predicted_seconds
from tfcdo.plan.schedule import Schedule
from tfcdo.topology.topology import Topology


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Holds the simulated and the measured time of one schedule.

    Attributes:
      names: the algorithms whose schedule it is; "auto" among them if it stands for one of them.
      size: the bytes on each device.
      num_packs: into how many packs the schedule cuts them.
      simulated: seconds, as `tfcdo.plan.device_work.predicted_seconds` predicts.
      measured: seconds, the median of what `tfcdo bench` has timed.
      spread: the distance between the quartiles of the times, in seconds.
      wrong: how many elements were not what numpy found.
    """

    names: tuple[str, ...]
    size: int
    num_packs: int
    simulated: float
    measured: float
    spread: float
    wrong: int | None

    @property
    def ratio(self) -> float:
        """Returns the simulated time over the measured one."""
        return self.simulated / self.measured


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Compares the predictions for one size with the clock.

    Attributes:
      predictions: one for each schedule, in the order of the algorithms.
      topology: the machine, as it was measured just before.
    """

    predictions: tuple[Prediction, ...]
    topology: Topology

    @property
    def fastest(self) -> Prediction:
        """Returns what was measured as the fastest."""
        return min(self.predictions, key=lambda one: one.measured)

    @property
    def chosen(self) -> Prediction:
        """Returns what `auto` takes."""
        (chosen,) = (one for one in self.predictions if "auto" in one.names)
        return chosen

    @property
    def loss(self) -> float:
        """Returns by which part of its time `auto` is slower than the fastest; 0 if it is that."""
        return self.chosen.measured / self.fastest.measured - 1

    @property
    def agreement(self) -> float:
        """Returns the part of the pairs of schedules that clock and simulation order alike."""
        pairs = [
            (one.simulated < other.simulated) == (one.measured < other.measured)
            for index, one in enumerate(self.predictions)
            for other in self.predictions[:index]
        ]
        return sum(pairs) / len(pairs) if pairs else 1.0


def run(
    sizes: Sequence[int],
    devices: Devices,
    measure_machine: Callable[[], Topology],
    settings: measure.Settings,
    track: tracking.Track = tracking.silently,
) -> list[Comparison]:
    """Simulates and measures all algorithms for some sizes.

    A machine that is shared with others may be twice as fast a minute later, so it is measured anew
    before each size.

    Args:
      sizes: the bytes on each device.
      devices: the devices.
      measure_machine: measures them.
      settings: how to measure.
      track: shows the progress.

    Returns:
      One comparison for each size.
    """
    return [
        _compare(size, devices, measure_machine(), settings, track)
        for size in track(list(sizes), description="sizes")
    ]


def median_ratio(comparisons: Sequence[Comparison]) -> float:
    """Returns the median over all sizes and schedules of simulated over measured time."""
    return statistics.median(
        one.ratio for comparison in comparisons for one in comparison.predictions
    )


def _compare(
    size: int,
    devices: Devices,
    topology: Topology,
    settings: measure.Settings,
    track: tracking.Track,
) -> Comparison:
    # Algorithms that stand for the same schedule would only be compared with their own noise.
    names_by_schedule: dict[Schedule, list[str]] = {}
    for name in algorithms.ALGORITHMS:
        schedule = algorithms.make_schedule(name, topology, size)
        names_by_schedule.setdefault(schedule, []).append(name)
    compared = [
        _implementation(names[0], len(schedule.packs), topology)
        for schedule, names in names_by_schedule.items()
    ]
    workload = workloads.one_value(size)
    found = {one.name: one for one in measure.run(workload, devices, compared, settings, track)}
    return Comparison(
        tuple(
            Prediction(
                tuple(names),
                size,
                len(schedule.packs),
                predicted_seconds(schedule, topology),
                found[names[0]].seconds,
                found[names[0]].spread,
                found[names[0]].wrong,
            )
            for schedule, names in names_by_schedule.items()
        ),
        topology,
    )


def _implementation(
    algorithm: str, num_packs: int, topology: Topology
) -> implementations.Implementation:
    # Left out, it is 1 for this algorithm.
    asked = num_packs if algorithm == "hierarchical_copy" else None
    return implementations.Implementation(
        algorithm,
        implementations.OURS,
        "AllReduceCrossDeviceOps",
        (("all_reduce_alg", algorithm), ("num_packs", asked), ("topology", topology)),
    )
