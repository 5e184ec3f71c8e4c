"""Batch plans: which elements of which values travel together, and along which copy tree."""

from __future__ import annotations

import dataclasses
import functools
import math

from tfcdo.plan.copy_tree import CopyTree


@dataclasses.dataclass(frozen=True)
class ValueSpec:
    """The dtype and shape of one replica value, as far as a plan needs them.

    Attributes:
      dtype: the name of its dtype; values of different dtypes never share a pack.
      itemsize: bytes per element.
      shape: its dimensions; None if they are not all known until the step runs.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...] | None

    @functools.cached_property
    def size(self) -> int | None:
        """Returns the number of elements; None if it is not known until the step runs."""
        return None if self.shape is None else math.prod(self.shape)


# Stands for a value about whose elements a plan can say nothing, such as slices of a table.
UNKNOWN = ValueSpec("unknown", 1, None)


@dataclasses.dataclass(frozen=True)
class ValueSlice:
    """A range of the elements of one flattened value.

    Attributes:
      value: the value's index in the batch.
      start: the first element.
      stop: one past the last element; None for a whole value of unknown size.
      whole: whether the slice is the whole value, which then needs no flattening to travel alone.
    """

    value: int
    start: int
    stop: int | None
    whole: bool

    @property
    def size(self) -> int:
        """Returns the number of elements; only for a slice whose size is known."""
        if self.stop is None:
            raise ValueError(f"the size of value {self.value} is not known before the step runs")
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class FusedTensor:
    """Slices that travel as one tensor.

    Attributes:
      slices: the slices; a single one travels as it is.
      stacked: whether several slices are whole values of one shape, stacked along a new first axis.
        Otherwise they are flattened and concatenated.
    """

    slices: tuple[ValueSlice, ...]
    stacked: bool = False


@dataclasses.dataclass(frozen=True)
class PackPlan:
    """One pack: its copy tree and what travels along it.

    Attributes:
      tree: the copy tree.
      fused_tensors: the pack's content.
    """

    tree: CopyTree
    fused_tensors: tuple[FusedTensor, ...]


# Compared and hashed by identity: `plan_batch` gives the same object for the same question, and a
# plan of many slices as a key should cost no more than that.
@dataclasses.dataclass(frozen=True, eq=False)
class BatchPlan:
    """The whole all-reduce of a batch of values.

    A plan that would miss an element, or all-reduce it twice, cannot be built.

    Attributes:
      packs: the packs; together they hold every element of every value exactly once.
      sizes: the number of elements of each value; None where it is not known.

    Raises:
      ValueError: if the trees span different numbers of devices, or the slices of a value leave a
        gap, overlap or do not end where the value ends.

    Example:
      >>> from tfcdo.plan.copy_tree import star
      >>> whole = ValueSlice(0, 0, 6, whole=True)
      >>> pack = PackPlan(star(2), (FusedTensor((whole,)),))
      >>> BatchPlan((pack,), (6,)).slices_of == ((whole,),)
      True
    """

    packs: tuple[PackPlan, ...]
    sizes: tuple[int | None, ...]

    def __post_init__(self) -> None:
        spans = sorted({pack.tree.num_devices for pack in self.packs})
        if len(spans) > 1:
            raise ValueError(f"packs must have trees over the same devices; got {spans} devices")
        for index, (size, slices) in enumerate(zip(self.sizes, self.slices_of, strict=True)):
            stops: list[int | None] = [0, *(part.stop for part in slices)]
            if [part.start for part in slices] != stops[:-1] or stops[-1] != size:
                raise ValueError(
                    f"packs must hold each element of value {index}, of size {size}, once; got it "
                    f"cut at {stops}"
                )

    @functools.cached_property
    def slices_of(self) -> tuple[tuple[ValueSlice, ...], ...]:
        """Returns `slices_of`; `slices_of[v]` are those of value `v`, in its elements' order."""
        slices: list[list[ValueSlice]] = [[] for _ in self.sizes]
        for pack in self.packs:
            for fused in pack.fused_tensors:
                for part in fused.slices:
                    slices[part.value].append(part)
        return tuple(tuple(sorted(parts, key=lambda part: part.start)) for parts in slices)
