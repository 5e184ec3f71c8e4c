"""Prints the tables of `tfcdo bench` and of its subcommands."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfcdo.bench import fit, hosts, implementations, link, measure
from tfcdo.cli import options
from tfcdo.units import format_bytes, format_seconds

_IMPLEMENTATIONS = (implementations.OURS, implementations.TENSORFLOW)
_STYLES = {implementations.OURS: "bold", implementations.TENSORFLOW: ""}


def show(results: Sequence[measure.Measurement], console: Console) -> None:
    """Prints a table of times for each workload, and one of other costs for the last."""
    groups = measure.by_workload(results)
    for group in groups:
        console.print(_table_of_times(group, console))
    text = (
        "Times are medians minus the baseline, ± is the distance between the quartiles. "
        "of TF, of floor: time relative to the fastest correct TensorFlow class and to the "
        "fastest single pass over the same memory; - where a time is smaller than its spread."
    )
    console.print(options.printable(text, console))
    console.print()
    console.print(_table_of_costs(groups[-1], console))


def _table(title: str, headings: Sequence[str], console: Console) -> Table:
    """Makes a table whose first column is names, and whose others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    table.title = title
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(options.printable(heading, console), justify="right", no_wrap=True)
    return table


def _table_of_times(group: Sequence[measure.Measurement], console: Console) -> Table:
    first = group[0]
    work = "sum" if first.workload == "sweep" else f"sum of {first.workload}'s gradients"
    headings = (
        *("implementation\n", "time\n(us)", "±\n(us)", "algbw\n(GB/s)", "busbw\n(GB/s)"),
        *("#wrong\n", "of\nTF", "of\nfloor"),
    )
    title = f"{first.size} bytes, {first.count} elements of {first.dtype}, {work}"
    table = _table(title, headings, console)
    tensorflow = measure.fastest(group, implementations.TENSORFLOW)
    floor = measure.fastest(group, measure.FLOOR)
    for one in group:
        is_implementation = one.kind in _IMPLEMENTATIONS
        has_bandwidth = one.kind != measure.BASELINE
        table.add_row(
            _short_name(one.name),
            _microseconds(one.seconds),
            _microseconds(one.spread),
            _number(one.algbw / 1e9) if has_bandwidth else "",
            _number(one.busbw / 1e9) if has_bandwidth else "",
            "" if one.wrong is None else Text(str(one.wrong), "bold red" if one.wrong else ""),
            _ratio(one, tensorflow) if is_implementation else "",
            _ratio(one, floor) if is_implementation else "",
            style=_STYLES.get(one.kind, "dim"),
        )
    return table


def _table_of_costs(group: Sequence[measure.Measurement], console: Console) -> Table:
    title = f"Other costs, for {group[0].size} bytes"
    headings = ("CPU time\n(us)", "first call\n(s)", "graph nodes\n(added)", "peak memory\n(MB)")
    table = _table(title, ("implementation\n", *headings), console)
    for one in group:
        table.add_row(
            _short_name(one.name),
            _microseconds(one.cpu_seconds),
            "-" if one.first_call is None else f"{one.first_call:.2f}",
            "-" if one.nodes is None else str(one.nodes),
            "-" if one.peak_memory is None else f"{one.peak_memory / 1e6:.1f}",
            style=_STYLES.get(one.kind, "dim"),
        )
    return table


def show_fit(results: Sequence[fit.FitMeasurement], console: Console) -> None:
    """Prints a table of training steps for each model."""
    for model in dict.fromkeys(one.model for one in results):
        headings = ("implementation\n", "step\n(ms)", "±\n(ms)", "of\nTF", "first step\n(s)")
        table = _table(f"Training steps of {model}", headings, console)
        group = [one for one in results if one.model == model]
        tensorflow = min(
            (one.seconds for one in group if one.kind == implementations.TENSORFLOW),
            default=math.nan,
        )
        for one in group:
            table.add_row(
                _short_name(one.name),
                f"{one.seconds * 1e3:.1f}",
                f"{one.spread * 1e3:.1f}",
                _number(one.seconds / tensorflow),
                f"{one.first_step:.1f}",
                style=_STYLES.get(one.kind, "dim"),
            )
        console.print(table)


def show_hosts(
    results: Sequence[hosts.HostsMeasurement], rate: link.Rate | None, console: Console
) -> None:
    """Prints the table of training steps on several workers."""
    theirs = next(one for one in results if one.kind == implementations.TENSORFLOW)
    table = _table(
        f"{theirs.num_workers} workers with {theirs.num_devices} virtual CPU devices each, "
        f"{format_bytes(theirs.gradient_bytes)} of gradients",
        ("strategy\n", "step\n(ms)", "±\n(ms)", "of\nTF", "sent\n(MB)", "of\nTF", "#wrong\n"),
        console,
    )
    for one in results:
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
    if rate:
        least = hosts.least_bytes(theirs.num_workers, theirs.gradient_bytes)
        seconds = least / rate.bytes_per_second
        text = f"Sending float32 takes at least {format_seconds(seconds)} at {rate.text}"
        console.print(options.printable(f"{text}, for both directions together.", console))


def show_averages(results: Sequence[measure.Measurement], console: Console) -> None:
    """Prints average bus bandwidths as nccl-tests does, tfcdo's best in the last line.

    They are averages over the sizes at which all implementations have a time above the noise.
    """
    ours = {one.name for one in results if one.kind == implementations.OURS}
    busbw = {
        (one.name, one.workload, one.size): one.busbw / 1e9
        for one in results
        if one.kind in _IMPLEMENTATIONS and not one.is_noise
    }
    names = {name for name, *_ in busbw}
    workloads = {(one.workload, one.size) for one in results}
    common = [work for work in workloads if all((name, *work) in busbw for name in names)]
    averages = {
        name: sum(busbw[(name, *work)] for work in common) / len(common)
        for name in (names if common else ())
    }
    # As for the exit status, TensorFlow's wrong results count only if nothing else ran.
    judged = [one for one in results if one.name in (ours or names)]
    wrong = sum(one.wrong or 0 for one in judged)
    console.print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    if len(common) < len(workloads):
        console.print(
            f"# Averages of {len(common)} of {len(workloads)} sizes; at the others, some time is "
            "below noise",
            soft_wrap=True,
        )
    for name in sorted(averages, key=lambda name: (name in ours, averages[name])):
        console.print(f"# Avg bus bandwidth    : {averages[name]:g} ({name})", soft_wrap=True)


def _short_name(name: str) -> str:
    return name.replace("num_packs=", "")


def _microseconds(seconds: float) -> str:
    if seconds < 0:
        return "below noise"
    value = seconds * 1e6
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _ratio(one: measure.Measurement, other: measure.Measurement | None) -> str:
    """Formats one time as a multiple of another; "-" where either is lost in the noise."""
    if other is None or one.seconds <= 0 or other.is_noise:
        return "-"
    return f"{one.seconds / other.seconds:.2f}"
