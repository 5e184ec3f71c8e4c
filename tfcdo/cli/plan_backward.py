"""`tfcdo plan --model resnet50 --backward 60ms`: what is left after a backward pass."""

from __future__ import annotations

import json
import math

import click
from rich.console import Console
from rich.table import Table

from tfcdo.bench.workloads import Workload
from tfcdo.cli import options
from tfcdo.plan import algorithms
from tfcdo.plan.overlap import Gradient
from tfcdo.plan.overlap import OverlapPlan
from tfcdo.plan.overlap import plan_overlap
from tfcdo.topology.topology import Topology
from tfcdo.units import format_bytes
from tfcdo.units import format_seconds


def plan_backward(
    model: Workload,
    topology: Topology,
    backward: float,
    algorithm: str,
    as_json: bool,
    console: Console,
) -> None:
    """Chooses packs for each algorithm, and prints what is left after the backward pass.

    Args:
      model: the gradients.
      topology: the machine.
      backward: the seconds of the backward pass.
      algorithm: the one whose packs are listed, or printed as JSON.
      as_json: whether to print JSON.
      console: where.
    """
    gradients = [Gradient(math.prod(shape) * model.itemsize, len(shape)) for shape in model.shapes]
    names = (algorithm,) if as_json else algorithms.ALGORITHMS
    with options.status(console, "Simulating ..."):
        plans = {name: plan_overlap(gradients, topology, backward, name) for name in names}
    chosen = plans[algorithm]
    if as_json:
        click.echo(json.dumps(_content(chosen, model, topology), indent=1))
        return
    title = (
        f"All-reduce of {model.name}'s {format_bytes(model.size)} of gradients on "
        f"{topology.num_devices} devices of {topology.name}, behind {format_seconds(backward)} of "
        "backward pass"
    )
    table = Table(title=options.printable(title, console), title_justify="left")
    table.add_column("Algorithm", no_wrap=True)
    for heading in ("Packs", "Largest", "Smallest", "Exposed after it"):
        table.add_column(heading, justify="right")
    for name, plan in plans.items():
        sizes = [pack.size for pack in plan.schedule.packs]
        table.add_row(
            name if name == plan.algorithm else f"{name}: {plan.algorithm}",
            str(len(sizes)),
            format_bytes(max(sizes, default=0)),
            format_bytes(min(sizes, default=0)),
            options.printable(format_seconds(plan.exposed), console),
            style="bold" if name == algorithm else None,
        )
    console.print(table)
    console.print(_table_of_packs(chosen, console))


def _table_of_packs(plan: OverlapPlan, console: Console) -> Table:
    table = Table(
        title=f"Packs of {plan.algorithm}, the last layers' gradients first", title_justify="left"
    )
    for heading in ("Pack", "Size", "Summed on", "Ready", "Done"):
        table.add_column(heading, justify="right")
    rows = zip(plan.schedule.packs, plan.ready, plan.done, strict=True)
    for number, (pack, ready, done) in enumerate(rows):
        table.add_row(
            str(number),
            format_bytes(pack.size),
            str(pack.tree.root),
            *(options.printable(format_seconds(time), console) for time in (ready, done)),
        )
    return table


def _content(plan: OverlapPlan, model: Workload, topology: Topology) -> dict[str, object]:
    return {
        "topology": topology.name,
        "model": model.name,
        "size": model.size,
        "algorithm": plan.algorithm,
        "backward": plan.backward,
        "exposed": plan.exposed,
        "packs": [
            {
                "start": pack.start,
                "stop": pack.stop,
                "parents": pack.tree.parents,
                "ready": ready,
                "done": done,
            }
            for pack, ready, done in zip(plan.schedule.packs, plan.ready, plan.done, strict=True)
        ],
    }
