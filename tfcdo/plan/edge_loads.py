"""Edge loads: what a byte up and down each edge of a copy tree costs, as arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tfcdo.topology.topology import Topology

Floats: TypeAlias = npt.NDArray[np.float64]
# An edge `(a, b)`, `a < b`; and a spanning tree as the numbers of its edges, in ascending order.
Edge: TypeAlias = tuple[int, int]
EdgeNumbers: TypeAlias = tuple[int, ...]


class EdgeLoads:
    """Holds which resources each edge loads, and finds spanning trees by price.

    A byte that goes along an edge, up and later down, keeps everything on its ways busy for as long
    as the slowest part of the way takes.

    Args:
      topology: the machine.
      direct: leave out the edges via the host, as long as the other links join all devices.

    Attributes:
      edges: the edges; the methods call them by their place in this list.
      speeds: the bytes per second of each resource.

    Example:
      >>> from tfcdo.topology import preset
      >>> loads = EdgeLoads(preset("nvswitch", 3))
      >>> loads.edges, loads.cheapest_tree(np.array([1.0, 3.0, 2.0]))
      ([(0, 1), (0, 2), (1, 2)], (0, 2))
    """

    def __init__(self, topology: Topology, direct: bool = False) -> None:
        links = {
            (link.source, link.target): link
            for link in (topology.direct_links if direct else topology.links)
        }
        self.num_devices = topology.num_devices
        self.edges: list[Edge] = [(a, b) for a, b in links if a < b and (b, a) in links]
        self.speeds = np.array([resource.bandwidth for resource in topology.resources])
        held = [
            (index, resource, topology.bandwidth(*pair))
            for index, (a, b) in enumerate(self.edges)
            for pair in ((a, b), (b, a))
            for resource in links[pair].resources
        ]
        self._edge_of = np.array([index for index, _, _ in held], np.int64)
        self._resource_of = np.array([resource for _, resource, _ in held], np.int64)
        self._seconds = 1 / np.array([speed for _, _, speed in held])
        self._ends = np.array(self.edges, np.int64).reshape(-1, 2)
        self._number = np.full((self.num_devices,) * 2, len(self.edges))
        for index, (a, b) in enumerate(self.edges):
            self._number[a, b] = self._number[b, a] = index

    def prices(self, resource_prices: Floats) -> Floats:
        """Returns the price of each edge, given what a second of each resource costs."""
        paid = self._seconds * resource_prices[self._resource_of]
        return np.asarray(np.bincount(self._edge_of, paid, len(self.edges)), np.float64)

    def load(self, edges: EdgeNumbers) -> Floats:
        """Returns for how many seconds a byte along some edges keeps each resource busy."""
        chosen = np.zeros(len(self.edges))
        chosen[list(edges)] = 1
        busy = self._seconds * chosen[self._edge_of]
        return np.asarray(np.bincount(self._resource_of, busy, len(self.speeds)), np.float64)

    def pairs(self, tree: EdgeNumbers) -> tuple[Edge, ...]:
        """Returns the edges of a tree as pairs of devices."""
        return tuple(self.edges[number] for number in tree)

    def numbers(self, pairs: Iterable[Edge]) -> EdgeNumbers:
        """Returns the numbers of the edges between pairs of devices, in any direction."""
        return tuple(int(self._number[pair]) for pair in pairs)

    def num_leaves(self, tree: EdgeNumbers) -> int:
        """Counts the devices that have one edge in a tree."""
        return int((self._degrees(tree) == 1).sum())

    def cheapest_tree(self, prices: Floats) -> EdgeNumbers:
        """Returns a minimum spanning tree, by Prim's algorithm."""
        table = np.append(prices, np.inf)[self._number]
        price, via = table[0].copy(), np.zeros(self.num_devices, np.int64)
        inside = np.arange(self.num_devices) == 0
        tree = []
        for _ in range(self.num_devices - 1):
            new = int(np.argmin(np.where(inside, np.inf, price)))
            tree.append(int(self._number[via[new], new]))
            inside[new] = True
            # Of equals the device that came last: so that the tree is a path rather than a star.
            cheaper = table[new] <= price
            price[cheaper], via[cheaper] = table[new][cheaper], new
        return tuple(sorted(tree))

    def with_fewer_leaves(
        self, tree: EdgeNumbers, prices: Floats, price_of_leaf: float
    ) -> EdgeNumbers:
        """Exchanges edges for others as long as that makes edges and leaves cheaper together.

        Args:
          tree: a spanning tree.
          prices: the price of each edge.
          price_of_leaf: the price of each leaf; below 0 there are rather more leaves.

        Returns:
          A spanning tree that no exchange of one edge makes cheaper.
        """
        first, second = self._ends.T
        while True:
            chosen = list(tree)
            degrees = self._degrees(tree)
            # One row for each edge that could go, one column for each that could come instead.
            sides = self._sides(tree)
            left = np.tile(degrees, (len(chosen), 1))
            rows = np.arange(len(chosen))
            left[rows, first[chosen]] -= 1
            left[rows, second[chosen]] -= 1
            # A device without an edge becomes a leaf by one, and a leaf is one no longer.
            gain = np.choose(np.minimum(left, 2), [1, -1, 0])
            leaves = (left == 1).sum(1) - (degrees == 1).sum()
            change = price_of_leaf * (leaves[:, None] + gain[:, first] + gain[:, second])
            change += prices[None, :] - prices[chosen][:, None]
            change[sides[:, first] == sides[:, second]] = np.inf
            out, new = np.unravel_index(np.argmin(change), change.shape)
            if change[out, new] > -1e-9:
                return tree
            chosen[out] = int(new)
            tree = tuple(sorted(chosen))

    def _degrees(self, tree: EdgeNumbers) -> npt.NDArray[np.int64]:
        return np.bincount(self._ends[list(tree)].ravel(), minlength=self.num_devices)

    def _sides(self, tree: EdgeNumbers) -> npt.NDArray[np.bool_]:
        """Returns for each edge of a tree the devices on one side of it."""
        near: list[list[tuple[int, int]]] = [[] for _ in range(self.num_devices)]
        for row, (a, b) in enumerate(self.pairs(tree)):
            near[a].append((b, row))
            near[b].append((a, row))
        order, above = [0], {0: (-1, -1)}
        for device in order:
            for other, row in near[device]:
                if other not in above:
                    above[other] = (device, row)
                    order.append(other)
        below = np.eye(self.num_devices, dtype=bool)
        sides = np.zeros((len(tree), self.num_devices), bool)
        for device in reversed(order[1:]):
            parent, row = above[device]
            sides[row] = below[device]
            below[parent] |= below[device]
        return sides
