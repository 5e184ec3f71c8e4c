"""The all-reduce algorithms by name: each says which copy trees the packs travel along."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from tfcdo import checks
from tfcdo import log
from tfcdo.plan import search
from tfcdo.plan import simulator
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.copy_tree import binomial
from tfcdo.plan.copy_tree import chain
from tfcdo.plan.copy_tree import star
from tfcdo.plan.copy_tree import two_level
from tfcdo.plan.lower_bound import additions_bound
from tfcdo.plan.schedule import Schedule
from tfcdo.plan.schedule import assign
from tfcdo.plan.schedule import cut
from tfcdo.plan.size_class import size_class
from tfcdo.topology.topology import Topology


def one_device(num_devices: int) -> tuple[CopyTree, ...]:
    """Returns the tree of a reduction to one device: everything is summed on device 0.

    Args:
      num_devices: how many devices there are.

    Returns:
      One star, so one pack.

    Example:
      >>> one_device(3)
      (CopyTree(parents=(None, 0, 0)),)
    """
    return (star(num_devices, 0),)


def ring(num_devices: int) -> tuple[CopyTree, ...]:
    """Returns the trees of a ring: pack `i` is summed along it up to device `i`, and copied back.

    Args:
      num_devices: how many devices there are.

    Returns:
      One chain for each device, each beginning one device further.

    References:
      Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
      2009.

    Example:
      >>> [tree.parents for tree in ring(3)]
      [(None, 0, 1), (2, None, 1), (2, 0, None)]
    """
    return tuple(chain(num_devices, root) for root in range(num_devices))


def shuffle(num_devices: int) -> tuple[CopyTree, ...]:
    """Returns the trees of a shuffle: each device sums one pack of all, and sends it to all.

    Args:
      num_devices: how many devices there are.

    Returns:
      One star for each device.

    References:
      Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
      MPICH", 2005 (pairwise exchange).

    Example:
      >>> [tree.parents for tree in shuffle(3)]
      [(None, 0, 0), (1, None, 1), (2, 2, None)]
    """
    return tuple(star(num_devices, root) for root in range(num_devices))


def halving_doubling(num_devices: int) -> tuple[CopyTree, ...]:
    """Returns the trees of halving-doubling: pack `i` takes the binomial tree of device `i`.

    In a power of two devices, rounds pair devices at distance 1, 2, 4, ...; any other number works
    too, with trees that lack some leaves.

    Args:
      num_devices: how many devices there are.

    Returns:
      One binomial tree for each device.

    References:
      Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
      MPICH", 2005.

    Example:
      >>> [tree.parents for tree in halving_doubling(3)]
      [(None, 0, 0), (1, None, 1), (2, 2, None)]
    """
    return tuple(binomial(num_devices, root) for root in range(num_devices))


def hierarchical_copy(num_devices: int) -> tuple[CopyTree, ...]:
    """Returns the trees of hierarchical copy: two stars, and one edge between their centres.

    Pack `i` is rooted on device `i`; on 8 devices these are the trees made for a DGX-1.

    Args:
      num_devices: how many devices there are.

    Returns:
      One two-level tree for each device.

    References:
      TensorFlow API reference, `tf.distribute.HierarchicalCopyAllReduce`.

    Example:
      >>> hierarchical_copy(8)[0].parents
      (None, 0, 0, 0, 0, 4, 4, 4)
    """
    return tuple(two_level(num_devices, root) for root in range(num_devices))


Algorithm: TypeAlias = "str | tuple[CopyTree, ...] | Schedule"
# Makes the schedule for a number of bytes and of packs, None for as many as the algorithm asks for.
Scheduler: TypeAlias = Callable[[int, "int | None"], Schedule]
CLASSICS: Mapping[str, Callable[[int], tuple[CopyTree, ...]]] = {
    "one_device": one_device,
    "ring": ring,
    "shuffle": shuffle,
    "halving_doubling": halving_doubling,
    "hierarchical_copy": hierarchical_copy,
}
ALGORITHMS: tuple[str, ...] = (*CLASSICS, "packed_trees", "auto")
# Of more packs than this, `auto` judges the algorithms by a part: the links are as busy with it.
_MAX_JUDGED_PACKS = 64
# For more devices than this `auto` does not simulate, which takes time with their cube.
MAX_SIMULATED_DEVICES = 64
_WORTH_MORE_PACKS = 0.995
# Two algorithms may draw apart by as much as the size differs from that for which `auto` decides:
# within a class by 2 % of it, which is much less than that in time.
_CLASSES_PER_DOUBLING = 16


def check_algorithm(algorithm: str) -> None:
    """Raises unless there is an algorithm of this name.

    Args:
      algorithm: the name.

    Raises:
      ValueError: if it is not one of `ALGORITHMS`.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}; known are {', '.join(ALGORITHMS)}")


def scheduler(algorithm: Algorithm, topology: Topology) -> Scheduler:
    """Returns the function that makes the schedules of an algorithm on a machine.

    Args:
      algorithm: one of `ALGORITHMS`; copy trees to be dealt out in turn, which ask for one pack
        each; or a schedule, whose trees get the same parts of the data.
      topology: the machine.

    Returns:
      A function of the number of bytes and of packs, as `make_schedule`.

    Raises:
      ValueError: if `algorithm` is an unknown name, no trees at all, or trees that do not span the
        topology's devices.

    Example:
      >>> from tfcdo.topology import preset
      >>> schedule = scheduler((star(4, 2),), preset("pcie", 4))(10, None)
      >>> [(pack.start, pack.stop, pack.tree.root) for pack in schedule.packs]
      [(0, 10, 2)]
    """
    if isinstance(algorithm, str):
        check_algorithm(algorithm)
        return functools.partial(make_schedule, algorithm, topology)
    if isinstance(algorithm, Schedule):
        planned, trees = algorithm, tuple(pack.tree for pack in algorithm.packs)
    else:
        planned, trees = None, algorithm
    if not trees:
        raise ValueError(f"algorithm must be a name or at least one copy tree; got {trees!r}")
    for index, tree in enumerate(trees):
        if tree.num_devices != topology.num_devices:
            raise ValueError(
                f"algorithm[{index}] must span the {topology.num_devices} devices of the topology; "
                f"got a tree over {tree.num_devices}"
            )

    def deal_out(num_bytes: int, num_packs: int | None) -> Schedule:
        if planned is not None and num_packs is None:
            return planned.resized(num_bytes)
        return assign(num_bytes, cut(num_bytes, num_packs or len(trees)), trees)

    return deal_out


def make_schedule(
    algorithm: str,
    topology: Topology,
    num_bytes: int,
    num_packs: int | None = None,
) -> Schedule:
    """Plans how an algorithm all-reduces some data on a machine.

    Args:
      algorithm: one of `ALGORITHMS`; `packed_trees` is `tfcdo.plan.search.packed_trees`, `auto`
        whichever of the others `fastest_algorithm` names.
      topology: the machine.
      num_bytes: how many bytes each device holds; 0 gives a schedule without packs.
      num_packs: cut the data into this many packs whose sizes differ by at most one byte, and give
        them the algorithm's trees in turn; by default the number that the algorithm asks for.

    Returns:
      A schedule in bytes over the topology's devices. The same arguments give the same schedule.

    Raises:
      ValueError: if the algorithm is unknown, `num_bytes` is negative or `num_packs` is below 1.
      TypeError: if `num_bytes` or `num_packs` is not an int.

    Example:
      >>> from tfcdo.topology import preset
      >>> schedule = make_schedule("ring", preset("dgx1"), 800)
      >>> len(schedule.packs), schedule.packs[3].size, schedule.packs[3].tree.root
      (8, 100, 3)
    """
    check_algorithm(algorithm)
    checks.check_sizes(num_bytes, num_packs)
    return _make_schedule(algorithm, topology, num_bytes, num_packs)


# Behind the checks, because to the cache 1e8 and True are the same as 10**8 and 1.
@functools.lru_cache(maxsize=512)
def _make_schedule(
    algorithm: str, topology: Topology, num_bytes: int, num_packs: int | None
) -> Schedule:
    if algorithm == "auto":
        algorithm = fastest_algorithm(topology, num_bytes, num_packs)
    if algorithm == "packed_trees":
        return search.packed_trees(topology, num_bytes, num_packs)
    trees = CLASSICS[algorithm](topology.num_devices)
    ranges = cut(num_bytes, len(trees) if num_packs is None else num_packs)
    return assign(num_bytes, ranges, trees)


def fastest_algorithm(topology: Topology, num_bytes: int, num_packs: int | None = None) -> str:
    """Returns the name of the algorithm that `auto` stands for, and logs it once.

    Sizes that differ little share a decision. Where all devices add with the same cores, one device
    is as fast as anything. On more than `MAX_SIMULATED_DEVICES` devices it is the ring, in which
    each device sends and receives the least, or, in fewer packs than a ring has, halving-doubling,
    which has the fewest copies one after another.

    Args:
      topology: the machine.
      num_bytes: how many bytes each device holds.
      num_packs: see `make_schedule`.

    Returns:
      The name of the algorithm whose schedule takes the least time in the simulator, see
      `tfcdo.plan.simulator.robust_seconds`; the first of those that take nearly as little.

    Raises:
      ValueError, TypeError: as `make_schedule`.

    Example:
      >>> from tfcdo.topology import preset
      >>> fastest_algorithm(preset("dgx1"), 10**8)
      'packed_trees'
    """
    checks.check_sizes(num_bytes, num_packs)
    return _decide(topology, size_class(num_bytes, _CLASSES_PER_DOUBLING), num_packs)


@functools.lru_cache(maxsize=512)
def _decide(topology: Topology, num_bytes: int, num_packs: int | None) -> str:
    """Decides for all sizes of a class; logs the decision, and how long it took if that is long."""
    began = time.monotonic()
    name = _fastest(topology, num_bytes, num_packs)
    if num_bytes and topology.num_devices > 1:
        packs = len(make_schedule(name, topology, num_bytes, num_packs).packs)
        seconds = time.monotonic() - began
        log.info_once(
            f"auto takes {name}, {packs} pack{'s' if packs > 1 else ''}, for about "
            f"{num_bytes / 1e6:.2g} MB on each of the {topology.num_devices} devices of "
            f"{topology.name}" + (f"; to plan this took {seconds:.1f} s" if seconds > 1 else "")
        )
    return name


def _fastest(topology: Topology, num_bytes: int, num_packs: int | None) -> str:
    alone = simulator.robust_seconds(make_schedule("one_device", topology, num_bytes), topology)
    if alone <= additions_bound(topology, num_bytes) / _WORTH_MORE_PACKS:
        return "one_device"
    if topology.num_devices > MAX_SIMULATED_DEVICES:
        few = num_packs is not None and num_packs < topology.num_devices
        return "halving_doubling" if few else "ring"
    if num_packs is not None and num_packs > _MAX_JUDGED_PACKS:
        num_bytes = num_bytes * _MAX_JUDGED_PACKS // num_packs
        num_packs = _MAX_JUDGED_PACKS
    seconds: dict[str, float] = {}
    for name in (*CLASSICS, "packed_trees"):
        schedule = make_schedule(name, topology, num_bytes, num_packs)
        least = min(seconds.values(), default=math.inf)
        seconds[name] = simulator.robust_seconds(schedule, topology, cutoff=least)
    return choose(seconds)


def choose(seconds: Mapping[str, float]) -> str:
    """Returns the algorithm to take, given the time of each.

    Args:
      seconds: the time of each algorithm, those first that ask for few packs.

    Returns:
      The first of those that take nearly as little time as any.

    Example:
      >>> choose({"one_device": 2.0, "ring": 1.001, "shuffle": 1.0})
      'ring'
    """
    # Packs cost ops, which the simulator does not count: more of them must be worth it.
    enough = min(seconds.values()) / _WORTH_MORE_PACKS
    return next(name for name, each in seconds.items() if each <= enough)
