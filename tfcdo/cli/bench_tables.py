"""Prints the tables of `tfcdo bench` and of its subcommands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfcdo.bench import results
from tfcdo.bench.results import ALONE, BASELINE, OURS, TENSORFLOW, Measurement
from tfcdo.cli import options
from tfcdo.log import format_bytes, format_seconds

# A heading, and the cell below it for a measurement.
_Column = tuple[str, Callable[[Measurement], str | Text]]
_STYLES = {TENSORFLOW: "", BASELINE: "dim", ALONE: "dim"}
_COMPARED = (OURS, TENSORFLOW)


def show(measured: Sequence[Measurement], console: Console) -> None:
    """Prints a table for each workload."""
    for group in results.by_workload(measured):
        _print_times(group, console)
    text = (
        "Times are medians minus the baseline (< noise: below it), ± is the distance between the "
        "quartiles. of TF: time relative to the fastest correct TensorFlow class; - where a time "
        "is smaller than its spread."
    )
    console.print(options.printable(text, console))


def show_updates(measured: Sequence[Measurement], console: Console) -> None:
    """Prints times, state and peak memory of each strategy's all-reduces and updates."""
    first = measured[0]
    ours = results.fastest(measured, OURS)
    columns: list[_Column] = [
        ("strategy\n", lambda one: one.name),
        *_step_columns(measured),
        ("of\ntfcdo", lambda one: _ratio(one, ours)),
        ("first\n(s)", lambda one: f"{one.first_call:.1f}"),
        ("state\n(MB)", lambda one: _megabytes(one.state_bytes)),
        ("peak\n(MB)", lambda one: _megabytes(one.peak_memory)),
    ]
    title = (
        f"{first.num_devices} devices, all-reduce and {first.workload} update of "
        f"{format_bytes(first.size)}"
    )
    _print(title, columns, measured, console)
    console.print("State: the optimizer's, on all devices together. Peak: of the process's memory.")


def show_hosts(
    measured: Sequence[Measurement], num_workers: int, rate: float | None, console: Console
) -> None:
    """Prints the table of training steps on several workers."""
    theirs = next(one for one in measured if one.kind == TENSORFLOW)

    def sent_of_theirs(one: Measurement) -> str:
        sent = one.bytes_sent or 0.0
        return "" if one.kind == ALONE else f"{sent / (theirs.bytes_sent or 0.0):.3f}"

    columns: list[_Column] = [
        ("strategy\n", lambda one: one.name),
        *_step_columns(measured),
        ("sent\n(MB)", lambda one: _megabytes(one.bytes_sent, 1)),
        ("of\nTF", sent_of_theirs),
    ]
    title = (
        f"{num_workers} workers with {theirs.num_devices} virtual CPU devices each, "
        f"{format_bytes(theirs.size)} of gradients"
    )
    _print(title, columns, measured, console)
    if rate:
        # Patarasuk and Yuan 2009: each of N workers sends at least 2 (N - 1) / N times its data.
        seconds = format_seconds(2 * (num_workers - 1) * theirs.size / rate)
        console.print(
            f"Sending float32 takes at least {options.printable(seconds, console)} at "
            f"{format_bytes(round(rate))}/s, for both directions together."
        )


def show_averages(measured: Sequence[Measurement], console: Console) -> None:
    """Prints average bus bandwidths as nccl-tests does, tfcdo's best in the last line."""
    compared = [one for one in measured if one.kind in _COMPARED]
    ours = {one.name for one in compared if one.kind == OURS}
    # As for the exit status, TensorFlow's wrong results count only if nothing else ran.
    wrong = sum(one.wrong or 0 for one in compared if one.name in ours or not ours)
    console.print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    busbw = {
        (one.name, one.workload, one.size): one.busbw / 1e9 for one in compared if not one.is_noise
    }
    names = {name for name, *_ in busbw}
    works = {(one.workload, one.size) for one in compared}
    common = [work for work in works if all((name, *work) in busbw for name in names)]
    if not names or not common:
        console.print("# Avg bus bandwidth    : below noise", soft_wrap=True)
        return
    if len(common) < len(works):
        console.print(
            f"# Averages of {len(common)} of {len(works)} sizes; at the others, some time is "
            "below noise",
            soft_wrap=True,
        )
    averages = {name: sum(busbw[(name, *work)] for work in common) / len(common) for name in names}
    lost = {one.name: -math.inf for one in compared if one.name not in names}
    for name, average in sorted(
        {**averages, **lost}.items(), key=lambda item: (item[0] in ours, item[1])
    ):
        shown = "below noise" if name in lost else f"{average:g}"
        console.print(f"# Avg bus bandwidth    : {shown} ({name})", soft_wrap=True)


def _print(
    title: str, columns: Sequence[_Column], rows: Sequence[Measurement], console: Console
) -> None:
    """Prints a table whose first column is names, and whose others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    table.title = title
    table.add_column(columns[0][0], overflow="fold")
    for heading, _ in columns[1:]:
        table.add_column(options.printable(heading, console), justify="right", no_wrap=True)
    for one in rows:
        style = _STYLES.get(one.kind, "bold")
        table.add_row(*(cell(one) for _, cell in columns), style=style)
    console.print(table)


def _print_times(group: Sequence[Measurement], console: Console) -> None:
    first = group[0]
    work = "sum" if first.workload == "sweep" else f"sum of {first.workload}'s gradients"
    theirs = results.fastest(group, TENSORFLOW)
    columns: list[_Column] = [
        ("implementation\n", _short_name),
        ("time\n(us)", lambda one: _microseconds(one.seconds)),
        ("±\n(us)", lambda one: _microseconds(one.spread)),
        ("algbw\n(GB/s)", lambda one: "" if one.wrong is None else _number(one.algbw / 1e9)),
        ("busbw\n(GB/s)", lambda one: "" if one.wrong is None else _number(one.busbw / 1e9)),
        ("#wrong\n", _wrong),
        ("of\nTF", lambda one: _ratio(one, theirs) if one.kind in _COMPARED else ""),
        ("first call\n(s)", lambda one: f"{one.first_call:.2f}"),
    ]
    title = f"{first.size} bytes, {first.count} elements of {first.dtype}, {work}"
    _print(title, columns, group, console)


def _step_columns(measured: Sequence[Measurement]) -> list[_Column]:
    """Makes the columns of training steps."""
    theirs = results.fastest(measured, TENSORFLOW)
    return [
        ("step\n(ms)", lambda one: f"{one.seconds * 1e3:.0f}"),
        ("±\n(ms)", lambda one: f"{one.spread * 1e3:.0f}"),
        ("of\nTF", lambda one: _ratio(one, theirs)),
    ]


def _short_name(one: Measurement) -> str:
    # In 80 columns there is no room for more.
    return one.name.replace("num_packs=", "").replace("AllReduce", "")


def _wrong(one: Measurement) -> str | Text:
    if one.wrong is None:
        return ""
    return Text(str(one.wrong), "bold red" if one.wrong else "")


def _megabytes(size: float | None, digits: int = 0) -> str:
    return "-" if size is None else f"{size / 1e6:.{digits}f}"


def _microseconds(seconds: float) -> str:
    if seconds < 0:
        return "< noise"
    value = seconds * 1e6
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _ratio(one: Measurement, other: Measurement | None) -> str:
    """Formats one time as a multiple of another; "-" where either is lost in the noise."""
    if other is None or one.seconds <= 0 or other.is_noise:
        return "-"
    return f"{one.seconds / other.seconds:.2f}"
