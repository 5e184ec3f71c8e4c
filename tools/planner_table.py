"""Prints a table as in docs/planner.md: how near to the bound `auto` comes on many machines.

`python tools/planner_table.py` takes about ten minutes; with a number N, every N-th machine of each
group is judged.
"""

from __future__ import annotations

import itertools
import operator
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import networkx as nx
import pages
from drawn_machines import draw_buses, draw_machine, draw_slow_link

from tfcdo.plan import algorithms, simulator, tree_program
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

MB = 10**6
SIZES = (1000 * MB, 25 * MB, MB)


def judge(machine: Topology, num_bytes: int) -> tuple[float, float]:
    """Plans as a first call does; returns its time over the bound, and the CPU time of planning."""
    began = time.process_time()
    plan = algorithms.make_plan("auto", machine, num_bytes)
    planning = time.process_time() - began
    seconds = simulator.robust_seconds(plan, machine)
    return seconds / bandwidth_bound(machine, num_bytes), planning


def bandwidth_bound(machine: Topology, num_bytes: int) -> float:
    """Returns the bound without latencies, which is simpler but less tight for small sizes."""
    solved = tree_program.solve(tree_program.Edges(machine)) if machine.num_devices > 1 else None
    copies = num_bytes * solved.bound if solved else 0.0
    return max(copies, tree_program.additions_bound(machine, num_bytes))


def parts_of_dgx1() -> list[Topology]:
    """Returns the parts of a DGX-1 of 3 to 7 devices that differ in more than numbering."""
    whole = preset("dgx1")
    found: list[tuple[Topology, nx.DiGraph]] = []
    for devices in (own for size in range(3, 8) for own in itertools.combinations(range(8), size)):
        part = whole.subset(devices)
        graph = nx.DiGraph()
        for link in part.links:
            pair = link.source, link.target
            graph.add_edge(*pair, kind=(part.bandwidth(*pair), link.via_host))
        if not any(nx.is_isomorphic(graph, other, edge_match=operator.eq) for _, other in found):
            found.append((part, graph))
    return [part for part, _ in found]


def groups() -> dict[str, list[Topology]]:
    """Returns the machines of each group."""
    small, seeds = (2, 3, 4), range(4)
    return {
        "drawn, 2 to 4 devices": [draw_machine(k, seed) for k in small for seed in seeds],
        "shared buses, 2 to 4 devices": [draw_buses(k, seed) for k in small for seed in seeds],
        "one slow link, 2 to 4 devices": [draw_slow_link(k, seed) for k in small for seed in seeds],
        "drawn, 5 to 9 devices": [draw_machine(k, seed) for k in range(5, 10) for seed in seeds],
        "drawn, 10 to 16 devices": [draw_machine(k, 0) for k in range(10, 17)],
        "drawn, 17 to 32 devices": [draw_machine(k, 0) for k in (17, 20, 24, 28, 32)],
        "parts of a DGX-1": parts_of_dgx1(),
        "presets": [preset("dgx1"), preset("dgx1_p100"), preset("nvswitch"), preset("pcie", 8)],
    }


def rows(step: int = 1) -> Iterator[Sequence[object]]:
    """Yields the cells of each group of machines: the medians and the largest values."""
    for (name, machines), size in itertools.product(groups().items(), SIZES):
        judged = (judge(machine, size) for machine in machines[::step])
        ratios, planning = zip(*judged, strict=True)
        yield (
            *(name, len(ratios), f"{size // MB} MB"),
            f"{statistics.median(ratios):.2f} / {max(ratios):.2f}",
            f"{statistics.median(planning):.1f} / {max(planning):.1f}",
        )


if __name__ == "__main__":
    heading = "machines | number | bytes | median / most | seconds to plan: median / most"
    for line in pages.table(heading, rows(*map(int, sys.argv[1:]))):
        print(line, flush=True)
