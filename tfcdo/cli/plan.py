"""`tfcdo plan`: compares algorithms on a machine by simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import click
from rich.console import Console

from tfcdo.cli import options, plan_options
from tfcdo.cli.here import Here, topology_of
from tfcdo.cli.plan_table import print_table
from tfcdo.plan.decide import codec_for
from tfcdo.plan.evaluation import Evaluation, evaluate, evaluate_all
from tfcdo.plan.plan import IDENTITY
from tfcdo.plan.saved_plan import SavedPlan
from tfcdo.plan.task_graph import Hosts
from tfcdo.plan.widening import widened
from tfcdo.topology.topology import Topology
from tfcdo.units import format_bytes, format_seconds


@click.command()
@plan_options.add_to
def plan(given: plan_options.Options) -> None:
    """Compare the all-reduce algorithms on a machine, without that machine.

    Each algorithm's copies are simulated: a link carries one at a time, as fast as it can, after
    the link's latency. The time is the median of runs in which each copy takes up to 5 % more or
    less, since nothing enforces their order; beside it the time if none does. The last column
    compares the time with a bound that no copy trees beat.
    """
    console = options.make_console(width_of_a_pipe=120)
    given.check()
    topology = _machine(given)
    _plan(given, topology, console)


def _machine(given: plan_options.Options) -> Topology:
    """Returns the machine that the options name, measured if it is this one."""
    topology = given.topology
    if isinstance(topology, Here):
        try:
            topology = topology_of(topology, given.measures)
        except (RuntimeError, ValueError) as error:
            raise click.ClickException(str(error)) from None
    assert topology is not None
    if given.devices is None:
        return topology
    try:
        return topology.subset(given.devices)
    except ValueError as error:
        raise click.UsageError(f"--devices: {error}") from None


def _plan(given: plan_options.Options, topology: Topology, console: Console) -> None:
    """Prints the table or the plan, and writes what else is asked for."""
    machine, sent, size, hosts = topology, given.size, format_bytes(given.size), None
    if given.wire:
        # Two bytes are sent for each four that are added.
        machine, sent = widened(topology, 2), -(-given.size // 2)
        size += f", sent as {format_bytes(sent)} of {given.wire}"
    if given.num_hosts:
        codec = codec_for(given.wire_between, "float32") if given.wire_between else IDENTITY
        sent_of_all = codec.share_bytes(1 << 20, 1, "float32") / (4 << 20)
        hosts = Hosts(given.num_hosts, given.network, sent=sent_of_all)
        rate = f"{format_bytes(round(given.network))}/s"
        size += f" across {given.num_hosts} hosts with {rate} of {given.wire_between or 'network'}"
    try:
        with options.status(console, "Planning ..."):
            if given.as_json:
                found = [evaluate(given.algorithm, machine, sent, given.num_packs)]
            else:
                found = evaluate_all(machine, sent, given.num_packs, hosts)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    (chosen,) = (each for each in found if each.algorithm == given.algorithm)
    text = ""
    if given.as_json or given.saved_file:
        # The times are of what is sent and added, but the plan is for this machine.
        text = dataclasses.replace(SavedPlan.of(chosen, machine), topology=topology).to_json()
    if given.as_json:
        click.echo(text)
    else:
        print_table(found, given.algorithm, machine, size, console)
    title = f"{chosen.label} on {machine.name}: {size} in {format_seconds(chosen.seconds)}"
    if chosen.bound:
        title += f", {chosen.ratio:.3f} x the bound"
    for what in _write_files(given, chosen, machine, title, text):
        if not given.as_json:
            console.print(what, soft_wrap=True)


def _write_files(
    given: plan_options.Options, chosen: Evaluation, machine: Topology, title: str, text: str
) -> Iterator[str]:
    """Writes the plan and the pictures that are asked for, and yields what to say of each."""
    if given.saved_file:
        given.saved_file.write_text(f"{text}\n", encoding="utf-8")
        yield f"Saved {chosen.label} in {given.saved_file}"
    if not given.trees_file and not given.gantt_file:
        return
    from tfcdo.plot.figures import save_figure
    from tfcdo.plot.gantt import draw_gantt
    from tfcdo.plot.trees import draw_trees

    for path, draw in ((given.trees_file, draw_trees), (given.gantt_file, draw_gantt)):
        if path:
            save_figure(draw(chosen.schedule, machine, title), path)
            yield f"Drew {chosen.label} in {path}"
