"""Takes samples of several steps in turn, and makes measurements of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

# Kinds of measurements. `ALONE`: a training step that drops its gradients.
OURS, TENSORFLOW, BASELINE, ALONE = "tfcdo", "tf", "baseline", "computing alone"
# Goes through a sequence and shows the progress, with the keyword `description`.
Track = Callable[..., Iterable[Any]]
_Sample = TypeVar("_Sample")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Measurement of one implementation or strategy; None: not measured in this bench."""

    name: str
    kind: str  # `OURS`, `TENSORFLOW`, or what else it is compared with.
    num_devices: int
    seconds: float  # Median of a call or step; of an implementation, minus the baseline's.
    spread: float  # Distance between the quartiles, in seconds.
    workload: str = ""  # Name of the values, model or optimizer.
    size: int = 0  # Bytes that each device holds and sums.
    count: int | None = None  # Elements that each device holds.
    dtype: str = "float32"
    wrong: int | None = None  # Elements that differ from numpy's.
    first_call: float | None = None  # Seconds of tracing and of the first call or step.
    sent_size: int | None = None  # Bytes of each device's values as they are sent, if not `size`.
    bytes_sent: float | None = None  # That crossed the link between the workers in a step.
    state_bytes: int | None = None  # The optimizer's, on all devices.

    @property
    def certain_seconds(self) -> float:
        """Returns the time; NaN if it is noise, not larger than its own spread."""
        return self.seconds if self.seconds > self.spread else math.nan

    @property
    def algbw(self) -> float:
        """Returns the bytes per second that the caller sees; NaN if the time is noise."""
        return self.size / self.certain_seconds

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


def median_and_spread(seconds: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Returns the median and the distance between the quartiles."""
    lower, median, upper = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
    return median, upper - lower


def fastest(measurements: Sequence[Measurement], kind: str) -> Measurement | None:
    """Returns the fastest measurement of one kind among those without wrong results."""
    correct = [one for one in measurements if one.kind == kind and not one.wrong]
    return min(correct, key=lambda one: one.seconds, default=None)
