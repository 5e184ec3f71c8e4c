"""Packing: which ranges of which values form which pack, and what of it travels as one tensor."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from tfcdo import checks
from tfcdo.plan import algorithms
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.schedule import Schedule
from tfcdo.plan.schedule import cut
from tfcdo.topology.topology import Topology

# What an op costs on top of its work, roughly, on a CPU: 64 KiB at 10 GB/s.
_SECONDS_PER_OP = 6.5e-6


@dataclasses.dataclass(frozen=True)
class ValueSpec:
    """What a plan needs to know of one replica value.

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
        """The number of elements; None if it is not known until the step runs."""
        return None if self.shape is None else math.prod(self.shape)


# Stands for a value about whose elements a plan can say nothing, such as slices of a table.
UNKNOWN = ValueSpec("unknown", 1, None)


@dataclasses.dataclass(frozen=True)
class PackingOptions:
    """How a caller wants values to be packed.

    Attributes:
      num_packs: cut all values of one dtype into this many packs; 0 for no such packing, None to
        leave the number and the sizes of the packs to the algorithm, which must then be a name.
      small_bytes: with `num_packs` 0, values smaller than this many bytes are grouped; 0 for none.
      small_group: at most this many values in such a group; 0 for no grouping.
      bytes_per_pack: no pack is larger than this many bytes; 0 for no limit.

    Raises:
      ValueError: if a number is negative.
      TypeError: if a number is no int.
    """

    num_packs: int | None = 1
    small_bytes: int = 0
    small_group: int = 0
    bytes_per_pack: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "num_packs" or value is not None:
                checks.check_int(name, value, at_least=0)


@dataclasses.dataclass(frozen=True)
class ValueSlice:
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
class FusedTensor:
    """Pieces that travel as one tensor.

    Attributes:
      pieces: the pieces; one alone travels as it is.
      stacked: several pieces are whole values of one shape, stacked along a new first axis; if not,
        they are flattened and concatenated.
    """

    pieces: tuple[ValueSlice, ...]
    stacked: bool = False


@dataclasses.dataclass(frozen=True)
class PackPlan:
    """One pack: its copy tree and what travels along it.

    Attributes:
      tree: the copy tree.
      bundles: the pack's content.
    """

    tree: CopyTree
    bundles: tuple[FusedTensor, ...]


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
    def pieces_of(self) -> tuple[tuple[ValueSlice, ...], ...]:
        """`pieces_of[v]`: the pieces of value `v`, in the order of its elements."""
        pieces: list[list[ValueSlice]] = [[] for _ in range(self.num_values)]
        for pack in self.packs:
            for bundle in pack.bundles:
                for piece in bundle.pieces:
                    pieces[piece.value].append(piece)
        return tuple(tuple(sorted(own, key=lambda piece: piece.start)) for own in pieces)


# Plans are small and pure; the bound only keeps a process that draws ever new shapes from growing.
@functools.lru_cache(maxsize=512)
def plan_batch(
    values: tuple[ValueSpec, ...],
    packing: PackingOptions,
    algorithm: str | tuple[CopyTree, ...],
    topology: Topology,
) -> BatchPlan:
    """Plans the all-reduce of a batch of values.

    Args:
      values: what is known of each value.
      packing: how to pack them.
      algorithm: the name of the algorithm that gives the copy trees, see
        `tfcdo.plan.algorithms.ALGORITHMS`; or the trees themselves, to be dealt out in turn.
      topology: the devices and their links.

    Returns:
      The plan; the same object for the same arguments, as long as it is remembered.

    Raises:
      ValueError: if `algorithm` is an unknown name, no trees at all, or trees that do not span the
        topology's devices; or if it is trees and `packing` leaves the packs to the algorithm.

    Example:
      >>> from tfcdo.topology.presets import nvswitch
      >>> specs = (ValueSpec("float32", 4, (3, 2)), ValueSpec("float32", 4, (2,)))
      >>> plan = plan_batch(specs, PackingOptions(2), "one_device", nvswitch(3))
      >>> [[(p.value, p.start, p.stop) for p in pack.bundles[0].pieces] for pack in plan.packs]
      [[(0, 0, 4)], [(0, 4, 6), (1, 0, 2)]]
    """
    _check_algorithm(algorithm, packing)
    contents = [
        content
        for own in _by_dtype(values)
        for content in _contents(values, own, packing, algorithm, topology)
    ]
    # An empty value has nothing to share a pack, and of a value whose size is not known nobody can
    # say where its parts would lie in one: both travel alone, as they are.
    contents += [
        _Content((ValueSlice(index, 0, value.size, whole=True),))
        for index, value in enumerate(values)
        if not value.size
    ]
    in_turn = _trees(algorithm, topology, values, sum(not content.tree for content in contents))
    limit = _concat_limit(topology)
    packs = tuple(
        PackPlan(content.tree or next(in_turn), _bundles(content.pieces, values, limit))
        for content in contents
    )
    plan = BatchPlan(packs, len(values))
    verify(plan, values, topology.num_devices)
    return plan


def _check_algorithm(algorithm: str | tuple[CopyTree, ...], packing: PackingOptions) -> None:
    if isinstance(algorithm, str):
        algorithms.check_algorithm(algorithm)
    elif not algorithm:
        raise ValueError(f"algorithm must be a name or at least one copy tree; got {algorithm!r}")
    elif packing.num_packs is None:
        raise ValueError(
            "num_packs must be an int if algorithm is given as copy trees, which cannot tell how "
            "many packs they are for; got None"
        )


def verify(plan: BatchPlan, values: Sequence[ValueSpec], num_devices: int) -> None:
    """Checks that a plan all-reduces exactly its values over exactly its devices.

    Args:
      plan: the plan to check.
      values: the values that it is for.
      num_devices: the number of devices that it is for.

    Raises:
      ValueError: if a tree spans another number of devices, or the pieces of a value leave a gap,
        overlap or do not end where the value ends.
    """
    for index, pack in enumerate(plan.packs):
        if pack.tree.num_devices != num_devices:
            raise ValueError(
                f"pack {index}: its tree spans {pack.tree.num_devices} devices, not {num_devices}"
            )
    for index, (value, pieces) in enumerate(zip(values, plan.pieces_of, strict=True)):
        stops: list[int | None] = [0, *(piece.stop for piece in pieces)]
        if [piece.start for piece in pieces] != stops[:-1] or stops[-1] != value.size:
            raise ValueError(f"value {index} of size {value.size} is cut at {stops}")


@dataclasses.dataclass(frozen=True)
class _Content:
    """What one pack holds, and its tree if that is not just the next in turn."""

    pieces: tuple[ValueSlice, ...]
    tree: CopyTree | None = None


def _by_dtype(values: Sequence[ValueSpec]) -> list[list[int]]:
    """The values of known, positive size, by dtype in the order of their first appearance."""
    groups: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        if value.size:
            groups.setdefault(value.dtype, []).append(index)
    return list(groups.values())


def _contents(
    values: Sequence[ValueSpec],
    own: Sequence[int],
    packing: PackingOptions,
    algorithm: str | tuple[CopyTree, ...],
    topology: Topology,
) -> list[_Content]:
    """What each pack holds, for the values of one dtype.

    The values are laid end to end, the line is cut into ranges, and these are found again in the
    values.
    """
    itemsize = values[own[0]].itemsize
    total = sum(_size(values[index]) for index in own)
    order = list(own)
    trees: list[CopyTree | None]
    if packing.num_packs is None:
        assert isinstance(algorithm, str)
        schedule = algorithms.make_schedule(algorithm, topology, total * itemsize).resized(total)
        stops, trees = _ends_and_trees(schedule)
    elif packing.num_packs:
        stops = [stop for _, stop in cut(total, packing.num_packs)]
        trees = [None] * len(stops)
    else:
        order, stops = _small_first(values, own, packing)
        trees = [None] * len(stops)
    limit = max(1, packing.bytes_per_pack // itemsize) if packing.bytes_per_pack else total
    counts = [-(-(stop - start) // limit) for start, stop in zip([0, *stops], stops)]
    stops = _capped(stops, counts)
    trees = [tree for tree, count in zip(trees, counts, strict=True) for _ in range(count)]
    pieces = _pieces_between([(index, _size(values[index])) for index in order], stops)
    return [_Content(*content) for content in zip(pieces, trees, strict=True)]


def _ends_and_trees(
    schedule: Schedule,
) -> tuple[list[int], list[CopyTree | None]]:
    return [pack.stop for pack in schedule.packs], [pack.tree for pack in schedule.packs]


def _small_first(
    values: Sequence[ValueSpec], own: Sequence[int], packing: PackingOptions
) -> tuple[list[int], list[int]]:
    """The order in which values are laid end to end, and the ends of the packs in that line.

    Small values come first, in groups; each other value is a pack of its own.
    """
    # Values of one dtype, so one limit in elements stands for the limit in bytes.
    limit = packing.small_bytes / values[own[0]].itemsize if packing.small_group else 0
    small = [index for index in own if _size(values[index]) < limit]
    order = small + [index for index in own if _size(values[index]) >= limit]
    ends = list(itertools.accumulate(_size(values[index]) for index in order))
    groups = ends[: len(small)][packing.small_group - 1 :: packing.small_group] if small else []
    if small and groups[-1:] != [ends[len(small) - 1]]:
        groups.append(ends[len(small) - 1])
    return order, groups + ends[len(small) :]


def _capped(stops: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Cuts each range between two stops into a number of ranges of nearly the same size."""
    return [
        start + end
        for start, stop, count in zip([0, *stops], stops, counts)
        for _, end in cut(stop - start, count)
    ]


def _pieces_between(
    sizes: Sequence[tuple[int, int]], stops: Sequence[int]
) -> list[tuple[ValueSlice, ...]]:
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
            pieces.append(ValueSlice(value, start, end, whole=(start, end) == (0, size)))
            position = begin + end
        packs.append(tuple(pieces))
    return packs


def _trees(
    algorithm: str | tuple[CopyTree, ...],
    topology: Topology,
    values: Sequence[ValueSpec],
    num_packs: int,
) -> Iterator[CopyTree]:
    """The trees to deal out to `num_packs` packs."""
    if not isinstance(algorithm, str):
        return itertools.cycle(algorithm)
    if not num_packs:
        return iter(())  # To plan may be to search.
    num_bytes = sum((value.size or 0) * value.itemsize for value in values)
    # Tiny batches may have fewer bytes than packs (of values of unknown size): the trees stay.
    schedule = algorithms.make_schedule(algorithm, topology, max(num_bytes, num_packs), num_packs)
    return (pack.tree for pack in schedule.packs)


def _concat_limit(topology: Topology) -> float:
    """The bytes up to which a piece is concatenated with others rather than sent on its own.

    Concatenating costs a pass over the piece, sending it on its own costs an op's overhead: up to
    the bytes that are passed over in that time it pays to concatenate. Where memory is much faster
    than the links (`addition_bandwidth` is infinite) it always does.
    """
    return _SECONDS_PER_OP * topology.addition_bandwidth


def _bundles(
    content: Sequence[ValueSlice], values: Sequence[ValueSpec], limit: float
) -> tuple[FusedTensor, ...]:
    """The content of a pack, split into what travels as one tensor."""

    def large(piece: ValueSlice) -> bool:
        return piece.stop is None or piece.size * values[piece.value].itemsize > limit

    bundles = [FusedTensor((piece,)) for piece in content if large(piece)]
    small = [piece for piece in content if not large(piece)]
    if not math.isfinite(limit):
        # Each tensor that travels costs a link's latency, so there is to be one.
        return (FusedTensor(tuple(small)), *bundles) if small else tuple(bundles)
    # Each tensor that travels only costs an op. Flat values are concatenated as they are; others
    # would have to be flattened first, each by an op, but those of one shape can be stacked.
    stackable: dict[tuple[int, ...], list[ValueSlice]] = {}
    for piece in small:
        shape = values[piece.value].shape if piece.whole else None
        if shape is not None and len(shape) != 1:
            stackable.setdefault(shape, []).append(piece)
    stacks = [FusedTensor(tuple(own), stacked=True) for own in stackable.values() if len(own) > 1]
    stacked = {piece for stack in stacks for piece in stack.pieces}
    odd = tuple(piece for piece in small if piece not in stacked)
    return (*stacks, *([FusedTensor(odd)] if odd else []), *bundles)


def _size(value: ValueSpec) -> int:
    assert value.size is not None  # Values of unknown size are never laid end to end.
    return value.size
