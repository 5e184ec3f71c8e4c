"""`tfcdo bench`: measures tfcdo's all-reduces and TensorFlow's side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console

from tfcdo.bench import devices as bench_devices
from tfcdo.bench import workloads
from tfcdo.cli import options

if TYPE_CHECKING:
    from tfcdo.bench import implementations, link

_DEVICES = options.number(
    *("-g", "--devices", "num_devices"), least=2, most=16, default=4,
    text="Number of devices: GPUs if there are enough, else virtual CPUs.",
)  # fmt: skip
_NAMES = click.option(
    "--ops",
    "names",
    multiple=True,
    metavar="NAME",
    default=("all",),
    show_default=True,
    help="Implementations: tfcdo, tf, all, or Python such as "
    "'tfcdo.AutoAllReduce(wire_dtype=\"bfloat16\")'. Repeatable.",
)


@dataclasses.dataclass(frozen=True)
class _Started:
    """TensorFlow, started: the console, the devices, and the implementations that can run."""

    console: Console
    devices: bench_devices.ChosenDevices
    compared: Sequence[implementations.Implementation]


@click.group(invoke_without_command=True, short_help="Measure all-reduce implementations.")
@click.option(
    *("-b", "--minbytes"), type=options.Size(), default="8", show_default=True,
    help="Smallest size; K, M, G: powers of 1024; KB, MB, GB: of 1000.",
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
    help="Model whose gradients replace the single value. Repeatable.",
)
@click.option(
    "--optimizer",
    type=click.Choice(workloads.OPTIMIZERS),
    help="Optimizer whose update is measured too, with and without sharded state.",
)
@_NAMES
@click.option("--eager", is_flag=True, help="Ops run one by one instead of in a graph.")
@options.JSON_FILE
@click.option("--plot", "plot_file", type=options.NewFile(".png"), help="File for a picture.")
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
    eager: bool,
    json_file: pathlib.Path | None,
    plot_file: pathlib.Path | None,
) -> int:
    """Measure all-reduce implementations side by side: tfcdo's, TensorFlow's, and the floor.

    The values are read from variables on each device, all-reduced in a graph, and used where they
    end up; the time of the same graph without the all-reduce is subtracted. The implementations
    take turns. Every result is compared with numpy's: the exit status is 1 if one of tfcdo's is
    wrong. The subcommands measure training steps.
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
    if optimizer:
        allowed = {"--optimizer", "--devices", "--iters", "--warmup", "--json"}
        if set(given) - allowed:
            raise click.UsageError(
                f"--optimizer has its own values and strategies; leave out "
                f"{', '.join(sorted(set(given) - allowed))}"
            )
        return _bench_updates(optimizer, num_devices, iterations, warmup, json_file)
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
    dtype = workloads.DTYPES[datatype]
    measured = [workloads.gradients_of(name, dtype) for name in models] or [
        workloads.one_value(size, dtype) for size in workloads.sizes(minbytes, maxbytes, stepfactor)
    ]
    with _refused_arguments_in_one_line():
        started = _start(num_devices, names, dtype)
        from tfcdo.bench import implementations, measure
        from tfcdo.cli import bench_tables

        results: list[measure.Measurement] = []
        settings = measure.Settings(iterations, warmup, eager)
        with options.progress(started.console) as track:
            # Sizes below one element are rounded up to it: each workload is measured once.
            for workload in track(list(dict.fromkeys(measured)), description="workloads"):
                results += measure.run(workload, started.devices, started.compared, settings, track)
    bench_tables.show(results, started.console)
    _write_json(results, json_file, started.devices.description)
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
    help="Keras model. Repeatable.",
)
@_DEVICES
@options.ITERATIONS
@_NAMES
@options.JSON_FILE
def fit(
    models: Sequence[str],
    num_devices: int,
    iterations: int,
    names: Sequence[str],
    json_file: pathlib.Path | None,
) -> int:
    """Time the training steps of a Keras model."""
    with _refused_arguments_in_one_line():
        started = _start(num_devices, names, "float32")
        from tfcdo.bench import fit
        from tfcdo.cli import bench_tables

        results = []
        with options.progress(started.console) as track:
            for name in track(list(dict.fromkeys(models)), description="models"):
                results += fit.run(name, started.devices, started.compared, iterations, track)
    bench_tables.show_fit(results, started.console)
    _write_json(results, json_file, started.devices.description)
    return 0


@bench.command()
@click.argument("num_workers", metavar="NUMBER", type=click.IntRange(2, 16))
@options.number(
    *("-g", "--devices", "num_devices"), least=1, most=16, default=4,
    text="Number of virtual CPU devices of each worker.",
)  # fmt: skip
@options.ITERATIONS
@options.WARMUP
@click.option(
    "--rate", metavar="1gbit", help="Limit of the link between the workers; needs root or tc."
)
@click.option(
    "--wire-between", type=options.BETWEEN_DTYPES, default="bfloat16", show_default=True,
    help="Dtype of gradients between workers, for a third strategy.",
)  # fmt: skip
@options.JSON_FILE
def workers(
    num_workers: int,
    num_devices: int,
    iterations: int,
    warmup: int,
    rate: str | None,
    wire_between: str,
    json_file: pathlib.Path | None,
) -> int:
    """Train a model on NUMBER processes of this host.

    TensorFlow's and tfcdo's MultiWorkerMirroredStrategy take turns: step time, and bytes between
    the processes. The exit status is 1 if a result of tfcdo's is wrong.
    """
    from tfcdo.bench import hosts, worker_pool
    from tfcdo.cli import bench_tables

    console = options.make_console(width_of_a_pipe=120)
    settings = hosts.HostsSettings(
        num_workers, num_devices, iterations, warmup, wire_between=wire_between
    )
    with _open_link(rate, console) as opened, options.progress(console) as track:
        try:
            results = hosts.run(settings, opened, track)
        except worker_pool.WorkerError as error:
            raise click.ClickException(str(error)) from error
    bench_tables.show_hosts(results, opened.rate, console)
    _write_json(results, json_file, "virtual CPU devices of several processes")
    return int(any(one.wrong for one in results if one.kind.startswith("tfcdo")))


def _bench_updates(
    optimizer: str,
    num_devices: int,
    iterations: int,
    warmup: int,
    json_file: pathlib.Path | None,
) -> int:
    """Measures all-reduce plus update under TensorFlow's strategy and tfcdo's."""
    console = options.make_console(width_of_a_pipe=120)
    with options.status(console, "Starting TensorFlow ..."), options.quiet_start():
        from tfcdo.bench import updates, worker_pool
        from tfcdo.cli import bench_updates
    with options.progress(console) as track:
        try:
            results = updates.run(optimizer, num_devices, iterations, warmup, track)
        except worker_pool.WorkerError as error:
            raise click.ClickException(str(error)) from error
    bench_updates.show(results, console)
    _write_json(results, json_file, f"{num_devices} devices")
    return int(any(one.wrong for one in results))


@contextlib.contextmanager
def _open_link(rate: str | None, console: Console) -> Iterator[link.Loopback]:
    """Opens a link of the workers' own; without a rate, falls back on the shared one."""
    from tfcdo.bench import link

    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(link.open_link(link.parse_rate(rate) if rate else None))
        except ValueError as error:
            raise click.UsageError(f"--{error}") from error
        except link.LinkError as error:
            if rate:
                raise click.ClickException(f"--rate: {error}") from error
            console.print(
                f"Counting all bytes on the machine's loopback, also other programs': {error}"
            )
            opened = link.shared_link()
        yield opened


def _start(num_devices: int, names: Sequence[str], dtype: str) -> _Started:
    """Starts TensorFlow, and makes the implementations that are named and can run here."""
    console = options.make_console(width_of_a_pipe=160)
    with options.status(console, "Starting TensorFlow ..."), options.quiet_start():
        import tensorflow as tf

        from tfcdo.bench import implementations

        tf.get_logger().setLevel("ERROR")
        try:
            # Devices come first, because constructing implementations may start TensorFlow.
            devices = bench_devices.choose_devices(num_devices)
            named = list(
                dict.fromkeys(found for name in names for found in implementations.parse(name))
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


def _write_json(results: Sequence[Any], path: pathlib.Path | None, description: str) -> None:
    if path:
        bench_devices.write_json(path, description, {"results": [_as_json(one) for one in results]})


def _as_json(one: Any) -> dict[str, Any]:
    """Returns a measurement's fields and bandwidths; None for NaN, which JSON does not have."""
    bandwidths = {name: getattr(one, name, math.nan) for name in ("algbw", "busbw")}
    return dataclasses.asdict(one) | {
        name: None if math.isnan(value) else value for name, value in bandwidths.items()
    }


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
