"""Packing: which ranges of which values form which pack, and what of it travels as one tensor."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from tfcdo.plan import algorithms
from tfcdo.plan import schedule as schedule_lib
from tfcdo.plan import topology as topology_lib
from tfcdo.plan import tree as tree_lib

# What an op costs on top of its work, roughly, on a CPU: 64 KiB at 10 GB/s.
_SECONDS_PER_OP = 6.5e-6


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


# Stands for a value about whose elements a plan can say nothing, such as slices of a table.
UNKNOWN = ValueSpec("unknown", 1, None)


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


# Compared and hashed by identity: `plan_batch` gives the same object for the same question, and a
# plan of many pieces as a key should cost no more than that.
@dataclasses.dataclass(frozen=True, eq=False)
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
    contents = _contents(values, packing)
    trees = _trees(algorithm, topology, values, len(contents))
    limit = _concat_limit(topology)
    packs = (
        PackPlan(trees[index % len(trees)], _bundles(content, values, limit))
        for index, content in enumerate(contents)
    )
    return BatchPlan(tuple(packs), len(values))


def _by_dtype(values: Sequence[ValueSpec]) -> list[list[int]]:
    """The values of known, positive size, by dtype in the order of their first appearance."""
    groups: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        if value.size:
            groups.setdefault(value.dtype, []).append(index)
    return list(groups.values())


def _contents(values: Sequence[ValueSpec], packing: Packing) -> list[tuple[Piece, ...]]:
    """What each pack holds, for all values."""
    contents = [
        content for own in _by_dtype(values) for content in _contents_of_dtype(values, own, packing)
    ]
    # An empty value has nothing to share a pack, and of a value whose size is not known nobody can
    # say where its parts would lie in one: both travel alone, as they are.
    return contents + [
        (Piece(index, 0, value.size, whole=True),)
        for index, value in enumerate(values)
        if not value.size
    ]


def _contents_of_dtype(
    values: Sequence[ValueSpec], own: Sequence[int], packing: Packing
) -> list[tuple[Piece, ...]]:
    """What each pack holds, for the values of one dtype: cut, then capped, then found again."""
    order, stops = _order_and_stops(values, own, packing)
    itemsize = values[own[0]].itemsize
    if packing.bytes_per_pack:
        stops = _capped(stops, max(1, packing.bytes_per_pack // itemsize))
    return _pieces_between([(index, _size(values[index])) for index in order], stops)


def _order_and_stops(
    values: Sequence[ValueSpec], own: Sequence[int], packing: Packing
) -> tuple[list[int], list[int]]:
    """The order in which values are laid end to end, and the ends of the packs in that line."""
    if packing.num_packs:
        total = sum(_size(values[index]) for index in own)
        return list(own), [stop for _, stop in schedule_lib.cut(total, packing.num_packs)]
    # Values of one dtype, so one limit in elements stands for the limit in bytes.
    limit = packing.small_bytes / values[own[0]].itemsize if packing.small_group else 0
    small = [index for index in own if _size(values[index]) < limit]
    order = small + [index for index in own if _size(values[index]) >= limit]
    ends = list(itertools.accumulate(_size(values[index]) for index in order))
    grouped = ends[: len(small)]
    full = grouped[packing.small_group - 1 :: packing.small_group] if small else []
    rest = grouped[-1:] if grouped[-1:] != full[-1:] else []
    return order, full + rest + ends[len(small) :]


def _capped(stops: Sequence[int], limit: int) -> list[int]:
    """Further ends, so that no pack has more than `limit` elements."""
    return [
        start + end
        for start, stop in zip([0, *stops], stops)
        for _, end in schedule_lib.cut(stop - start, -(-(stop - start) // limit))
    ]


def _pieces_between(
    sizes: Sequence[tuple[int, int]], stops: Sequence[int]
) -> list[tuple[Piece, ...]]:
    """Cuts values that lie end to end where packs end.

    Args:
      sizes: `(value, size)` of each value, in the order in which they lie.
      stops: where each pack ends, in elements from the first value's start.

    Returns:
      The pieces of each pack.
    """
    packs = []
    remaining = iter(sizes)
    value, size, begin = -1, 0, 0  # `begin` is where `value` begins in the line.
    position = 0
    for stop in stops:
        pieces = []
        while position < stop:
            if position == begin + size:
                begin += size
                value, size = next(remaining)
            start, end = position - begin, min(stop - begin, size)
            pieces.append(Piece(value, start, end, whole=(start, end) == (0, size)))
            position = begin + end
        packs.append(tuple(pieces))
    return packs


def _trees(
    algorithm: str, topology: topology_lib.Topology, values: Sequence[ValueSpec], num_packs: int
) -> tuple[tree_lib.CopyTree, ...]:
    """The trees to deal out to `num_packs` packs."""
    num_bytes = sum((value.size or 0) * value.itemsize for value in values)
    # Tiny batches may have fewer bytes than packs (of values of unknown size): the trees stay.
    schedule = algorithms.make_schedule(
        algorithm, topology, max(num_bytes, num_packs), max(num_packs, 1)
    )
    return tuple(pack.tree for pack in schedule.packs)


def _concat_limit(topology: topology_lib.Topology) -> float:
    """The bytes up to which a piece is concatenated with others rather than sent on its own.

    Concatenating costs a pass over the piece, sending it on its own costs an op's overhead: up to
    the bytes that are passed over in that time it pays to concatenate. Where memory is much faster
    than the links (`addition_bandwidth` is infinite) it always does.
    """
    return _SECONDS_PER_OP * topology.addition_bandwidth


def _bundles(
    content: Sequence[Piece], values: Sequence[ValueSpec], limit: float
) -> tuple[tuple[Piece, ...], ...]:
    """The content of a pack, split into what is concatenated and what travels alone."""
    together: list[Piece] = []
    alone: list[tuple[Piece, ...]] = []
    for piece in content:
        if piece.stop is not None and piece.size * values[piece.value].itemsize <= limit:
            together.append(piece)
        else:
            alone.append((piece,))
    return tuple([tuple(together)] if together else []) + tuple(alone)


def _size(value: ValueSpec) -> int:
    assert value.size is not None  # Values of unknown size are never laid end to end.
    return value.size
