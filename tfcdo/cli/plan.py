"""`tfcdo plan`: compares algorithms on a machine by simulation."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Sequence

import click
from click.core import ParameterSource
from rich import box
from rich.console import Console
from rich.table import Table

from tfcdo.cli import options
from tfcdo.exchange.casts import BY_NAME
from tfcdo.exchange.protocol import SUM, Exchange
from tfcdo.log import format_bytes, format_count, format_seconds
from tfcdo.plan import algorithms, simulator, tree_program
from tfcdo.plan.algorithms import PackingOptions
from tfcdo.plan.decide import BetweenHosts, Machine, Options, decide
from tfcdo.plan.evaluation import Evaluation, check_num_devices
from tfcdo.plan.plan import Batch, Request, ValueSpec
from tfcdo.plan.simulator import Hosts
from tfcdo.topology import measurement
from tfcdo.topology.presets import PRESETS, preset
from tfcdo.topology.topology import Topology

_MACHINES = ", ".join((*PRESETS, "nvswitch:16 and the like", "here"))
_MOST_BYTES, _MOST_HOSTS = 800 * 10**9, 1024  # Bytes are of all devices of one host.


def _parse_machine(text: str) -> Topology | int:
    """Looks a preset up or reads a file; for "here" returns its number of devices, or 0."""
    name, _, count = text.partition(":")
    if name == "here" and re.fullmatch(r"([1-9]\d?)?", count):
        if count and int(count) > measurement.MOST_DEVICES:
            raise ValueError(
                f"{text!r}: at most {measurement.MOST_DEVICES} devices can be measured"
            )
        return int(count or 0)
    # Limited to 9 digits: int() refuses huge strings.
    if name in PRESETS and re.fullmatch(r"(\d{1,9})?", count):
        # Checked first, as making the links of many devices takes seconds.
        check_num_devices(name, int(count or 1))
        return preset(name, int(count) if count else None)
    content = _read(text)
    try:
        if content.lstrip().startswith(("{", "[")):
            return measurement.parse(content.encode()).topology
        return Topology.from_nvidia_smi(content)
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error


def _read(name: str) -> str:
    if name == "-" and sys.stdin is None:
        raise ValueError("-: standard input is closed")
    try:
        with click.open_file(name, encoding="utf-8") as file:
            return str(file.read()).removeprefix("\ufeff")
    except FileNotFoundError:
        raise ValueError(f"{name!r} is neither a file nor a known machine: {_MACHINES}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{name}: expected text; the file holds something else") from None
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from error


@click.command(short_help="Compare the all-reduce algorithms on any machine.")
@options.option(
    "-t --topology wanted",
    options.parsed("topology", _parse_machine),
    "Preset such as nvswitch:16, here, a file, or - for standard input.",
    metavar="NAME|FILE|-",
)
@options.option(
    "-b --bytes num_bytes", options.SIZE, "Size on each device; M is 1024^2, MB is 1000^2.", "100MB"
)
@options.option(
    "-a --algorithm",
    click.Choice(algorithms.ALGORITHMS),
    "Algorithm that is highlighted, drawn and saved.",
    "auto",
)
@options.option(
    "--num-packs",
    options.number(1, algorithms.MOST_PACKS),
    "Number of equal packs; TensorFlow's default is 1.",
)
@options.option(
    "--save saved_file",
    options.new_file(".json"),
    "File for the plan, for tfcdo.AutoAllReduce(plan=...).",
)
@options.option(
    "--draw trees_file",
    options.new_file(".png", ".svg"),
    "Picture of the machine and the copy trees: .png or .svg.",
)
@options.option(
    "--hosts num_hosts", options.number(1, _MOST_HOSTS), "Number of hosts, all like this machine."
)
@options.option(
    "--network",
    options.parsed("bandwidth", options.parse_bandwidth),
    "Bandwidth of each host: bytes per second, or as in 100gbit.",
    "12.5G",
)
@options.option("--exchange", click.Choice([*BY_NAME]), "Dtype in which hosts send float32.")
@click.pass_context
def plan(
    context: click.Context,
    wanted: Topology | int | None,
    num_bytes: int,
    algorithm: str,
    num_packs: int | None,
    saved_file: pathlib.Path | None,
    trees_file: pathlib.Path | None,
    num_hosts: int | None,
    network: float,
    exchange: str | None,
) -> None:
    """Compare the all-reduce algorithms on a machine, without that machine.

    Each algorithm's copies are simulated: a link carries one at a time, as fast as it can, after
    the link's latency. The time is the median of runs in which each copy takes up to 5 % more or
    less, since nothing enforces their order. The last column compares it with a bound that no copy
    trees beat.

    Machines are dgx1, dgx1_p100, nvswitch, pcie, shared_memory and fully_connected, with a size as
    in nvswitch:16; here, or here:8, is this machine, measured; a file has the output of
    `nvidia-smi topo -m` or of Topology.to_json.
    """
    if wanted is None:
        raise click.UsageError(f"--topology names the machine: {_MACHINES}, or a file")
    is_network_given = context.get_parameter_source("network") is ParameterSource.COMMANDLINE
    of_one_host = num_packs or saved_file or trees_file
    options.refuse(
        (is_network_given and not num_hosts, "--network is between hosts: it needs --hosts"),
        (exchange and not num_hosts, "--exchange needs --hosts"),
        (num_hosts and of_one_host, "--num-packs, --save and --draw are for one host"),
    )
    if trees_file:
        from tfcdo import plot  # Before time is spent on data for it.
    console = options.make_console()
    topology = _measure(wanted) if isinstance(wanted, int) else wanted
    size, hosts = format_bytes(num_bytes), None
    if num_hosts:
        most = f"{format_bytes(_MOST_BYTES // topology.num_devices)} with --hosts on this machine"
        too_many = num_bytes * topology.num_devices > _MOST_BYTES
        options.refuse((too_many, f"--bytes must be at most {most}"))
        hosts = Hosts(num_hosts, network)
        rate = f"{format_bytes(round(network))}/s"
        number = format_count(num_hosts, "host")
        size += f" across {number} with {rate} of {exchange or 'network'}"
    sent = BY_NAME[exchange] if exchange else SUM
    with options.reported(click.UsageError, ValueError), options.status("Planning ..."):
        check_num_devices(topology.name, topology.num_devices)
        found = [
            evaluate(name, topology, num_bytes, num_packs, hosts, sent)
            for name in algorithms.ALGORITHMS
        ]
    _print_table(found, algorithm, size, console)
    (chosen,) = (each for each in found if each.algorithm == algorithm)
    if saved_file:
        with options.writing(saved_file):
            saved_file.write_text(f"{chosen.to_json()}\n", encoding="utf-8")
        console.print(f"Saved {chosen.label} in {saved_file}", soft_wrap=True)
    if trees_file:
        title = f"{chosen.label} on {topology.name}: {size} in {format_seconds(chosen.seconds)}"
        if chosen.bound:
            title += f", {chosen.ratio:.3f} x the bound"
        with options.writing(trees_file):
            plot.save_figure(plot.draw_trees(chosen.plan, topology, title), trees_file)
        console.print(f"Drew {chosen.label} in {trees_file}", soft_wrap=True)


def _measure(count: int) -> Topology:
    """Measures devices of this machine; 0 are all GPUs, or some virtual CPU devices."""
    devices = options.start_tensorflow(count or None)
    refused = options.reported(click.ClickException, RuntimeError, ValueError)
    with refused, options.status("Measuring ...") as tell:
        return measurement.measure(
            devices.names, progress=lambda done, what: tell(f"{done:.0%} {what}")
        )


def evaluate(
    algorithm: str,
    topology: Topology,
    num_bytes: int,
    num_packs: int | None = None,
    hosts: Hosts | None = None,
    exchange: Exchange = SUM,
) -> Evaluation:
    """Simulates the all-reduce of a float32 gradient."""
    count = topology.num_devices
    value = ValueSpec("float32", (-(-num_bytes // 4),))  # Whole elements.
    request = Request(value, tuple(range(count)), exchange=exchange)
    batch = Batch("sum", count, hosts.count if hosts else 1, ("",) * count, (request,))
    between = BetweenHosts(exchange=exchange) if hosts else None
    chosen = Options(algorithm, PackingOptions(num_packs), between=between)
    made = decide(batch, chosen, Machine(topology))
    seconds = simulator.robust_seconds(made, topology, hosts=hosts)
    ordered = simulator.simulate(made, topology, hosts=hosts).seconds
    bound = tree_program.lower_bound_seconds(topology, num_bytes)
    if hosts is not None:
        bound = max(bound, made.bytes_between_hosts / hosts.bandwidth)
    return Evaluation(topology, algorithm, made.algorithm, made, seconds, ordered, bound)


def _print_table(
    evaluations: Sequence[Evaluation], highlighted: str, size: str, console: Console
) -> None:
    topology = evaluations[0].topology
    count = topology.num_devices
    holders = f"each of {count} devices" if count > 1 else "the only device"
    table = Table(
        title=f"All-reduce of {size} on {holders} of {topology.name}",
        caption="Time: simulated, the median of runs in which copies take up to 5 % more or less. "
        f"Ordered: if none does. Bound: {format_seconds(evaluations[0].bound)}",
        title_justify="left",
        caption_justify="left",
        box=box.MINIMAL,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("Algorithm", no_wrap=True)
    for heading in ("Packs", "Busiest\nlink", "Bytes\non it", "Time", "Ordered", "Time /\nbound"):
        table.add_column(heading, justify="right", no_wrap=heading != "Busiest\nlink")
    for one in evaluations:
        link, num_bytes = simulator.bottleneck(one.plan, topology)
        cells = (
            str(len(one.plan.packs)),
            link or "none",
            format_bytes(num_bytes),
            format_seconds(one.seconds),
            format_seconds(one.ordered_seconds),
            f"{one.ratio:.3f}" if one.bound else "-",
        )
        style = "bold" if one.algorithm == highlighted else None
        table.add_row(one.label, *cells, style=style)
    console.print(table)
