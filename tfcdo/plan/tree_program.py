"""Copy trees by linear programming: how much of the data along each, so that links end soonest.

Each spanning tree carries a part of the data, and loads all resources of its edges, up and down.
There are far too many trees to list: in column generation, the tree that improves a solution most
is a minimum spanning tree under the resources' dual prices.

References:
  Nash-Williams, "Edge-disjoint spanning trees of finite graphs", 1961, and Tutte, "On the problem
  of decomposing a graph into n connected factors", 1961 (packing spanning trees).
  Garg and Koenemann, "Faster and Simpler Algorithms for Multicommodity Flow and other Fractional
  Packing Problems", FOCS 1998 (prices that rise with the load).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tfcdo import checks
from tfcdo.plan import copy_tree
from tfcdo.topology.topology import Topology, check_topology

Floats: TypeAlias = npt.NDArray[np.float64]
# A spanning tree: the numbers of its edges, ascending.
Tree: TypeAlias = tuple[int, ...]

# The first prices of resources differ at most by the square of this.
_UNLIKE = 1e4
# Each tree raises the price of the resource that it loads most by e to the power of this.
_PRICE_RISE = 0.3
# How many trees rising prices give, and column generation at most adds; the bound holds after any
# number. Programs with very many resources are slow, so machines of more devices get fewer trees.
_ROUNDS_PER_DEVICE = 10
_MAX_ROUNDS = 20_480
_MAX_COLUMNS = 2**16
# How far rates may be from the best ones.
_GAP = 1e-3
# The lower bound is within this factor of the best one of its kind.
_PRECISION = 1.01


class Edges:
    """The undirected edges of a machine, by number, and the cost of a byte up and down each.

    A byte pays a link's latency `latency_per_byte` times: 1 / bytes of a pack.
    """

    def __init__(self, topology: Topology, latency_per_byte: float = 0.0) -> None:
        count = topology.num_devices
        self.topology, self.num_devices = topology, count
        self.pairs = tuple(itertools.combinations(range(count), 2))
        self.number = np.zeros((count, count), np.int64)
        self.number[np.triu_indices(count, 1)] = np.arange(len(self.pairs))
        self.number += self.number.T
        self.seconds = np.zeros((count, count))
        edges: list[int] = []
        resources: list[int] = []
        seconds: list[float] = []
        for link in topology.links:
            pair = link.source, link.target
            self.seconds[pair] = 1 / topology.bandwidth(*pair) + link.latency * latency_per_byte
            edges += [int(self.number[pair])] * len(link.resources)
            resources += link.resources
            seconds += [self.seconds[pair]] * len(link.resources)
        self.num_resources = len(topology.resources)
        self._edge_of, self._resource_of = np.array(edges, np.int64), np.array(resources, np.int64)
        self._seconds_of = np.array(seconds)
        self._roots: dict[Tree, tuple[tuple[int, float], ...]] = {}
        # The seconds per byte of each resource's slowest link.
        self.slowest = np.zeros(self.num_resources)
        np.maximum.at(self.slowest, self._resource_of, self._seconds_of)

    def prices(self, resource_prices: Floats) -> Floats:
        """Returns the price of each edge, given the price of a second of each resource."""
        paid = self._seconds_of * resource_prices[self._resource_of]
        return np.asarray(np.bincount(self._edge_of, paid, len(self.pairs)), np.float64)

    def load(self, tree: Tree) -> Floats:
        """Returns the seconds for which a byte along a tree keeps each resource busy."""
        chosen = np.zeros(len(self.pairs))
        chosen[list(tree)] = 1.0
        busy = self._seconds_of * chosen[self._edge_of]
        return np.asarray(np.bincount(self._resource_of, busy, self.num_resources), np.float64)

    def tree(self, prices: Floats, root: int = 0, nearness: float = 0.0) -> Tree:
        """Returns a tree between the cheapest (Prim, nearness 0) and the nearest (Dijkstra, 1)."""
        table = prices[self.number]
        key, via = table[root].copy(), np.full(self.num_devices, root)
        distance = np.zeros(self.num_devices)
        key[root] = np.inf
        outside = np.arange(self.num_devices) != root
        edges = []
        for _ in range(self.num_devices - 1):
            new = int(np.argmin(key))
            outside[new] = False
            near = int(via[new])
            edges.append(int(self.number[near, new]))
            distance[new] = distance[near] + table[near, new]
            keys = table[new] + nearness * distance[new]
            # A tie goes to the last device, so that the tree is a path rather than a star.
            better = outside & (keys <= key)
            key[better], via[better] = keys[better], new
            key[new] = np.inf
        return tuple(sorted(edges))

    def roots(self, tree: Tree) -> tuple[tuple[int, float], ...]:
        """Returns a tree's center and its longest path's ends as roots, with their `longest`."""
        if tree in self._roots:
            return self._roots[tree]
        # Seconds from each device to each other one along the tree.
        way = np.zeros((self.num_devices, self.num_devices))
        seen = [0]
        for device, near in copy_tree.rooted([self.pairs[edge] for edge in tree], 0).edges:
            way[device, seen] = self.seconds[device, near] + way[near, seen]
            way[seen, device] = way[seen, near] + self.seconds[near, device]
            seen.append(device)
        # The seconds of a byte's longest way from a leaf to each root, and from there to a leaf.
        longest = way.max(0) + way.max(1)
        ends = np.unravel_index(int((way + way.T).argmax()), way.shape)
        roots = tuple((int(root), float(longest[root])) for root in (longest.argmin(), *ends))
        self._roots[tree] = roots
        return roots


@functools.cache
def _solver_class() -> type[Any]:
    """Returns the class of HiGHS's solver, which prints nothing while it is made."""
    import highspy  # Here, because it takes 40 ms and not every plan needs it.

    class Silent(highspy.Highs):
        # The constructor of newer ones calls this, and version 1.16 would print its version here.
        def enableCallbacks(self) -> None:  # noqa: N802
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    return Silent


class TreeProgram:
    """The linear program over the trees that are known: the largest sum of rates.

    A rate is relative to the `unit`, seconds per byte. A column is scaled by its largest load, so
    that the solver sees numbers of at most 1 however different the links are.
    """

    def __init__(self, edges: Edges, unit: float) -> None:
        self.edges, self.unit = edges, unit
        self.trees: dict[Tree, float] = {}  # Each with its scale.
        import highspy

        self.solver = _solver_class()()
        self.solver.setOptionValue("output_flag", False)
        self.solver.setOptionValue("threads", 1)
        self.solver.changeObjectiveSense(highspy.ObjSense.kMaximize)
        # The resources are not busy for more than a second a second; the rates have any sum.
        for bound in [1.0] * edges.num_resources + [math.inf]:
            self.solver.addRow(-math.inf, bound, 0, np.array([], np.int32), np.array([]))

    def add(self, tree: Tree) -> bool:
        """Adds a tree; returns whether it is new."""
        if tree in self.trees:
            return False
        load = np.append(self.edges.load(tree) / self.unit, 1.0)
        scale = self.trees[tree] = float(load[:-1].max())
        held = np.flatnonzero(load).astype(np.int32)
        self.solver.addCol(1 / scale, 0.0, math.inf, len(held), held, load[held] / scale)
        return True

    def solve(self) -> tuple[Floats, Floats]:
        """Returns the rates and the resources' prices; raises unless the solver found the best."""
        import highspy

        self.solver.run()
        status = self.solver.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise ArithmeticError(
                f"HiGHS did not solve the linear program of {self.edges.topology.name!r}: "
                f"it says {status}"
            )
        solution = self.solver.getSolution()
        # Rounding may leave a little below 0.
        rates = np.maximum(solution.col_value, 0) / np.array(list(self.trees.values()))
        return rates, np.maximum(solution.row_dual[: self.edges.num_resources], 0)

    def value(self, values: Sequence[float] | Floats) -> None:
        """Changes how much the rate of each tree counts."""
        for index, (value, scale) in enumerate(zip(values, self.trees.values(), strict=True)):
            self.solver.changeColCost(index, float(value) / scale)

    def require(self, least_rate: float) -> None:
        """Requires a sum of all rates."""
        self.solver.changeRowBounds(self.edges.num_resources, least_rate, math.inf)

    def allow(self, allowed: Sequence[bool] | npt.NDArray[np.bool_]) -> None:
        """Changes which trees may have a rate."""
        for index, may in enumerate(allowed):
            self.solver.changeColBounds(index, 0.0, math.inf if may else 0.0)


@dataclasses.dataclass(frozen=True)
class Solved:
    """A solved program: trees, rates, prices, and the seconds per byte that no trees beat."""

    program: TreeProgram
    rates: Floats
    prices: Floats
    bound: float


def solve(edges: Edges, known: Iterable[Tree] = ()) -> Solved | None:
    """Finds trees whose rates are nearly the best; None if copies take no time.

    `known` are trees to begin with. Others come from prices that rise with each tree's load, which
    soon gives all trees of a good solution; column generation adds the missing ones.
    """
    devices = edges.num_devices
    # The fastest tree alone takes longer than all trees, by at most the number of links.
    prices = np.ones(edges.num_resources)
    tree, bound = _cheapest(edges, prices)
    slowest = float(edges.load(tree).max())
    if not bound:
        return None
    # Prices are correct in the ratio of the speeds where all resources are busy, but the ratio must
    # not hide links that are much too slow.
    near = np.clip(edges.slowest, slowest / _UNLIKE, slowest * _UNLIKE)
    prices = np.where(edges.slowest > 0, 1 / near, 0.0)
    trees = dict.fromkeys((*known, tree))
    busy, rate = np.zeros(edges.num_resources), 0.0
    for _ in range(min(_ROUNDS_PER_DEVICE * devices, _MAX_ROUNDS // devices)):
        tree, found = _cheapest(edges, prices)
        bound = max(bound, found)
        trees[tree] = None
        load = edges.load(tree)
        rate += 1 / float(load.max())
        load /= load.max()
        busy += load
        prices = prices * np.exp(_PRICE_RISE * load)
        prices /= prices.sum()
    program = TreeProgram(edges, float(busy.max()) / rate)
    for tree in trees:
        program.add(tree)
    rates, prices = program.solve()
    for _ in range(_MAX_COLUMNS // devices**2):
        tree, found = _cheapest(edges, prices)
        bound = max(bound, found)
        if rates.sum() * bound / program.unit >= 1 - _GAP or not program.add(tree):
            break
        rates, prices = program.solve()
    return Solved(program, rates, prices, bound)


def _cheapest(edges: Edges, prices: Floats) -> tuple[Tree, float]:
    """Returns the cheapest tree, and the bound that the prices prove, in seconds per byte.

    Whatever the rates, they pay at least the price of the cheapest tree for each byte, and at most
    the price of all resources in each second.
    """
    edge_prices = edges.prices(prices)
    tree = edges.tree(edge_prices)
    return tree, float(edge_prices[list(tree)].sum() / prices.sum()) if prices.any() else 0.0


def shallow_rates(solved: Solved, ways: Floats, slack: float) -> Floats:
    """Returns rates of few trees with short ways (in seconds): the best sum, but for a slack."""
    program, ways = solved.program, np.minimum(ways, 1e4 * ways.min())
    program.require((1 - slack) * float(solved.rates.sum()))
    costs = ways
    for _ in range(4):
        program.value(-costs / costs.max())
        rates, _ = program.solve()
        parts = rates / rates.sum()
        # Small parts cost more in the next program, so that they vanish.
        costs = ways / (parts + 0.02)
    # The trees that are left, with the largest sum of rates.
    program.require(-np.inf)
    program.allow(parts > 1e-4)
    program.value(1 - 1e-4 * ways / ways.max())
    rates, _ = program.solve()
    program.allow(np.full(len(ways), True))
    program.value(np.ones(len(ways)))
    return rates


# The lower bound: a time that no copy trees beat, however the data is cut into packs.


def lower_bound_seconds(topology: Topology, num_bytes: int) -> float:
    """Returns a time that no copy trees beat, for any number of packs.

    The larger of two bounds:

    * Let the largest pack have `s` bytes. Then each link pays its latency at least once for `s`
      bytes, so the rates of all spanning trees together take at least the time of a linear program
      with `1 / bandwidth + latency / s` seconds per byte. And the pack itself takes at least the
      shortest way from all devices to a root and back. One of both is long, whatever `s` is.
    * `K-1` times the data is added, by K devices unless they share one adder.

    Args:
      topology: the machine.
      num_bytes: how many bytes each device holds.

    Returns:
      The time in seconds.

    Raises:
      ValueError: if `num_bytes` is negative.
      TypeError: if it is not an int, or `topology` not a topology.

    References:
      Cai et al., "Synthesizing Optimal Collective Algorithms", PPoPP 2021 (bounds of a DGX-1).

    Example:
      >>> from tfcdo.topology import preset
      >>> f"{1e3 * lower_bound_seconds(preset('dgx1'), 10**8):.3f} ms"
      '1.196 ms'
    """
    check_topology(topology)
    checks.check_int("num_bytes", num_bytes, at_least=0, at_most=checks.LARGEST_INT)
    return max(_copies_bound(topology, num_bytes), additions_bound(topology, num_bytes))


@functools.lru_cache(maxsize=512)
def _copies_bound(topology: Topology, num_bytes: int) -> float:
    if topology.num_devices == 1 or not num_bytes:
        return 0.0
    solved = solve(Edges(topology, 1 / num_bytes))
    if solved is None:
        return _way_and_back(topology, 1.0)
    # One bound falls with the largest pack, the other rises: they meet between `low` and `high`.
    low, high, links = 1.0, float(num_bytes), num_bytes * solved.bound
    while high > _PRECISION * low and links < _way_and_back(topology, high):
        size = math.sqrt(low * high)
        # The last program has nearly the same trees.
        solved = solve(Edges(topology, 1 / size), solved.program.trees)
        assert solved is not None
        if num_bytes * solved.bound > _way_and_back(topology, size):
            low = size
        else:
            high, links = size, num_bytes * solved.bound
    return max(_way_and_back(topology, low), links)


def additions_bound(topology: Topology, num_bytes: int) -> float:
    """Returns the time of the additions alone, a bound that costs nothing to know."""
    adders = 1 if topology.serial_reduction else topology.num_devices
    return num_bytes * (topology.num_devices - 1) / adders / topology.addition_bandwidth


def _way_and_back(topology: Topology, num_bytes: float) -> float:
    """Returns the seconds of the shortest way of a pack from all devices to a root and back."""
    count = topology.num_devices
    way = np.full((count, count), np.inf)
    np.fill_diagonal(way, 0.0)
    for link in topology.links:
        pair = link.source, link.target
        way[pair] = link.latency + num_bytes / topology.bandwidth(*pair)
    back = way.copy()
    # Each copy towards the root is followed by an addition.
    way += (1 - np.eye(count)) * num_bytes / topology.addition_bandwidth
    for seconds in (way, back):
        for device in range(count):
            np.minimum(seconds, seconds[:, [device]] + seconds[[device], :], out=seconds)
    return float((way.max(0) + back.max(1)).min())
