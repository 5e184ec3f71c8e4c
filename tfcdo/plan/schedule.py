"""Schedules: which range of the data travels along which copy tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tfcdo import checks
from tfcdo.plan.copy_tree import CopyTree


@dataclasses.dataclass(frozen=True)
class Pack:
    """A contiguous range of the flattened data and the copy tree that it is reduced along.

    Attributes:
      start: the first unit of the range (bytes where a schedule is planned, elements where it is
        executed).
      stop: one past the last unit.
      tree: the copy tree.
    """

    start: int
    stop: int
    tree: CopyTree

    @property
    def size(self) -> int:
        """The number of units in the pack."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A whole all-reduce: packs that tile the data, each with its copy tree.

    Attributes:
      num_devices: how many devices take part.
      size: the number of units that each device holds.
      packs: the packs, in the order of the data.
      order: the copies `(pack, source, target)` of all packs in the order in which links serve
        them: of two copies that wait for one link, the earlier in `order` goes first. None for
        first come, first served.

    Example:
      >>> from tfcdo.plan.copy_tree import star
      >>> ranges = cut(10, 2)
      >>> schedule = assign(10, ranges, [star(3, 0), star(3, 1)])
      >>> verify(schedule)
      >>> [(pack.start, pack.stop, pack.tree.root) for pack in schedule.packs]
      [(0, 5, 0), (5, 10, 1)]
    """

    num_devices: int
    size: int
    packs: tuple[Pack, ...]
    order: tuple[tuple[int, int, int], ...] | None = None

    def resized(self, size: int) -> Schedule:
        """The same trees with the same shares of another amount of data.

        Args:
          size: the number of units of the new schedule.

        Returns:
          A schedule whose packs tile `size` units; packs that become empty are left out.
        """
        stops = [(pack.stop * size + self.size // 2) // max(self.size, 1) for pack in self.packs]
        starts = [0, *stops[:-1]]
        kept = [
            i for i, (start, stop) in enumerate(zip(starts, stops, strict=True)) if stop > start
        ]
        packs = tuple(Pack(starts[i], stops[i], self.packs[i].tree) for i in kept)
        if self.order is None:
            return Schedule(self.num_devices, size, packs)
        new_index = {old: new for new, old in enumerate(kept)}
        order = tuple(
            (new_index[pack], source, target)
            for pack, source, target in self.order
            if pack in new_index
        )
        return Schedule(self.num_devices, size, packs, order)


def verify(schedule: Schedule) -> None:
    """Checks that a schedule all-reduces exactly its data over exactly its devices.

    A `CopyTree` cannot be built unless it is a spanning tree, so it remains to check that every
    tree spans this schedule's devices, that the packs tile the data, and that the order of the
    copies, if the schedule gives one, can be kept.

    Args:
      schedule: the schedule to check.

    Raises:
      ValueError: if a tree spans another number of devices, or the packs leave a gap, overlap, are
        empty, or do not end where the data ends, or the order does not hold each copy once, after
        all copies whose data it needs.
    """
    position = 0
    for index, pack in enumerate(schedule.packs):
        if pack.tree.num_devices != schedule.num_devices:
            raise ValueError(
                f"pack {index}: its tree spans {pack.tree.num_devices} devices, "
                f"the schedule has {schedule.num_devices}"
            )
        if pack.start != position or pack.stop <= pack.start:
            raise ValueError(
                f"pack {index}: the range [{pack.start}, {pack.stop}) must begin at {position} "
                "and must not be empty"
            )
        position = pack.stop
    if position != schedule.size:
        raise ValueError(f"the packs end at {position}, the data at {schedule.size}")
    if schedule.order is not None:
        _verify_order(schedule.packs, schedule.order)


def _verify_order(packs: Sequence[Pack], order: Sequence[tuple[int, int, int]]) -> None:
    wanted = {
        (index, source, target)
        for index, pack in enumerate(packs)
        for child, parent in pack.tree.edges
        for source, target in ((child, parent), (parent, child))
    }
    if len(order) != len(wanted) or set(order) != wanted:
        raise ValueError(
            f"order must hold each of the {len(wanted)} copies once; it has {len(order)} entries, "
            f"{len(wanted & set(order))} of the right ones"
        )
    done = set()
    for pack, source, target in order:
        missing = [
            copy
            for copy in needed_copies(packs[pack].tree, source, target)
            if (pack, *copy) not in done
        ]
        if missing:
            raise ValueError(
                f"order: pack {pack} goes from {source} to {target} before {missing[0]}, "
                "whose data it needs"
            )
        done.add((pack, source, target))


def needed_copies(tree: CopyTree, source: int, target: int) -> tuple[tuple[int, int], ...]:
    """The copies that must have arrived before one copy of the same pack can begin.

    Args:
      tree: the pack's copy tree.
      source: the device that sends.
      target: the device that receives, `source`'s neighbour in the tree.

    Returns:
      The `(source, target)` of the copies to `source` that make up what it sends: those of all its
      children on the way up and at the root, that of its parent on the way down.

    Example:
      >>> from tfcdo.plan.copy_tree import chain
      >>> tree = chain(3)
      >>> needed_copies(tree, 1, 0), needed_copies(tree, 0, 1), needed_copies(tree, 1, 2)
      (((2, 1),), ((1, 0),), ((0, 1),))
    """
    parent = tree.parents[source]
    if parent is None or parent == target:
        return tuple((child, source) for child in tree.children[source])
    return ((parent, source),)


def cut(size: int, num_packs: int) -> tuple[tuple[int, int], ...]:
    """Cuts `size` units into `num_packs` ranges whose sizes differ by at most one.

    Args:
      size: how many units to cut.
      num_packs: how many ranges to make, at least 1. With fewer units than packs there are only
        `size` ranges, because an empty pack would move nothing.

    Returns:
      The ranges `(start, stop)`, in order.

    Raises:
      ValueError: if `size` is negative or `num_packs` is below 1.
      TypeError: if one of them is no int.

    Example:
      >>> cut(7, 3)
      ((0, 2), (2, 4), (4, 7))
    """
    checks.check_int("size", size, at_least=0)
    checks.check_int("num_packs", num_packs, at_least=1)
    count = min(num_packs, size)
    stops = [size * (index + 1) // count for index in range(count)]
    return tuple(zip([0, *stops], stops, strict=False))


def assign(size: int, ranges: Iterable[tuple[int, int]], trees: Sequence[CopyTree]) -> Schedule:
    """Gives the ranges the trees in turn, so that the roots spread over the devices.

    Args:
      size: how many units each device holds.
      ranges: the `(start, stop)` of each pack; they tile the data.
      trees: the trees to hand out; range `i` gets tree `i` modulo their number.

    Returns:
      The schedule.

    Raises:
      ValueError: if there are no trees.
    """
    if not trees:
        raise ValueError(f"trees must hold at least one copy tree; got {trees!r}")
    packs = (
        Pack(start, stop, trees[index % len(trees)]) for index, (start, stop) in enumerate(ranges)
    )
    return Schedule(trees[0].num_devices, size, tuple(packs))
