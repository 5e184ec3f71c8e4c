"""Searches the tree packings that come with the package: `python tools/bundle_plans.py`.

Writes `bundled_plans.json` anew, with what it has found and what was there, as far as it is the
fastest for some size; it takes about four minutes on two cores. What is found for one size serves
all sizes: `packed_trees` tries all packings of a machine.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence

import msgspec

from tfcdo.plan import annealing
from tfcdo.plan import bundled_plans
from tfcdo.plan import search
from tfcdo.plan import simulator
from tfcdo.plan.bundled_plans import BundledPlan
from tfcdo.plan.candidates import neighbours_of
from tfcdo.plan.candidates import ring_paths
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.tree_packing import Permutation
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.topology.isomorphism import symmetries
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

KB, MB, GB = 10**3, 10**6, 10**9
SIZES = (10 * KB, 100 * KB, MB, 5 * MB, 25 * MB, 100 * MB, GB)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A preset topology, or a part of one.

    Attributes:
      topology: the preset's name.
      num_devices: the preset's size.
      subset: the devices, if not all.
    """

    topology: str
    num_devices: int
    subset: tuple[int, ...] = ()

    def build(self) -> Topology:
        """Returns the topology."""
        whole = preset(self.topology, self.num_devices)
        return whole.subset(self.subset) if self.subset else whole


@dataclasses.dataclass(frozen=True)
class Case:
    """Says what to search for, and how.

    Several annealings begin at random packings; the best few of what they find are annealed thrice
    more, each time cooler, and the best of that is kept. For larger sizes the search goes on from
    copies of the packing, because smaller packs keep more links busy.

    Attributes:
      machine: the machine.
      num_bytes: the size.
      trees: how many trees to begin with; 0 for what a call finds at run time instead of all
        this.
      rings: begin with paths along rings instead of random trees.
      symmetric: whether to search representatives and add their images.
      robustness: see `annealing.cost`.
      seeds: how many annealings.
      tasks: how many tasks each of them simulates.
      temperature: how hot each begins.
      kept: how many to go on with.
      polish_tasks: how many tasks each of their further annealings simulates.
      polish_temperature: how hot the first of those begins.
      larger: `(num_bytes, copies)` of the searches that go on from what was found.
    """

    machine: Machine
    num_bytes: int
    trees: int = 0
    rings: bool = False
    symmetric: bool = False
    robustness: float = 0.5
    seeds: int = 1
    tasks: int = 0
    temperature: float = 0.0
    kept: int = 1
    polish_tasks: int = 0
    polish_temperature: float = 0.01
    larger: tuple[tuple[int, int], ...] = ()


DGX1 = Machine("dgx1", 8)
THREE = Machine("dgx1", 8, (0, 1, 2))
FIVE = Machine("dgx1", 8, (0, 1, 2, 3, 4))
PAIRS = Machine("pcie", 4)

HARD_CASES = (
    Case(DGX1, MB, trees=2, symmetric=True, robustness=0.0, seeds=30, tasks=60_000,
         temperature=0.1, polish_tasks=200_000, polish_temperature=0.05),
    Case(DGX1, 5 * MB, trees=2, symmetric=True, seeds=16, tasks=100_000, temperature=0.05, kept=3,
         polish_tasks=200_000, polish_temperature=0.02),
    Case(DGX1, 25 * MB, trees=4, rings=True, symmetric=True, seeds=4, tasks=600_000,
         temperature=0.02, kept=4, polish_tasks=600_000),
    Case(PAIRS, 100 * MB, trees=4, robustness=0.2, seeds=16, tasks=100_000, temperature=0.02,
         polish_tasks=400_000, larger=((GB, 1), (GB, 2))),
    Case(THREE, 100 * MB, trees=8, robustness=0.2, seeds=12, tasks=100_000, temperature=0.02,
         kept=2, polish_tasks=400_000, larger=((GB, 2), (GB, 3))),
    Case(FIVE, 100 * MB, trees=8, robustness=0.1, seeds=12, tasks=200_000, temperature=0.02,
         kept=5, polish_tasks=800_000, larger=((GB, 2),)),
)  # fmt: skip
# These machines get what the search at run time would find as well, so that they need none.
EASY_CASES = tuple(
    Case(machine, num_bytes)
    for machine in (
        DGX1,
        THREE,
        FIVE,
        PAIRS,
        Machine("dgx1_p100", 8),
        Machine("nvswitch", 8),
        Machine("fully_connected", 2),
        Machine("fully_connected", 4),
        Machine("fully_connected", 8),
    )
    for num_bytes in SIZES
)


def solve(case: Case) -> list[tuple[int, TreePacking]]:
    """Searches the packings of a case.

    Args:
      case: what to search for.

    Returns:
      The sizes and the packings found for them.
    """
    topology = case.machine.build()
    if not case.trees:
        packings = [search.search(topology, case.num_bytes), *search.dealt(topology)]
        return [(case.num_bytes, search.fastest(packings, topology, case.num_bytes))]
    group = symmetries(topology) if case.symmetric else symmetries(topology)[:1]

    def cost(packing: TreePacking, num_bytes: int) -> float:
        images = packing.expanded(group)
        return annealing.cost(images, topology, num_bytes, robustness=case.robustness)

    def polished(packing: TreePacking, num_bytes: int, seed: int) -> TreePacking:
        for round_ in range(3):
            packing = annealing.improve(
                packing, topology, num_bytes, group=group, tasks=case.polish_tasks,
                seed=seed + 100 * (round_ + 1), temperature=case.polish_temperature / 2**round_,
                robustness=case.robustness,
            )  # fmt: skip
        return packing

    rough = []
    for seed in range(case.seeds):
        start = _start(case, topology, group, random.Random(seed))
        packing = annealing.improve(
            start, topology, case.num_bytes, group=group,
            tasks=case.tasks, seed=seed, temperature=case.temperature, robustness=case.robustness,
        )  # fmt: skip
        rough.append((cost(packing, case.num_bytes), seed, packing))
    rough.sort(key=lambda entry: entry[:2])
    fine = [polished(packing, case.num_bytes, seed) for _, seed, packing in rough[: case.kept]]
    best = min(fine, key=lambda packing: cost(packing, case.num_bytes))
    found = [(case.num_bytes, best.expanded(group).rounded())]
    for num_bytes, copies in case.larger:
        copied = TreePacking(best.trees * copies, best.weights * copies)
        found.append((num_bytes, polished(copied, num_bytes, 0).expanded(group).rounded()))
    return found


def _start(
    case: Case,
    topology: Topology,
    group: Sequence[Permutation],
    rng: random.Random,
) -> TreePacking:
    if not case.rings:
        trees = tuple(_random_tree(topology, rng) for _ in range(case.trees))
        return TreePacking(trees, (1.0,) * case.trees)
    paths = ring_paths(topology)
    assert paths is not None
    # Of paths that are images of one another, one is enough; and each ring gets as many of them.
    orbits: dict[frozenset[CopyTree], tuple[CopyTree, float]] = {}
    for tree, weight in zip(paths.trees, paths.weights, strict=True):
        images = TreePacking((tree,), (weight,)).expanded(group).trees
        orbits.setdefault(frozenset(images), (tree, weight))
    rings = sorted(set(paths.weights), reverse=True)
    chosen = [
        path
        for ring in rings
        for path in rng.sample(
            [path for path in orbits.values() if path[1] == ring], case.trees // len(rings)
        )
    ]
    return TreePacking(tuple(tree for tree, _ in chosen), tuple(weight for _, weight in chosen))


def _random_tree(topology: Topology, rng: random.Random) -> CopyTree:
    neighbours = neighbours_of(topology)
    reached = [rng.randrange(topology.num_devices)]
    parents: list[int | None] = [None] * topology.num_devices
    while len(reached) < topology.num_devices:
        parent = rng.choice(reached)
        new = [device for device in neighbours[parent] if device not in reached]
        if new:
            child = rng.choice(new)
            parents[child] = parent
            reached.append(child)
    return CopyTree(tuple(parents))


def entries(case: Case, found: Iterable[tuple[int, TreePacking]]) -> list[BundledPlan]:
    """Returns what `bundled_plans.json` says of the packings of a case.

    Args:
      case: the case.
      found: what `solve` returned.

    Returns:
      One entry for each packing, with its time against the bound for the reader's information.
    """
    topology = case.machine.build()
    return [
        BundledPlan(
            topology=case.machine.topology,
            num_devices=case.machine.num_devices,
            subset=case.machine.subset or None,
            num_bytes=num_bytes,
            robust_ratio=round(
                simulator.robust_seconds(packing.schedule(num_bytes), topology)
                / lower_bound(topology, num_bytes),
                3,
            ),
            weights=packing.weights,
            parents=packing.to_document().parents,
        )
        for num_bytes, packing in found
    ]


def useful(plans: Sequence[BundledPlan]) -> list[BundledPlan]:
    """Returns the plans that are the fastest of those of their machine for one of the sizes."""
    by_machine: dict[Topology, dict[TreePacking, BundledPlan]] = {}
    for plan in plans:
        machine = plan.machine()
        packing = TreePacking.from_document(plan, machine.num_devices)
        by_machine.setdefault(machine, {}).setdefault(packing, plan)
    chosen = {
        own[search.fastest(list(own), machine, num_bytes)]
        for machine, own in by_machine.items()
        for num_bytes in SIZES
    }
    return [plan for plan in plans if plan in chosen]


def write(plans: Iterable[BundledPlan]) -> None:
    """Writes `bundled_plans.json`, one plan a line; of plans that are alike, the first."""
    lines = dict.fromkeys(msgspec.json.encode(plan).decode() for plan in plans)
    bundled_plans.FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def main() -> None:
    """Searches all cases and writes `bundled_plans.json`."""
    cases = (*HARD_CASES, *EASY_CASES)
    # What earlier versions of the search have found may be better than what this one finds.
    plans = list(bundled_plans.read())
    with tempfile.TemporaryDirectory() as folder:
        # Trees that earlier searches have kept are not looked at.
        os.environ["TFCDO_CACHE_DIR"] = folder
        with concurrent.futures.ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
            for case, found in zip(cases, pool.map(solve, cases), strict=True):
                for plan in entries(case, found):
                    plans.append(plan)
                    where = f"{plan.topology}:{plan.num_devices} {plan.subset or ''}"
                    sys.stdout.write(
                        f"{where} {plan.num_bytes} bytes: {len(plan.weights)} packs, "
                        f"{plan.robust_ratio} times the bound\n"
                    )
                    sys.stdout.flush()
    write(useful(plans))


if __name__ == "__main__":
    main()
