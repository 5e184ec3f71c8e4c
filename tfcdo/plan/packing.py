"""Packing: which ranges of which values form which pack, and what of it is sent as one tensor."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from tfcdo import checks
from tfcdo.plan import algorithms
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.plan import FusedTensor, PlannedPack, Slice
from tfcdo.plan.schedule import Schedule, cut
from tfcdo.topology.topology import Topology

# What an op costs on top of its work, roughly, on a CPU: 64 KiB at 10 GB/s.
_SECONDS_PER_OP = 6.5e-6


@dataclasses.dataclass(frozen=True)
class PackingOptions:
    """The caller's wishes about how values are packed.

    Attributes:
      num_packs: cut all values of one dtype into this many packs; 0 for no such packing, None to
        leave the number and the sizes of the packs of all dtypes together to the algorithm.
      agg_small_grads_max_bytes: with `num_packs` 0, values smaller than this many bytes are
        grouped; 0 for none.
      agg_small_grads_max_group: at most this many values in such a group; 0 for no grouping.
      bytes_per_pack: no pack is larger than this many bytes; 0 for no limit.
      one_tensor_per_pack: whether the slices of a pack are always sent as one tensor, however large
        they are; only values of unknown size are sent alone.
      last_first: whether the last values are packed first, as a backward pass makes them.

    Raises:
      ValueError: if a number is negative.
      TypeError: if a number is not an int.
    """

    num_packs: int | None = 1
    agg_small_grads_max_bytes: int = 0
    agg_small_grads_max_group: int = 0
    bytes_per_pack: int = 0
    one_tensor_per_pack: bool = False
    last_first: bool = False

    def __post_init__(self) -> None:
        if self.num_packs is not None:
            checks.check_int("num_packs", self.num_packs, at_least=0)
        for name in ("agg_small_grads_max_bytes", "agg_small_grads_max_group", "bytes_per_pack"):
            checks.check_int(name, getattr(self, name), at_least=0)


@dataclasses.dataclass(frozen=True)
class Item:
    """A value to pack.

    Attributes:
      value: its index in the batch.
      dtype: the dtype that it is packed in; values of different dtypes never share a pack.
      itemsize: bytes per element, as it is sent.
      shape: its dimensions; None if they are not all known.
    """

    value: int
    dtype: str
    itemsize: int
    shape: tuple[int, ...] | None

    @functools.cached_property
    def size(self) -> int | None:
        """Returns the number of elements; None if it is not known."""
        return None if self.shape is None else math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class _Line:
    """The values of one dtype, laid end to end."""

    items: tuple[Item, ...]

    @property
    def itemsize(self) -> int:
        """Returns the bytes per element."""
        return self.items[0].itemsize

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Returns the first element of each value, and the end of the line."""
        return tuple(itertools.accumulate((item.size or 0 for item in self.items), initial=0))

    @property
    def size(self) -> int:
        """Returns the number of elements of all values."""
        return self.starts[-1]

    def slices(self, start: int, stop: int) -> tuple[Slice, ...]:
        """Returns the slices of the values between two elements of the line."""
        slices = []
        for position in range(bisect.bisect_right(self.starts, start) - 1, len(self.items)):
            item, begin = self.items[position], self.starts[position]
            if begin >= stop:
                break
            slices.append(
                Slice(item.value, max(start - begin, 0), min(stop - begin, item.size or 0))
            )
        return tuple(slices)


@dataclasses.dataclass(frozen=True)
class _Range:
    """The elements of a line that form a pack; without a tree, it gets the next one in turn."""

    start: int
    stop: int
    scheduled: int | None = None  # The index of its pack in the schedule, which has its tree.

    def cut(self, limit: int) -> list[_Range]:
        """Returns ranges of nearly equal sizes, none of more than `limit` elements."""
        size = self.stop - self.start
        ends = cut(size, -(-size // limit))
        return [_Range(self.start + a, self.start + b, self.scheduled) for a, b in ends]


def pack(
    items: Sequence[Item],
    options: PackingOptions,
    algorithm: algorithms.Algorithm,
    topology: Topology,
) -> list[PlannedPack]:
    """Packs values, without codecs and root steps.

    Args:
      items: the values.
      options: how to pack them.
      algorithm: the name of the algorithm that gives the copy trees, see
        `tfcdo.plan.algorithms.ALGORITHMS`; the trees themselves, to be dealt out in turn; or a
        schedule.
      topology: the devices and their links.

    Returns:
      The packs, in the order in which they are sent.

    Raises:
      ValueError: if `algorithm` is an unknown name, no trees at all, or trees that do not span the
        topology's devices.

    Example:
      >>> from tfcdo.topology.presets import nvswitch
      >>> items = [Item(0, "float32", 4, (3, 2)), Item(1, "float32", 4, (2,))]
      >>> packs = pack(items, PackingOptions(2), "one_device", nvswitch(3))
      >>> [[(s.value, s.start, s.stop) for s in packed.tensors[0].slices] for packed in packs]
      [[(0, 0, 4)], [(0, 4, 6), (1, 0, 2)]]
    """
    if options.last_first:
        items = items[::-1]
    scheduler = algorithms.scheduler(algorithm, topology)
    lines = _lines(items)
    schedule = None
    if options.num_packs is None and lines:
        schedule = scheduler(sum(line.size * line.itemsize for line in lines), None)
    content = [
        (line.items[0].dtype, line.slices(part.start, part.stop), part.scheduled)
        for line, ranges in _ranges(lines, options, schedule)
        for part in ranges
    ]
    # An empty value has nothing to share a pack, and the parts of a value of unknown size have no
    # place in one: both are sent alone, as they are.
    content += [
        (item.dtype, (Slice(item.value, 0, item.size),), None) for item in items if not item.size
    ]
    in_turn = _trees_in_turn(scheduler, items, sum(place is None for _, _, place in content))
    limit = math.inf if options.one_tensor_per_pack else _concat_limit(topology)
    by_value = {item.value: item for item in items}
    last: dict[int, int] = {}  # For each pack of the schedule, its last pack here.
    packs = []
    for number, (dtype, slices, place) in enumerate(content):
        tensors = _fuse(slices, by_value, limit)
        if schedule is None or place is None:
            packs.append(PlannedPack("sum", tensors, dtype, next(in_turn)))
        else:
            planned = schedule.packs[place]
            after: int | None = getattr(planned, "after", None)
            window = None if after is None else last.get(after)
            packs.append(PlannedPack("sum", tensors, dtype, planned.tree, after=window))
            last[place] = number
    return packs


def _lines(items: Sequence[Item]) -> list[_Line]:
    """Lays the values of known, positive size end to end, each dtype in a line of its own."""
    by_dtype: dict[str, list[Item]] = {}
    for item in items:
        if item.size:
            by_dtype.setdefault(item.dtype, []).append(item)
    return [_Line(tuple(members)) for members in by_dtype.values()]


def _ranges(
    lines: Sequence[_Line], options: PackingOptions, schedule: Schedule | None
) -> Iterator[tuple[_Line, list[_Range]]]:
    """Cuts lines into packs; yields each, perhaps in another order, with its ranges."""
    if schedule is not None:
        found = _as_scheduled(lines, schedule)
    elif options.num_packs:
        cuts = [cut(line.size, options.num_packs) for line in lines]
        found = [[_Range(start, stop) for start, stop in ranges] for ranges in cuts]
    else:
        grouped = [_small_values_grouped(line, options) for line in lines]
        lines, found = [line for line, _ in grouped], [ranges for _, ranges in grouped]
    for line, ranges in zip(lines, found, strict=True):
        if options.bytes_per_pack:
            limit = max(1, options.bytes_per_pack // line.itemsize)
            ranges = [part for whole in ranges for part in whole.cut(limit)]
        yield line, ranges


def _as_scheduled(lines: Sequence[_Line], schedule: Schedule) -> list[list[_Range]]:
    """Cuts lines as a schedule does for the bytes of all of them, laid end to end.

    Where a line ends within a pack of the schedule, the pack is cut in two.
    """
    ends = list(itertools.accumulate(line.size * line.itemsize for line in lines))
    found = []
    for line, begin in zip(lines, [0, *ends], strict=False):

        def element(byte: int, line: _Line = line, begin: int = begin) -> int:
            """Returns the element of the line that begins nearest to a byte of all lines."""
            return min(max((byte - begin + line.itemsize // 2) // line.itemsize, 0), line.size)

        ranges = [
            _Range(element(planned.start), element(planned.stop), place)
            for place, planned in enumerate(schedule.packs)
        ]
        found.append([part for part in ranges if part.stop > part.start])
    return found


def _small_values_grouped(line: _Line, options: PackingOptions) -> tuple[_Line, list[_Range]]:
    """Puts small values first, in groups; each other value is a pack of its own."""
    group_size = options.agg_small_grads_max_group
    limit = options.agg_small_grads_max_bytes if group_size else 0
    small = [item for item in line.items if (item.size or 0) * item.itemsize < limit]
    large = [item for item in line.items if (item.size or 0) * item.itemsize >= limit]
    groups = [small[first : first + group_size] for first in range(0, len(small), group_size or 1)]
    counts = [len(group) for group in groups] + [1] * len(large)
    line = _Line((*small, *large))
    ends = itertools.accumulate(counts, initial=0)
    return line, [
        _Range(line.starts[first], line.starts[last]) for first, last in itertools.pairwise(ends)
    ]


def _trees_in_turn(
    scheduler: algorithms.Scheduler, items: Sequence[Item], num_packs: int
) -> Iterator[CopyTree]:
    """Returns the trees to deal out to `num_packs` packs."""
    if not num_packs:
        return iter(())  # To make a schedule may be to search.
    num_bytes = sum((item.size or 0) * item.itemsize for item in items)
    # Tiny batches may have fewer bytes than packs (of values of unknown size): the trees stay.
    return (pack.tree for pack in scheduler(max(num_bytes, num_packs), num_packs).packs)


def _concat_limit(topology: Topology) -> float:
    """Returns the bytes up to which a slice is concatenated with others rather than sent alone.

    Concatenating costs a pass over the slice, sending it alone costs an op's overhead: up to the
    bytes that are passed over in that time it pays to concatenate. Where memory is much faster than
    the links (`addition_bandwidth` is infinite) it always does.
    """
    return _SECONDS_PER_OP * topology.addition_bandwidth


def _fuse(
    slices: Sequence[Slice], items: Mapping[int, Item], limit: float
) -> tuple[FusedTensor, ...]:
    """Divides the content of a pack into tensors."""

    def is_large(part: Slice) -> bool:
        return part.stop is None or part.size * items[part.value].itemsize > limit

    alone = [FusedTensor((part,)) for part in slices if is_large(part)]
    small = [part for part in slices if not is_large(part)]
    # Each tensor that is sent costs a link's latency, so there is to be one. Where there are no
    # links it only costs an op: then flat values are concatenated as they are; others would have to
    # be flattened first, each by an op, but values of one shape can be stacked.
    stacks = _stacks(small, items) if math.isfinite(limit) else []
    stacked = {part for stack in stacks for part in stack.slices}
    rest = tuple(part for part in small if part not in stacked)
    return (*stacks, *([FusedTensor(rest)] if rest else []), *alone)


def _stacks(slices: Sequence[Slice], items: Mapping[int, Item]) -> list[FusedTensor]:
    """Stacks the whole values that are not flat and have a shape in common with others."""
    by_shape: dict[tuple[int, ...], list[Slice]] = {}
    for part in slices:
        item = items[part.value]
        if item.shape is not None and len(item.shape) != 1 and part.size == item.size:
            by_shape.setdefault(item.shape, []).append(part)
    return [FusedTensor(tuple(own), stacked=True) for own in by_shape.values() if len(own) > 1]
