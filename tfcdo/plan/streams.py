"""Streams: copy trees with parts of the data, and the packs and windows that are made of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfcdo.plan import copy_tree
from tfcdo.plan import schedule as schedules


@dataclasses.dataclass(frozen=True)
class Stream:
    """A copy tree, and the packs that are sent along it one after another.

    Attributes:
      tree: the tree.
      part: its part of the data, relative to the other streams.
      num_packs: the number of equal packs that its part is cut into.
      window: the number of packs in flight; None for no limit.
    """

    tree: copy_tree.CopyTree
    part: float
    num_packs: int = 1
    window: int | None = None


Streams = tuple[Stream, ...]


def deal(streams: Sequence[Stream], num_bytes: int) -> schedules.Schedule:
    """Returns the schedule of streams, whose packs are in turn.

    Example:
      >>> schedule = deal([Stream(copy_tree.star(2), 1.0, 3, window=2)], 300)
      >>> [(pack.start, pack.stop, pack.after) for pack in schedule.packs]
      [(0, 100, None), (100, 200, None), (200, 300, 0)]
    """
    order = turns(streams)
    total = sum(stream.part for stream in streams)
    packs: list[schedules.Pack] = []
    of_stream: list[list[int]] = [[] for _ in streams]
    end, start = 0.0, 0
    for position, (_, index) in enumerate(order):
        stream, earlier = streams[index], of_stream[index]
        end += stream.part / stream.num_packs / total
        # The last byte of very many is no float.
        stop = num_bytes if position == len(order) - 1 else min(round(num_bytes * end), num_bytes)
        if stop > start:
            waits = stream.window is not None and len(earlier) >= stream.window
            after = earlier[-stream.window] if waits and stream.window else None
            earlier.append(len(packs))
            packs.append(schedules.Pack(start, stop, stream.tree, after))
            start = stop
    return schedules.Schedule(streams[0].tree.num_devices, num_bytes, tuple(packs))


def turns(streams: Sequence[Stream]) -> list[tuple[float, int]]:
    """Returns the order of the packs: when each is sent, and the index of its stream."""
    return sorted(
        ((number + 0.5) / stream.num_packs, index)
        for index, stream in enumerate(streams)
        for number in range(stream.num_packs)
    )


def equal(streams: Streams, num_packs: int) -> Streams:
    """Returns the streams with so many equal packs in all, as near to their parts as can be."""
    total = sum(stream.part for stream in streams)
    counts = [math.floor(num_packs * stream.part / total) for stream in streams]
    lacking = [num_packs * stream.part / total - count for stream, count in zip(streams, counts)]
    largest_first = sorted(range(len(streams)), key=lambda index: (-lacking[index], index))
    for index in largest_first[: num_packs - sum(counts)]:
        counts[index] += 1
    return tuple(
        dataclasses.replace(stream, part=float(count), num_packs=count)
        for stream, count in zip(streams, counts, strict=True)
        if count
    )
