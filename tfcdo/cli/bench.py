"""`tfcdo bench`: measures tfcdo's all-reduces and TensorFlow's side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource
from rich.console import Console

from tfcdo.bench import devices as bench_devices
from tfcdo.bench import results, worker_pool, workloads
from tfcdo.cli import bench_tables, options

if TYPE_CHECKING:
    from tfcdo.bench import hosts, implementations

_DEVICES = options.option(
    "-g --devices num_devices",
    options.number(2, 16),
    "Number of devices: GPUs if there are enough, else virtual CPUs.",
    4,
)
_NAMES = options.option(
    "--ops names",
    str,
    "Implementations: tfcdo, tf, all, or Python such as "
    "'tfcdo.AutoAllReduce(wire_dtype=\"bfloat16\")'. Repeatable.",
    ("all",),
    multiple=True,
    metavar="NAME",
)


@click.group(invoke_without_command=True, short_help="Measure all-reduce implementations.")
@options.option("-b --minbytes", options.SIZE, "Smallest size; M is 1024^2, MB is 1000^2.", "8")
@options.option("-e --maxbytes", options.SIZE, "Largest size.", "128M")
@options.option("-f --stepfactor", options.number(2), "Factor from one size to the next.", 8)
@_DEVICES
@options.ITERATIONS
@options.WARMUP
@options.option(
    "-d --datatype", click.Choice(list(workloads.DTYPES)), "Type of the numbers.", "float"
)
@options.option(
    "--model models",
    click.Choice(workloads.model_names()),
    "Model whose gradients replace the single value. Repeatable.",
    multiple=True,
)
@options.option(
    "--optimizer",
    click.Choice(workloads.OPTIMIZERS),
    "Optimizer whose update is measured, with and without sharded state.",
)
@_NAMES
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
    wrong. The subcommand measures training steps on several hosts.
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
        {f"{' and '.join(sorted(refused))} {reason}": refused, order: minbytes > maxbytes}
    )
    if context.invoked_subcommand:
        return 0
    if optimizer:
        return _bench_updates(optimizer, num_devices, iterations, warmup, json_file)
    dtype = workloads.DTYPES[datatype]
    benched = [workloads.gradients_of(name, dtype) for name in models] or [
        workloads.one_value(size, dtype) for size in workloads.sizes(minbytes, maxbytes, stepfactor)
    ]
    console, devices, compared = _start(num_devices, names, dtype)
    from tfcdo.bench import measure

    found: list[results.Measurement] = []
    with options.progress() as track:
        # Sizes below one element are rounded up to it: each workload is measured once.
        for workload in track(list(dict.fromkeys(benched)), description="workloads"):
            found += measure.run(workload, devices, compared, iterations, warmup, track)
    bench_tables.show(found, console)
    _write_json(found, json_file, devices.description)
    bench_tables.show_averages(found, console)
    return int(any(one.wrong for one in found if one.kind == results.OURS))


@bench.command()
@click.argument("num_workers", metavar="NUMBER", type=options.number(2, 16))
@options.option(
    "-g --devices num_devices",
    options.number(1, 16),
    "Number of virtual CPU devices of each worker.",
    4,
)
@options.ITERATIONS
@options.WARMUP
@options.option(
    "--rate",
    options.BANDWIDTH,
    "Limit of the link between the workers; needs root or tc.",
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
    with _open_link(rate, console) as opened, _progress_of_workers() as track:
        found = hosts.run(opened, num_workers, num_devices, iterations, warmup, track=track)
    bench_tables.show_hosts(found, num_workers, rate, console)
    _write_json(found, json_file, f"{num_devices} virtual CPU devices of {num_workers} processes")
    return 0


def _bench_updates(
    optimizer: str,
    num_devices: int,
    iterations: int,
    warmup: int,
    json_file: pathlib.Path | None,
) -> int:
    """Measures all-reduce plus update under TensorFlow's strategy and tfcdo's."""
    console = options.make_console()
    with options.status("Starting TensorFlow ..."), options.quiet_start():
        from tfcdo.bench import updates
    with _progress_of_workers() as track:
        found = updates.run(optimizer, num_devices, iterations, warmup, track)
    bench_tables.show_updates(found, console)
    _write_json(found, json_file, f"{num_devices} devices")
    return 0


@contextlib.contextmanager
def _progress_of_workers() -> Iterator[results.Track]:
    """Shows the progress of a block in which an error of a worker is the command's."""
    try:
        with options.progress() as track:
            yield track
    except worker_pool.WorkerError as error:
        raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def _open_link(rate: float | None, console: Console) -> Iterator[hosts.Loopback]:
    """Opens a link of the workers' own; without a rate, falls back on the shared one."""
    from tfcdo.bench import hosts

    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(hosts.open_link(rate))
        except hosts.LinkError as error:
            if rate:
                raise click.ClickException(f"--rate: {error}") from error
            console.print(
                f"Counting all bytes on the machine's loopback, also other programs': {error}"
            )
            opened = hosts.shared_link()
        yield opened


def _start(
    num_devices: int, names: Sequence[str], dtype: str
) -> tuple[Console, bench_devices.ChosenDevices, list[implementations.Implementation]]:
    """Starts TensorFlow; makes the implementations that are named and can run on the devices."""
    console = options.make_console()
    with options.status("Starting TensorFlow ..."), options.quiet_start():
        import tensorflow as tf

        from tfcdo.bench import implementations

        tf.get_logger().setLevel("ERROR")
        try:
            # Devices come first, because constructing implementations may start TensorFlow.
            devices = bench_devices.choose_devices(num_devices)
            named = [found for name in names for found in implementations.parse(name)]
            reasons = {one: one.reason_not_to_run(devices.names, dtype) for one in named}
            compared = [one for one, reason in reasons.items() if not reason]
            for one in compared:
                one.check_arguments(devices.names)
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        tf.config.list_logical_devices()
    console.print(f"{devices.description}, TensorFlow {tf.__version__}")
    for reason in dict.fromkeys(filter(None, reasons.values())):
        left_out = [one.name for one in reasons if reasons[one] == reason]
        console.print(f"Without {' and '.join(left_out)}: {reason}")
    if not compared:
        raise click.UsageError("none of the implementations can run here")
    return console, devices, compared


def _write_json(
    found: Sequence[results.Measurement], path: pathlib.Path | None, description: str
) -> None:
    """Writes measurements after a description of their environment, if there is a file for it."""
    if not path:
        return
    measured = []
    for one in found:
        bandwidths = {"algbw": one.algbw, "busbw": one.busbw} if one.count else {}
        # JSON has no NaN.
        finite = {key: None if math.isnan(value) else value for key, value in bandwidths.items()}
        measured.append(dataclasses.asdict(one) | finite)
    content = {**bench_devices.describe_environment(description), "results": measured}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
