"""Schedules: which range of the data travels along which copy tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tfcdo.plan import tree as tree_lib


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
    tree: tree_lib.CopyTree

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

    Example:
      >>> ranges = cut(10, 2)
      >>> schedule = assign(10, ranges, [tree_lib.star(3, 0), tree_lib.star(3, 1)])
      >>> verify(schedule)
      >>> [(pack.start, pack.stop, pack.tree.root) for pack in schedule.packs]
      [(0, 5, 0), (5, 10, 1)]
    """

    num_devices: int
    size: int
    packs: tuple[Pack, ...]

    def resized(self, size: int) -> Schedule:
        """The same trees with the same shares of another amount of data.

        Args:
          size: the number of units of the new schedule.

        Returns:
          A schedule whose packs tile `size` units; packs that become empty are left out.
        """
        scale = [(pack.stop * size + self.size // 2) // max(self.size, 1) for pack in self.packs]
        starts = [0, *scale[:-1]]
        resized = (
            Pack(start, stop, pack.tree)
            for start, stop, pack in zip(starts, scale, self.packs, strict=True)
        )
        return Schedule(self.num_devices, size, tuple(pack for pack in resized if pack.size))


def verify(schedule: Schedule) -> None:
    """Checks that a schedule all-reduces exactly its data over exactly its devices.

    A `CopyTree` cannot be built unless it is a spanning tree, so it remains to check that every
    tree spans this schedule's devices, and that the packs tile the data.

    Args:
      schedule: the schedule to check.

    Raises:
      ValueError: if a tree spans another number of devices, or the packs leave a gap, overlap, are
        empty, or do not end where the data ends.
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


def cut(size: int, num_packs: int) -> tuple[tuple[int, int], ...]:
    """Cuts `size` units into `num_packs` ranges whose sizes differ by at most one.

    Args:
      size: how many units to cut.
      num_packs: how many ranges to make, at least 1. With fewer units than packs there are only
        `size` ranges, because an empty pack would move nothing.

    Returns:
      The ranges `(start, stop)`, in order.

    Example:
      >>> cut(7, 3)
      ((0, 2), (2, 4), (4, 7))
    """
    stops = [size * (index + 1) // num_packs for index in range(num_packs)]
    return tuple(
        (start, stop) for start, stop in zip([0, *stops], stops, strict=False) if stop > start
    )


def assign(
    size: int, ranges: Iterable[tuple[int, int]], trees: Sequence[tree_lib.CopyTree]
) -> Schedule:
    """Gives the ranges the trees in turn, so that the roots spread over the devices.

    Args:
      size: how many units each device holds.
      ranges: the `(start, stop)` of each pack; they tile the data.
      trees: the trees to hand out; range `i` gets tree `i` modulo their number.

    Returns:
      The schedule.
    """
    packs = (
        Pack(start, stop, trees[index % len(trees)]) for index, (start, stop) in enumerate(ranges)
    )
    return Schedule(trees[0].num_devices, size, tuple(packs))
