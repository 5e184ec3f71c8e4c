"""Spanning trees by linear programming: the most bytes per second that copy trees can all-reduce.

Each spanning tree over the devices has a rate, and each resource of the machine a budget: a second
per second. A tree loads all that its edges hold, on their way up and on their way down. The largest
sum of rates is a linear program with far too many trees to list, solved by column generation: the
tree that improves a solution most is a minimum spanning tree under the resources' dual prices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import highspy
import numpy as np

from tfcdo.plan.edge_loads import Edge
from tfcdo.plan.edge_loads import EdgeLoads
from tfcdo.plan.edge_loads import EdgeNumbers
from tfcdo.plan.edge_loads import Floats
from tfcdo.topology.topology import Topology

# Where rates and bound are this close, they are one number but for rounding.
_SAME = 1e-9
# How many rounds there may be, times the square of the number of devices. On 16 devices half of
# them made the rates the best on all machines seen.
_MAX_ROUNDS_OF_ONE = 2**18
_MOST_WITH_OWN_TREES = 128
_ROUNDS_FOR_LEAVES = 150


@dataclasses.dataclass(frozen=True)
class TreeRates:
    """Spanning trees and the rates at which they may carry data at the same time.

    Attributes:
      trees: the edges `(a, b)`, `a < b`, of each tree.
      rates: the bytes per second of each tree, above 0; together they overload no resource.
    """

    trees: tuple[tuple[Edge, ...], ...]
    rates: tuple[float, ...]


class _Program:
    """Holds the linear program over the trees that are known.

    Args:
      loads: what the trees cost.
      unit: seconds per byte of the order of the solution, so that the solver's numbers are near 1.
    """

    def __init__(self, loads: EdgeLoads, unit: float) -> None:
        self._loads, self.unit = loads, unit
        self._trees: dict[EdgeNumbers, None] = {}
        self._solver = highspy.Highs()
        self._solver.setOptionValue("output_flag", False)
        self._solver.setOptionValue("threads", 1)
        self._solver.changeObjectiveSense(highspy.ObjSense.kMaximize)
        for _ in loads.speeds:
            self._solver.addRow(-highspy.kHighsInf, 1.0, 0, np.array([], np.int32), np.array([]))

    @property
    def trees(self) -> tuple[EdgeNumbers, ...]:
        """Returns the trees that are known."""
        return tuple(self._trees)

    def add(self, tree: EdgeNumbers, value: float = 1.0) -> bool:
        """Adds a tree whose bytes count so much; returns whether it is new."""
        if tree in self._trees:
            return False
        self._trees[tree] = None
        load = self._loads.load(tree) / self.unit
        held = np.flatnonzero(load).astype(np.int32)
        self._solver.addCol(value, 0.0, highspy.kHighsInf, len(held), held, load[held])
        return True

    def value(self, values: Iterable[float]) -> None:
        """Changes what the bytes of each tree count."""
        for index, value in enumerate(values):
            self._solver.changeColCost(index, value)

    def solve(self) -> tuple[Floats, Floats]:
        """Returns the best rates, times the unit, and the resources' dual prices."""
        self._solver.run()
        solution = self._solver.getSolution()
        # Rounding may leave a little below 0.
        return np.maximum(solution.col_value, 0), np.maximum(solution.row_dual, 0)

    def best_trees(self) -> list[EdgeNumbers]:
        """Returns the trees, those that a solution may use first."""
        worth = np.array(self._solver.getSolution().col_dual)
        trees = self.trees
        return [trees[index] for index in np.argsort(-worth, kind="stable")]

    def rates(self, solution: Floats) -> TreeRates:
        """Returns the trees of a solution that carry something."""
        used = np.flatnonzero(solution > 1e-6 * solution.sum())
        trees = self.trees
        return TreeRates(
            tuple(self._loads.pairs(trees[index]) for index in used),
            tuple(float(solution[index] / self.unit) for index in used),
        )


@dataclasses.dataclass(frozen=True)
class _Solved:
    """The program of a machine, solved: its numbers, without the unit."""

    loads: EdgeLoads
    program: _Program
    solution: Floats
    seconds_per_byte: float


def seconds_per_byte(topology: Topology, direct: bool = False) -> float:
    """Returns the time per byte that no copy trees beat, as far as copies alone go.

    Args:
      topology: the machine.
      direct: count only trees along the direct links, as long as those join all devices.

    Returns:
      Seconds per byte on each device; 0 if copies take no time.

    Example:
      >>> from tfcdo.topology import preset
      >>> f"{seconds_per_byte(preset('dgx1'), direct=True) * 25e9 * 48:.3f}"
      '14.000'
    """
    solved = _solve(topology, direct)
    return solved.seconds_per_byte if solved else 0.0


def best_rates(topology: Topology) -> TreeRates | None:
    """Returns trees and rates of the largest sum.

    On more than 16 devices the sum may be less, where many trees are needed.

    Args:
      topology: the machine.

    Returns:
      The trees and rates; None if copies take no time.

    Example:
      >>> from tfcdo.topology import preset
      >>> found = best_rates(preset("dgx1"))
      >>> f"{sum(found.rates) * seconds_per_byte(preset('dgx1')):.6f}"
      '1.000000'
    """
    solved = _solve(topology, False)
    return solved.program.rates(solved.solution) if solved else None


def trees_near_the_best(
    topology: Topology, prices_of_leaf: Iterable[float]
) -> Iterator[list[tuple[Edge, ...]]]:
    """Finds trees of which solutions of nearly the largest sum are made.

    Where two streams of packs meet, each waits for packs that the other has not sent yet, as
    nothing keeps them in an order: trees of few leaves have few such places. Trees of many leaves
    are not deep.

    Args:
      topology: the machine.
      prices_of_leaf: what a leaf costs, in parts of the price of the cheapest tree; below 0 for
        trees of many leaves.

    Yields:
      For each price the trees, the best first; none if copies take no time.

    Example:
      >>> from tfcdo.topology import preset
      >>> few, many = trees_near_the_best(preset("fully_connected", 4), [0.02, -0.02])
      >>> len(few) <= len(many)
      True
    """
    solved = _solve.__wrapped__(topology, False)
    if solved is None:
        return
    loads, program = solved.loads, solved.program
    for price_of_leaf in prices_of_leaf:

        def value(tree: EdgeNumbers, price: float = price_of_leaf) -> float:
            return 1 - price * (loads.num_leaves(tree) - 2)

        program.value(map(value, program.trees))
        _, prices = program.solve()
        for _ in range(_ROUNDS_FOR_LEAVES):
            edge_prices = loads.prices(prices) * (1 / solved.seconds_per_byte)
            cheapest = loads.cheapest_tree(edge_prices)
            other = loads.with_fewer_leaves(cheapest, edge_prices, price_of_leaf)
            new = [program.add(tree, value(tree)) for tree in (cheapest, other)]
            if not any(new):
                break
            _, prices = program.solve()
        yield [loads.pairs(tree) for tree in program.best_trees()]


@functools.lru_cache(maxsize=64)
def _solve(topology: Topology, direct: bool) -> _Solved | None:
    """Generates trees until no rates can be better; None if copies take no time."""
    if topology.num_devices == 1:
        return None
    loads = EdgeLoads(topology, direct)
    # Prices in the ratio of the speeds are right where all resources are as busy as they can be.
    prices = np.where(np.isfinite(loads.speeds), loads.speeds, 0)
    tree, bound = _cheapest(loads, prices)
    if not bound:
        return None
    program = _Program(loads, bound)
    solution = np.zeros(0)
    for _ in range(_num_rounds(topology.num_devices)):
        if solution.sum() * bound / program.unit >= 1 - _SAME or not program.add(tree):
            break
        solution, prices = program.solve()
        tree, found = _cheapest(loads, prices)
        bound = max(bound, found)
    return _Solved(loads, program, solution, bound)


def _num_rounds(devices: int) -> int:
    """Returns how many trees there may be; the bound holds after any number."""
    # Of machines whose devices are all alike, each device has a tree of its own.
    own = 2 * devices if devices <= _MOST_WITH_OWN_TREES else 1
    return max(_MAX_ROUNDS_OF_ONE // devices**2, own)


def _cheapest(loads: EdgeLoads, prices: Floats) -> tuple[EdgeNumbers, float]:
    """Returns the cheapest tree, and the bound that the prices prove: in seconds per byte.

    Whatever the rates, they pay at least the price of the cheapest tree for each byte, and at most
    the price of all budgets in each second.
    """
    edge_prices = loads.prices(prices)
    tree = loads.cheapest_tree(edge_prices)
    return tree, float(edge_prices[list(tree)].sum() / prices.sum()) if prices.any() else 0.0
