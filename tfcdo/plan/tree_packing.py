"""Tree packings: copy trees, and how much of the data travels along each."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

import msgspec

from tfcdo import checks
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.schedule import Pack
from tfcdo.plan.schedule import Schedule

# No more packs than this: each costs 2 (K-1) ops.
MAX_PACKS = 64

Permutation = tuple[int, ...]


class TreePackingDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a `TreePacking` in JSON: the weights, and the parents of each tree."""

    weights: tuple[float, ...]
    parents: tuple[tuple[int | None, ...], ...]


@dataclasses.dataclass(frozen=True)
class TreePacking:
    """Copy trees, and the weight of each: its part of the data.

    Attributes:
      trees: the trees.
      weights: a positive number for each tree; only their ratios count.

    Raises:
      ValueError: if there are no trees, or not as many weights, or a weight or their sum is not a
        positive number, or the trees span different devices.

    Example:
      >>> from tfcdo.plan.copy_tree import star
      >>> packing = TreePacking((star(2, 0), star(2, 1)), (3.0, 1.0))
      >>> [pack.size for pack in packing.schedule(100).packs]
      [75, 25]
    """

    trees: tuple[CopyTree, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.trees) != len(self.weights) or not self.trees:
            raise ValueError(
                f"weights must be as many as trees, at least one; got {len(self.weights)} weights "
                f"for {len(self.trees)} trees"
            )
        if not all(weight > 0 and math.isfinite(weight) for weight in self.weights):
            raise ValueError(f"weights must be positive numbers; got {self.weights}")
        if not math.isfinite(sum(self.weights)):
            raise ValueError(f"weights must have a sum that is a number; got {self.weights}")
        spans = sorted({tree.num_devices for tree in self.trees})
        if len(spans) > 1:
            raise ValueError(f"trees must span the same devices; got trees over {spans} devices")

    @classmethod
    def from_document(cls, document: TreePackingDocument, num_devices: int) -> TreePacking:
        """Returns the packing that a document describes.

        Args:
          document: the description.
          num_devices: how many devices its trees must span.

        Returns:
          The packing.

        Raises:
          ValueError: if the document does not describe a packing over so many devices.
        """
        packing = cls(tuple(map(CopyTree, document.parents)), document.weights)
        if packing.trees[0].num_devices != num_devices:
            raise ValueError(
                f"trees must span {num_devices} devices; got {packing.trees[0].num_devices}"
            )
        return packing

    def to_document(self) -> TreePackingDocument:
        """Returns what describes this packing in JSON."""
        parents = tuple(tree.parents for tree in self.trees)
        return TreePackingDocument(weights=self.weights, parents=parents)

    def schedule(self, num_bytes: int) -> Schedule:
        """Cuts the data into one pack for each tree, of sizes in the ratio of the weights.

        Args:
          num_bytes: how many bytes each device holds.

        Returns:
          A schedule of `num_bytes` bytes; a tree whose part is below one byte may get none.
        """
        ends = list(itertools.accumulate(self.weights))
        # The ratio first: a large part of many bytes may be too large for a float. And no float is
        # the last byte of more than 2**53.
        stops = [min(round(num_bytes * (end / ends[-1])), num_bytes) for end in ends[:-1]]
        stops.append(num_bytes)
        packs = (
            Pack(start, stop, tree)
            for start, stop, tree in zip([0, *stops], stops, self.trees, strict=False)
            if stop > start
        )
        return Schedule(self.trees[0].num_devices, num_bytes, tuple(packs))

    def rounded(self) -> TreePacking:
        """Rounds the weights to six digits: precise enough, and short to write down."""
        return TreePacking(self.trees, tuple(float(f"{weight:.6g}") for weight in self.weights))

    def round_robin(self, num_packs: int) -> TreePacking:
        """Deals the trees out in turn to packs of equal weight.

        Args:
          num_packs: how many packs, at least 1.

        Returns:
          A packing of `num_packs` trees.

        Raises:
          ValueError: if `num_packs` is below 1.
          TypeError: if it is not an int.
        """
        checks.check_int("num_packs", num_packs, at_least=1)
        trees = itertools.islice(itertools.cycle(self.trees), num_packs)
        return TreePacking(tuple(trees), (1.0,) * num_packs)

    def expanded(self, group: Iterable[Permutation]) -> TreePacking:
        """Adds the images of all trees under permutations of the devices.

        Args:
          group: the permutations, at least one; `permutation[d]` is what device `d` becomes.

        Returns:
          A packing of all images of all trees, each with the weight of its tree.

        Raises:
          ValueError: if there are no permutations.
        """
        group = tuple(group)
        return TreePacking(
            tuple(_image(tree, permutation) for permutation in group for tree in self.trees),
            self.weights * len(group),
        )


def _image(tree: CopyTree, permutation: Permutation) -> CopyTree:
    parents: list[int | None] = [None] * tree.num_devices
    for device, parent in enumerate(tree.parents):
        parents[permutation[device]] = None if parent is None else permutation[parent]
    return CopyTree(tuple(parents))
