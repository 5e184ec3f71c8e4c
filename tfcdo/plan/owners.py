"""Owners: which device updates which variable, and along which tree its gradient comes."""

from __future__ import annotations

from collections.abc import Sequence

from tfcdo.plan import algorithms, copy_tree
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.topology.topology import Topology


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


def tree_of(
    owner: int, algorithm: algorithms.Algorithm, topology: Topology, num_bytes: int
) -> CopyTree:
    """Returns the algorithm's tree with this root; if there is none, another one's edges."""
    count = topology.num_devices
    if algorithm == "auto":
        algorithm = algorithms.fastest_algorithm(topology, num_bytes, count)
    if algorithm == "one_device":
        return copy_tree.star(count, owner)
    schedule = algorithms.scheduler(algorithm, topology)(max(num_bytes, count), count)
    trees = [pack.tree for pack in schedule.packs]
    for tree in trees:
        if tree.root == owner:
            return tree
    return copy_tree.rooted(trees[owner % len(trees)].edges, owner)
