"""Saved plans: a schedule in a file, with the machine that it was made for and where it came from.

A plan is printed by `tfcdo plan --json`, written by `tfcdo plan --save`, and used by
`tfcdo.AutoAllReduce(plan=...)`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import msgspec

from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.evaluation import Evaluation
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.schedule import Pack
from tfcdo.plan.schedule import Schedule
from tfcdo.topology.serialization import TopologyDocument
from tfcdo.topology.topology import Topology


class PackDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a `Pack` in bytes, by the parents of its tree."""

    start: int
    stop: int
    parents: tuple[int | None, ...]


class PlanDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a `SavedPlan` in JSON."""

    topology: TopologyDocument
    algorithm: str
    resolved: str
    origin: str
    num_devices: int
    size: int
    seconds: float
    ordered_seconds: float
    bound: float
    packs: tuple[PackDocument, ...]


@dataclasses.dataclass(frozen=True)
class SavedPlan:
    """A schedule for a machine, and what is known of it.

    Attributes:
      topology: the machine.
      algorithm: the name of the algorithm that was asked for.
      resolved: the same, or for `auto` the one that it stands for.
      origin: where the trees came from, for people.
      schedule: the schedule, in bytes.
      seconds: its robust time, see `tfcdo.plan.simulator.robust_seconds`.
      ordered_seconds: its time if no copy is disturbed.
      bound: the time that no copy trees beat.

    Raises:
      ValueError: if schedule and topology differ in the number of devices.

    Example:
      >>> from tfcdo.plan.evaluation import evaluate
      >>> from tfcdo.topology import preset
      >>> machine = preset("pcie")
      >>> plan = SavedPlan.of(evaluate("ring", machine, 10**6), machine)
      >>> plan.origin, SavedPlan.from_json(plan.to_json()) == plan
      ("the algorithm's own trees", True)
    """

    topology: Topology
    algorithm: str
    resolved: str
    origin: str
    schedule: Schedule
    seconds: float
    ordered_seconds: float
    bound: float

    def __post_init__(self) -> None:
        if self.schedule.num_devices != self.topology.num_devices:
            raise ValueError(
                f"the packs must have trees over the {self.topology.num_devices} devices of "
                f"{self.topology.name!r}; got trees over {self.schedule.num_devices}"
            )

    @classmethod
    def of(cls, evaluation: Evaluation, topology: Topology) -> SavedPlan:
        """Returns the plan that was evaluated.

        Args:
          evaluation: the evaluation.
          topology: the machine that it was made for.
        """
        return cls(
            topology,
            evaluation.algorithm,
            evaluation.resolved,
            evaluation.origin,
            evaluation.schedule,
            evaluation.seconds,
            evaluation.ordered_seconds(topology),
            lower_bound(topology, evaluation.schedule.size),
        )

    def to_json(self) -> str:
        """Returns this plan as a JSON text, which `from_json` reads; one pack or link a line."""
        document = msgspec.to_builtins(self._to_document())
        machine, packs = document.pop("topology"), document.pop("packs")
        lines = [f'"topology": {_object_of_lines(machine)}']
        lines += [f'"{name}": {json.dumps(value)}' for name, value in document.items()]
        lines.append(f'"packs": {_list_of_lines(packs, "  ")}')
        return "{\n" + ",\n".join(f"  {line}" for line in lines) + "\n}"

    def _to_document(self) -> PlanDocument:
        return PlanDocument(
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
                PackDocument(start=pack.start, stop=pack.stop, parents=pack.tree.parents)
                for pack in self.schedule.packs
            ),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> SavedPlan:
        """Reads a JSON text that `to_json` has written.

        Args:
          text: the text.

        Returns:
          The plan; its trees and packs have been checked, its times are taken as they are.

        Raises:
          ValueError: if the text is not JSON, or not of a plan.
        """
        try:
            document = msgspec.json.decode(text, type=PlanDocument)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"not a plan as `tfcdo plan --save` writes it: {error}") from None
        packs = (Pack(one.start, one.stop, CopyTree(one.parents)) for one in document.packs)
        return cls(
            Topology.from_document(document.topology),
            document.algorithm,
            document.resolved,
            document.origin,
            Schedule(document.num_devices, document.size, tuple(packs)),
            document.seconds,
            document.ordered_seconds,
            document.bound,
        )

    @classmethod
    def read(cls, path: str | pathlib.Path) -> SavedPlan:
        """Reads a file that `tfcdo plan --save` has written.

        Args:
          path: the file.

        Returns:
          The plan.

        Raises:
          ValueError: if there is no such file, or it does not hold a plan; the message names it.
        """
        try:
            return cls.from_json(pathlib.Path(path).read_bytes())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def why_not_on(self, topology: Topology) -> str | None:
        """Says why this plan is not one for some machine.

        Args:
          topology: the machine at hand.

        Returns:
          The reason, or None if it is the machine that the plan was made for. Two measurements of
          a machine differ a little, and are known as the same by their name.
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
        return f"its {made_for.name!r} has other links than the one at hand"


def _list_of_lines(entries: list[object], indent: str) -> str:
    lines = ",".join(f"\n{indent}  {json.dumps(one, ensure_ascii=False)}" for one in entries)
    return f"[{lines}\n{indent}]"


def _object_of_lines(fields: dict[str, object]) -> str:
    parts = (
        f'\n    "{name}": '
        + (
            _list_of_lines(value, "    ")
            if isinstance(value, list)
            else json.dumps(value, ensure_ascii=False)
        )
        for name, value in fields.items()
    )
    return "{" + ",".join(parts) + "\n  }"
