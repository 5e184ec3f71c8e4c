"""Owners: which device updates which variable."""

from __future__ import annotations

from collections.abc import Sequence


def deal(sizes: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Deals variables to devices: the largest first, each to the device that has least so far.

    The largest share is at most 4/3 of the best one (Graham, 1969), and the same on every host.

    Example:
      >>> deal([1, 4, 2, 3], 2)
      (0, 0, 1, 1)
    """
    load, owner = [0] * num_devices, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner[index] = load.index(min(load))
        load[owner[index]] += sizes[index]
    return tuple(owner)


def loads(sizes: Sequence[int], owner: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Returns the sum of the sizes that each device owns."""
    return tuple(
        sum(size for size, at in zip(sizes, owner, strict=True) if at == device)
        for device in range(num_devices)
    )
