"""Packing: which ranges of which values are in which pack, and along which copy tree it is sent.

The trees are the all-reduce algorithms', by name. Variables also get their owners here: the
devices that update them with the sum.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from tfcdo import checks, log
from tfcdo.exchange import dtypes
from tfcdo.plan import copy_tree, packed_trees, simulator, tree_program
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.plan import (
    FusedTensor,
    Pack,
    Plan,
    Slice,
    ValueSpec,
    cut,
    in_turn,
    plan_of_bytes,
    size_class,
)
from tfcdo.topology.topology import Topology, check_topology

Algorithm: TypeAlias = "str | Sequence[CopyTree] | Plan"


# The shape of the trees of each algorithm, for a number of devices and a root. Pack i is sent along
# the tree that is rooted at device i; `one_device` has one tree for all packs.
# Ring: Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
# 2009. Shuffle (pairwise exchange) and halving-doubling (at distances 1, 2, 4, ...): Thakur,
# Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
# Hierarchical copy: `tf.distribute.HierarchicalCopyAllReduce`.
CLASSICS: Mapping[str, Callable[[int, int], CopyTree]] = {
    "one_device": copy_tree.star,
    "ring": copy_tree.chain,
    "shuffle": copy_tree.star,
    "halving_doubling": copy_tree.binomial,
    "hierarchical_copy": copy_tree.two_level,
}
ALGORITHMS: tuple[str, ...] = (*CLASSICS, "packed_trees", "auto")
# With more packs than this, `auto` judges the algorithms by a part: the links are as busy with it.
_MAX_JUDGED_PACKS = 64
MOST_PACKS = 4096  # More take longer to plan and simulate than anyone waits.
# For more devices than this `auto` does not simulate, which takes time with their cube.
MAX_SIMULATED_DEVICES = 64
# The rough cost of an op, besides its work, on a CPU: 64 KiB at 10 GB/s.
_SECONDS_PER_OP = 6.5e-6


def resized(plan: Plan, num_bytes: int) -> Plan:
    """Returns the same trees with the same shares of another number of bytes."""
    packs: list[tuple[int, CopyTree, int | None]] = []
    # The pack of the new plan that stands for each old one: its own or, if that became empty, the
    # one that it waited for.
    stands_for: list[int | None] = []
    total, stop, start = max(plan.num_sent_bytes, 1), 0, 0
    for pack, tree in zip(plan.packs, plan.trees, strict=True):
        after = None if pack.after is None else stands_for[pack.after]
        stands_for.append(after)
        stop += pack.num_sent_bytes
        end = (stop * num_bytes + total // 2) // total
        if end > start:
            stands_for[-1] = len(packs)
            packs.append((end - start, tree, after))
            start = end
    return plan_of_bytes(len(plan.nodes), packs)


def make_plan(
    algorithm: Algorithm, topology: Topology, num_bytes: int, num_packs: int | None = None
) -> Plan:
    """Plans how an algorithm all-reduces some data on a machine.

    Args:
      algorithm: one of `ALGORITHMS`; "packed_trees" plans for this machine, "auto" takes the
        fastest of the others. Or copy trees over the topology's devices, which the packs get in
        turn. Or a plan, whose trees get the same parts of the data.
      topology: the machine.
      num_bytes: how many bytes each device holds; 0 gives a plan without packs.
      num_packs: cut the data into this many packs whose sizes differ by at most one byte; by
        default the number and the sizes that the algorithm needs.

    Returns:
      A plan of bytes over the topology's devices, with windows where the algorithm has them. The
      same arguments give the same plan, in any process.

    Raises:
      ValueError: if the algorithm is unknown or its trees have another number of devices,
        `num_bytes` is negative or `num_packs` not from 1 to 4096.
      TypeError: if `algorithm` is neither a name nor copy trees, `topology` not a topology, or
        `num_bytes` or `num_packs` not an int.

    Example:
      >>> from tfcdo import plan
      >>> from tfcdo.topology import preset
      >>> ring = plan.make_plan("ring", preset("dgx1"), 800)
      >>> len(ring.packs), ring.packs[3].num_bytes, ring.packs[3].tree.root
      (8, 100, 3)
    """
    check_topology(topology)
    checks.check_int("num_bytes", num_bytes, at_least=0, at_most=checks.LARGEST_INT)
    if num_packs is not None:
        checks.check_int("num_packs", num_packs, at_least=1, at_most=MOST_PACKS)
    if isinstance(algorithm, str):
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")
        return _make_plan(algorithm, topology, num_bytes, num_packs)
    trees = _checked_trees(algorithm, topology)
    if isinstance(algorithm, Plan) and num_packs is None:
        return resized(algorithm, num_bytes)
    return in_turn(cut(num_bytes, len(trees) if num_packs is None else num_packs), trees)


def _checked_trees(algorithm: Any, topology: Topology) -> Sequence[CopyTree]:
    trees = algorithm.trees if isinstance(algorithm, Plan) else algorithm
    if not isinstance(trees, Sequence) or not all(isinstance(tree, CopyTree) for tree in trees):
        raise TypeError(f"algorithm must be a name or a list of copy trees; got {trees!r}")
    if not trees:
        raise ValueError(f"algorithm must be a name or at least one copy tree; got {trees!r}")
    for tree in trees:
        if tree.num_devices != topology.num_devices:
            raise ValueError(
                f"copy trees must span the {topology.num_devices} devices of the topology; "
                f"got a tree over {tree.num_devices}"
            )
    return trees


# Behind the checks, because to the cache 1e8 and True are the same as 10**8 and 1.
@functools.lru_cache(maxsize=512)
def _make_plan(algorithm: str, topology: Topology, num_bytes: int, num_packs: int | None) -> Plan:
    if algorithm == "auto":
        algorithm = fastest_algorithm(topology, num_bytes, num_packs)
    if algorithm == "packed_trees":
        return packed_trees.packed_trees(topology, num_bytes, num_packs)
    shape, count = CLASSICS[algorithm], topology.num_devices
    roots = range(1 if algorithm == "one_device" else count)
    return make_plan([shape(count, root) for root in roots], topology, num_bytes, num_packs)


def fastest_algorithm(topology: Topology, num_bytes: int, num_packs: int | None = None) -> str:
    """Returns the name of the algorithm that `auto` stands for, and logs it once."""
    return _decide(topology, size_class(num_bytes), num_packs)


@functools.lru_cache(maxsize=512)
def _decide(topology: Topology, num_bytes: int, num_packs: int | None) -> str:
    """Decides for all sizes of a class; logs the decision, and how long it took if that is long."""
    began = time.monotonic()
    name = _fastest(topology, num_bytes, num_packs)
    if num_bytes and topology.num_devices > 1:
        packs = len(make_plan(name, topology, num_bytes, num_packs).packs)
        seconds = time.monotonic() - began
        log.info_once(
            f"auto takes {name}, {log.format_count(packs, 'pack')}, for about "
            f"{num_bytes / 1e6:.2g} MB on each of the {topology.num_devices} devices of "
            f"{topology.name}" + (f"; to plan this took {seconds:.1f} s" if seconds > 1 else "")
        )
    return name


def _fastest(topology: Topology, num_bytes: int, num_packs: int | None) -> str:
    # Where all devices add with the same cores, one device is as fast as anything.
    alone = simulator.simulate(make_plan("one_device", topology, num_bytes), topology).seconds
    if alone <= simulator.NEARLY_AS_FAST * tree_program.additions_bound(topology, num_bytes):
        return "one_device"
    if topology.num_devices > MAX_SIMULATED_DEVICES:
        # Each device sends least in a ring; halving-doubling has the fewest copies in a row.
        few = num_packs is not None and num_packs < topology.num_devices
        return "halving_doubling" if few else "ring"
    if num_packs is not None and num_packs > _MAX_JUDGED_PACKS:
        num_bytes = num_bytes * _MAX_JUDGED_PACKS // num_packs
        num_packs = _MAX_JUDGED_PACKS
    seconds: dict[str, float] = {}
    for name in (*CLASSICS, "packed_trees"):
        plan = make_plan(name, topology, num_bytes, num_packs)
        cutoff = min(seconds.values(), default=math.inf)
        seconds[name] = simulator.robust_seconds(plan, topology, cutoff=cutoff)
    return simulator.first_of_fastest(seconds)


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
    algorithm: Algorithm | None,
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
        planned = make_plan(algorithm, topology, num_bytes).packs
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
    trees: Iterator[CopyTree | None] = itertools.repeat(None)
    if algorithm is not None and count:
        trees = iter(make_plan(algorithm, topology, max(num_bytes, count), count).trees)
    # Concatenating costs a pass over a slice, sending it alone an op's overhead: up to the bytes
    # that are passed over in that time it pays to concatenate. Where memory is much faster than the
    # links (`addition_bandwidth` is infinite) it always does.
    limit = math.inf if algorithm is None else _SECONDS_PER_OP * topology.addition_bandwidth
    last: dict[int | None, int] = {}  # For each planned pack, its last pack here.
    packs = []
    for number, (dtype, slices, place) in enumerate(content):
        tensors = _fuse(slices, values, limit / itemsizes[dtype])
        if place is None:
            tree, after = next(trees), None
        else:
            tree, after = planned[place].tree, last.get(planned[place].after)
            last[place] = number
        packs.append(Pack("sum", tensors, dtype, tree, after=after))
    return packs


def _cut_line(
    line: Sequence[Slice],
    itemsize: int,
    begin: int,  # Its first byte, where all lines are laid end to end.
    options: PackingOptions,
    planned: Sequence[Pack],  # For the bytes of all lines.
) -> Iterator[tuple[tuple[Slice, ...], int | None]]:
    """Yields the slices of each pack of a line, and the index of its planned pack, if any."""
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
    """Deals variables to devices: the largest first, each to the device that has least so far."""
    # The largest share is at most 4/3 of the best one (Graham, 1969), and the same on every host.
    load, owner = [0] * num_devices, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner[index] = load.index(min(load))
        load[owner[index]] += sizes[index]
    return tuple(owner)
