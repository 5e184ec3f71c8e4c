"""Finds the forests that come with the package: `python tools/bundle_plans.py`.

Writes `bundled_plans.json` anew, the same on every run; it takes about four minutes on two cores.
What is found for one size serves all sizes: `packed_trees` tries all forests of a machine.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tfcdo.plan import plan_cache
from tfcdo.plan import search
from tfcdo.plan import simulator
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.tree_packing import Permutation
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.plan.tree_packing import neighbours_of
from tfcdo.plan.tree_packing import ring_paths
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

KB, MB, GB = 10**3, 10**6, 10**9


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
        """The topology."""
        whole = preset(self.topology, self.num_devices)
        return whole.subset(self.subset) if self.subset else whole


@dataclasses.dataclass(frozen=True)
class Case:
    """What to search for, and how.

    Several annealings begin at random forests; the best few of what they find are annealed thrice
    more, each time cooler, and the best of that is kept. For larger sizes the search goes on from
    copies of the forest, because smaller packs keep more links busy.

    Attributes:
      machine: the machine.
      num_bytes: the size.
      trees: how many trees to begin with; 0 for `search.search` instead of all this.
      rings: begin with paths along rings instead of random trees.
      symmetric: whether to search representatives and add their images.
      robustness: see `search.cost`.
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
    for num_bytes in (10 * KB, 100 * KB, MB, 5 * MB, 25 * MB, 100 * MB, GB)
)


def solve(case: Case) -> list[tuple[int, TreePacking]]:
    """Searches the forests of a case.

    Args:
      case: what to search for.

    Returns:
      The sizes and the forests found for them.
    """
    topology = case.machine.build()
    if not case.trees:
        return [(case.num_bytes, search.search(topology, case.num_bytes))]
    group = search.symmetries(topology) if case.symmetric else search.symmetries(topology)[:1]

    def cost(forest: TreePacking, num_bytes: int) -> float:
        images = forest.expanded(group)
        return search.cost(images, topology, num_bytes, robustness=case.robustness)

    def polished(forest: TreePacking, num_bytes: int, seed: int) -> TreePacking:
        for round_ in range(3):
            forest = search.improve(
                forest, topology, num_bytes, group=group, tasks=case.polish_tasks,
                seed=seed + 100 * (round_ + 1), temperature=case.polish_temperature / 2**round_,
                robustness=case.robustness,
            )  # fmt: skip
        return forest

    rough = []
    for seed in range(case.seeds):
        start = _start(case, topology, group, random.Random(seed))
        forest = search.improve(
            start, topology, case.num_bytes, group=group,
            tasks=case.tasks, seed=seed, temperature=case.temperature, robustness=case.robustness,
        )  # fmt: skip
        rough.append((cost(forest, case.num_bytes), seed, forest))
    rough.sort(key=lambda entry: entry[:2])
    fine = [polished(forest, case.num_bytes, seed) for _, seed, forest in rough[: case.kept]]
    best = min(fine, key=lambda forest: cost(forest, case.num_bytes))
    found = [(case.num_bytes, best.expanded(group).rounded())]
    for num_bytes, copies in case.larger:
        copied = TreePacking(best.trees * copies, best.shares * copies)
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
    for tree, share in zip(paths.trees, paths.shares, strict=True):
        images = TreePacking((tree,), (share,)).expanded(group).trees
        orbits.setdefault(frozenset(images), (tree, share))
    rings = sorted(set(paths.shares), reverse=True)
    chosen = [
        path
        for ring in rings
        for path in rng.sample(
            [path for path in orbits.values() if path[1] == ring], case.trees // len(rings)
        )
    ]
    return TreePacking(tuple(tree for tree, _ in chosen), tuple(share for _, share in chosen))


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


def entries(case: Case, found: Iterable[tuple[int, TreePacking]]) -> list[dict[str, Any]]:
    """What `bundled_plans.json` says of the forests of a case.

    Args:
      case: the case.
      found: what `solve` returned.

    Returns:
      One entry for each forest, with its times against the bound for the reader's information.
    """
    topology = case.machine.build()
    lines = []
    for num_bytes, forest in found:
        schedule = forest.schedule(num_bytes)
        bound = lower_bound(topology, num_bytes)
        lines.append(
            {
                "topology": case.machine.topology,
                "num_devices": case.machine.num_devices,
                **({"subset": list(case.machine.subset)} if case.machine.subset else {}),
                "num_bytes": num_bytes,
                "robust_ratio": round(simulator.robust_seconds(schedule, topology) / bound, 3),
                "forest": plan_cache.encode(forest),
            }
        )
    return lines


def main() -> None:
    """Searches all cases and writes `bundled_plans.json`."""
    cases = (*HARD_CASES, *EASY_CASES)
    unique: dict[str, str] = {}
    with concurrent.futures.ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        for case, found in zip(cases, pool.map(solve, cases), strict=True):
            for entry in entries(case, found):
                machine = [entry["topology"], entry["num_devices"], entry.get("subset")]
                forest = json.dumps([machine, entry["forest"]])
                unique.setdefault(forest, json.dumps(entry))
                shown = {key: value for key, value in entry.items() if key != "forest"}
                sys.stdout.write(f"{shown} packs: {len(entry['forest']['shares'])}\n")
                sys.stdout.flush()
    text = "[\n" + ",\n".join(unique.values()) + "\n]\n"
    plan_cache.PRESETS_FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
