"""`tfcdo plan --hosts`: compares algorithms across hosts by simulation."""

from __future__ import annotations

import dataclasses
import json

import click
from rich.console import Console
from rich.table import Table

from tfcdo.cli import options
from tfcdo.plan import algorithms
from tfcdo.plan.several_hosts import Cluster
from tfcdo.plan.several_hosts import HostsEvaluation
from tfcdo.plan.several_hosts import evaluate_across_hosts
from tfcdo.plan.several_hosts import evaluate_flat_ring
from tfcdo.plan.several_hosts import lower_bound_across_hosts
from tfcdo.units import format_bytes
from tfcdo.units import format_seconds


def plan_hosts(
    cluster: Cluster,
    num_bytes: int,
    algorithm: str,
    backward: float | None,
    as_json: bool,
    console: Console,
) -> None:
    """Simulates all algorithms and prints a table or JSON.

    Args:
      cluster: the hosts.
      num_bytes: how many bytes each device holds.
      algorithm: the one whose row stands out, or whose result is printed as JSON.
      backward: the seconds of a backward pass; None for none.
      as_json: whether to print JSON.
      console: where.
    """
    names = (algorithm,) if as_json else algorithms.ALGORITHMS
    with options.status(console, "Simulating ..."):
        evaluations = [
            evaluate_across_hosts(name, cluster, num_bytes, backward=backward or 0.0)
            for name in names
        ]
        ring = evaluate_flat_ring(cluster, num_bytes)
    bound = lower_bound_across_hosts(cluster, num_bytes)
    if as_json:
        click.echo(_to_json(evaluations[0], ring, bound, cluster, num_bytes, backward))
    else:
        _print_table([*evaluations, ring], algorithm, bound, cluster, num_bytes, backward, console)


def _print_table(
    evaluations: list[HostsEvaluation],
    highlighted: str,
    bound: float,
    cluster: Cluster,
    num_bytes: int,
    backward: float | None,
    console: Console,
) -> None:
    topology, network = cluster.topology, cluster.network
    table = Table(
        title=f"All-reduce of {format_bytes(num_bytes)} on each of {topology.num_devices} devices "
        f"of each of {cluster.num_hosts} hosts, {topology.name}, "
        f"{format_bytes(round(network.bandwidth))}/s between hosts"
        + (f", where {network.sent:.0%} of the bytes travel" if network.sent < 1 else ""),
        caption=options.printable(
            f"Simulated, with packs that cross the network one after the other. Bound: "
            f"{format_seconds(bound)}",
            console,
        ),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("Algorithm", no_wrap=True)
    headings = ["Packs", "Time", "Time / bound"]
    if backward is not None:
        headings += [f"After {format_seconds(backward)} of backward pass", "Hidden"]
    for heading in headings:
        table.add_column(options.printable(heading, console), justify="right")
    for one in evaluations:
        cells = [
            str(one.num_packs),
            format_seconds(one.seconds),
            f"{one.seconds / bound:.3f}" if bound else "-",
        ]
        if backward is not None:
            cells += [format_seconds(one.exposed), f"{one.hidden:.0%}"]
        table.add_row(
            one.algorithm,
            *(options.printable(cell, console) for cell in cells),
            style="bold" if one.algorithm == highlighted else None,
        )
    console.print(table)


def _to_json(
    evaluation: HostsEvaluation,
    ring: HostsEvaluation,
    bound: float,
    cluster: Cluster,
    num_bytes: int,
    backward: float | None,
) -> str:
    content = {
        "topology": cluster.topology.name,
        "num_hosts": cluster.num_hosts,
        "num_devices": cluster.topology.num_devices,
        "network": dataclasses.asdict(cluster.network),
        "size": num_bytes,
        "backward": backward,
        "bound": bound,
        **dataclasses.asdict(evaluation),
        "hidden": evaluation.hidden,
        "flat_ring_seconds": ring.seconds,
    }
    return json.dumps(content, indent=2)
