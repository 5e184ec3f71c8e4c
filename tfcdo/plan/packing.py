"""Packing: which ranges of which values form which pack, and what of it travels as one tensor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from tfcdo.plan import algorithms
from tfcdo.plan import schedule as schedule_lib
from tfcdo.plan import topology as topology_lib
from tfcdo.plan import tree as tree_lib


@dataclasses.dataclass(frozen=True)
class ValueSpec:
    """What a plan needs to know of one replica value.

    Attributes:
      dtype: the name of its dtype; values of different dtypes never share a pack.
      itemsize: bytes per element.
      size: the number of elements; None if it is not known until the step runs.
    """

    dtype: str
    itemsize: int
    size: int | None


@dataclasses.dataclass(frozen=True)
class Packing:
    """How a caller wants values to be packed.

    Attributes:
      num_packs: cut all values of one dtype into this many packs; 0 for no such packing, None to
        leave the number and the sizes of the packs to the algorithm.
      small_bytes: with `num_packs` 0, values smaller than this many bytes are grouped; 0 for none.
      small_group: at most this many values in such a group; 0 for no grouping.
      bytes_per_pack: no pack is larger than this many bytes; 0 for no limit.
    """

    num_packs: int | None = 1
    small_bytes: int = 0
    small_group: int = 0
    bytes_per_pack: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """A range of the elements of one flattened value.

    Attributes:
      value: the value's index in the batch.
      start: the first element.
      stop: one past the last element; None for a whole value of unknown size.
      whole: whether the piece is the whole value, which then needs no flattening to travel alone.
    """

    value: int
    start: int
    stop: int | None
    whole: bool

    @property
    def size(self) -> int:
        """The number of elements; only for a piece whose size is known."""
        if self.stop is None:
            raise ValueError(f"the size of value {self.value} is not known before the step runs")
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class PackPlan:
    """One pack: its copy tree and what travels along it.

    Attributes:
      tree: the copy tree.
      bundles: the pack's pieces, in tuples that are concatenated and travel as one tensor.
    """

    tree: tree_lib.CopyTree
    bundles: tuple[tuple[Piece, ...], ...]


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The whole all-reduce of a batch of values.

    Attributes:
      packs: the packs; together they hold every element of every value exactly once.
      num_values: the number of values in the batch.
    """

    packs: tuple[PackPlan, ...]
    num_values: int

    @functools.cached_property
    def pieces_of(self) -> tuple[tuple[Piece, ...], ...]:
        """`pieces_of[v]`: the pieces of value `v`, in the order of its elements."""
        pieces: list[list[Piece]] = [[] for _ in range(self.num_values)]
        for pack in self.packs:
            for bundle in pack.bundles:
                for piece in bundle:
                    pieces[piece.value].append(piece)
        return tuple(tuple(sorted(own, key=lambda piece: piece.start)) for own in pieces)


# Plans are small and pure; the bound only keeps a process that draws ever new shapes from growing.
@functools.lru_cache(maxsize=512)
def plan_batch(
    values: tuple[ValueSpec, ...],
    packing: Packing,
    algorithm: str,
    topology: topology_lib.Topology,
) -> BatchPlan:
    """Plans the all-reduce of a batch of values.

    Args:
      values: what is known of each value.
      packing: how to pack them.
      algorithm: the name of the algorithm that gives the copy trees; see
        `tfcdo.plan.algorithms.ALGORITHMS`.
      topology: the devices and their links.

    Returns:
      The plan; the same object for the same arguments, as long as it is remembered.

    Raises:
      ValueError: if `algorithm` is not known.

    Example:
      >>> specs = (ValueSpec("float32", 4, 6), ValueSpec("float32", 4, 2))
      >>> plan = plan_batch(specs, Packing(2), "one_device", topology_lib.shared_memory(3))
      >>> [[(p.value, p.start, p.stop) for b in pack.bundles for p in b] for pack in plan.packs]
      [[(0, 0, 4)], [(0, 4, 6), (1, 0, 2)]]
    """
    contents = [
        content
        for own in _by_dtype(values)
        for content in _contents(values, own, packing, algorithm, topology)
    ]
    trees = _trees(algorithm, topology, values, len(contents))
    limit = topology.concat_limit_bytes
    packs = (
        PackPlan(trees[index % len(trees)], _bundles(content, values, limit))
        for index, content in enumerate(contents)
    )
    return BatchPlan(tuple(packs), len(values))
