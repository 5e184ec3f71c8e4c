"""The values that the doctor's questions are answered with; the keys of `tfcdo doctor --json`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error instead of an answer."""

    error: str


@dataclasses.dataclass(frozen=True)
class NoAnswer(Failure):
    """No answer at all: the probe hangs, or has ended."""

    hangs: bool


def hangs(answer: object) -> bool:
    """Returns whether the probe hangs instead of an answer."""
    return isinstance(answer, NoAnswer) and answer.hangs


@dataclasses.dataclass(frozen=True)
class Skipped:
    """The reason why something was not tried."""

    skipped: str


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
class SeenDevices:
    """Names of the devices that TensorFlow sees, of those examined, and of the driver's GPUs."""

    physical: tuple[str, ...]
    logical: tuple[str, ...]
    examined: tuple[str, ...]
    description: str
    on_cpu: bool
    gpus_of_nvidia_smi: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Whether a class of tfcdo's can run on the devices, why or why not, and the remedy."""

    name: str
    can_run: bool
    reason: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class LinkSpeed:
    """Bytes per second from one device to another, None for no limit, and whether via the host."""

    source: int
    target: int
    bandwidth: float | None
    via_host: bool


@dataclasses.dataclass(frozen=True)
class FoundTopology:
    """The topology that joins the devices, and how it was found."""

    name: str
    reason: str
    links: tuple[LinkSpeed, ...]


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """The plan for a model's gradients, and the largest Adam state that a device holds."""

    bytes: int
    values: int
    algorithm: str
    reason: str
    packs: int
    graph_ops: int
    state_bytes: int = 0
    sharded_state_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies between two devices: wrong bytes of the first, bytes per second of the fastest."""

    wrong: int
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Sums:
    """All-reduces by one implementation: elements on all devices, wrong ones, seconds of a call."""

    skipped: str = dataclasses.field(default="", kw_only=True)  # Always empty.
    elements: int
    wrong: int
    seconds: float


CopiesAnswer = Copies | Failure | Skipped
SumsAnswer = Sums | Failure | Skipped
