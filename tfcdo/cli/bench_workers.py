"""`tfcdo bench workers`: measures multi-worker strategies on processes of this host."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator

import click
from rich import box
from rich.console import Console
from rich.table import Table

from tfcdo.bench import devices, hosts, link, worker_pool
from tfcdo.cli import options
from tfcdo.cli.progress import progress
from tfcdo.units import format_bytes, format_seconds


class _Rate(options.ParamType):
    """A rate as tc writes it, such as 1gbit."""

    name = "rate"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> link.Rate:
        """Reads the rate."""
        try:
            return link.parse_rate(str(value))
        except ValueError as error:
            self.fail(str(error).removeprefix("rate "), param, ctx)


@click.command()
@click.argument("num_workers", metavar="NUMBER", type=click.IntRange(2, 16))
@options.number(
    *("-g", "--devices", "num_devices"), least=1, most=16, default=4,
    text="Number of virtual CPU devices of each worker.",
)  # fmt: skip
@options.ITERATIONS
@options.WARMUP
@click.option(
    "--rate",
    type=_Rate(),
    metavar="1gbit",
    help="Limit of the link between the workers, in a network namespace of its own.",
)
@click.option(
    "--wire-between",
    type=options.BETWEEN_DTYPES,
    default="bfloat16",
    show_default=True,
    help="Dtype that one of tfcdo's strategies sends gradients in.",
)
@options.JSON_FILE
def workers(
    num_workers: int,
    num_devices: int,
    iterations: int,
    warmup: int,
    rate: link.Rate | None,
    wire_between: str,
    json_file: pathlib.Path | None,
) -> int:
    """Train a model on NUMBER processes of this host.

    TensorFlow's and tfcdo's MultiWorkerMirroredStrategy take turns: step time, and bytes between
    the processes. The exit status is 1 if a result of tfcdo's is wrong.
    """
    console = options.make_console(width_of_a_pipe=120)
    settings = hosts.HostsSettings(
        num_workers, num_devices, iterations, warmup, wire_between=wire_between
    )
    with progress(console) as track, _open_link(rate, console) as opened:
        try:
            result = hosts.run(settings, opened, track)
        except worker_pool.WorkerError as error:
            raise click.ClickException(str(error)) from error
    _show(result, console)
    if json_file:
        _write_json(result, json_file)
    ours = [result.of_kind("tfcdo"), result.of_kind(f"tfcdo {wire_between}")]
    return int(any(one.wrong != 0 or one.distinct_copies != 1 for one in ours))


@contextlib.contextmanager
def _open_link(rate: link.Rate | None, console: Console) -> Iterator[link.Loopback]:
    """Opens a link of the workers' own; without a rate, falls back on the shared one."""
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(link.open_link(rate))
        except link.LinkError as error:
            if rate:
                raise click.ClickException(f"--rate: {error}") from error
            console.print(
                f"Counting all bytes on the machine's loopback, also other programs': {error}"
            )
            opened = link.shared_link()
        yield opened


def _show(result: hosts.HostsResult, console: Console) -> None:
    theirs = result.of_kind("tf")
    rate = f", {theirs.rate} for both directions together" if theirs.rate else ""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{theirs.num_workers} workers with {theirs.num_devices} virtual CPU devices each, "
        f"{format_bytes(theirs.gradient_bytes)} of gradients{rate}",
        title_justify="left",
    )
    table.add_column("strategy\n")
    for heading in ("step\n(ms)", "±\n(ms)", "of\nTF", "sent\n(MB)", "of\nTF", "#wrong\n"):
        table.add_column(options.printable(heading, console), justify="right", no_wrap=True)
    for one in result.measurements:
        is_strategy = one.wrong is not None
        table.add_row(
            one.name,
            f"{one.seconds * 1e3:.0f}",
            f"{one.spread * 1e3:.0f}",
            f"{one.seconds / theirs.seconds:.2f}",
            f"{one.bytes_sent / 1e6:.1f}",
            f"{one.bytes_sent / theirs.bytes_sent:.3f}" if is_strategy else "",
            str(one.wrong) if is_strategy else "",
        )
    console.print(table)
    sending = ""
    if result.least_sending_seconds:
        sending = f" or sending ({format_seconds(result.least_sending_seconds)} at least)"
    ratio = result.limit / theirs.seconds
    console.print(
        options.printable(
            f"No step is shorter than computing{sending}: {format_seconds(result.limit)}, "
            f"{ratio:.2f} of TensorFlow's. All trainings started alike; the weights of the two that"
            f" cast nothing now differ by at most {result.weight_difference:.0e}.",
            console,
        )
    )
    for one in result.measurements:
        if one.distinct_copies not in (None, 1):
            console.print(f"{one.name}: the replicas have {one.distinct_copies} different weights")


def _write_json(result: hosts.HostsResult, path: pathlib.Path) -> None:
    found = {
        "results": [dataclasses.asdict(one) for one in result.measurements],
        "weight_difference": result.weight_difference,
        "least_sending_seconds": result.least_sending_seconds,
        "limit": result.limit,
        # Mean number of runnable processes in the last minute, workers included.
        "load": os.getloadavg()[0],
    }
    devices.write_json(path, "virtual CPU devices of several processes", found)
