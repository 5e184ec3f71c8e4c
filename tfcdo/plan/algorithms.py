"""The all-reduce algorithms by name: each gives the copy trees of the packs."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tfcdo import checks, log
from tfcdo.plan import copy_tree, packed_trees, simulator, tree_program
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.plan import Plan, cut, in_turn, plan_of_bytes, size_class
from tfcdo.topology.topology import Topology, check_topology

Algorithm: TypeAlias = "str | Sequence[CopyTree] | Plan"


def _of_each_root(tree: Callable[[int, int], CopyTree]) -> Callable[[int], tuple[CopyTree, ...]]:
    """Returns a function that returns one tree for each device, rooted there."""
    return lambda num_devices: tuple(tree(num_devices, root) for root in range(num_devices))


# The trees of each algorithm over a number of devices; pack i is sent along the i-th of them.
# Ring: Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
# 2009. Shuffle (pairwise exchange) and halving-doubling (at distances 1, 2, 4, ...): Thakur,
# Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
# Hierarchical copy: `tf.distribute.HierarchicalCopyAllReduce`.
CLASSICS: Mapping[str, Callable[[int], tuple[CopyTree, ...]]] = {
    "one_device": lambda num_devices: (copy_tree.star(num_devices),),
    "ring": _of_each_root(copy_tree.chain),
    "shuffle": _of_each_root(copy_tree.star),
    "halving_doubling": _of_each_root(copy_tree.binomial),
    "hierarchical_copy": _of_each_root(copy_tree.two_level),
}
ALGORITHMS: tuple[str, ...] = (*CLASSICS, "packed_trees", "auto")
# With more packs than this, `auto` judges the algorithms by a part: the links are as busy with it.
_MAX_JUDGED_PACKS = 64
# For more devices than this `auto` does not simulate, which takes time with their cube.
MAX_SIMULATED_DEVICES = 64


def resized(plan: Plan, num_bytes: int) -> Plan:
    """Returns the same trees with the same shares of another number of bytes.

    Packs that become empty are left out; a pack that waited for one of them waits for the pack that
    it waited for.
    """
    packs: list[tuple[int, CopyTree, int | None]] = []
    # The pack of the new plan that stands for each old one: its own, or its window's.
    stands_for: list[int | None] = []
    total, stop, start = max(plan.num_sent_bytes, 1), 0, 0
    for pack, tree in zip(plan.packs, plan.trees, strict=True):
        after = None if pack.after is None else stands_for[pack.after]
        stands_for.append(after)
        stop += pack.num_sent_bytes
        end = (stop * num_bytes + total // 2) // total
        if end > start:
            stands_for[-1] = len(packs)
            packs.append((end - start, tree, after))
            start = end
    return plan_of_bytes(len(plan.nodes), packs)


def make_plan(
    algorithm: Algorithm,
    topology: Topology,
    num_bytes: int,
    num_packs: int | None = None,
) -> Plan:
    """Plans how an algorithm all-reduces some data on a machine.

    Args:
      algorithm: one of `ALGORITHMS`; "packed_trees" plans for this machine, "auto" takes the
        fastest of the others. Or copy trees over the topology's devices, which the packs get in
        turn. Or a plan, whose trees get the same parts of the data.
      topology: the machine.
      num_bytes: how many bytes each device holds; 0 gives a plan without packs.
      num_packs: cut the data into this many packs whose sizes differ by at most one byte; by
        default the number and the sizes that the algorithm needs.

    Returns:
      A plan of bytes over the topology's devices, with windows where the algorithm has them. The
      same arguments give the same plan, in any process.

    Raises:
      ValueError: if the algorithm is unknown or its trees have another number of devices,
        `num_bytes` is negative or `num_packs` is below 1.
      TypeError: if `algorithm` is neither a name nor copy trees, `topology` not a topology, or
        `num_bytes` or `num_packs` not an int.

    Example:
      >>> from tfcdo import plan
      >>> from tfcdo.topology import preset
      >>> ring = plan.make_plan("ring", preset("dgx1"), 800)
      >>> len(ring.packs), ring.packs[3].num_bytes, ring.packs[3].tree.root
      (8, 100, 3)
    """
    check_topology(topology)
    checks.check_sizes(num_bytes, num_packs)
    if isinstance(algorithm, str):
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")
        return _make_plan(algorithm, topology, num_bytes, num_packs)
    trees = _checked_trees(algorithm, topology)
    if isinstance(algorithm, Plan) and num_packs is None:
        return resized(algorithm, num_bytes)
    return in_turn(cut(num_bytes, len(trees) if num_packs is None else num_packs), trees)


def _checked_trees(algorithm: Any, topology: Topology) -> Sequence[CopyTree]:
    trees = algorithm.trees if isinstance(algorithm, Plan) else algorithm
    if not isinstance(trees, Sequence) or not all(isinstance(tree, CopyTree) for tree in trees):
        raise TypeError(f"algorithm must be a name or a list of copy trees; got {trees!r}")
    if not trees:
        raise ValueError(f"algorithm must be a name or at least one copy tree; got {trees!r}")
    for index, tree in enumerate(trees):
        if tree.num_devices != topology.num_devices:
            raise ValueError(
                f"algorithm[{index}] must span the {topology.num_devices} devices of the topology; "
                f"got a tree over {tree.num_devices}"
            )
    return trees


# Behind the checks, because to the cache 1e8 and True are the same as 10**8 and 1.
@functools.lru_cache(maxsize=512)
def _make_plan(algorithm: str, topology: Topology, num_bytes: int, num_packs: int | None) -> Plan:
    if algorithm == "auto":
        algorithm = fastest_algorithm(topology, num_bytes, num_packs)
    if algorithm == "packed_trees":
        return packed_trees.packed_trees(topology, num_bytes, num_packs)
    return make_plan(CLASSICS[algorithm](topology.num_devices), topology, num_bytes, num_packs)


def fastest_algorithm(topology: Topology, num_bytes: int, num_packs: int | None = None) -> str:
    """Returns the name of the algorithm that `auto` stands for, and logs it once.

    It has the least `robust_seconds`; of nearly equal ones, the first of `ALGORITHMS`. Where all
    devices add with the same cores, one device is as fast as anything. More than
    `MAX_SIMULATED_DEVICES` devices take the ring, in which each device sends least, or for fewer
    packs than a ring has halving-doubling, which has the fewest copies one after another.
    """
    return _decide(topology, size_class(num_bytes), num_packs)


@functools.lru_cache(maxsize=512)
def _decide(topology: Topology, num_bytes: int, num_packs: int | None) -> str:
    """Decides for all sizes of a class; logs the decision, and how long it took if that is long."""
    began = time.monotonic()
    name = _fastest(topology, num_bytes, num_packs)
    if num_bytes and topology.num_devices > 1:
        packs = len(make_plan(name, topology, num_bytes, num_packs).packs)
        seconds = time.monotonic() - began
        log.info_once(
            f"auto takes {name}, {packs} pack{'s' if packs > 1 else ''}, for about "
            f"{num_bytes / 1e6:.2g} MB on each of the {topology.num_devices} devices of "
            f"{topology.name}" + (f"; to plan this took {seconds:.1f} s" if seconds > 1 else "")
        )
    return name


def _fastest(topology: Topology, num_bytes: int, num_packs: int | None) -> str:
    alone = simulator.simulate(make_plan("one_device", topology, num_bytes), topology).seconds
    if alone <= simulator.NEARLY_AS_FAST * tree_program.additions_bound(topology, num_bytes):
        return "one_device"
    if topology.num_devices > MAX_SIMULATED_DEVICES:
        few = num_packs is not None and num_packs < topology.num_devices
        return "halving_doubling" if few else "ring"
    if num_packs is not None and num_packs > _MAX_JUDGED_PACKS:
        num_bytes = num_bytes * _MAX_JUDGED_PACKS // num_packs
        num_packs = _MAX_JUDGED_PACKS
    seconds: dict[str, float] = {}
    for name in (*CLASSICS, "packed_trees"):
        plan = make_plan(name, topology, num_bytes, num_packs)
        cutoff = min(seconds.values(), default=math.inf)
        seconds[name] = simulator.robust_seconds(plan, topology, cutoff=cutoff)
    return simulator.first_of_fastest(seconds)
