"""Matches the devices of two topologies that are wired alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tfcdo.topology.topology import Topology


def isomorphisms(one: Topology, other: Topology, limit: int) -> Iterator[tuple[int, ...]]:
    """Finds how the devices of two topologies can be matched so that their links are alike.

    Bandwidth, latency and `via_host` are compared, not what links share.

    Args:
      one: a topology.
      other: another one, perhaps the same.
      limit: stop after this many.

    Yields:
      `images`, where device `d` of `one` is like device `images[d]` of `other`; in ascending order.

    Example:
      >>> from tfcdo.topology import preset
      >>> list(isomorphisms(preset("dgx1"), preset("dgx1"), 10))[1]
      (2, 3, 0, 1, 6, 7, 4, 5)
    """
    if one.num_devices != other.num_devices:
        return
    kinds, other_kinds = one.link_kinds, other.link_kinds

    def extend(images: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        new = len(images)
        if new == one.num_devices:
            yield images
            return
        for image in range(one.num_devices):
            if image not in images and all(
                kinds[new, old] == other_kinds[image, images[old]]
                and kinds[old, new] == other_kinds[images[old], image]
                for old in range(new)
            ):
                yield from extend((*images, image))

    yield from itertools.islice(extend(()), limit)


def symmetries(topology: Topology, limit: int = 16) -> tuple[tuple[int, ...], ...]:
    """Returns the permutations of the devices that change no link's bandwidth and latency.

    Args:
      topology: the machine.
      limit: a machine with more symmetries than this has too many to be of use in a search.

    Returns:
      All of them, the identity first, or the identity alone if there are more than `limit`.

    Example:
      >>> from tfcdo.topology import preset
      >>> symmetries(preset("dgx1"))[1]
      (2, 3, 0, 1, 6, 7, 4, 5)
    """
    found = tuple(isomorphisms(topology, topology, limit + 1))
    return found if len(found) <= limit else (tuple(range(topology.num_devices)),)
