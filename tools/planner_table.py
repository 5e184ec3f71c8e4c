"""Writes docs/planner.md: how near to the bound `auto` comes on machines that nobody has seen.

`python tools/planner_table.py` takes some minutes. Plans are searched anew, in a folder of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence

from drawn_machines import draw_machine

from tfcdo.plan import algorithms
from tfcdo.plan import simulator
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.topology.isomorphism import isomorphisms
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

MB, GB = 10**6, 10**9
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "planner.md"
_SEEDS = 20
_HEAD = """# How near to the bound plans come

Made by `python tools/planner_table.py`. The time is the median of 20 simulated runs in which each
copy takes up to 5 % more or less and nothing keeps the copies in an order; the bound is that of
`tfcdo.plan.lower_bound`, which no copy trees beat, whatever links they use. The drawn machines are
those of `tools/drawn_machines.py`: connected graphs of links of 0.3 to 300 GB/s, some of them
asymmetric, some with shared ports, and one to three host bridges for all other pairs. The parts of a
DGX-1 are all of 3 to 7 of its devices, up to symmetry. Targets are of the median and of the most.

| machines | number | bytes | time / bound of `auto`, median | most | targets | over its best algorithm, most | seconds to plan, most |
|---|---|---|---|---|---|---|---|
"""  # noqa: E501


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of `auto` on one machine.

    Attributes:
      ratio: its robust time over the bound.
      regret: its robust time over that of the fastest algorithm.
      planning: the seconds that a first plan took, of CPU time.
    """

    ratio: float
    regret: float
    planning: float


def judge(machine: Topology, num_bytes: int) -> Result:
    """Plans for a machine as a first call does, and judges what came out."""
    began = time.process_time()
    algorithms.make_schedule("auto", machine, num_bytes)
    planning = time.process_time() - began
    seconds = {
        name: simulator.robust_seconds(
            algorithms.make_schedule(name, machine, num_bytes), machine, num_seeds=_SEEDS
        )
        for name in algorithms.ALGORITHMS
    }
    ratio = seconds["auto"] / lower_bound(machine, num_bytes)
    return Result(ratio, seconds["auto"] / min(seconds.values()), planning)


def parts_of_dgx1() -> list[Topology]:
    """Returns the parts of a DGX-1 of 3 to 7 devices that differ in more than numbering."""
    whole = preset("dgx1")
    found: list[Topology] = []
    for size in range(3, 8):
        for devices in itertools.combinations(range(8), size):
            part = whole.subset(devices)
            if not any(
                part.num_devices == other.num_devices
                and next(iter(isomorphisms(part, other, 1)), None) is not None
                for other in found
            ):
                found.append(part)
    return found


def row(name: str, machines: Iterable[Topology], num_bytes: int, targets: str) -> str:
    """Returns the table's row of a group of machines."""
    results = []
    for machine in machines:
        results.append(judge(machine, num_bytes))
        sys.stderr.write(f"{machine.name} {num_bytes}: {results[-1]}\n")
    ratios = [result.ratio for result in results]
    return (
        f"| {name} | {len(results)} | {num_bytes // MB} MB | {statistics.median(ratios):.2f} "
        f"| {max(ratios):.2f} | {targets} | {max(result.regret for result in results):.3f} "
        f"| {max(result.planning for result in results):.1f} |"
    )


def drawn(sizes: Sequence[int], seeds: int) -> list[Topology]:
    """Returns machines of several sizes."""
    return [draw_machine(devices, seed) for devices in sizes for seed in range(seeds)]


def main() -> None:
    """Judges all groups and writes the page."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TFCDO_CACHE_DIR"] = folder
        rows = [
            row("drawn, 2 to 4 devices", drawn((2, 3, 4), 5), GB, "1.08, 1.30"),
            row("drawn, 5 to 9 devices", drawn(range(5, 10), 3), GB, "1.22, 1.65"),
            row("drawn, 10 to 16 devices", drawn(range(10, 17), 2), GB, "1.55, 2.10"),
            row("parts of a DGX-1", parts_of_dgx1(), GB, "1.18, 1.32"),
            *(
                row(f"{name}:{preset(name).num_devices}", [preset(name)], num_bytes, "")
                for name in ("dgx1", "dgx1_p100", "nvswitch", "pcie")
                for num_bytes in (25 * MB, 100 * MB, GB)
            ),
        ]
    PAGE.write_text(_HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
