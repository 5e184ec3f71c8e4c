"""Packing: which ranges of which values form which pack, and which are sent as one tensor.

Here variables also get their owners: the devices that update them with the sum.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tfcdo.exchange import dtypes
from tfcdo.plan import algorithms
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.plan import FusedTensor, Pack, Slice, ValueSpec, cut
from tfcdo.topology.topology import Topology

# The rough cost of an op, besides its work, on a CPU: 64 KiB at 10 GB/s.
_SECONDS_PER_OP = 6.5e-6


@dataclasses.dataclass(frozen=True)
class PackingOptions:
    """The caller's wishes about how values are packed, checked."""

    # Cut all values of one dtype into this many packs; 0 for no such packing, None to leave the
    # number and the sizes of the packs of all dtypes together to the algorithm.
    num_packs: int | None = 1
    # With `num_packs` 0, values of fewer bytes are sent in groups of at most this many; 0 for none.
    agg_small_grads_max_bytes: int = 0
    agg_small_grads_max_group: int = 0
    bytes_per_pack: int = 0  # No pack is larger than this many bytes; 0 for no limit.
    last_first: bool = False  # Whether the last values are packed first, as a backward pass does.
    whole_values: bool = False  # Whether no value is cut, however large it is.


def pack(
    values: Mapping[int, ValueSpec],
    options: PackingOptions,
    algorithm: algorithms.Algorithm | None,
    topology: Topology,
    wire: str | None = None,
) -> list[Pack]:
    """Packs values, without codecs and root steps; returns the packs in the order of sending.

    `values` have their index in the batch and the dtype that they are packed in, which the values
    of a pack share; `wire` is the dtype that they are sent in, None for their own. Without an
    `algorithm`, packs have no copy tree and are sent as one tensor each, however large.
    """
    indices = sorted(values, reverse=options.last_first)
    whole = [(values[index].dtype, Slice(index, 0, values[index].size)) for index in indices]
    # The values of each dtype, laid end to end.
    lines: dict[str, list[Slice]] = {}
    for dtype, part in whole:
        if part.size:
            lines.setdefault(dtype, []).append(part)
    itemsizes = {dtype: dtypes.itemsize(wire or dtype) for dtype, _ in whole}
    sizes = [itemsizes[dtype] * sum(part.size for part in line) for dtype, line in lines.items()]
    *begins, num_bytes = itertools.accumulate(sizes, initial=0)
    planned: Sequence[Pack] = ()
    if algorithm is not None and options.num_packs is None and lines:
        planned = algorithms.make_plan(algorithm, topology, num_bytes).packs
    # The slices of each pack; and the index of its planned pack, None if it gets the next tree in
    # turn.
    content = [
        (dtype, slices, place)
        for (dtype, line), begin in zip(lines.items(), begins, strict=True)
        for slices, place in _cut_line(line, itemsizes[dtype], begin, options, planned)
    ]
    # An empty value has nothing to share a pack, and the parts of a value of unknown size have no
    # place in one: both are sent alone, as they are.
    content += [(dtype, (part,), None) for dtype, part in whole if not part.size]
    count = sum(place is None for _, _, place in content)
    # To plan may be to search. Tiny batches may have fewer bytes than packs (of values
    # of unknown size): the trees stay.
    in_turn: Iterator[CopyTree | None] = itertools.repeat(None)
    if algorithm is not None and count:
        made = algorithms.make_plan(algorithm, topology, max(num_bytes, count), count)
        in_turn = iter(made.trees)
    # Concatenating costs a pass over a slice, sending it alone an op's overhead: up to the bytes
    # that are passed over in that time it pays to concatenate. Where memory is much faster than the
    # links (`addition_bandwidth` is infinite) it always does.
    limit = math.inf if algorithm is None else _SECONDS_PER_OP * topology.addition_bandwidth
    last: dict[int | None, int] = {}  # For each planned pack, its last pack here.
    packs = []
    for number, (dtype, slices, place) in enumerate(content):
        tensors = _fuse(slices, values, limit / itemsizes[dtype])
        if place is None:
            tree, after = next(in_turn), None
        else:
            tree, after = planned[place].tree, last.get(planned[place].after)
            last[place] = number
        packs.append(Pack("sum", tensors, dtype, tree, after=after))
    return packs


def _cut_line(
    line: Sequence[Slice],
    itemsize: int,
    begin: int,
    options: PackingOptions,
    planned: Sequence[Pack],
) -> Iterator[tuple[tuple[Slice, ...], int | None]]:
    """Yields the slices of each pack of a line, and the index of its planned pack, if any.

    Packs are planned for the bytes of all lines, laid end to end; this line's first one is `begin`.
    """
    size = sum(part.size for part in line)
    places: Iterable[int | None] = itertools.repeat(None)
    if planned:
        # The elements that begin nearest to a byte; where a line ends, a pack is cut in two.
        stops = itertools.accumulate(each.num_bytes for each in planned)
        ends = [(stop - begin + itemsize // 2) // itemsize for stop in stops]
        ends = [min(max(end, 0), size) for end in ends]
        places = range(len(ends))
    elif options.num_packs:
        ends = list(itertools.accumulate(cut(size, options.num_packs)))
    else:
        line, sizes = _small_values_grouped(line, itemsize, options)
        ends = list(itertools.accumulate(sizes))
    most = max(1, options.bytes_per_pack // itemsize) if options.bytes_per_pack else size
    if options.whole_values and options.num_packs:
        ends = _ends_of_whole_values(line, min(most, -(-size // options.num_packs)))
    most = size if options.whole_values else most
    rest = list(line[::-1])
    for start, stop, place in zip([0, *ends], ends, places, strict=False):
        for part in cut(stop - start, -(-(stop - start) // most)):
            yield tuple(_take(rest, part)), place


def _ends_of_whole_values(line: Sequence[Slice], most: int) -> list[int]:
    """Returns where packs end: each has the values that fit into `most` elements, at least one."""
    ends, begin, end = [], 0, 0
    for part in line:
        if end > begin and end + part.size - begin > most:
            ends.append(end)
            begin = end
        end += part.size
    return [*ends, end]


def _take(rest: list[Slice], size: int) -> Iterator[Slice]:
    """Takes `size` elements from the slices at the end of a list."""
    while size:
        part = rest.pop()
        taken = min(part.size, size)
        if taken < part.size:
            rest.append(Slice(part.value, part.start + taken, part.stop))
        yield Slice(part.value, part.start, part.start + taken)
        size -= taken


def _small_values_grouped(
    line: Sequence[Slice], itemsize: int, options: PackingOptions
) -> tuple[list[Slice], list[int]]:
    """Puts small values first; returns the sizes of groups of these, and of each other value."""
    group = options.agg_small_grads_max_group
    limit = options.agg_small_grads_max_bytes if group else 0
    small = [part for part in line if part.size * itemsize < limit]
    large = [part for part in line if part.size * itemsize >= limit]
    firsts = range(0, len(small), group or 1)
    groups = [sum(part.size for part in small[first : first + group]) for first in firsts]
    return small + large, groups + [part.size for part in large]


def _fuse(
    slices: Sequence[Slice], values: Mapping[int, ValueSpec], limit: float
) -> tuple[FusedTensor, ...]:
    """Divides the content of a pack into tensors; slices of more elements are sent alone."""
    small = [part for part in slices if part.stop is not None and part.size <= limit]
    alone = [part for part in slices if part.stop is None or part.size > limit]
    # Each tensor that is sent costs a link's latency, so one is best. Without links it only costs
    # an op: then flat values are concatenated as they are. Others would need an op each to be
    # flattened first, but whole values of one shape can be stacked.
    by_shape: dict[tuple[int | None, ...], list[Slice]] = {}
    for part in small if math.isfinite(limit) else ():
        spec = values[part.value]
        if spec.shape is not None and len(spec.shape) != 1 and part.size == spec.size:
            by_shape.setdefault(spec.shape, []).append(part)
    stacks = [FusedTensor(tuple(own), stacked=True) for own in by_shape.values() if len(own) > 1]
    stacked = {part for stack in stacks for part in stack.slices}
    rest = tuple(part for part in small if part not in stacked)
    others = [rest] if rest else []
    return (*stacks, *map(FusedTensor, others), *(FusedTensor((part,)) for part in alone))


def deal_owners(sizes: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Deals variables to devices: the largest first, each to the device that has least so far.

    The largest share is at most 4/3 of the best one (Graham, 1969), and the same on every host.
    """
    load, owner = [0] * num_devices, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner[index] = load.index(min(load))
        load[owner[index]] += sizes[index]
    return tuple(owner)


def owned_sizes(sizes: Sequence[int], owner: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Returns the sum of the sizes that each device owns."""
    return tuple(
        sum(size for size, at in zip(sizes, owner, strict=True) if at == device)
        for device in range(num_devices)
    )
