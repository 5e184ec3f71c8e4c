"""Evaluations: an algorithm's plan for a machine with its times, which a file can keep.

`tfcdo plan` prints and saves them; `tfcdo.AutoAllReduce(plan=...)` reads a saved one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

import msgspec

from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.plan import Plan, plan_of_bytes
from tfcdo.topology.topology import FORMAT, Topology, TopologyDocument, encode, of_this_format

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
# A machine of this many devices takes half a minute.
MAX_DEVICES = 128


class PackDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a pack in bytes, by the parents of its tree."""

    start: int
    stop: int
    parents: tuple[int | None, ...]
    after: int | None = None


class PlanDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes an `Evaluation` in JSON."""

    format: int = FORMAT
    topology: TopologyDocument
    algorithm: str
    resolved: str
    num_devices: int
    size: int
    seconds: _Seconds
    ordered_seconds: _Seconds
    bound: _Seconds
    packs: tuple[PackDocument, ...]


# Fields that a document has as an evaluation has them.
_AS_THEY_ARE = ("algorithm", "resolved", "seconds", "ordered_seconds", "bound")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A plan for a machine, and its simulated times."""

    topology: Topology
    algorithm: str  # As it was asked for.
    resolved: str  # The same, or for `auto` the algorithm that it stands for.
    plan: Plan  # Its values are bytes if it was read.
    seconds: float  # Its robust time, see `tfcdo.plan.robust_seconds`.
    ordered_seconds: float  # Its time if no copy is disturbed and they go in order.
    bound: float  # See `tfcdo.plan.lower_bound_seconds`.

    @property
    def ratio(self) -> float:
        """Returns the time over the bound, at least 1; infinity where the bound is 0."""
        return max(self.seconds / self.bound, 1.0) if self.bound else math.inf

    @property
    def label(self) -> str:
        """Returns the name for readers: for `auto` also the algorithm that it stands for."""
        if self.algorithm == self.resolved:
            return self.algorithm
        return f"{self.algorithm}: {self.resolved}"

    def to_json(self) -> str:
        """Returns a JSON text, which `from_json` reads; one pack a line."""
        packs: list[PackDocument] = []
        stop = 0
        for pack, tree in zip(self.plan.packs, self.plan.trees, strict=True):
            start, stop = stop, stop + pack.num_sent_bytes
            packs.append(
                PackDocument(start=start, stop=stop, parents=tree.parents, after=pack.after)
            )
        document = PlanDocument(
            topology=self.topology.to_document(),
            num_devices=len(self.plan.nodes),
            size=stop,
            packs=tuple(packs),
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
        )
        return encode(document)

    @classmethod
    def from_json(cls, text: str | bytes) -> Evaluation:
        """Reads a text of `to_json`, or raises `ValueError`; times are not simulated again."""
        try:
            content = of_this_format(msgspec.json.decode(text))
            document = msgspec.convert(content, PlanDocument)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"not a plan as `tfcdo plan --save` writes it: {error}") from None
        stops = [0, *(pack.stop for pack in document.packs)]
        starts, ends = [pack.start for pack in document.packs], sorted({*stops})
        if starts != stops[:-1] or stops != ends or stops[-1] != document.size:
            raise ValueError(
                "packs must begin at 0, then where the one before stops, must not be empty, and "
                f"must end at {document.size}; got packs that begin at {starts} and stop at "
                f"{stops[1:]}"
            )
        topology = Topology.from_document(document.topology)
        if document.num_devices != topology.num_devices:
            raise ValueError(
                f"num_devices must be the topology's, {topology.num_devices}; got "
                f"{document.num_devices}"
            )
        packs = (
            (pack.stop - pack.start, CopyTree(pack.parents), pack.after) for pack in document.packs
        )
        return cls(
            topology=topology,
            plan=plan_of_bytes(topology.num_devices, packs),
            **{name: getattr(document, name) for name in _AS_THEY_ARE},
        )

    def why_not_on(self, topology: Topology) -> str | None:
        """Says why this plan is not for a machine; None if it was made for this one."""
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
        # Two measurements of a machine differ a little, and are known as the same by their name.
        if topology.is_measured:
            return None
        return f"its {made_for.name!r} has other links than the current one"


def check_num_devices(name: str, num_devices: int) -> None:
    """Raises `ValueError` if a machine has too many devices for all algorithms to be simulated."""
    if num_devices > MAX_DEVICES:
        raise ValueError(
            f"topology must have at most {MAX_DEVICES} devices to be simulated, which takes time "
            f"with the cube of their number; {name!r} has {num_devices}"
        )
