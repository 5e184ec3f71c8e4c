"""Takes samples of several steps in turn, and makes measurements of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

# Kinds of measurements.
OURS, TENSORFLOW, FLOOR, BASELINE = "tfcdo", "tf", "floor", "baseline"
# Goes through a sequence and shows the progress, with the keyword `description`.
Track = Callable[..., Iterable[Any]]
_Sample = TypeVar("_Sample")


def silently(sequence: Iterable[Any], *, description: str) -> Iterable[Any]:
    """Yields the items of a sequence and shows nothing."""
    del description
    return sequence


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Measurement of one implementation or strategy; None for what its bench does not measure.

    Attributes:
      name: what the tables call it.
      kind: `OURS`, `TENSORFLOW`, or what else it is compared with.
      seconds: median time of a call or step; of an implementation, minus the baseline's.
      spread: distance between the quartiles of the same times, in seconds.
      workload: name of the values, model or optimizer.
      size: bytes that each device holds and sums.
      count: elements that each device holds.
      wrong: number of elements that differ from numpy's; of updates, of differing variables.
      cpu_seconds: as `seconds`, of the CPU time of all threads.
      first_call: seconds of tracing and of the first call or step.
      nodes: number of ops that are added to the baseline's graph.
      peak_memory: bytes in use at most; of an implementation, beyond the input.
      sent_size: bytes of each device's values as they are sent; None for `size`.
      bytes_sent: bytes that crossed the link between the workers in a step.
      state_bytes: bytes of the optimizer's state on all devices.
      difference: largest difference from the weights of tfcdo without sharding.
    """

    name: str
    kind: str
    num_devices: int
    seconds: float
    spread: float
    workload: str = ""
    size: int = 0
    count: int | None = None
    dtype: str = "float32"
    wrong: int | None = None
    cpu_seconds: float | None = None
    first_call: float | None = None
    nodes: int | None = None
    peak_memory: int | None = None
    sent_size: int | None = None
    bytes_sent: float | None = None
    state_bytes: int | None = None
    difference: float | None = None

    @property
    def is_noise(self) -> bool:
        """Returns whether the time is not larger than its own spread."""
        return self.seconds <= self.spread

    @property
    def algbw(self) -> float:
        """Returns the bytes per second that the caller sees; NaN if the time is noise."""
        return math.nan if self.is_noise else self.size / self.seconds

    @property
    def busbw(self) -> float:
        """Returns the bytes per second over each link of a ring that takes the same time."""
        sent = 1.0 if self.sent_size is None else self.sent_size / self.size
        return self.algbw * sent * 2 * (self.num_devices - 1) / self.num_devices


def take_turns(
    samples: Mapping[str, Callable[[], _Sample]], iterations: int, warmup: int, track: Track
) -> dict[str, list[_Sample]]:
    """Takes samples A B C A B C ..., so that a change of the machine's load affects all of them."""
    taken: dict[str, list[_Sample]] = {name: [] for name in samples}
    for _ in track(range(warmup + iterations), description="rounds"):
        for name, sample in samples.items():
            taken[name].append(sample())
    return {name: of_name[warmup:] for name, of_name in taken.items()}


def median_and_spread(seconds: Sequence[float]) -> tuple[float, float]:
    """Returns the median and the distance between the quartiles."""
    lower, median, upper = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
    return median, upper - lower


def by_workload(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """Splits measurements, sorted by workload, into one list for each workload."""
    groups = itertools.groupby(measurements, lambda one: (one.workload, one.size))
    return [list(group) for _, group in groups]


def fastest(measurements: Sequence[Measurement], kind: str) -> Measurement | None:
    """Returns the fastest measurement of one kind among those without wrong results."""
    correct = [one for one in measurements if one.kind == kind and not one.wrong]
    return min(correct, key=lambda one: one.seconds, default=None)
