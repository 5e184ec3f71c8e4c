"""Schedules: which range of the data is sent along which copy tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tfcdo import checks
from tfcdo.plan import copy_tree


@dataclasses.dataclass(frozen=True)
class Pack:
    """A contiguous range of the flattened data and the copy tree that it is reduced along.

    Attributes:
      start: the first unit of the range (bytes where a schedule is planned, elements where it is
        executed).
      stop: one past the last unit.
      tree: the copy tree.
      after: the window: the index of an earlier pack of the same tree, whose result a leaf holds
        before it sends this pack. None for no window: a leaf sends the pack when its values are
        ready.
      between_hosts: the bytes of it that each host sends to the others; 0 for one host.
    """

    start: int
    stop: int
    tree: copy_tree.CopyTree
    after: int | None = None
    between_hosts: float = 0.0

    @property
    def size(self) -> int:
        """Returns the number of units in the pack."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A whole all-reduce: packs that tile the data, each with its copy tree.

    A schedule that would not all-reduce exactly its data over exactly its devices cannot be built.

    Attributes:
      num_devices: how many devices take part.
      size: the number of units that each device holds.
      packs: the packs, in the order of the data.

    Raises:
      ValueError: if a tree spans another number of devices; the packs leave a gap, overlap, are
        empty, or do not end where the data ends; or a window is not an earlier pack of its tree.

    Example:
      >>> from tfcdo.plan.copy_tree import star
      >>> schedule = assign(10, cut(10, 2), [star(3, 0), star(3, 1)])
      >>> [(pack.start, pack.stop, pack.tree.root) for pack in schedule.packs]
      [(0, 5, 0), (5, 10, 1)]
      >>> Schedule(3, 11, schedule.packs)
      Traceback (most recent call last):
      ValueError: packs must end where the data ends, at 11; got packs that end at 10
    """

    num_devices: int
    size: int
    packs: tuple[Pack, ...]

    def __post_init__(self) -> None:
        position = 0
        for index, pack in enumerate(self.packs):
            if pack.tree.num_devices != self.num_devices:
                raise ValueError(
                    f"packs[{index}] must have a tree over {self.num_devices} devices; got one "
                    f"over {pack.tree.num_devices}"
                )
            if pack.start != position or pack.stop <= pack.start:
                raise ValueError(
                    f"packs[{index}] must begin at {position} and must not be empty; got the range "
                    f"[{pack.start}, {pack.stop})"
                )
            position = pack.stop
            if pack.after is not None and not (
                0 <= pack.after < index and self.packs[pack.after].tree == pack.tree
            ):
                raise ValueError(
                    f"packs[{index}].after must be None or the index of an earlier pack of the "
                    f"same tree; got {pack.after}"
                )
        if position != self.size:
            raise ValueError(
                f"packs must end where the data ends, at {self.size}; got packs that end at "
                f"{position}"
            )

    def resized(self, size: int) -> Schedule:
        """Returns the same trees with the same shares of another amount of data.

        Packs that become empty are left out; a pack that waited for one of them waits for the pack
        that it waited for.
        """
        stops = [(pack.stop * size + self.size // 2) // max(self.size, 1) for pack in self.packs]
        packs: list[Pack] = []
        # The pack of the new schedule that stands for each old one: its own, or its window's.
        stands_for: list[int | None] = []
        for start, stop, pack in zip([0, *stops], stops, self.packs, strict=False):
            after = None if pack.after is None else stands_for[pack.after]
            stands_for.append(after)
            if stop > start:
                stands_for[-1] = len(packs)
                packs.append(Pack(start, stop, pack.tree, after))
        return Schedule(self.num_devices, size, tuple(packs))


def cut(size: int, num_packs: int) -> tuple[tuple[int, int], ...]:
    """Cuts `size` units into `num_packs` ranges whose sizes differ by at most one.

    With fewer units than packs there are only `size` ranges, because an empty pack moves nothing.

    Example:
      >>> cut(7, 3)
      ((0, 2), (2, 4), (4, 7))
    """
    checks.check_int("size", size, at_least=0)
    checks.check_int("num_packs", num_packs, at_least=1)
    count = min(num_packs, size)
    stops = [size * (index + 1) // count for index in range(count)]
    return tuple(zip([0, *stops], stops, strict=False))


def size_class(num_bytes: int) -> int:
    """Returns a size within an eighth of this one, for which all sizes of its class are planned."""
    shift = max(num_bytes.bit_length() - 3, 0)
    return (num_bytes >> shift << shift) + (1 << shift >> 1)


def assign(
    size: int, ranges: Iterable[tuple[int, int]], trees: Sequence[copy_tree.CopyTree]
) -> Schedule:
    """Gives the ranges the trees in turn, so that the roots spread over the devices."""
    if not trees:
        raise ValueError(f"trees must hold at least one copy tree; got {trees!r}")
    packs = (
        Pack(start, stop, trees[index % len(trees)]) for index, (start, stop) in enumerate(ranges)
    )
    return Schedule(trees[0].num_devices, size, tuple(packs))
