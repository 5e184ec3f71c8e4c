"""`tfcdo bench`: measures tfcdo's all-reduces and TensorFlow's side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console

from tfcdo.bench import workloads
from tfcdo.cli import bench_compare, bench_workers, options
from tfcdo.cli.progress import progress
from tfcdo.cli.quiet_start import quiet_start

if TYPE_CHECKING:
    from tfcdo.bench import implementations, measure
    from tfcdo.bench.devices import ChosenDevices

# The status that GNU's timeout has.
_TIMED_OUT = 124


_DEVICES = options.number(
    *("-g", "--devices", "num_devices"), least=2, most=16, default=4,
    text="Number of devices: GPUs if there are that many, else virtual CPU devices.",
)  # fmt: skip
_NAMES = click.option(
    "--ops",
    "names",
    multiple=True,
    metavar="NAME",
    default=("all",),
    show_default=True,
    help="Implementations: tfcdo, tf or all; or one, as Python writes it, such as "
    "'tf.HierarchicalCopyAllReduce(num_packs=8)'. Can be repeated.",
)
_WIRE = click.option(
    "--wire",
    type=options.WIRE_DTYPES,
    help="Send float and double as this dtype: wire_dtype= of tfcdo's classes. busbw counts the "
    "bytes that are sent.",
)
_COMPARE = click.option(
    "--compare",
    "earlier",
    type=bench_compare.EarlierFile(),
    metavar="OLD.json",
    help="Show an earlier run, written by --json, next to this one.",
)


@dataclasses.dataclass(frozen=True)
class _Started:
    """TensorFlow, started: the console, the devices, and the implementations that can run."""

    console: Console
    devices: ChosenDevices
    compared: Sequence[implementations.Implementation]


@click.group(invoke_without_command=True)
@click.option(
    *("-b", "--minbytes"), type=options.Size(), default="8", show_default=True,
    help="Smallest size of the one value that is all-reduced; K, M and G are powers of 1024, KB, "
    "MB and GB of 1000.",
)  # fmt: skip
@click.option(
    *("-e", "--maxbytes"), type=options.Size(), default="128M", show_default=True,
    help="Largest size.",
)  # fmt: skip
@options.number(
    *("-f", "--stepfactor"), least=2, most=None, default=8, text="Factor from one size to the next."
)
@_DEVICES
@options.ITERATIONS
@options.WARMUP
@click.option(
    *("-d", "--datatype"), type=click.Choice(list(workloads.DTYPES)), default="float",
    show_default=True, help="Type of the numbers.",
)  # fmt: skip
@click.option(
    "--model",
    "models",
    type=click.Choice(workloads.model_names()),
    multiple=True,
    metavar="NAME",
    help="All-reduce a model's gradients instead of one value: resnet50, bert-base, mobilenet, "
    "tiny (500 values of 64 numbers) or tiny-matrices (500 of 8 x 8). Can be repeated.",
)
@_NAMES
@_WIRE
@click.option("--eager", is_flag=True, help="Run op by op instead of in a graph.")
@options.JSON_FILE
@_COMPARE
@click.option(
    *("-T", "--timeout"), type=click.FloatRange(0.0, min_open=True), metavar="SECONDS",
    help="End with status 124 if building an implementation, or a sample of it, takes longer.",
)  # fmt: skip
@click.option(
    "--plot", "plot_file", type=options.NewFile(".png"), help="File for a picture of the results."
)
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
    names: Sequence[str],
    wire: str | None,
    eager: bool,
    json_file: pathlib.Path | None,
    earlier: bench_compare.Earlier | None,
    timeout: float | None,
    plot_file: pathlib.Path | None,
) -> int:
    """Measure all-reduce implementations side by side: tfcdo's, TensorFlow's, and the floor.

    The values are read from variables on each device, all-reduced in a graph, and used where they
    end up; the time of the same graph without the all-reduce is subtracted. The implementations
    take turns. Every result is compared with numpy's: the exit status is 1 if one of tfcdo's is
    wrong. The subcommands measure other work.
    """
    given = [
        parameter.opts[-1]
        for parameter in context.command.params
        if context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    ]
    if context.invoked_subcommand:
        if given:
            raise click.UsageError(
                f"{' and '.join(given)} must follow the subcommand {context.invoked_subcommand}"
            )
        return 0
    dtype = workloads.DTYPES[datatype]
    sizes = [name for name in given if name in ("--minbytes", "--maxbytes", "--stepfactor")]
    if models and sizes:
        raise click.UsageError(
            f"{' and '.join(sizes)} cannot be given with --model, which has gradients of fixed "
            "sizes"
        )
    if minbytes > maxbytes:
        raise click.UsageError(
            f"--minbytes must be at most --maxbytes; got {minbytes} and {maxbytes} bytes"
        )
    if plot_file:
        options.require_matplotlib()
    if wire and dtype not in ("float32", "float64"):
        raise click.UsageError(f"--wire casts float and double; --datatype is {datatype}")
    measured = [workloads.gradients_of(name, dtype) for name in models] or [
        workloads.one_value(size, dtype) for size in workloads.sizes(minbytes, maxbytes, stepfactor)
    ]

    with _refused_arguments_in_one_line():
        started = _start(num_devices, names, wire, dtype)
        from tfcdo.bench import implementations, measure, tracking
        from tfcdo.cli import bench_tables

        results: list[measure.Measurement] = []

        def give_up(name: str) -> None:
            """Reports what was measured so far; only the end of the process ends what hangs."""
            if results:
                bench_tables.show(results, started.console)
                _write(started, results, json_file, earlier)
            click.echo(f"tfcdo: {name} took longer than --timeout {timeout:g} s", err=True)
            sys.stdout.flush()
            os._exit(_TIMED_OUT)

        watch = tracking.Watchdog(timeout, give_up)
        settings = measure.Settings(iterations, warmup, eager)
        with progress(started.console) as track:
            # Sizes below one element are rounded up to it: each workload is measured once.
            for workload in track(list(dict.fromkeys(measured)), description="workloads"):
                results += measure.run(
                    workload, started.devices, started.compared, settings, track, watch
                )
    bench_tables.show(results, started.console)
    _write(started, results, json_file, earlier)
    if plot_file:
        from tfcdo.plot import bench as bench_plot

        bench_plot.save(results, started.devices, plot_file)
    bench_tables.show_averages(results, started.console)
    return int(any(one.wrong for one in results if one.kind == implementations.OURS))


@bench.command()
@click.option(
    "--model",
    "models",
    type=click.Choice(list(workloads.KERAS_MODELS)),
    multiple=True,
    default=("mobilenet",),
    show_default=True,
    help="Keras model. Can be repeated.",
)
@_DEVICES
@options.ITERATIONS
@_NAMES
@_WIRE
@options.JSON_FILE
@_COMPARE
def fit(
    models: Sequence[str],
    num_devices: int,
    iterations: int,
    names: Sequence[str],
    wire: str | None,
    json_file: pathlib.Path | None,
    earlier: bench_compare.Earlier | None,
) -> int:
    """Time the training steps of a Keras model."""
    with _refused_arguments_in_one_line():
        started = _start(num_devices, names, wire, "float32")
        from tfcdo.bench import fit
        from tfcdo.cli import bench_tables

        results = []
        with progress(started.console) as track:
            for name in track(list(dict.fromkeys(models)), description="models"):
                results += fit.run(name, started.devices, started.compared, iterations, track)
    bench_tables.show_fit(results, started.console)
    _write(started, results, json_file, earlier)
    return 0


@bench.command()
@click.argument("num_rows", metavar="ROWS", type=click.IntRange(1, 10**6))
@click.option(
    "--repeat",
    type=click.FloatRange(0.0, 1.0),
    default=0.5,
    show_default=True,
    help="Share of a device's rows that all devices have.",
)
@_DEVICES
@options.ITERATIONS
@options.WARMUP
@_NAMES
@options.JSON_FILE
def sparse(
    num_rows: int,
    repeat: float,
    num_devices: int,
    iterations: int,
    warmup: int,
    names: Sequence[str],
    json_file: pathlib.Path | None,
) -> int:
    """Reduce ROWS rows of a table on each device and update the table.

    The table is of 1,000,000 x 64 numbers; it is updated by SGD and with momentum. The exit status
    is 1 if an update by one of tfcdo's classes is wrong.
    """
    with _refused_arguments_in_one_line():
        started = _start(num_devices, names, None, "float32")
        from tfcdo.bench import implementations, measure, rows
        from tfcdo.cli import bench_tables

        settings = measure.Settings(iterations, warmup)
        with progress(started.console) as track:
            results = rows.run(
                rows.TableRows(num_rows, repeat), started.devices, started.compared, settings, track
            )
    bench_tables.show_rows(results, started.console)
    _write(started, results, json_file, None)
    return int(any(one.wrong for one in results if one.kind == implementations.OURS))


bench.add_command(bench_workers.workers)


def _start(num_devices: int, names: Sequence[str], wire: str | None, dtype: str) -> _Started:
    """Starts TensorFlow, and makes the implementations that are named and can run here."""
    console = options.make_console(width_of_a_pipe=160)
    with options.status(console, "Starting TensorFlow ..."), quiet_start():
        import tensorflow as tf

        from tfcdo.bench import implementations
        from tfcdo.bench.devices import choose_devices

        tf.get_logger().setLevel("ERROR")
        try:
            # Devices come first, because constructing implementations may start TensorFlow.
            devices = choose_devices(num_devices)
            named = dict.fromkeys(
                found.with_wire(wire) if wire else found
                for name in names
                for found in implementations.parse(name)
            )
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        tf.config.list_logical_devices()
    console.print(f"{devices.description}, TensorFlow {tf.__version__}")
    reasons = {one: one.reason_not_to_run(devices.names, dtype) for one in named}
    for reason in dict.fromkeys(filter(None, reasons.values())):
        left_out = [one.name for one in named if reasons[one] == reason]
        console.print(f"Without {' and '.join(left_out)}: {reason}")
    compared = [one for one in named if not reasons[one]]
    if not compared:
        raise click.UsageError("none of the implementations can run here")
    return _Started(console, devices, compared)


def _write(
    started: _Started,
    results: Sequence[Any],
    json_file: pathlib.Path | None,
    earlier: bench_compare.Earlier | None,
) -> None:
    """Compares with the earlier run, and writes the JSON file."""
    from tfcdo.bench import devices

    description = started.devices.description
    if earlier:
        now = devices.describe_environment(description)
        bench_compare.show(earlier, now, results, started.console)
    if json_file:
        found = {"results": [bench_compare.as_json(one) for one in results]}
        devices.write_json(json_file, description, found)


@contextlib.contextmanager
def _refused_arguments_in_one_line() -> Iterator[None]:
    """Reports arguments that prove wrong when they are used; all other errors are bugs."""
    try:
        yield
    except ValueError as error:
        from tfcdo.bench import implementations

        if not isinstance(error, implementations.UnusableArgumentsError):
            raise
        raise click.UsageError(str(error)) from error
