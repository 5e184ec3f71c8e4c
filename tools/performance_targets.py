"""Lists the targets of docs/performance.md and compares them with measurements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

AUTO = "tfcdo.AutoAllReduce"
FASTEST = "the fastest TensorFlow class"
FLOOR = "the floor"
HIERARCHICAL = "HierarchicalCopyAllReduce"
TF_HIERARCHICAL = "tf.HierarchicalCopyAllReduce(num_packs=1)"
ONE_DEVICE = "ReductionToOneDevice"
COLLECTIVE = "tf.CollectiveAllReduce"

# A run is made anew if half of its implementations spread more than this part of their times,
UNDISTURBED = 0.1
# until there are so many, of which the least disturbed counts.
MAX_TRIES = 3

# One measurement, as `tfcdo bench --json` writes it.
Result = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of `tfcdo bench`.

    Attributes:
      model: whose gradients are all-reduced.
      num_devices: over how many devices.
      eager: whether without a graph.
    """

    model: str
    num_devices: int
    eager: bool = False

    def __str__(self) -> str:
        return f"{self.model}, K = {self.num_devices}{', eager' if self.eager else ''}"


@dataclasses.dataclass(frozen=True)
class Target:
    """The largest wanted ratio of one number to another one of the same run.

    Attributes:
      case: the run.
      ours: the name of tfcdo's implementation.
      against: that of the other, or `FASTEST` or `FLOOR`.
      at_most: the ratio to reach.
      quantity: which number; a field of a measurement.
    """

    case: Case
    ours: str
    against: str
    at_most: float
    quantity: str = "seconds"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A target and what was measured.

    Attributes:
      target: the target.
      ratio: what was measured; not a number if the times are lost in their spread.
      limit: of times, the ratio that the least would have that an all-reduce takes; else None.
    """

    target: Target
    ratio: float
    limit: float | None

    @property
    def met(self) -> bool:
        """Returns whether the ratio is small enough."""
        return self.ratio <= self.target.at_most


RESNETS = tuple(Case("resnet50", count) for count in (2, 4, 8))
TINIES = tuple(Case("tiny", count) for count in (4, 8))
MATRICES = tuple(Case("tiny-matrices", count) for count in (4, 8))
BERT, MOBILENET, EAGER = Case("bert-base", 4), Case("mobilenet", 4), Case("tiny", 4, eager=True)
CASES = (*RESNETS, BERT, MOBILENET, *TINIES, *MATRICES, EAGER)
PROFILED = (TF_HIERARCHICAL, "tf.ReductionToOneDevice", AUTO)

TARGETS = (
    Target(RESNETS[1], AUTO, FLOOR, 1.15),
    Target(RESNETS[2], AUTO, FLOOR, 1.25),
    Target(RESNETS[1], AUTO, FASTEST, 0.75),
    Target(RESNETS[2], AUTO, FASTEST, 0.55),
    Target(RESNETS[0], AUTO, FASTEST, 1.00),
    Target(BERT, AUTO, FASTEST, 0.75),
    Target(MOBILENET, AUTO, FASTEST, 0.65),
    *(Target(case, AUTO, FASTEST, 0.50) for case in TINIES),
    *(Target(case, AUTO, FASTEST, 0.75) for case in MATRICES),
    *(Target(case, f"tfcdo.{HIERARCHICAL}", TF_HIERARCHICAL, 0.35) for case in RESNETS[1:]),
    *(Target(case, f"tfcdo.{ONE_DEVICE}", f"tf.{ONE_DEVICE}", 0.80) for case in RESNETS[1:]),
    *(Target(case, AUTO, COLLECTIVE, 0.18) for case in RESNETS[1:]),
    Target(RESNETS[2], AUTO, TF_HIERARCHICAL, 0.10, "nodes"),
    Target(RESNETS[2], AUTO, TF_HIERARCHICAL, 0.40, "first_call"),
    Target(EAGER, AUTO, FASTEST, 0.60),
    Target(RESNETS[1], AUTO, f"tf.{ONE_DEVICE}", 1.10, "peak_memory"),
)


def outcome(target: Target, results: Sequence[Result]) -> Outcome:
    """Compares a target with what its case measured."""
    ours = _named(results, target.ours)
    other = reference(results, target.against)
    limit = None
    if target.quantity == "seconds" and not target.case.eager:
        limit = _least(results) / other["seconds"]
    ratio = ours[target.quantity] / other[target.quantity]
    # The median of a difference may be below 0, and a reference within its spread measures nothing.
    lost = target.quantity == "seconds" and (ratio <= 0 or other["seconds"] <= other["spread"])
    return Outcome(target, math.nan if lost else ratio, limit)


def _least(results: Sequence[Result]) -> float:
    """Returns the seconds that any all-reduce takes: the floor's, or packing's if longer."""
    packing = [one["seconds"] for one in results if one["kind"] == "packing"]
    return max([reference(results, FLOOR)["seconds"], *packing])


def reference(results: Sequence[Result], name: str) -> Result:
    if name not in (FASTEST, FLOOR):
        return _named(results, name)
    kind = "tf" if name == FASTEST else "floor"
    right = [one for one in results if one["kind"] == kind and not one["wrong"]]
    return min(right, key=lambda one: one["seconds"])


def _named(results: Sequence[Result], name: str) -> Result:
    (found,) = [one for one in results if one["name"] == name]
    return found
