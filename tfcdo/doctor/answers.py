"""The values that the doctor's questions are answered with; the keys of `tfcdo doctor --json`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Failure:
    """No answer but an error.

    Attributes:
      error: what went wrong.
    """

    error: str


@dataclasses.dataclass(frozen=True)
class NoAnswer(Failure):
    """No answer at all.

    Attributes:
      hangs: whether there was no end to be waited for; otherwise the probe has ended.
    """

    hangs: bool


def hangs(answer: object) -> bool:
    """Returns whether there was no end of the answer to be waited for."""
    return isinstance(answer, NoAnswer) and answer.hangs


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Something that was not tried.

    Attributes:
      skipped: the reason.
    """

    skipped: str


@dataclasses.dataclass(frozen=True)
class Versions:
    """Versions of packages, None where there is none.

    Attributes:
      tfcdo: tfcdo's.
      python: Python's.
      tensorflow: TensorFlow's; None if it cannot be imported, as for numpy.
      keras: Keras's, which is needed by Keras users only.
      numpy: numpy's.
      cuda: CUDA's that TensorFlow was built with.
      problem: why this TensorFlow cannot be used; empty if it can.
      remedy: what to do about that.
    """

    tfcdo: str
    python: str
    tensorflow: str | None = None
    keras: str | None = None
    numpy: str | None = None
    cuda: str | None = None
    problem: str = ""
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices that TensorFlow sees.

    Attributes:
      physical: the names of all physical devices.
      logical: the names of all logical devices.
      examined: the names of those that are examined.
      description: what these are, in words.
      on_cpu: whether they are virtual CPU devices.
      gpus_of_nvidia_smi: the GPUs that the driver knows.
    """

    physical: tuple[str, ...]
    logical: tuple[str, ...]
    examined: tuple[str, ...]
    description: str
    on_cpu: bool
    gpus_of_nvidia_smi: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Answer to whether one of tfcdo's all-reduces can run on the devices.

    Attributes:
      name: the name of its class.
      can_run: whether it can.
      reason: why, or why not.
      remedy: what to do if it cannot; empty if it can.
    """

    name: str
    can_run: bool
    reason: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Link:
    """Link of the topology: the way from one device to another.

    Attributes:
      source: the sending device's index.
      target: the receiving device's index.
      bandwidth: in bytes per second; None for a link that is never the slowest part, as JSON has
        no infinity.
      via_host: whether it leads over the host.
    """

    source: int
    target: int
    bandwidth: float | None
    via_host: bool


@dataclasses.dataclass(frozen=True)
class FoundTopology:
    """Topology that was found to join the devices.

    Attributes:
      name: the topology's.
      reason: how it was found.
      links: between each ordered pair of devices that has one.
    """

    name: str
    reason: str
    links: tuple[Link, ...]


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """Plan: what `AutoAllReduce` would do with a model's gradients.

    Attributes:
      bytes: the size of the gradients.
      values: how many there are.
      algorithm: the algorithm that it chooses.
      reason: why.
      packs: in how many packs.
      graph_ops: how many ops that makes in a graph.
    """

    bytes: int
    values: int
    algorithm: str
    reason: str
    packs: int
    graph_ops: int


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies of a known pattern from one device to another.

    Attributes:
      wrong: how many bytes of the first copy were not as they had been sent.
      bandwidth: of the fastest one, in bytes per second.
    """

    wrong: int
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Sums:
    """All-reduces over all devices by one implementation.

    Attributes:
      skipped: always empty; JSON has it of those that were tried, too.
      elements: how many elements there were on all devices.
      wrong: how many of them were not what numpy found.
      seconds: the time of the fastest of a few calls.
    """

    skipped: str = dataclasses.field(default="", kw_only=True)
    elements: int
    wrong: int
    seconds: float


CopiesAnswer = Copies | Failure | Skipped
SumsAnswer = Sums | Failure | Skipped
