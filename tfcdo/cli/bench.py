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

from tfcdo.bench import hosts
from tfcdo.bench import link
from tfcdo.bench import workloads
from tfcdo.cli import bench_compare
from tfcdo.cli import bench_options
from tfcdo.cli import options
from tfcdo.cli.bench_hosts import bench_hosts
from tfcdo.cli.progress import progress
from tfcdo.cli.quiet_start import quiet_start

if TYPE_CHECKING:
    from tfcdo.bench import implementations
    from tfcdo.bench import measure
    from tfcdo.bench.devices import Devices

# The names of parameters that only some runs use.
_OF_A_SWEEP = ("minbytes", "maxbytes", "stepfactor")
_NOT_OF_FIT = (
    *(*_OF_A_SWEEP, "warmup", "datatype", "eager", "plot_file", "rate", "timeout"),
    "sparse_rows",
)
_NOT_OF_SPARSE = (
    *(*_OF_A_SWEEP, "datatype", "models", "eager", "wire", "plot_file", "rate"),
    *("timeout", "earlier"),
)
_NOT_OF_WORKERS = (
    *(*_OF_A_SWEEP, "datatype", "models", "names", "eager", "fit", "wire", "plot_file"),
    *("earlier", "timeout", "sparse_rows"),
)
_NOT_OF_PREDICT = (
    *("datatype", "models", "names", "eager", "fit", "wire", "plot_file", "rate"),
    *("earlier", "timeout", "sparse_rows"),
)
# The sizes of --predict: what is smaller is a matter of the cost of ops alone.
_PREDICTED = (2**20, 2**28, 4)
_FIT_MODEL = "mobilenet"
# The status that GNU's timeout has.
_TIMED_OUT = 124


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """Where results go, and what they are compared with."""

    console: Console
    json_file: pathlib.Path | None
    plot_file: pathlib.Path | None
    earlier: bench_compare.Earlier | None

    def write(self, results: Sequence[Any], devices: Devices) -> None:
        """Compares with the earlier run, and writes the JSON file."""
        from tfcdo.bench import machine
        from tfcdo.cli import bench_report

        if self.earlier:
            now = machine.describe_environment(devices.description)
            bench_compare.show(self.earlier, now, results, self.console)
        if self.json_file:
            bench_report.write_json(results, devices, self.json_file)


@click.command()
@bench_options.add_to
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
    predicts: bool,
    sparse_rows: int | None,
    repeat: float | None,
    num_workers: int | None,
    rate: link.Rate | None,
    wire: str | None,
    json_file: pathlib.Path | None,
    earlier: bench_compare.Earlier | None,
    timeout: float | None,
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
        with progress(console) as track:
            return bench_hosts(settings, rate, json_file, console, track)
    if rate:
        raise click.UsageError("--rate limits the link between --workers, which are not given")
    if num_devices < 2:
        raise click.UsageError(f"--devices must be at least 2 without --workers; got {num_devices}")
    if predicts:
        _refuse(context, _NOT_OF_PREDICT, "--predict, which compares all algorithms")
        if not _given(context, _OF_A_SWEEP):
            minbytes, maxbytes, stepfactor = _PREDICTED
    if fit:
        _check_fit(context, models)
    if sparse_rows:
        _refuse(context, _NOT_OF_SPARSE, "--sparse, which reduces rows of a table of its own")
    elif repeat is not None:
        raise click.UsageError("--repeat is about the rows of --sparse, which is not given")
    if models:
        _refuse(context, _OF_A_SWEEP, "--model, as a model's gradients have sizes of their own")
    if minbytes > maxbytes:
        raise click.UsageError(
            f"--minbytes must be at most --maxbytes; got {minbytes} and {maxbytes} bytes"
        )
    if plot_file:
        options.require_matplotlib()
    dtype = workloads.DTYPES[datatype]
    if wire and dtype not in ("float32", "float64"):
        raise click.UsageError(f"--wire casts float and double; --datatype is {datatype}")
    sizes = list(workloads.sizes(minbytes, maxbytes, stepfactor))
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
        from tfcdo.cli.bench_predict import bench_predict

        tf.get_logger().setLevel("ERROR")
        with _errors_as_messages():
            # Devices come first, because constructing implementations may start TensorFlow.
            devices = choose_devices(num_devices)
            parsed = [found for name in names for found in implementations.parse(name)]
            if wire:
                parsed = [found.with_wire(wire) for found in parsed]
        tf.config.list_logical_devices()

    outputs = _Outputs(console, json_file, plot_file, earlier)
    console.print(f"{devices.description}, TensorFlow {tf.__version__}")
    if predicts:
        timing = measure.Settings(iterations, warmup)
        with progress(console) as track:
            return bench_predict(sizes, devices, timing, json_file, console, track)
    compared = _runnable(list(dict.fromkeys(parsed)), devices, dtype, console)
    try:
        if fit:
            return _fit(models, devices, compared, iterations, outputs)
        timing = measure.Settings(iterations, warmup, eager)
        if sparse_rows:
            return _sparse(
                sparse_rows, 0.5 if repeat is None else repeat, devices, compared, timing, outputs
            )
        return _all_reduce(measured, devices, compared, timing, timeout, outputs)
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
    given = _given(context, parameters)
    if given:
        raise click.UsageError(f"{' and '.join(given)} cannot be given beside {beside}")


def _given(context: click.Context, parameters: Sequence[str]) -> list[str]:
    """Returns the options among some parameters that the command line has."""
    return [
        parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name in parameters
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]


def _all_reduce(
    measured: Sequence[workloads.Workload],
    devices: Devices,
    compared: Sequence[implementations.Implementation],
    settings: measure.Settings,
    timeout: float | None,
    outputs: _Outputs,
) -> int:
    from tfcdo.bench import implementations
    from tfcdo.bench import measure
    from tfcdo.bench import watchdog
    from tfcdo.cli import bench_report

    results: list[measure.Measurement] = []

    def give_up(name: str) -> None:
        """Reports what was measured so far; nothing but its process ends what hangs."""
        if results:
            bench_report.show(results, outputs.console)
            outputs.write(results, devices)
        click.echo(f"tfcdo: {name} took longer than --timeout {timeout:g} s", err=True)
        sys.stdout.flush()
        os._exit(_TIMED_OUT)

    with progress(outputs.console) as track, watchdog.Watchdog(timeout, give_up).running() as watch:
        for workload in track(measured, description="workloads"):
            results += measure.run(workload, devices, compared, settings, track, watch)
    bench_report.show(results, outputs.console)
    outputs.write(results, devices)
    if outputs.plot_file:
        from tfcdo.plot import bench

        bench.save(results, devices, outputs.plot_file)
    bench_report.show_averages(results, outputs.console)
    return int(any(one.wrong for one in results if one.kind == implementations.OURS))


def _sparse(
    num_rows: int,
    repeat: float,
    devices: Devices,
    compared: Sequence[implementations.Implementation],
    settings: measure.Settings,
    outputs: _Outputs,
) -> int:
    from tfcdo.bench import implementations
    from tfcdo.bench import rows
    from tfcdo.cli import bench_rows

    workload = rows.Workload(num_rows, repeat)
    with progress(outputs.console) as track, _errors_as_messages():
        results = rows.run(workload, devices, compared, settings, track)
    bench_rows.show(results, outputs.console)
    outputs.write(results, devices)
    return int(any(one.wrong for one in results if one.kind == implementations.OURS))


def _fit(
    models: Sequence[str],
    devices: Devices,
    compared: Sequence[implementations.Implementation],
    rounds: int,
    outputs: _Outputs,
) -> int:
    from tfcdo.bench import fit
    from tfcdo.cli import bench_report

    names = tuple(dict.fromkeys(models)) or (_FIT_MODEL,)
    results = []
    with progress(outputs.console) as track:
        for name in track(names, description="models"):
            results += fit.run(name, devices, compared, rounds, track)
    bench_report.show_fit(results, outputs.console)
    outputs.write(results, devices)
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
