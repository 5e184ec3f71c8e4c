"""Evaluations: an algorithm's schedule for a machine with its times, which a file can keep.

`tfcdo plan` prints and saves them; `tfcdo.AutoAllReduce(plan=...)` reads a saved one.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib

import msgspec

from tfcdo.plan import copy_tree
from tfcdo.plan import schedule as schedules
from tfcdo.topology import serialization
from tfcdo.topology.topology import Topology

# A machine with so many devices takes half a minute.
MAX_DEVICES = 128


class PackDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a `Pack` in bytes, by the parents of its tree."""

    start: int
    stop: int
    parents: tuple[int | None, ...]
    after: int | None = None


class PlanDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes an `Evaluation` in JSON."""

    format: int = serialization.FORMAT
    topology: serialization.TopologyDocument
    algorithm: str
    resolved: str
    num_devices: int
    size: int
    seconds: float
    ordered_seconds: float
    bound: float
    packs: tuple[PackDocument, ...]


# Fields that a document has as an evaluation has them.
_AS_THEY_ARE = ("algorithm", "resolved", "seconds", "ordered_seconds", "bound")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A schedule for a machine, and its simulated times.

    Attributes:
      topology: the machine.
      algorithm: the name of the algorithm that was asked for.
      resolved: the same, or for `auto` the algorithm that it stands for.
      schedule: the schedule, in bytes.
      seconds: its robust time, see `tfcdo.plan.robust_seconds`.
      ordered_seconds: its time if no copy is disturbed and they go in order.
      bound: see `tfcdo.plan.lower_bound_seconds`.
    """

    topology: Topology
    algorithm: str
    resolved: str
    schedule: schedules.Schedule
    seconds: float
    ordered_seconds: float
    bound: float

    def __post_init__(self) -> None:
        if self.schedule.num_devices != self.topology.num_devices:
            raise ValueError(
                f"packs must have trees over the {self.topology.num_devices} devices of "
                f"{self.topology.name!r}; got trees over {self.schedule.num_devices}"
            )

    @property
    def ratio(self) -> float:
        """Returns the time over the bound, at least 1; infinity where the bound is 0."""
        return max(self.seconds / self.bound, 1.0) if self.bound else math.inf

    @property
    def label(self) -> str:
        """Returns the name for people: for `auto` also the algorithm that it stands for."""
        if self.algorithm == self.resolved:
            return self.algorithm
        return f"{self.algorithm}: {self.resolved}"

    @property
    def origin(self) -> str:
        """Returns where the trees are from, for people."""
        if self.resolved == "packed_trees":
            return f"packed trees for {self.topology.name}"
        return "the algorithm's own trees"

    def to_json(self) -> str:
        """Returns a JSON text, which `from_json` reads; one pack a line."""
        packs = (
            PackDocument(
                start=pack.start, stop=pack.stop, parents=pack.tree.parents, after=pack.after
            )
            for pack in self.schedule.packs
        )
        document = PlanDocument(
            topology=self.topology.to_document(),
            num_devices=self.schedule.num_devices,
            size=self.schedule.size,
            packs=tuple(packs),
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
        )
        return serialization.encode(document)

    @classmethod
    def from_json(cls, text: str | bytes) -> Evaluation:
        """Reads a text of `to_json`, or raises `ValueError`; times are taken as they are."""
        try:
            content = serialization.upgraded(msgspec.json.decode(text))
            document = msgspec.convert(content, PlanDocument)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"not a plan as `tfcdo plan --save` writes it: {error}") from None
        packs = (
            schedules.Pack(one.start, one.stop, copy_tree.CopyTree(one.parents), one.after)
            for one in document.packs
        )
        return cls(
            topology=Topology.from_document(document.topology),
            schedule=schedules.Schedule(document.num_devices, document.size, tuple(packs)),
            **{name: getattr(document, name) for name in _AS_THEY_ARE},
        )

    @classmethod
    def read(cls, path: str | pathlib.Path) -> Evaluation:
        """Reads a file; raises `ValueError`, which names it, if it does not hold a plan."""
        try:
            return cls.from_json(pathlib.Path(path).read_bytes())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def why_not_on(self, topology: Topology) -> str | None:
        """Says why this plan is not for a machine; None if it was made for this one.

        Two measurements of a machine differ a little, and are known as the same by their name.
        """
        made_for = self.topology
        if made_for.num_devices != topology.num_devices:
            return (
                f"it was made for {made_for.num_devices} devices, and there are "
                f"{topology.num_devices}"
            )
        if made_for.fingerprint == topology.fingerprint:
            return None
        if made_for.name != topology.name:
            return f"it was made for {made_for.name!r}, and these devices are {topology.name!r}"
        if made_for.is_measured and topology.is_measured:
            return None
        return f"its {made_for.name!r} has other links than the current one"


def check_num_devices(name: str, num_devices: int) -> None:
    """Raises `ValueError` if a machine has too many devices for all algorithms to be simulated."""
    if num_devices > MAX_DEVICES:
        raise ValueError(
            f"topology must have at most {MAX_DEVICES} devices to be simulated, which takes time "
            f"with the cube of their number; {name!r} has {num_devices}"
        )
