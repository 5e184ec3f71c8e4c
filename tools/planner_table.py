"""Writes the table of docs/planner.md: how near to the bound `auto` comes on many machines.

`python tools/planner_table.py` takes about ten minutes; with a number N, every N-th machine of each
group is judged.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import networkx as nx
from drawn_machines import draw_buses, draw_machine, draw_slow_link

from tfcdo.plan import algorithms, lower_bound, simulator
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

MB, GB = 10**6, 10**9
SIZES = (GB, 25 * MB, MB)
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "planner.md"
MARK = "<!-- made by tools/planner_table.py -->\n"
HEAD = """| machines | number | bytes | time / bandwidth bound | time / tight bound | CPU seconds |
|---|---|---|---|---|---|
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of `auto` on one machine.

    Attributes:
      ratio: its robust time over the bandwidth bound.
      tight_ratio: the same over the tight bound.
      planning: the seconds that a first plan took, of CPU time.
    """

    ratio: float
    tight_ratio: float
    planning: float


def judge(machine: Topology, num_bytes: int) -> Result:
    """Plans for a machine as a first call does, and judges the plan."""
    began = time.process_time()
    plan = algorithms.make_plan("auto", machine, num_bytes)
    planning = time.process_time() - began
    seconds = simulator.robust_seconds(plan, machine)
    return Result(
        seconds / lower_bound.bandwidth_bound(machine, num_bytes),
        seconds / lower_bound.lower_bound_seconds(machine, num_bytes),
        planning,
    )


def parts_of_dgx1() -> list[Topology]:
    """Returns the parts of a DGX-1 of 3 to 7 devices that differ in more than numbering."""
    whole = preset("dgx1")
    found: list[tuple[Topology, nx.DiGraph]] = []
    for size in range(3, 8):
        for devices in itertools.combinations(range(8), size):
            part = whole.subset(devices)
            graph = nx.DiGraph()
            for link in part.links:
                pair = link.source, link.target
                graph.add_edge(*pair, kind=(part.bandwidth(*pair), link.via_host))
            if not any(
                nx.is_isomorphic(graph, other, edge_match=lambda one, two: one == two)
                for _, other in found
            ):
                found.append((part, graph))
    return [part for part, _ in found]


def row(name: str, machines: Iterable[Topology], num_bytes: int) -> str:
    """Returns the table's row of a group of machines."""
    results = []
    for machine in machines:
        results.append(judge(machine, num_bytes))
        sys.stderr.write(f"{machine.name} {num_bytes}: {results[-1]}\n")

    def median_and_most(values: Sequence[float], digits: int) -> str:
        return f"{statistics.median(values):.{digits}f} / {max(values):.{digits}f}"

    return (
        f"| {name} | {len(results)} | {num_bytes // MB} MB "
        f"| {median_and_most([result.ratio for result in results], 2)} "
        f"| {median_and_most([result.tight_ratio for result in results], 2)} "
        f"| {median_and_most([result.planning for result in results], 1)} |"
    )


def drawn(
    sizes: Sequence[int], seeds: int, draw: Callable[[int, int], Topology] = draw_machine
) -> list[Topology]:
    """Returns machines of several sizes."""
    return [draw(devices, seed) for devices in sizes for seed in range(seeds)]


def groups() -> dict[str, list[Topology]]:
    """Returns the machines of each group."""
    presets = (("nvswitch", 8), ("nvswitch", 16), ("pcie", 4), ("pcie", 8), ("fully_connected", 8))
    return {
        "drawn, 2 to 4 devices": drawn((2, 3, 4), 5),
        "shared buses, 2 to 4 devices": drawn((2, 3, 4), 4, draw_buses),
        "one slow link, 2 to 4 devices": drawn((2, 3, 4), 4, draw_slow_link),
        "drawn, 5 to 9 devices": drawn(range(5, 10), 3),
        "drawn, 10 to 16 devices": drawn(range(10, 17), 2),
        "drawn, 17 to 32 devices": drawn((17, 20, 24, 28, 32), 2),
        "parts of a DGX-1": parts_of_dgx1(),
        "presets": [
            preset("dgx1"),
            preset("dgx1_p100"),
            *(preset(name, count) for name, count in presets),
        ],
        "nvswitch, 64 devices": [preset("nvswitch", 64)],
    }


def main(step: int = 1) -> None:
    """Judges every so many machines of all groups, and puts the table at the end of the page."""
    rows = [
        row(name, machines[::step], size) for name, machines in groups().items() for size in SIZES
    ]
    text, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    PAGE.write_text(text + MARK + HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
