"""`tfcdo bench`: measures tfcdo's all-reduces and TensorFlow's side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from tfcdo.bench import hosts
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

# What is measured where no option says so.
_FIT_MODEL, _REPEAT = "mobilenet", 0.5
# The status that GNU's timeout has.
_TIMED_OUT = 124


@dataclasses.dataclass(frozen=True)
class _Run:
    """Measurement in this process, where TensorFlow has started.

    Attributes:
      given: the options.
      console: where results are printed.
      devices: over which devices.
      settings: how to measure.
      compared: the implementations.
    """

    given: bench_options.Options
    console: Console
    devices: Devices
    settings: measure.Settings
    compared: Sequence[implementations.Implementation]

    def write(self, results: Sequence[Any]) -> None:
        """Compares with the earlier run, and writes the JSON file."""
        from tfcdo.bench import machine
        from tfcdo.cli import bench_report

        if self.given.earlier:
            now = machine.describe_environment(self.devices.description)
            bench_compare.show(self.given.earlier, now, results, self.console)
        if self.given.json_file:
            bench_report.write_json(results, self.devices, self.given.json_file)


@click.command()
@bench_options.add_to
def bench(given: bench_options.Options) -> int:
    """Measure all-reduce implementations side by side: tfcdo's, TensorFlow's, and the floor.

    The values are read from variables on each device, all-reduced in a graph, and used where they
    end up; the time of the same graph without the all-reduce is subtracted. The implementations
    take turns. Every result is compared with numpy's: the exit status is 1 if one of tfcdo's is
    wrong.
    """
    given.check()
    if given.num_workers:
        return _workers(given, given.num_workers)
    started = _start(given)
    from tfcdo.bench import implementations

    run = _without_what_cannot_run(started)
    try:
        if given.fit:
            return _fit(run)
        return _sparse(run, given.sparse_rows) if given.sparse_rows else _all_reduce(run)
    except implementations.UnusableArgumentsError as error:
        raise click.UsageError(str(error)) from error


def _workers(given: bench_options.Options, num_workers: int) -> int:
    settings = hosts.Settings(num_workers, given.num_devices, given.iterations, given.warmup)
    console = options.make_console(width_of_a_pipe=120)
    with progress(console) as track:
        return bench_hosts(settings, given.rate, given.json_file, console, track)


def _start(given: bench_options.Options) -> _Run:
    """Starts TensorFlow, and makes the implementations that are named."""
    console = options.make_console(width_of_a_pipe=160)
    with options.status(console, "Starting TensorFlow ..."), quiet_start():
        import tensorflow as tf

        from tfcdo.bench import implementations
        from tfcdo.bench import measure
        from tfcdo.bench.devices import choose_devices

        tf.get_logger().setLevel("ERROR")
        with _errors_as_messages():
            # Devices come first, because constructing implementations may start TensorFlow.
            devices = choose_devices(given.num_devices)
            named = [found for name in given.names for found in implementations.parse(name)]
            if given.wire:
                named = [found.with_wire(given.wire) for found in named]
        tf.config.list_logical_devices()
    console.print(f"{devices.description}, TensorFlow {tf.__version__}")
    settings = measure.Settings(given.iterations, given.warmup, given.eager)
    return _Run(given, console, devices, settings, list(dict.fromkeys(named)))


def _without_what_cannot_run(run: _Run) -> _Run:
    """Leaves out the implementations that cannot run here, and prints the reason."""
    compared = []
    left_out: dict[str, list[str]] = {}
    for implementation in run.compared:
        reason = implementation.reason_not_to_run(run.devices.names, run.given.dtype)
        if reason:
            left_out.setdefault(reason, []).append(implementation.name)
        else:
            compared.append(implementation)
    for reason, names in left_out.items():
        run.console.print(f"Without {' and '.join(names)}: {reason}")
    if not compared:
        raise click.UsageError("none of the implementations can run here")
    return dataclasses.replace(run, compared=compared)


def _all_reduce(run: _Run) -> int:
    from tfcdo.bench import implementations
    from tfcdo.bench import measure
    from tfcdo.bench import watchdog
    from tfcdo.cli import bench_report

    given = run.given
    results: list[measure.Measurement] = []

    def give_up(name: str) -> None:
        """Reports what was measured so far; nothing but its process ends what hangs."""
        if results:
            bench_report.show(results, run.console)
            run.write(results)
        click.echo(f"tfcdo: {name} took longer than --timeout {given.timeout:g} s", err=True)
        sys.stdout.flush()
        os._exit(_TIMED_OUT)

    watching = watchdog.Watchdog(given.timeout, give_up).running()
    with progress(run.console) as track, watching as watch:
        for workload in track(given.measured, description="workloads"):
            results += measure.run(workload, run.devices, run.compared, run.settings, track, watch)
    bench_report.show(results, run.console)
    run.write(results)
    if given.plot_file:
        from tfcdo.plot import bench

        bench.save(results, run.devices, given.plot_file)
    bench_report.show_averages(results, run.console)
    return int(any(one.wrong for one in results if one.kind == implementations.OURS))


def _sparse(run: _Run, num_rows: int) -> int:
    from tfcdo.bench import implementations
    from tfcdo.bench import rows
    from tfcdo.cli import bench_rows

    repeat = _REPEAT if run.given.repeat is None else run.given.repeat
    workload = rows.Workload(num_rows, repeat)
    with progress(run.console) as track, _errors_as_messages():
        results = rows.run(workload, run.devices, run.compared, run.settings, track)
    bench_rows.show(results, run.console)
    run.write(results)
    return int(any(one.wrong for one in results if one.kind == implementations.OURS))


def _fit(run: _Run) -> int:
    from tfcdo.bench import fit
    from tfcdo.cli import bench_report

    names = tuple(dict.fromkeys(run.given.models)) or (_FIT_MODEL,)
    results = []
    with progress(run.console) as track:
        for name in track(names, description="models"):
            results += fit.run(name, run.devices, run.compared, run.given.iterations, track)
    bench_report.show_fit(results, run.console)
    run.write(results)
    return 0


@contextlib.contextmanager
def _errors_as_messages() -> Iterator[None]:
    """Reports wrong options, and what this machine does not have, without a traceback."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
