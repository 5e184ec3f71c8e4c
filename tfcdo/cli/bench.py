"""`tfcdo bench`: measures tfcdo's all-reduces and TensorFlow's side by side."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import click
from click.core import ParameterSource
from rich import progress as rich_progress
from rich.console import Console

from tfcdo.bench import hosts
from tfcdo.bench import link
from tfcdo.bench import workloads
from tfcdo.cli import options
from tfcdo.cli.bench_hosts import RateType
from tfcdo.cli.bench_hosts import bench_hosts
from tfcdo.cli.quiet_start import quiet_start

if TYPE_CHECKING:
    from tfcdo.bench import implementations
    from tfcdo.bench import measure
    from tfcdo.bench import tracking
    from tfcdo.bench.devices import Devices

_Item = TypeVar("_Item")

# The names of parameters that only some runs use.
_OF_A_SWEEP = ("minbytes", "maxbytes", "stepfactor")
_NOT_OF_FIT = (*_OF_A_SWEEP, "warmup", "datatype", "eager", "plot_file", "rate")
_NOT_OF_WORKERS = (*_OF_A_SWEEP, "datatype", "models", "names", "eager", "fit", "plot_file")
_FIT_MODEL = "mobilenet"
# More would not end in a day.
_MAX_ITERATIONS = 10**6


@click.command()
@click.option(
    "-b",
    "--minbytes",
    type=options.Size(),
    default="8",
    show_default=True,
    help="Smallest size of the one value that is all-reduced; K, M and G are powers of 1024, KB, "
    "MB and GB of 1000.",
)
@click.option(
    "-e",
    "--maxbytes",
    type=options.Size(),
    default="128M",
    show_default=True,
    help="Largest size.",
)
@click.option(
    "-f",
    "--stepfactor",
    type=click.IntRange(2),
    default=8,
    show_default=True,
    help="From one size to the next.",
)
@click.option(
    "-g",
    "--devices",
    "num_devices",
    type=click.IntRange(1, 16),
    default=4,
    show_default=True,
    help="How many devices: GPUs if there are that many, else virtual CPU devices; with --workers, "
    "virtual CPU devices of each worker.",
)
@click.option(
    "-n",
    "--iters",
    "iterations",
    type=click.IntRange(1, _MAX_ITERATIONS),
    default=20,
    show_default=True,
    help="How many samples of each implementation count, taken in turn.",
)
@click.option(
    "-w",
    "--warmup",
    type=click.IntRange(0, _MAX_ITERATIONS),
    default=5,
    show_default=True,
    help="How many are taken before.",
)
@click.option(
    "-d",
    "--datatype",
    type=click.Choice(list(workloads.DTYPES)),
    default="float",
    show_default=True,
    help="The type of the numbers.",
)
@click.option(
    "--model",
    "models",
    type=click.Choice(workloads.model_names()),
    multiple=True,
    metavar="NAME",
    help="All-reduce a model's gradients instead of one value: resnet50, bert-base, mobilenet, "
    "tiny (500 values of 64 numbers) or tiny-matrices (500 of 8 x 8). Can be repeated.",
)
@click.option(
    "--ops",
    "names",
    multiple=True,
    metavar="NAME",
    default=("all",),
    show_default=True,
    help="Which implementations: tfcdo, tf or all; or one, as Python writes it, such as "
    "'tf.HierarchicalCopyAllReduce(num_packs=8)'. Can be repeated.",
)
@click.option("--eager", is_flag=True, help="Run op by op instead of in a graph.")
@click.option(
    "--fit",
    is_flag=True,
    help="Train a real Keras model (--model mobilenet or resnet50) and time its steps instead.",
)
@click.option(
    "--workers",
    "num_workers",
    type=click.IntRange(2, 16),
    help="Train a model on so many processes of this host instead, under TensorFlow's and tfcdo's "
    "MultiWorkerMirroredStrategy in turn: step time, and bytes between the processes.",
)
@click.option(
    "--rate",
    type=RateType(),
    metavar="1gbit",
    help="Limit the link between the workers, in a network namespace of its own.",
)
@click.option(
    "--json", "json_file", type=options.NewFile(".json"), help="Write the results to this file."
)
@click.option(
    "--plot", "plot_file", type=options.NewFile(".png"), help="Draw the results in this file."
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
    eager: bool,
    fit: bool,
    num_workers: int | None,
    rate: link.Rate | None,
    json_file: pathlib.Path | None,
    plot_file: pathlib.Path | None,
) -> int:
    """Measure all-reduce implementations side by side: tfcdo's, TensorFlow's, and the floor.

    The values are read from variables on each device, all-reduced in a graph, and used where they
    end up; the time of the same graph without the all-reduce is subtracted. The implementations
    take turns. Every result is compared with numpy's: the exit status is 1 if one of tfcdo's is
    wrong.
    """
    # First the checks that need no TensorFlow, which takes seconds to start.
    if num_workers:
        _refuse(context, _NOT_OF_WORKERS, "--workers, which trains one model under two strategies")
        settings = hosts.Settings(num_workers, num_devices, iterations, warmup)
        console = options.make_console(width_of_a_pipe=120)
        with _progress(console) as track:
            return bench_hosts(settings, rate, json_file, console, track)
    if rate:
        raise click.UsageError("--rate limits the link between --workers, which are not given")
    if num_devices < 2:
        raise click.UsageError(f"--devices must be at least 2 without --workers; got {num_devices}")
    if fit:
        _check_fit(context, models)
    if models:
        _refuse(context, _OF_A_SWEEP, "--model, as a model's gradients have sizes of their own")
    if minbytes > maxbytes:
        raise click.UsageError(
            f"--minbytes must be at most --maxbytes; got {minbytes} and {maxbytes} bytes"
        )
    if plot_file:
        options.require_matplotlib()
    dtype = workloads.DTYPES[datatype]
    sizes = workloads.sizes(minbytes, maxbytes, stepfactor)
    found = [workloads.gradients_of(name, dtype) for name in models] or [
        workloads.one_value(size, dtype) for size in sizes
    ]
    # Sizes below that of one element are all rounded up to it: each workload is measured once.
    measured = list(dict.fromkeys(found))
    console = options.make_console(width_of_a_pipe=160)
    with options.status(console, "Starting TensorFlow ..."), quiet_start():
        import tensorflow as tf

        from tfcdo.bench import implementations
        from tfcdo.bench import measure
        from tfcdo.bench.devices import choose_devices

        tf.get_logger().setLevel("ERROR")
        with _errors_as_messages():
            # Devices come first, because constructing implementations may start TensorFlow.
            devices = choose_devices(num_devices)
            parsed = [found for name in names for found in implementations.parse(name)]
        tf.config.list_logical_devices()

    console.print(f"{devices.description}, TensorFlow {tf.__version__}")
    compared = _runnable(list(dict.fromkeys(parsed)), devices, dtype, console)
    try:
        if fit:
            return _fit(models, devices, compared, iterations, json_file, console)
        timing = measure.Settings(iterations, warmup, eager)
        return _all_reduce(measured, devices, compared, timing, json_file, plot_file, console)
    except implementations.UnusableArgumentsError as error:
        raise click.UsageError(str(error)) from error


def _check_fit(context: click.Context, models: Sequence[str]) -> None:
    _refuse(context, _NOT_OF_FIT, "--fit, which only times the steps of a model in training")
    unknown = [name for name in models if name not in workloads.KERAS_MODELS]
    if unknown:
        known = " or ".join(workloads.KERAS_MODELS)
        raise click.UsageError(f"--fit can train --model {known}, not {unknown[0]}")


def _refuse(context: click.Context, parameters: Sequence[str], beside: str) -> None:
    """Refuses options that would have no effect beside another one."""
    given = [
        parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name in parameters
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{' and '.join(given)} cannot be given beside {beside}")


def _all_reduce(
    measured: Sequence[workloads.Workload],
    devices: Devices,
    compared: Sequence[implementations.Implementation],
    settings: measure.Settings,
    json_file: pathlib.Path | None,
    plot_file: pathlib.Path | None,
    console: Console,
) -> int:
    from tfcdo.bench import implementations
    from tfcdo.bench import measure
    from tfcdo.cli import bench_report

    results = []
    with _progress(console) as track:
        for workload in track(measured, description="workloads"):
            results += measure.run(workload, devices, compared, settings, track)
    bench_report.show(results, console)
    if json_file:
        bench_report.write_json(results, devices, json_file)
    if plot_file:
        from tfcdo.plot import bench

        bench.save(results, devices, plot_file)
    return int(any(one.wrong for one in results if one.kind == implementations.OURS))


def _fit(
    models: Sequence[str],
    devices: Devices,
    compared: Sequence[implementations.Implementation],
    rounds: int,
    json_file: pathlib.Path | None,
    console: Console,
) -> int:
    from tfcdo.bench import fit
    from tfcdo.cli import bench_report

    names = tuple(dict.fromkeys(models)) or (_FIT_MODEL,)
    results = []
    with _progress(console) as track:
        for name in track(names, description="models"):
            results += fit.run(name, devices, compared, rounds, track)
    bench_report.show_fit(results, console)
    if json_file:
        bench_report.write_json(results, devices, json_file)
    return 0


def _runnable(
    parsed: Sequence[implementations.Implementation],
    devices: Devices,
    dtype: str,
    console: Console,
) -> list[implementations.Implementation]:
    """Leaves out the implementations that cannot run here, and prints the reason."""
    compared = []
    left_out: dict[str, list[str]] = {}
    for implementation in parsed:
        reason = implementation.reason_not_to_run(devices.names, dtype)
        if reason:
            left_out.setdefault(reason, []).append(implementation.name)
        else:
            compared.append(implementation)
    for reason, names in left_out.items():
        console.print(f"Without {' and '.join(names)}: {reason}")
    if not compared:
        raise click.UsageError("none of the implementations can run here")
    return compared


@contextlib.contextmanager
def _errors_as_messages() -> Iterator[None]:
    """Reports wrong options, and what this machine does not have, without a traceback."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[tracking.Track]:
    """Shows progress bars on a terminal, one for each sequence that is being gone through."""
    columns = (
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.description}", markup=False),
    )
    # Without refreshes by a thread, which would run in the middle of what is being timed.
    with rich_progress.Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=False,
    ) as progress:

        def track(sequence: Sequence[_Item], *, description: str) -> Iterable[_Item]:
            task = progress.add_task(description, total=len(sequence))
            progress.refresh()
            yield from progress.track(sequence, task_id=task)
            progress.remove_task(task)

        yield track
