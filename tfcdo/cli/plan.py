"""`tfcdo plan`: what each algorithm would do on a machine, and how long that would take."""

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
from tfcdo.plan import algorithms
from tfcdo.plan import simulator
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.schedule import Schedule
from tfcdo.topology.presets import PRESETS
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology
from tfcdo.units import format_bytes
from tfcdo.units import format_seconds

# Below this many columns, only those that say how fast an algorithm is and why.
_WIDE = 98
_ALWAYS_SHOWN = ("Fullest link", "Time", "Time / bound")
# Of a device, or of devices. Of thousands of digits, Python would make no int.
_NUMBER = r"\d{1,9}"


class Devices(click.ParamType):
    """Device numbers, separated by commas."""

    name = "devices"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Reads them."""
        if not re.fullmatch(rf"{_NUMBER}(,{_NUMBER})*", str(value)):
            self.fail(f"{value!r} is no list of device numbers such as 0,1,2")
        return tuple(map(int, value.split(",")))


class Machine(click.ParamType):
    """A preset, or a file that describes a machine."""

    name = "topology"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Topology:
        """Reads it."""
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
    type=options.Size(1000),
    default="100M",
    show_default=True,
    help="How many bytes each device holds; K, M and G are 10^3, 10^6 and 10^9.",
)
@click.option(
    "-d", "--devices", type=Devices(), metavar="0,1,...", help="Only these devices of the machine."
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
@click.option("--json", "as_json", is_flag=True, help="Print the schedule instead of the table.")
def plan(
    topology: Topology,
    num_bytes: int,
    devices: tuple[int, ...] | None,
    algorithm: str,
    trees_file: pathlib.Path | None,
    gantt_file: pathlib.Path | None,
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
        options.need_matplotlib()
    if devices is not None:
        try:
            topology = topology.subset(devices)
        except ValueError as error:
            raise click.UsageError(f"--devices: {error}") from None
    console = options.make_console(width_of_a_pipe=120)
    with console.status("Searching for trees ..."):
        names = [algorithm] if as_json else algorithms.ALGORITHMS
        schedules = {
            name: algorithms.make_schedule(name, topology, num_bytes)
            for name in dict.fromkeys((*names, algorithm))
        }
    chosen = schedules[algorithm]
    if as_json:
        click.echo(_as_json(chosen, topology, algorithm))
    else:
        _show(schedules, algorithm, topology, num_bytes, console)
    if trees_file or gantt_file:
        drawn = _full_name(algorithm, topology, num_bytes)
        _draw(chosen, topology, drawn, trees_file, gantt_file)
        if not as_json:
            for path in filter(None, (trees_file, gantt_file)):
                console.print(f"Drew {drawn} in {path}", soft_wrap=True)


def _show(
    schedules: dict[str, Schedule],
    chosen: str,
    topology: Topology,
    num_bytes: int,
    console: Console,
) -> None:
    bound = lower_bound(topology, num_bytes)
    seconds = {
        name: simulator.robust_seconds(schedule, topology) for name, schedule in schedules.items()
    }
    table = Table(
        title=f"All-reduce of {format_bytes(num_bytes)} on each of {topology.num_devices} "
        f"devices of {topology.name}",
        caption=f"Simulated: the median of runs in which copies take up to 5 % more or less. "
        f"Bound: {format_seconds(bound)}",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("Algorithm", no_wrap=True)
    headings = ("Packs", "Depth", "Fullest link", "Bytes on it", "Time", "Time / bound")
    shown = headings if console.width >= _WIDE else _ALWAYS_SHOWN
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=heading.startswith("Time"))
    for name, schedule in schedules.items():
        link, load = simulator.bottleneck(schedule, topology)
        cells = (
            str(len(schedule.packs)),
            str(max((pack.tree.depth for pack in schedule.packs), default=0)),
            link or "none",
            format_bytes(load),
            format_seconds(seconds[name]),
            f"{seconds[name] / bound:.3f}" if bound else "-",
        )
        table.add_row(
            _full_name(name, topology, num_bytes),
            *(cell for heading, cell in zip(headings, cells, strict=True) if heading in shown),
            style="bold" if name == chosen else None,
        )
    console.print(table)


def _full_name(algorithm: str, topology: Topology, num_bytes: int) -> str:
    """The algorithm's name; of "auto" also which one that is."""
    if algorithm != "auto":
        return algorithm
    return f"auto: {algorithms.fastest_algorithm(topology, num_bytes)}"


def _as_json(schedule: Schedule, topology: Topology, algorithm: str) -> str:
    """The schedule as JSON, one pack a line."""

    def lines(values: Sequence[Any]) -> str:
        return "[\n" + ",\n".join(f"    {json.dumps(value)}" for value in values) + "\n  ]"

    packs = [
        {"start": pack.start, "stop": pack.stop, "parents": pack.tree.parents}
        for pack in schedule.packs
    ]
    fields = {
        "topology": json.dumps(topology.name, ensure_ascii=False),
        "algorithm": json.dumps(algorithm),
        "num_devices": json.dumps(schedule.num_devices),
        "size": json.dumps(schedule.size),
        "seconds": json.dumps(simulator.robust_seconds(schedule, topology)),
        "bound": json.dumps(lower_bound(topology, schedule.size)),
        "packs": lines(packs),
    }
    return "{\n" + ",\n".join(f'  "{key}": {value}' for key, value in fields.items()) + "\n}"


def _draw(
    schedule: Schedule,
    topology: Topology,
    name: str,
    trees_file: pathlib.Path | None,
    gantt_file: pathlib.Path | None,
) -> None:
    from tfcdo.plot.figures import save_figure
    from tfcdo.plot.gantt import draw_gantt
    from tfcdo.plot.trees import draw_trees

    seconds = simulator.robust_seconds(schedule, topology)
    title = f"{name} on {topology.name}: {format_bytes(schedule.size)} in {format_seconds(seconds)}"
    bound = lower_bound(topology, schedule.size)
    if bound:
        title += f", {seconds / bound:.3f} x the bound"
    for path, draw in ((trees_file, draw_trees), (gantt_file, draw_gantt)):
        if path is not None:
            save_figure(draw(schedule, topology, title), path)
