"""Grouping what is alike, so that it runs together, and putting the results in order again."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any


def group(keys: Iterable[Hashable]) -> list[tuple[int, ...]]:
    """Groups the positions of equal keys.

    Args:
      keys: the keys.

    Returns:
      The positions of each key, ascending; the groups are in the order of their first members.

    Example:
      >>> group("abca")
      [(0, 3), (1,), (2,)]
    """
    groups: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        groups.setdefault(key, []).append(position)
    return [tuple(positions) for positions in groups.values()]


def members(items: Sequence[Any], positions: Iterable[int]) -> list[Any]:
    """Returns the items at some positions."""
    return [items[position] for position in positions]


def in_order(groups: Sequence[Sequence[int]], results: Iterable[Sequence[Any]]) -> list[Any]:
    """Puts the results of groups in the order of what was grouped.

    Args:
      groups: the positions, all of them once, as `group` returns them.
      results: for each group, one result for each of its positions.

    Returns:
      The results by position.

    Raises:
      ValueError: if there are more or fewer results than positions.

    Example:
      >>> in_order([(0, 3), (1,), (2,)], ["ad", "b", "c"])
      ['a', 'b', 'c', 'd']
    """
    placed = {
        position: result
        for positions, own in zip(groups, results, strict=True)
        for position, result in zip(positions, own, strict=True)
    }
    return [placed[position] for position in range(len(placed))]
