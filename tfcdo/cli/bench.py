"""`tfcdo bench`: measures tfcdo's all-reduces and TensorFlow's side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import click
import msgspec
from click.core import ParameterSource
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfcdo.bench import results, worker_pool, workloads
from tfcdo.bench.results import ALONE, BASELINE, OURS, TENSORFLOW, Measurement
from tfcdo.cli import options
from tfcdo.log import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from tfcdo.bench import devices as bench_devices
    from tfcdo.bench import measure


# Bytes per second at which a step ends in time, and whose queue tc counts in 32 bits.
_SLOWEST_RATE, _FASTEST_RATE = 125e3, 10e9


def _read_rate(text: str) -> float:
    """Reads the rate of a link."""
    rate = options.parse_bandwidth(text)
    if not _SLOWEST_RATE <= rate <= _FASTEST_RATE:
        raise ValueError(f"expected a bandwidth from 1mbit to 80gbit; got {text!r}")
    return rate


@click.group(invoke_without_command=True, short_help="Measure all-reduce implementations.")
@options.option("-b --minbytes", options.SIZE, "Smallest size; M is 1024^2, MB is 1000^2.", "8")
@options.option("-e --maxbytes", options.SIZE, "Largest size.", "128M")
@options.option("-f --stepfactor", options.number(2), "Factor from one size to the next.", 8)
@options.option(
    "-g --devices num_devices",
    options.number(2, options.MOST_DEVICES),
    "Number of devices: GPUs if there are enough, else virtual CPUs.",
    4,
)
@options.ITERATIONS
@options.WARMUP
@options.option(
    "-d --datatype", click.Choice(list(workloads.DTYPES)), "Type of the numbers.", "float"
)
@options.option(
    "--model models",
    click.Choice(list(workloads.MODELS)),
    "Model whose gradients replace the single value. Repeatable.",
    multiple=True,
)
@options.option(
    "--optimizer",
    click.Choice(workloads.OPTIMIZERS),
    "Optimizer whose update is measured, with and without sharded state.",
)
@options.option(
    "--ops names",
    str,
    "Implementations: tfcdo, tf, all, or Python such as "
    "'tfcdo.AutoAllReduce(wire_dtype=\"bfloat16\")'. Repeatable.",
    ("all",),
    multiple=True,
    metavar="NAME",
)
@options.JSON_FILE
@click.pass_context
def bench(
    context: click.Context,
    minbytes: int,
    maxbytes: int,
    stepfactor: int,
    num_devices: int,
    iterations: int,
    warmup: int,
    datatype: str,
    models: Sequence[str],
    optimizer: str | None,
    names: Sequence[str],
    json_file: pathlib.Path | None,
) -> int:
    """Measure all-reduce implementations side by side: tfcdo's and TensorFlow's.

    The values are read from variables on each device, all-reduced in a graph, and used where they
    end up; the time of the same graph without the all-reduce is subtracted. The implementations
    take turns. Every result is compared with numpy's: the exit status is 1 if one of tfcdo's is
    incorrect. The subcommand measures training steps on several hosts.
    """
    given = {
        max(parameter.opts, key=len)
        for parameter in context.command.params
        if context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    }
    refused, reason = set[str](), ""
    if context.invoked_subcommand:
        refused, reason = given, f"must follow the subcommand {context.invoked_subcommand}"
    elif optimizer:
        refused = given - {"--optimizer", "--devices", "--iters", "--warmup", "--json"}
        reason = "cannot be given with --optimizer, which has its own values and strategies"
    elif models:
        refused = given & {"--minbytes", "--maxbytes", "--stepfactor"}
        reason = "cannot be given with --model, which has gradients of fixed sizes"
    order = f"--minbytes must be at most --maxbytes; got {minbytes} and {maxbytes} bytes"
    options.refuse(
        (refused, f"{' and '.join(sorted(refused))} {reason}"), (minbytes > maxbytes, order)
    )
    os.environ |= worker_pool.KERAS_DEFAULTS
    if context.invoked_subcommand:
        return 0
    console = options.make_console()
    devices = options.start_tensorflow(num_devices)
    import tensorflow as tf

    from tfcdo.bench import measure

    console.print(f"{devices.description}, TensorFlow {tf.__version__}")
    if optimizer:
        from tfcdo.bench import updates  # It needs Keras.

        options.refuse((optimizer not in updates.BY_NAME, f"this Keras has no {optimizer}"))
        with options.progress() as track:
            found = updates.run(optimizer, devices, iterations, warmup, track)
        size = format_bytes(found[0].size)
        _show(f"{num_devices} devices, all-reduce and {optimizer} update of {size}", found, console)
        console.print("State: the optimizer's, on all devices together.")
        _write_json(found, json_file, devices.description)
        return 0
    dtype = workloads.DTYPES[datatype]
    benched = [workloads.gradients_of(name, dtype) for name in models] or [
        workloads.one_value(size, dtype) for size in workloads.sizes(minbytes, maxbytes, stepfactor)
    ]
    compared = _compared(names, devices, dtype, console)
    try:
        with options.progress() as track:
            # Sizes below one element are rounded up to it: each workload is measured once.
            groups = [
                measure.run(workload, devices, compared, iterations, warmup, track)
                for workload in track(list(dict.fromkeys(benched)), description="workloads")
            ]
    except (MemoryError, tf.errors.ResourceExhaustedError) as error:
        raise click.ClickException(f"out of memory: {worker_pool.first_line(error)}") from error
    for group in groups:
        one = group[0]
        work = "sum" if one.workload == "sweep" else f"sum of {one.workload}'s gradients"
        title = f"{one.size} bytes, {one.count} elements of {one.dtype}, {work}"
        _show(title, group, console)
    console.print(
        "Times are medians minus the baseline (< noise: below it), ± is the distance between the "
        "quartiles. of TF: time relative to the fastest correct TensorFlow class; - where a time "
        "is smaller than its spread."
    )
    found = [one for group in groups for one in group]
    _write_json(found, json_file, devices.description)
    return int(any(one.wrong for one in found if one.kind == OURS))


@bench.command()
@click.argument("num_workers", metavar="NUMBER", type=options.number(2, options.MOST_DEVICES))
@options.option(
    "-g --devices num_devices",
    options.number(1, options.MOST_DEVICES),
    "Number of virtual CPU devices of each worker.",
    4,
)
@options.ITERATIONS
@options.WARMUP
@options.option(
    "--rate",
    options.parsed("bandwidth", _read_rate),
    "Limit of the link between the workers; needs tc, and root or user namespaces.",
    metavar="1gbit",
)
@options.JSON_FILE
def workers(
    num_workers: int,
    num_devices: int,
    iterations: int,
    warmup: int,
    rate: float | None,
    json_file: pathlib.Path | None,
) -> int:
    """Train a model on NUMBER processes of this host.

    TensorFlow's and tfcdo's MultiWorkerMirroredStrategy take turns: step time, and bytes between
    the processes.
    """
    console = options.make_console()
    with options.status("Starting TensorFlow ..."), options.quiet_start():
        from tfcdo.bench import hosts
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(hosts.open_link(rate))
        except hosts.LinkError as error:
            if rate:
                raise click.ClickException(f"--rate: {error}") from error
            text = "Counting all bytes on the machine's loopback, also other programs'"
            console.print(f"{text}: {error}")
            opened = hosts.Loopback()
        track = stack.enter_context(options.progress())
        stack.enter_context(options.reported(click.ClickException, worker_pool.WorkerError))
        found = hosts.run(opened, num_workers, num_devices, iterations, warmup, track)
    size = found[0].size
    devices = format_count(num_devices, "virtual CPU device")
    title = f"{num_workers} workers with {devices} each, "
    _show(f"{title}{format_bytes(size)} of gradients", found, console)
    if rate:
        # Patarasuk and Yuan 2009: each of N workers sends at least 2 (N - 1) / N times its data.
        seconds = format_seconds(2 * (num_workers - 1) * size / rate)
        speed = f"{format_bytes(round(rate))}/s, for both directions together"
        console.print(f"Sending float32 takes at least {seconds} at {speed}.")
    _write_json(found, json_file, f"{devices} of {num_workers} processes")
    return 0


def _compared(
    names: Sequence[str], devices: bench_devices.ChosenDevices, dtype: str, console: Console
) -> list[measure.Implementation]:
    """Makes the implementations that are named and can run on the devices; says which cannot."""
    from tfcdo.bench import measure

    with options.reported(click.UsageError, ValueError):
        named = [found for name in names for found in measure.parse(name)]
        reasons = {one: one.reason_not_to_run(devices.names, dtype) for one in named}
        compared = [one for one, reason in reasons.items() if not reason]
        for one in compared:
            one.check_arguments(devices.names)
    for reason in dict.fromkeys(filter(None, reasons.values())):
        left_out = [one.name for one in reasons if reasons[one] == reason]
        console.print(f"Without {' and '.join(left_out)}: {reason}")
    if not compared:
        raise click.UsageError("none of the implementations can run here")
    return compared


def _write_json(found: Sequence[Measurement], path: pathlib.Path | None, description: str) -> None:
    """Writes measurements after a description of their environment, if there is a file for it."""
    if not path:
        return
    from tfcdo.bench.devices import describe_environment

    measured = [
        dataclasses.asdict(one) | ({"algbw": one.algbw, "busbw": one.busbw} if one.count else {})
        for one in found
    ]
    content = {**describe_environment(description), "results": measured}
    # NaN is null.
    with options.writing(path):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def _show(title: str, measured: Sequence[Measurement], console: Console) -> None:
    """Prints a table of measurements, without the columns that they have no values for."""
    theirs = results.fastest(measured, TENSORFLOW)
    their_seconds = theirs.certain_seconds if theirs else math.nan
    sent_of_theirs = theirs.bytes_sent if theirs else None

    def time(seconds: float) -> str:
        return format_seconds(seconds) if seconds >= 0 else "< noise"

    columns: Mapping[str, Callable[[Measurement], str | Text]] = {
        "time\n": lambda one: time(one.seconds),
        "±\n": lambda one: time(one.spread),
        "algbw\n(GB/s)": lambda one: "" if one.wrong is None else _number(one.algbw, 1e9),
        "busbw\n(GB/s)": lambda one: "" if one.wrong is None else _number(one.busbw, 1e9),
        "#wrong\n": lambda one: (
            "" if one.wrong is None else Text(str(one.wrong), "bold red" if one.wrong else "")
        ),
        "of\nTF": lambda one: (
            "" if one.kind == BASELINE else _number(one.certain_seconds, their_seconds)
        ),
        "first call\n(s)": lambda one: _number(one.first_call),
        "state\n(MB)": lambda one: _number(one.state_bytes, 1e6),
        "sent\n(MB)": lambda one: _number(one.bytes_sent, 1e6),
        "sent,\nof TF": lambda one: _number(one.bytes_sent, sent_of_theirs),
    }
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.title_justify = "left"
    table.add_column("\n", overflow="fold")
    shown = {heading: cell for heading, cell in columns.items() if any(map(cell, measured))}
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in measured:
        # In 80 columns there is no room for more.
        name = one.name.replace("num_packs=", "").replace("AllReduce", "")
        style = {TENSORFLOW: "", BASELINE: "dim", ALONE: "dim"}.get(one.kind, "bold")
        table.add_row(name, *(cell(one) for cell in shown.values()), style=style)
    console.print(table)


def _number(value: float | None, unit: float | None = 1.0) -> str:
    """Formats a number in a unit; "-" where either is NaN."""
    if value is None or not unit:
        return ""
    return "-" if math.isnan(value / unit) else f"{value / unit:.2f}"
