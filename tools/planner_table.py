"""Makes the table of docs/planner.md, in about ten minutes: how near to the bound `auto` comes."""

from __future__ import annotations

import itertools
import operator
import statistics
import time
from collections.abc import Iterator, Sequence

import networkx as nx
import pages
from drawn_machines import draw_buses, draw_machine, draw_slow_link

from tfcdo.plan import algorithms, simulator, tree_program
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

SIZES = {"1 GB": 10**9, "25 MB": 25 * 10**6}


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


def parts_of_dgx1(num_devices: int) -> list[Topology]:
    """Returns the parts of a DGX-1 of some devices that differ in more than numbering."""
    parts: list[tuple[Topology, nx.DiGraph]] = []
    for devices in itertools.combinations(range(8), num_devices):
        part = preset("dgx1").subset(devices)
        graph = nx.DiGraph()
        for link in part.links:
            pair = link.source, link.target
            graph.add_edge(*pair, kind=(part.bandwidth(*pair), link.via_host))
        if not any(nx.is_isomorphic(graph, other, edge_match=operator.eq) for _, other in parts):
            parts.append((part, graph))
    return [part for part, _ in parts]


def groups() -> dict[str, list[Topology]]:
    """Returns the machines of each group."""
    small = (2, 3, 4)
    return {
        "drawn, 2 to 4 devices": [draw_machine(k, seed) for k in small for seed in range(40)],
        "shared buses, 2 to 4 devices": [draw_buses(k, seed) for k in small for seed in range(9)],
        "one slow link, 2 to 4 devices": [
            draw_slow_link(k, seed) for k in small for seed in range(4)
        ],
        "drawn, 5 to 9 devices": [draw_machine(k, 0) for k in range(5, 10)],
        "drawn, 10 to 16 devices": [draw_machine(k, 0) for k in (10, 13, 16)],
        "drawn, 17 to 32 devices": [draw_machine(k, 0) for k in (17, 24, 32)],
        **{f"parts of a DGX-1, {k} devices": parts_of_dgx1(k) for k in range(3, 8)},
    }


def rows() -> Iterator[Sequence[object]]:
    """Yields the cells of each group of machines: the medians and the largest values."""
    cases = [*itertools.product(SIZES, groups().items())]
    for size, (name, machines) in pages.with_progress(cases, lambda case: case[1][0]):
        ratios, planning = zip(*(judge(machine, SIZES[size]) for machine in machines))
        yield (
            *(name, len(ratios), size),
            f"{statistics.median(ratios):.2f} / {max(ratios):.2f}",
            f"{statistics.median(planning):.1f} / {max(planning):.1f}",
        )


if __name__ == "__main__":
    heading = "machines | number | bytes | median / most | seconds to plan: median / most"
    pages.replace("docs/planner.md", "planner_table.py", pages.table(heading, rows()))
