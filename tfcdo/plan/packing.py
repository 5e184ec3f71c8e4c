"""Packing: which ranges of which values form which pack, and what of it travels as one tensor."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from tfcdo import checks
from tfcdo.plan import algorithms
from tfcdo.plan.batch_plan import BatchPlan
from tfcdo.plan.batch_plan import FusedTensor
from tfcdo.plan.batch_plan import PackPlan
from tfcdo.plan.batch_plan import ValueSlice
from tfcdo.plan.batch_plan import ValueSpec
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.schedule import cut
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
      one_tensor_per_pack: whether the slices of a pack always travel as one tensor, however large
        they are; only values whose size is not known travel alone.

    Raises:
      ValueError: if a number is negative.
      TypeError: if a number is not an int.
    """

    num_packs: int | None = 1
    agg_small_grads_max_bytes: int = 0
    agg_small_grads_max_group: int = 0
    bytes_per_pack: int = 0
    one_tensor_per_pack: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "one_tensor_per_pack" and (name != "num_packs" or value is not None):
                checks.check_int(name, value, at_least=0)


@dataclasses.dataclass(frozen=True)
class _Line:
    """The values of one dtype, laid end to end.

    Attributes:
      values: the index in the batch and the number of elements, at least one, of each value.
      itemsize: bytes per element.
    """

    values: tuple[tuple[int, int], ...]
    itemsize: int

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Returns where each value begins, in elements, and where the line ends."""
        return tuple(itertools.accumulate((size for _, size in self.values), initial=0))

    @property
    def size(self) -> int:
        """Returns the number of elements of all values."""
        return self.starts[-1]

    def slices(self, start: int, stop: int) -> tuple[ValueSlice, ...]:
        """Returns what the elements from `start` to `stop` are of the values."""
        slices = []
        for position in range(bisect.bisect_right(self.starts, start) - 1, len(self.values)):
            (value, size), begin = self.values[position], self.starts[position]
            if begin >= stop:
                break
            first, last = max(start - begin, 0), min(stop - begin, size)
            slices.append(ValueSlice(value, first, last, whole=last - first == size))
        return tuple(slices)


@dataclasses.dataclass(frozen=True)
class _Range:
    """The elements of a line that form a pack.

    Attributes:
      start: the first element.
      stop: one past the last element.
      tree: the copy tree; None for the next one of those that are dealt out in turn.
    """

    start: int
    stop: int
    tree: CopyTree | None = None

    def cut(self, limit: int) -> list[_Range]:
        """Returns ranges of nearly equal sizes, none of more than `limit` elements."""
        size = self.stop - self.start
        ends = cut(size, -(-size // limit))
        return [_Range(self.start + start, self.start + stop, self.tree) for start, stop in ends]


# Plans are small and pure; the bound only keeps a process that draws ever new shapes from growing.
@functools.lru_cache(maxsize=512)
def plan_batch(
    values: tuple[ValueSpec, ...],
    packing: PackingOptions,
    algorithm: algorithms.Algorithm,
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
        topology's devices.

    Example:
      >>> from tfcdo.topology.presets import nvswitch
      >>> specs = (ValueSpec("float32", 4, (3, 2)), ValueSpec("float32", 4, (2,)))
      >>> plan = plan_batch(specs, PackingOptions(2), "one_device", nvswitch(3))
      >>> [[(s.value, s.start, s.stop) for s in pack.fused_tensors[0].slices]
      ...  for pack in plan.packs]
      [[(0, 0, 4)], [(0, 4, 6), (1, 0, 2)]]
    """
    scheduler = algorithms.scheduler(algorithm, topology)
    packs = [
        (line.slices(part.start, part.stop), part.tree)
        for line, ranges in _ranges(_lines(values), packing, scheduler)
        for part in ranges
    ]
    # An empty value has nothing to share a pack, and of a value whose size is not known nobody can
    # say where its parts would lie in one: both travel alone, as they are.
    packs += [
        ((ValueSlice(index, 0, value.size, whole=True),), None)
        for index, value in enumerate(values)
        if not value.size
    ]
    in_turn = _trees_in_turn(scheduler, values, sum(tree is None for _, tree in packs))
    limit = math.inf if packing.one_tensor_per_pack else _concat_limit(topology)
    plans = tuple(
        PackPlan(tree or next(in_turn), _fuse(slices, values, limit)) for slices, tree in packs
    )
    return BatchPlan(plans, tuple(value.size for value in values))


def _lines(values: Sequence[ValueSpec]) -> list[_Line]:
    """Lays the values of known, positive size end to end, each dtype in a line of its own."""
    by_dtype: dict[str, list[tuple[int, int]]] = {}
    for index, value in enumerate(values):
        if value.size:
            by_dtype.setdefault(value.dtype, []).append((index, value.size))
    return [_Line(tuple(own), values[own[0][0]].itemsize) for own in by_dtype.values()]


def _ranges(
    lines: Sequence[_Line], packing: PackingOptions, scheduler: algorithms.Scheduler
) -> Iterator[tuple[_Line, list[_Range]]]:
    """Cuts lines into packs; yields each, perhaps in another order, with its ranges."""
    if packing.num_packs is None:
        found = _as_scheduled(lines, scheduler)
    elif packing.num_packs:
        cuts = [cut(line.size, packing.num_packs) for line in lines]
        found = [[_Range(start, stop) for start, stop in ranges] for ranges in cuts]
    else:
        grouped = [_small_values_grouped(line, packing) for line in lines]
        lines, found = [line for line, _ in grouped], [ranges for _, ranges in grouped]
    for line, ranges in zip(lines, found, strict=True):
        if packing.bytes_per_pack:
            limit = max(1, packing.bytes_per_pack // line.itemsize)
            ranges = [part for whole in ranges for part in whole.cut(limit)]
        yield line, ranges


def _as_scheduled(lines: Sequence[_Line], scheduler: algorithms.Scheduler) -> list[list[_Range]]:
    """Cuts lines as the algorithm does, whose schedule also says which tree each pack takes.

    The lines travel at the same time, so there is one schedule for the bytes of all of them, laid
    end to end; where a line ends within a pack, the pack is cut in two.
    """
    ends = list(itertools.accumulate(line.size * line.itemsize for line in lines))
    if not ends:
        return []
    packs = scheduler(ends[-1], None).packs
    found = []
    for line, begin in zip(lines, [0, *ends], strict=False):

        def element(byte: int, line: _Line = line, begin: int = begin) -> int:
            """Returns the element of the line that begins nearest to a byte of all lines."""
            return min(max((byte - begin + line.itemsize // 2) // line.itemsize, 0), line.size)

        cuts = ((element(pack.start), element(pack.stop), pack.tree) for pack in packs)
        found.append([_Range(start, stop, tree) for start, stop, tree in cuts if stop > start])
    return found


def _small_values_grouped(line: _Line, packing: PackingOptions) -> tuple[_Line, list[_Range]]:
    """Puts small values first, in groups; each other value is a pack of its own."""
    group_size = packing.agg_small_grads_max_group
    limit = packing.agg_small_grads_max_bytes if group_size else 0
    small = [value for value in line.values if value[1] * line.itemsize < limit]
    large = [value for value in line.values if value[1] * line.itemsize >= limit]
    groups = [small[first : first + group_size] for first in range(0, len(small), group_size or 1)]
    counts = [len(group) for group in groups] + [1] * len(large)
    line = _Line((*small, *large), line.itemsize)
    ends = itertools.accumulate(counts, initial=0)
    return line, [
        _Range(line.starts[first], line.starts[last]) for first, last in itertools.pairwise(ends)
    ]


def _trees_in_turn(
    scheduler: algorithms.Scheduler, values: Sequence[ValueSpec], num_packs: int
) -> Iterator[CopyTree]:
    """Returns the trees to deal out to `num_packs` packs."""
    if not num_packs:
        return iter(())  # To make a schedule may be to search.
    num_bytes = sum((value.size or 0) * value.itemsize for value in values)
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
    slices: Sequence[ValueSlice], values: Sequence[ValueSpec], limit: float
) -> tuple[FusedTensor, ...]:
    """Divides the content of a pack into tensors."""

    def is_large(part: ValueSlice) -> bool:
        return part.stop is None or part.size * values[part.value].itemsize > limit

    alone = [FusedTensor((part,)) for part in slices if is_large(part)]
    small = [part for part in slices if not is_large(part)]
    # Each tensor that travels costs a link's latency, so there is to be one. Where there are no
    # links it only costs an op: then flat values are concatenated as they are; others would have to
    # be flattened first, each by an op, but those of one shape can be stacked.
    stacks = _stacks(small, values) if math.isfinite(limit) else []
    stacked = {part for stack in stacks for part in stack.slices}
    rest = tuple(part for part in small if part not in stacked)
    return (*stacks, *([FusedTensor(rest)] if rest else []), *alone)


def _stacks(slices: Sequence[ValueSlice], values: Sequence[ValueSpec]) -> list[FusedTensor]:
    """Stacks the whole values that are not flat and have a shape in common with others."""
    by_shape: dict[tuple[int, ...], list[ValueSlice]] = {}
    for part in slices:
        shape = values[part.value].shape if part.whole else None
        if shape is not None and len(shape) != 1:
            by_shape.setdefault(shape, []).append(part)
    return [FusedTensor(tuple(own), stacked=True) for own in by_shape.values() if len(own) > 1]
