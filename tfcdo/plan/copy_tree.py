"""Copy trees: the edges along which one pack is reduced up and broadcast down."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence

from tfcdo import checks


@dataclasses.dataclass(frozen=True)
class CopyTree:
    """A rooted spanning tree over the devices `0..K-1`.

    A pack is reduced from the leaves to the root, each device adding what its children send to
    what it holds, and the sum is copied back along the same edges. Because the sum is formed once,
    at the root, and only copied afterwards, all devices end up with the same bits.

    Attributes:
      parents: `parents[d]` is the device that `d` sends its partial sum to, and receives the result
        from; None for the root.

    Raises:
      ValueError: if `parents` is not a spanning tree of its devices: no root or several, a parent
        that is not a device, or a cycle.
      TypeError: if `parents` is not a tuple of ints and None, and so could not be a key.

    Example:
      >>> tree = CopyTree(parents=(None, 0, 1))
      >>> tree.root, tree.children, tree.depth
      (0, ((1,), (2,), ()), 2)
    """

    parents: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parents, tuple):
            raise TypeError(f"parents must be a tuple; got {self.parents!r}")
        roots = [device for device, parent in enumerate(self.parents) if parent is None]
        if len(roots) != 1:
            raise ValueError(
                f"parents must hold exactly one None (the root); got {self.parents}, "
                f"which has {len(roots)}"
            )
        for device, parent in enumerate(self.parents):
            if parent is not None:
                checks.check_int(f"parents[{device}]", parent, 0, len(self.parents) - 1)
        if len(self.top_down) != len(self.parents):
            raise ValueError(f"parents must reach every device from the root; got {self.parents}")

    @property
    def num_devices(self) -> int:
        """Counts the devices that the tree spans."""
        return len(self.parents)

    @functools.cached_property
    def root(self) -> int:
        """Returns the device where the sum is formed."""
        return self.parents.index(None)

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Returns `children`; `children[d]` are the devices that send to `d`, ascending."""
        below: list[list[int]] = [[] for _ in self.parents]
        for device, parent in enumerate(self.parents):
            if parent is not None:
                below[parent].append(device)
        return tuple(map(tuple, below))

    @functools.cached_property
    def top_down(self) -> tuple[int, ...]:
        """Returns the devices in an order in which every parent comes before its children."""
        order = [self.root]
        for device in order:
            order.extend(self.children[device])
        return tuple(order)

    @property
    def bottom_up(self) -> tuple[int, ...]:
        """Returns the devices in an order in which all children come before their parent."""
        return self.top_down[::-1]

    @functools.cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Returns the `(child, parent)` pairs, from the root downwards."""
        return tuple(
            (device, parent)
            for device in self.top_down
            if (parent := self.parents[device]) is not None
        )

    @functools.cached_property
    def depth(self) -> int:
        """Counts the edges between the root and the device furthest from it."""
        level = {self.root: 0}
        for child, parent in self.edges:
            level[child] = level[parent] + 1
        return max(level.values())


def _check(num_devices: int, root: int) -> None:
    checks.check_int("num_devices", num_devices, at_least=1)
    checks.check_int("root", root, at_least=0, at_most=num_devices - 1)


def star(num_devices: int, root: int = 0) -> CopyTree:
    """Returns the tree in which every device sends straight to `root`, of depth 1."""
    _check(num_devices, root)
    return CopyTree(tuple(None if device == root else root for device in range(num_devices)))


def path(order: Sequence[int], root: int) -> CopyTree:
    """Returns the tree whose edges join neighbours in `order`, rooted anywhere on the path.

    Args:
      order: all devices, each once, in the order in which the path visits them.
      root: the device where the sum is formed; in the middle of the path the tree has half the
        depth that it has at an end.

    Returns:
      A tree in which each device but the root sends to its neighbour on the root's side.

    Raises:
      ValueError: if `order` is not a permutation of the devices or `root` is not in it.
      TypeError: if `order` is not a list of ints.

    Example:
      >>> path((3, 1, 0, 2), root=1).parents
      (1, None, 0, 1)
    """
    try:
        order = [operator.index(device) for device in order]
    except TypeError:
        raise TypeError(f"order must be a list of devices, which are ints; got {order!r}") from None
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"order must hold each device 0..{len(order) - 1} once; got {order}")
    if root not in order:
        raise ValueError(f"root must be one of the devices {sorted(order)}; got {root}")
    return rooted(list(itertools.pairwise(order)), root)


def rooted(edges: Sequence[tuple[int, int]], root: int) -> CopyTree:
    """Returns the tree of some edges, whose ends may be in any order, with a root."""
    near: list[list[int]] = [[] for _ in range(len(edges) + 1)]
    for a, b in edges:
        near[a].append(b)
        near[b].append(a)
    parents: list[int | None] = [None] * len(near)
    for device in (order := [root]):
        for other in near[device]:
            if other != parents[device]:
                parents[other] = device
                order.append(other)
    return CopyTree(tuple(parents))


def chain(num_devices: int, root: int = 0) -> CopyTree:
    """Returns the path `root, root + 1, ..., root - 1`, modulo `num_devices`, from its root on."""
    _check(num_devices, root)
    return path([(root + step) % num_devices for step in range(num_devices)], root)


def binomial(num_devices: int, root: int = 0) -> CopyTree:
    """Returns the binomial tree: in round `r`, every second device that is left sends and is done.

    Devices are counted from the root. Each sends to the one `2**r` before it.
    """
    _check(num_devices, root)
    parents: list[int | None] = [None] * num_devices
    for rank in range(1, num_devices):
        # Clearing the lowest set bit gives the rank that this one sends to.
        parents[(rank + root) % num_devices] = ((rank & (rank - 1)) + root) % num_devices
    return CopyTree(tuple(parents))


def two_level(num_devices: int, root: int = 0) -> CopyTree:
    """Returns the hierarchical-copy tree: two stars, and one edge between their centres.

    On 8 devices these are the trees that fit a DGX-1, where GPUs 0-3 and 4-7 are two fully
    connected groups and each GPU has one link to its partner (its number plus or minus 4) in the
    other group. Where the halves differ by one, the device without a partner uses the last of the
    smaller half.
    """
    _check(num_devices, root)
    half = (num_devices + 1) // 2
    partner = root - half if root >= half else min(root + half, num_devices - 1)
    parents: list[int | None] = [
        root if device == partner or (device < half) == (root < half) else partner
        for device in range(num_devices)
    ]
    parents[root] = None
    return CopyTree(tuple(parents))
