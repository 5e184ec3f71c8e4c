"""The values that the doctor's questions are answered with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error instead of an answer; the probe may hang instead."""

    error: str
    hangs: bool = False


@dataclasses.dataclass(frozen=True)
class Versions:
    """Versions of packages, None where there is none; why this TensorFlow cannot be used, if so."""

    tfcdo: str
    python: str
    tensorflow: str | None = None
    keras: str | None = None
    numpy: str | None = None
    cuda: str | None = None  # That TensorFlow was built with.
    problem: str = ""
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of a machine, and tfcdo's choices for them."""

    physical: Sequence[str]  # Names of the devices that TensorFlow sees.
    logical: Sequence[str]  # Names of the devices that they are used as.
    examined: Sequence[str]  # Full names.
    description: str  # Of the examined devices.
    on_cpu: bool
    gpus_of_nvidia_smi: Sequence[str]
    topology: str  # JSON.
    topology_reason: str  # How it was found.
    nccl_problem: str = ""
    nccl_remedy: str = ""
    models: Sequence[str] = ()  # A line for each of two models: the plan, and memory.


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies between two devices: wrong bytes of the first, bytes per second of the fastest."""

    wrong: int
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Sums:
    """An all-reduce by one implementation: elements on all devices, 0 if it cannot run; wrong."""

    elements: int = 0
    wrong: int = 0
