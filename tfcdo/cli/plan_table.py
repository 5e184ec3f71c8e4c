"""Prints the table of `tfcdo plan`: the algorithms on a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from tfcdo.cli import options
from tfcdo.plan.evaluation import Evaluation
from tfcdo.plan.simulator import bottleneck
from tfcdo.topology.topology import Topology
from tfcdo.units import format_bytes, format_seconds

# On narrower consoles only the columns that say how fast an algorithm is, and why.
_WIDE = 110
_ALWAYS_SHOWN = ("Busiest link", "Time", "Time / bound")


def print_table(
    evaluations: Sequence[Evaluation],
    highlighted: str,
    topology: Topology,
    size: str,
    console: Console,
) -> None:
    """Prints a row for each algorithm.

    Args:
      evaluations: the algorithms' schedules and times.
      highlighted: the algorithm whose row stands out.
      topology: the machine.
      size: what each device holds, and how it travels.
      console: where.
    """
    count = topology.num_devices
    holders = f"each of {count} devices" if count > 1 else "the only device"
    table = Table(
        title=f"All-reduce of {size} on {holders} of {topology.name}",
        caption=options.printable(
            "Time: simulated, the median of runs in which copies take up to 5 % more or less. "
            f"Ordered: if none does. Bound: {format_seconds(evaluations[0].bound)}",
            console,
        ),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("Algorithm", no_wrap=True)
    # Each column's text of an evaluation.
    columns: dict[str, Callable[[Evaluation], str]] = {
        "Packs": lambda one: str(len(one.schedule.packs)),
        "Depth": lambda one: str(max((pack.tree.depth for pack in one.schedule.packs), default=0)),
        "Busiest link": lambda one: bottleneck(one.schedule, topology)[0] or "none",
        "Bytes on it": lambda one: format_bytes(bottleneck(one.schedule, topology)[1]),
        "Time": lambda one: format_seconds(one.seconds),
        "Ordered": lambda one: format_seconds(one.ordered_seconds),
        "Time / bound": lambda one: f"{one.ratio:.3f}" if one.bound else "-",
    }
    shown = tuple(columns) if console.width >= _WIDE else _ALWAYS_SHOWN
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=heading.startswith("Time"))
    for evaluation in evaluations:
        table.add_row(
            evaluation.label,
            *(options.printable(columns[heading](evaluation), console) for heading in shown),
            style="bold" if evaluation.algorithm == highlighted else None,
        )
    console.print(table)
