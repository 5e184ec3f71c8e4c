"""Plans all-reduces that hide behind the backward pass that makes what they sum.

A backward pass makes the gradients of the last layers first, so packs are cut from the last
variable to the first, and a pack begins when the gradient of its first variable is there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from tfcdo.plan import algorithms
from tfcdo.plan import simulator
from tfcdo.plan import task_graph
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.schedule import Pack
from tfcdo.plan.schedule import Schedule
from tfcdo.plan.task_graph import TaskGraph
from tfcdo.topology.topology import Topology

_NUMBERS_OF_PACKS = (1, 2, 4, 8, 16, 32, 64)
# How much smaller the last pack is than the first, as all of it is left when the pass has ended.
_TAPERS = (1.0, 4.0)
# Runs of the simulator, of which the median counts: packs that are ready at once go in any order.
_NUM_RUNS = 3
# More packs cost ops, which the simulator does not count.
_WORTH_MORE_PACKS = 0.99


@dataclasses.dataclass(frozen=True)
class Gradient:
    """Facts about the gradient of one variable.

    Attributes:
      num_bytes: its bytes.
      rank: its number of dimensions.
    """

    num_bytes: int
    rank: int


@dataclasses.dataclass(frozen=True)
class OverlapPlan:
    """An all-reduce behind a backward pass.

    Attributes:
      algorithm: whose trees the packs take.
      schedule: the packs, in bytes, in the order in which they are ready.
      backward: the seconds of the backward pass.
      ready: when the gradients of each pack are there, in seconds since the pass began.
      done: when each pack is all-reduced.
    """

    algorithm: str
    schedule: Schedule
    backward: float
    ready: tuple[float, ...]
    done: tuple[float, ...]

    @property
    def exposed(self) -> float:
        """Returns how long the all-reduce goes on after the backward pass, in seconds."""
        return max(max(self.done, default=0.0) - self.backward, 0.0)


def ready_times(gradients: Sequence[Gradient], backward: float) -> list[float]:
    """Estimates when a backward pass has made each gradient.

    Networks are mostly made so that each layer takes about as long as another: each kernel or
    matrix takes the same part of the pass, vectors take none.

    Args:
      gradients: those of the variables, in the order of the layers.
      backward: the seconds of the pass.

    Returns:
      Seconds since the pass began, in the order of the layers.

    Example:
      >>> ready_times([Gradient(400, 2), Gradient(20, 1), Gradient(400, 2)], 1.0)
      [1.0, 0.5, 0.5]
    """
    costly = [gradient.rank > 1 for gradient in gradients]
    if not any(costly):
        costly = [True] * len(gradients)
    done = list(itertools.accumulate(reversed(costly)))[::-1]
    return [backward * made / sum(costly) for made in done]


def plan_overlap(
    gradients: Sequence[Gradient],
    topology: Topology,
    backward: float,
    algorithm: str = "auto",
) -> OverlapPlan:
    """Chooses number and sizes of packs, and trees, so that least is left after a backward pass.

    Args:
      gradients: those of the variables, in the order of the layers.
      topology: the machine.
      backward: the seconds of the pass.
      algorithm: whose trees to deal out to the packs in turn; "auto" for those that leave least.

    Returns:
      The plan; of those that leave nearly as little, one of few packs.

    Raises:
      ValueError: if the algorithm is unknown.

    Example:
      >>> from tfcdo.topology import preset
      >>> layers = [Gradient(25 * 10**6, 2)] * 4
      >>> found = plan_overlap(layers, preset("pcie"), 60e-3, "ring")
      >>> alone = simulator.robust_seconds(
      ...     algorithms.make_schedule("ring", preset("pcie"), 10**8), preset("pcie"))
      >>> found.exposed < 0.5 * alone
      True
    """
    return _plan_overlap(tuple(gradients), topology, backward, algorithm)


@functools.lru_cache(maxsize=64)
def _plan_overlap(
    gradients: tuple[Gradient, ...], topology: Topology, backward: float, algorithm: str
) -> OverlapPlan:
    algorithms.check_algorithm(algorithm)
    size = sum(gradient.num_bytes for gradient in gradients)
    best: OverlapPlan | None = None
    for num_packs, taper, (name, trees) in itertools.product(
        _NUMBERS_OF_PACKS, _TAPERS, _trees_by_name(algorithm, topology, size).items()
    ):
        if num_packs == 1 and taper != _TAPERS[0]:
            continue
        in_turn = [trees[index % len(trees)] for index in range(num_packs)]
        found = _simulated(gradients, topology, backward, name, in_turn, taper)
        if best is None or found.exposed < _WORTH_MORE_PACKS * best.exposed:
            best = found
    assert best is not None
    return best


def _trees_by_name(
    algorithm: str, topology: Topology, size: int
) -> dict[str, tuple[CopyTree, ...]]:
    """Returns the trees that are dealt out to packs in turn, of each algorithm to be tried."""
    names: tuple[str, ...] = (algorithm,)
    if algorithm == "auto":
        names = (*algorithms.CLASSICS, "packed_trees")
        if algorithms.fastest_algorithm(topology, size) == "one_device":
            names = ("one_device",)
    return {
        name: tuple(
            pack.tree for pack in algorithms.make_schedule(name, topology, max(size, 1)).packs
        )
        for name in names
    }


def _simulated(
    gradients: Sequence[Gradient],
    topology: Topology,
    backward: float,
    algorithm: str,
    trees: Sequence[CopyTree],
    taper: float,
) -> OverlapPlan:
    size = sum(gradient.num_bytes for gradient in gradients)
    packs = _tapered(size, len(trees), taper)
    schedule = Schedule(
        topology.num_devices,
        size,
        tuple(Pack(start, stop, tree) for (start, stop), tree in zip(packs, trees, strict=False)),
    )
    ready = _ready_packs(gradients, schedule, ready_times(gradients, backward))
    return OverlapPlan(algorithm, schedule, backward, ready, _done(schedule, topology, ready))


def _tapered(size: int, count: int, taper: float) -> list[tuple[int, int]]:
    """Cuts `size` units into ranges that shrink evenly, the last to a part of the first."""
    weights = [taper + (1 - taper) * index / max(count - 1, 1) for index in range(count)]
    ends = list(itertools.accumulate(weights))
    stops = [round(size * (end / ends[-1])) for end in ends]
    return [pair for pair in zip([0, *stops], stops, strict=False) if pair[1] > pair[0]]


def _ready_packs(
    gradients: Sequence[Gradient], schedule: Schedule, times: Sequence[float]
) -> tuple[float, ...]:
    """Returns when the last of a pack's gradients is there, from the last layer to the first."""
    stops = list(itertools.accumulate(one.num_bytes for one in reversed(gradients)))
    ready, position = [], 0
    for pack in schedule.packs:
        while stops[position] < pack.stop:
            position += 1
        ready.append(times[len(gradients) - 1 - position])
    return tuple(ready)


def _done(schedule: Schedule, topology: Topology, ready: Sequence[float]) -> tuple[float, ...]:
    graph = _waiting(task_graph.build(schedule, topology), ready)
    runs = []
    for seed in range(_NUM_RUNS):
        _, ends = simulator.run_shuffled(graph, 0.0, seed)
        done = list(ready)
        for (_, pack, _, _), end in zip(graph.names, ends, strict=True):
            done[pack] = max(done[pack], end)
        runs.append(tuple(done))
    # One run as it was: of each pack's own median, the last would be earlier than in any run.
    return sorted(runs, key=lambda done: max(done, default=0.0))[_NUM_RUNS // 2]


def _waiting(graph: TaskGraph, ready: Sequence[float]) -> TaskGraph:
    """Makes all tasks that wait for nothing wait for the gradients of their pack."""
    builder = task_graph.TaskGraphBuilder(graph)
    for pack, seconds in enumerate(ready):
        builder.wait_for_gradients(graph, pack, seconds, graph.num_resources + pack)
    return builder.graph()
