"""`tfcdo plan`: compares algorithms on a machine by simulation."""

from __future__ import annotations

import dataclasses
import pathlib

import click

from tfcdo.bench import workloads
from tfcdo.cli import options
from tfcdo.cli.here import Here
from tfcdo.cli.here import topology_of
from tfcdo.cli.machine_types import Devices
from tfcdo.cli.machine_types import Machine
from tfcdo.cli.plan_backward import plan_backward
from tfcdo.cli.plan_hosts import plan_hosts
from tfcdo.cli.plan_table import print_plans
from tfcdo.cli.plan_table import print_table
from tfcdo.plan import algorithms
from tfcdo.plan.evaluation import Evaluation
from tfcdo.plan.evaluation import evaluate
from tfcdo.plan.evaluation import evaluate_all
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.saved_plan import SavedPlan
from tfcdo.plan.several_hosts import MAX_HOSTS
from tfcdo.plan.several_hosts import Cluster
from tfcdo.plan.several_hosts import Network
from tfcdo.plan.widening import widened
from tfcdo.topology.presets import PRESETS
from tfcdo.topology.topology import Topology
from tfcdo.units import format_bytes
from tfcdo.units import format_seconds

# More packs take more time to simulate than anyone waits.
_MAX_PACKS = 4096


@click.command()
@click.option(
    "-t",
    "--topology",
    type=Machine(),
    metavar="NAME|FILE",
    help=f"The machine: {', '.join(PRESETS)} (those of any size also with a number of "
    "devices, as in nvswitch:16); here, or here:8 for so many devices, to measure this machine; or "
    "a file, either JSON as Topology.to_json writes it or what "
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
    "--num-packs",
    type=click.IntRange(1, _MAX_PACKS),
    help="Cut the data into so many packs of one size; by default as each algorithm asks for. "
    "TensorFlow's classes have 1 by default.",
)
@click.option(
    "--save",
    "saved_file",
    type=options.NewFile(".json"),
    help="Write the highlighted algorithm's plan to this file, for tfcdo.AutoAllReduce(plan=...).",
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
    help="With --hosts or --model: how long a backward pass makes the gradients behind which packs "
    "hide.",
)
@click.option(
    "--model",
    type=click.Choice(workloads.model_names()),
    metavar="NAME",
    help="The gradients of this model instead of --bytes: resnet50, bert-base, mobilenet, tiny or "
    "tiny-matrices; with --backward, when each pack is ready and done.",
)
@click.option(
    "--wire",
    type=options.WIRE_DTYPES,
    help="The bytes are of float32 and travel as this: half of them, added in 32 bits.",
)
@click.option(
    "--wire-between",
    type=options.WIRE_DTYPES,
    help="With --hosts: the bytes are of float32 and travel between hosts as this, half of them.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the plan, as --save writes it, not the table."
)
@click.option(
    "--measure",
    "measures",
    is_flag=True,
    help="With -t here: measure this machine again, even if that was done before.",
)
@click.option(
    "--list", "lists", is_flag=True, help="List the plans that need no search: bundled, and kept."
)
def plan(
    topology: Topology | Here | None,
    num_bytes: int,
    devices: tuple[int, ...] | None,
    algorithm: str,
    num_packs: int | None,
    saved_file: pathlib.Path | None,
    trees_file: pathlib.Path | None,
    gantt_file: pathlib.Path | None,
    num_hosts: int | None,
    network: float,
    backward: float | None,
    model: str | None,
    wire: str | None,
    wire_between: str | None,
    as_json: bool,
    measures: bool,
    lists: bool,
) -> None:
    """Compare the all-reduce algorithms on a machine, without that machine.

    Each algorithm's copies are simulated: a link carries one at a time, as fast as it can, after
    the link's latency. The time is the median of runs in which each copy takes up to 5 % more or
    less, since nothing enforces their order; beside it the time if none does. The last column
    compares the time with a bound that no copy trees beat.
    """
    console = options.make_console(width_of_a_pipe=120)
    if lists:
        print_plans(console)
        return
    if topology is None:
        raise click.UsageError("Missing option '-t' / '--topology': the machine to plan for")
    if trees_file and gantt_file and trees_file.resolve() == gantt_file.resolve():
        raise click.UsageError(f"--draw and --gantt need different files; both are {gantt_file}")
    if trees_file or gantt_file:
        options.require_matplotlib()
    topology = _machine(topology, measures, devices)
    gradients = workloads.gradients_of(model) if model else None
    if gradients:
        num_bytes = gradients.size
    if num_hosts:
        if trees_file or gantt_file:
            raise click.UsageError("--draw and --gantt draw one host: leave --hosts out")
        if num_packs or saved_file:
            raise click.UsageError("--num-packs and --save are for one host: leave --hosts out")
        if wire:
            raise click.UsageError("--wire is of the copies inside a host: leave --hosts out")
        sent = 0.5 if wire_between else 1.0
        cluster = Cluster(topology, num_hosts, Network(network, sent=sent))
        plan_hosts(cluster, num_bytes, algorithm, backward, as_json, console)
        return
    if backward is not None:
        if gradients is None:
            raise click.UsageError("--backward needs --model, or --hosts")
        if num_packs or saved_file or trees_file or gantt_file:
            raise click.UsageError(
                "--backward chooses packs itself, and draws and saves nothing: leave --num-packs, "
                "--save, --draw and --gantt out"
            )
        plan_backward(gradients, topology, backward, algorithm, as_json, console)
        return
    if wire_between is not None:
        raise click.UsageError("--wire-between needs --hosts")
    # Two bytes travel for each four that are added.
    machine, sent = (widened(topology, 2), -(-num_bytes // 2)) if wire else (topology, num_bytes)
    try:
        with options.status(console, "Searching for trees ..."):
            if as_json:
                evaluations = [evaluate(algorithm, machine, sent, num_packs)]
            else:
                evaluations = evaluate_all(machine, sent, num_packs)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    (chosen,) = (found for found in evaluations if found.algorithm == algorithm)
    bound = lower_bound(machine, sent)
    size = format_bytes(num_bytes) + (f", sent as {format_bytes(sent)} of {wire}" if wire else "")
    if as_json or saved_file:
        # The times are of what travels and is added, but the plan is for this machine.
        saved = SavedPlan.of(chosen, machine)
        text = dataclasses.replace(saved, topology=topology).to_json()
    if as_json:
        click.echo(text)
    else:
        print_table(evaluations, algorithm, machine, bound, size, console)
    if saved_file:
        saved_file.write_text(f"{text}\n", encoding="utf-8")
        if not as_json:
            console.print(f"Saved {chosen.label} in {saved_file}", soft_wrap=True)
    for path in _draw(chosen, machine, bound, size, trees_file, gantt_file):
        if not as_json:
            console.print(f"Drew {chosen.label} in {path}", soft_wrap=True)


def _machine(
    topology: Topology | Here, measures: bool, devices: tuple[int, ...] | None
) -> Topology:
    """Returns the machine that the options name, measured if it is this one."""
    if isinstance(topology, Here):
        try:
            topology = topology_of(topology, measures)
        except (RuntimeError, ValueError) as error:
            raise click.ClickException(str(error)) from None
    elif measures:
        raise click.UsageError("--measure measures this machine: it needs -t here")
    if devices is None:
        return topology
    try:
        return topology.subset(devices)
    except ValueError as error:
        raise click.UsageError(f"--devices: {error}") from None


def _draw(
    evaluation: Evaluation,
    topology: Topology,
    bound: float,
    size: str,
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

    seconds = evaluation.seconds
    title = f"{evaluation.label} on {topology.name}: {size} in {format_seconds(seconds)}"
    if bound:
        title += f", {seconds / bound:.3f} x the bound"
    for path, draw in ((trees_file, draw_trees), (gantt_file, draw_gantt)):
        if path is not None:
            save_figure(draw(evaluation.schedule, topology, title), path)
    return drawn
