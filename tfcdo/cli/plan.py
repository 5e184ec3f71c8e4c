"""`tfcdo plan`: compares algorithms on a machine by simulation."""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tfcdo.cli import options
from tfcdo.cli.plan_hosts import plan_hosts
from tfcdo.plan import algorithms
from tfcdo.plan.evaluation import Evaluation
from tfcdo.plan.evaluation import evaluate
from tfcdo.plan.evaluation import evaluate_all
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.several_hosts import MAX_HOSTS
from tfcdo.plan.several_hosts import Cluster
from tfcdo.plan.several_hosts import Network
from tfcdo.topology.presets import PRESETS
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology
from tfcdo.units import format_bytes
from tfcdo.units import format_seconds

# On narrower consoles only the columns that say how fast an algorithm is, and why.
_WIDE = 98
_ALWAYS_SHOWN = ("Busiest link", "Time", "Time / bound")
# Limited to 9 digits: int() refuses huge strings.
_NUMBER = r"\d{1,9}"


class Devices(options.ParamType):
    """Device numbers separated by commas."""

    name = "devices"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Reads the numbers."""
        if not re.fullmatch(rf"{_NUMBER}(,{_NUMBER})*", str(value)):
            self.fail(f"{value!r} is not a list of device numbers such as 0,1,2")
        return tuple(map(int, value.split(",")))


class Machine(options.ParamType):
    """A preset, or a file that describes a machine."""

    name = "topology"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Topology:
        """Looks the preset up, or reads the file."""
        name, _, count = str(value).partition(":")
        try:
            if name in PRESETS and re.fullmatch(f"({_NUMBER})?", count):
                return preset(name, int(count) if count else None)
        except ValueError as error:
            self.fail(str(error))
        text = self._read(value)
        is_json = text.lstrip().startswith(("{", "["))
        read = Topology.from_json if is_json else Topology.from_nvidia_smi
        try:
            return read(text)
        except ValueError as error:
            self.fail(f"{value}: {error}")

    def _read(self, value: str) -> str:
        try:
            if value == "-":
                if sys.stdin is None:
                    self.fail("-: standard input is closed")
                text = sys.stdin.read()
            else:
                # Not a Path, which takes no name for that of the current folder.
                with open(value, encoding="utf-8") as file:  # noqa: PTH123
                    text = file.read()
        except FileNotFoundError:
            self.fail(f"{value!r} is neither a file nor a known machine: {', '.join(PRESETS)}")
        except UnicodeDecodeError:
            self.fail(f"{value}: expected text; the file holds something else")
        except OSError as error:
            self.fail(f"{value}: {error.strerror}")
        return text.removeprefix("\ufeff")


@click.command()
@click.option(
    "-t",
    "--topology",
    type=Machine(),
    required=True,
    metavar="NAME|FILE",
    help=f"The machine: {', '.join(PRESETS)} (those of any size also with a number of "
    "devices, as in nvswitch:16); or a file, either JSON as Topology.to_json writes it or what "
    "`nvidia-smi topo -m` printed; - for standard input.",
)
@click.option(
    "-b",
    "--bytes",
    "num_bytes",
    type=options.Size(),
    default="100MB",
    show_default=True,
    help="The bytes that each device holds; K, M and G are powers of 1024, KB, MB and GB of 1000.",
)
@click.option(
    "--devices", type=Devices(), metavar="0,1,...", help="Only these devices of the machine."
)
@click.option(
    "-a",
    "--algorithm",
    type=click.Choice(algorithms.ALGORITHMS),
    default="auto",
    show_default=True,
    help="The algorithm whose row stands out, and that is drawn or printed.",
)
@click.option(
    "--draw",
    "trees_file",
    type=options.NewFile(".png", ".svg"),
    help="Draw the machine and the copy trees: .png or .svg",
)
@click.option(
    "--gantt",
    "gantt_file",
    type=options.NewFile(".png", ".svg"),
    help="Draw the transfers over time: .png or .svg",
)
@click.option(
    "--hosts",
    "num_hosts",
    type=click.IntRange(1, MAX_HOSTS),
    help="So many of these machines, and a flat ring over all their devices beside the algorithms.",
)
@click.option(
    "--network",
    type=options.Bandwidth(),
    default="12.5G",
    show_default=True,
    help="What each host can send to the others, in bytes per second (K, M and G are powers of "
    "1000, as vendors count), or as 100gbit.",
)
@click.option(
    "--backward",
    type=options.Duration(),
    metavar="60ms",
    help="With --hosts: how long a backward pass makes the gradients behind which packs hide.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the schedule instead of the table.")
def plan(
    topology: Topology,
    num_bytes: int,
    devices: tuple[int, ...] | None,
    algorithm: str,
    trees_file: pathlib.Path | None,
    gantt_file: pathlib.Path | None,
    num_hosts: int | None,
    network: float,
    backward: float | None,
    as_json: bool,
) -> None:
    """Compare the all-reduce algorithms on a machine, without that machine.

    Each algorithm's copies are simulated: a link carries one at a time, as fast as it can, after
    the link's latency. The time is the median of runs in which each copy takes up to 5 % more or
    less. The last column compares it with the bound of the direct links.
    """
    if trees_file and gantt_file and trees_file.resolve() == gantt_file.resolve():
        raise click.UsageError(f"--draw and --gantt need different files; both are {gantt_file}")
    if trees_file or gantt_file:
        options.require_matplotlib()
    if devices is not None:
        try:
            topology = topology.subset(devices)
        except ValueError as error:
            raise click.UsageError(f"--devices: {error}") from None
    console = options.make_console(width_of_a_pipe=120)
    if num_hosts:
        if trees_file or gantt_file:
            raise click.UsageError("--draw and --gantt draw one host: leave --hosts out")
        cluster = Cluster(topology, num_hosts, Network(network))
        plan_hosts(cluster, num_bytes, algorithm, backward, as_json, console)
        return
    if backward is not None:
        raise click.UsageError("--backward needs --hosts")
    with options.status(console, "Searching for trees ..."):
        if as_json:
            evaluations = [evaluate(algorithm, topology, num_bytes)]
        else:
            evaluations = evaluate_all(topology, num_bytes)
    (chosen,) = (found for found in evaluations if found.algorithm == algorithm)
    bound = lower_bound(topology, num_bytes)
    if as_json:
        click.echo(_to_json(chosen, topology, bound))
    else:
        _print_table(evaluations, algorithm, topology, bound, console)
    for path in _draw(chosen, topology, bound, trees_file, gantt_file):
        if not as_json:
            console.print(f"Drew {chosen.label} in {path}", soft_wrap=True)


def _print_table(
    evaluations: Sequence[Evaluation],
    highlighted: str,
    topology: Topology,
    bound: float,
    console: Console,
) -> None:
    size = format_bytes(evaluations[0].schedule.size)
    count = topology.num_devices
    holders = f"each of {count} devices" if count > 1 else "the only device"
    table = Table(
        title=f"All-reduce of {size} on {holders} of {topology.name}",
        caption=options.printable(
            "Simulated: the median of runs in which copies take up to 5 % more or less. "
            f"Bound: {format_seconds(bound)}",
            console,
        ),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("Algorithm", no_wrap=True)
    headings = ("Packs", "Depth", "Busiest link", "Bytes on it", "Time", "Time / bound")
    shown = headings if console.width >= _WIDE else _ALWAYS_SHOWN
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=heading.startswith("Time"))
    for evaluation in evaluations:
        cells = (
            str(len(evaluation.schedule.packs)),
            str(evaluation.depth),
            options.printable(evaluation.bottleneck or "none", console),
            format_bytes(evaluation.bottleneck_bytes),
            options.printable(format_seconds(evaluation.seconds), console),
            f"{evaluation.seconds / bound:.3f}" if bound else "-",
        )
        table.add_row(
            evaluation.label,
            *(cell for heading, cell in zip(headings, cells, strict=True) if heading in shown),
            style="bold" if evaluation.algorithm == highlighted else None,
        )
    console.print(table)


def _to_json(evaluation: Evaluation, topology: Topology, bound: float) -> str:
    """Returns the schedule as JSON, one pack a line."""

    def lines(values: Sequence[Any]) -> str:
        return "[\n" + ",\n".join(f"    {json.dumps(value)}" for value in values) + "\n  ]"

    schedule = evaluation.schedule
    packs = [
        {"start": pack.start, "stop": pack.stop, "parents": pack.tree.parents}
        for pack in schedule.packs
    ]
    fields = {
        "topology": json.dumps(topology.name),
        "algorithm": json.dumps(evaluation.algorithm),
        "num_devices": json.dumps(schedule.num_devices),
        "size": json.dumps(schedule.size),
        "seconds": json.dumps(evaluation.seconds),
        "bound": json.dumps(bound),
        "packs": lines(packs),
    }
    return "{\n" + ",\n".join(f'  "{key}": {value}' for key, value in fields.items()) + "\n}"


def _draw(
    evaluation: Evaluation,
    topology: Topology,
    bound: float,
    trees_file: pathlib.Path | None,
    gantt_file: pathlib.Path | None,
) -> list[pathlib.Path]:
    """Draws the pictures that are asked for and returns their files."""
    drawn = [path for path in (trees_file, gantt_file) if path is not None]
    if not drawn:
        return []
    from tfcdo.plot.figures import save_figure
    from tfcdo.plot.gantt import draw_gantt
    from tfcdo.plot.trees import draw_trees

    size, seconds = evaluation.schedule.size, evaluation.seconds
    title = f"{evaluation.label} on {topology.name}: {format_bytes(size)} in "
    title += format_seconds(seconds)
    if bound:
        title += f", {seconds / bound:.3f} x the bound"
    for path, draw in ((trees_file, draw_trees), (gantt_file, draw_gantt)):
        if path is not None:
            save_figure(draw(evaluation.schedule, topology, title), path)
    return drawn
