"""Saved plans: a schedule in a file, with the machine that it was made for.

A plan is printed by `tfcdo plan --json`, written by `tfcdo plan --save`, and used by
`tfcdo.AutoAllReduce(plan=...)`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import msgspec

from tfcdo.plan import copy_tree
from tfcdo.plan import evaluation as evaluations
from tfcdo.plan import schedule as schedules
from tfcdo.topology import serialization
from tfcdo.topology.topology import Topology


class PackDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a `Pack` in bytes, by the parents of its tree."""

    start: int
    stop: int
    parents: tuple[int | None, ...]
    after: int | None = None


class PlanDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a `SavedPlan` in JSON; earlier versions wrote an `origin`."""

    topology: serialization.TopologyDocument
    algorithm: str
    resolved: str
    origin: str = ""
    num_devices: int
    size: int
    seconds: float
    ordered_seconds: float
    bound: float
    packs: tuple[PackDocument, ...]


@dataclasses.dataclass(frozen=True)
class SavedPlan:
    """A schedule for a machine, and its simulated times.

    Attributes:
      topology: the machine.
      algorithm: the name of the algorithm that was asked for.
      resolved: the same, or for `auto` the one that it stands for.
      schedule: the schedule, in bytes.
      seconds: its robust time, see `tfcdo.plan.robust_seconds`.
      ordered_seconds: its time if no copy is disturbed.
      bound: the time that no copy trees beat.

    Example:
      >>> from tfcdo.topology import preset
      >>> machine = preset("pcie")
      >>> plan = SavedPlan.of(evaluations.evaluate("ring", machine, 10**6), machine)
      >>> SavedPlan.from_json(plan.to_json()) == plan
      True
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

    @classmethod
    def of(cls, found: evaluations.Evaluation, topology: Topology) -> SavedPlan:
        """Returns the plan that was evaluated, for the machine that it was made for."""
        return cls(
            topology,
            found.algorithm,
            found.resolved,
            found.schedule,
            found.seconds,
            found.ordered_seconds,
            found.bound,
        )

    @property
    def origin(self) -> str:
        """Returns where the trees are from, for people."""
        if self.resolved == "packed_trees":
            return f"packed trees for {self.topology.name}"
        return "the algorithm's own trees"

    def to_json(self) -> str:
        """Returns this plan as a JSON text, which `from_json` reads; one pack a line."""
        document = PlanDocument(
            topology=self.topology.to_document(),
            algorithm=self.algorithm,
            resolved=self.resolved,
            origin=self.origin,
            num_devices=self.schedule.num_devices,
            size=self.schedule.size,
            seconds=self.seconds,
            ordered_seconds=self.ordered_seconds,
            bound=self.bound,
            packs=tuple(
                PackDocument(
                    start=pack.start, stop=pack.stop, parents=pack.tree.parents, after=pack.after
                )
                for pack in self.schedule.packs
            ),
        )
        content = msgspec.to_builtins(document)
        packs = ",".join(f"\n    {json.dumps(pack)}" for pack in content.pop("packs"))
        fields = [f'"{name}": {json.dumps(content[name])}' for name in content]
        return "{\n  " + ",\n  ".join([*fields, f'"packs": [{packs}\n  ]']) + "\n}"

    @classmethod
    def from_json(cls, text: str | bytes) -> SavedPlan:
        """Reads a text that `to_json` has written; raises `ValueError` if it is not a plan.

        Trees and packs are checked, the times are taken as they are.
        """
        try:
            document = msgspec.json.decode(text, type=PlanDocument)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"not a plan as `tfcdo plan --save` writes it: {error}") from None
        packs = (
            schedules.Pack(one.start, one.stop, copy_tree.CopyTree(one.parents), one.after)
            for one in document.packs
        )
        return cls(
            Topology.from_document(document.topology),
            document.algorithm,
            document.resolved,
            schedules.Schedule(document.num_devices, document.size, tuple(packs)),
            document.seconds,
            document.ordered_seconds,
            document.bound,
        )

    @classmethod
    def read(cls, path: str | pathlib.Path) -> SavedPlan:
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
