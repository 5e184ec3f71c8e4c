"""Prints the tables of `tfcdo bench`, of its `fit` and of its `sparse`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfcdo.bench import fit, implementations, measure, rows
from tfcdo.cli import options

_REDOP = "sum"
_WORKLOAD_COLUMNS = ("size\n(B)", "count\n(elements)", "type\n", "redop\n")
# Width that the table of times needs with these columns.
_WIDE = 130
_IMPLEMENTATIONS = (implementations.OURS, implementations.TENSORFLOW)
_STYLES = {implementations.OURS: "bold", implementations.TENSORFLOW: ""}


def short_name(name: str) -> str:
    """Shortens an implementation's name for a column."""
    return name.replace("num_packs=", "")


def show(results: Sequence[measure.Measurement], console: Console) -> None:
    """Prints the tables of times and of other costs, of one workload after the other."""
    for table in _tables_of_times(results, console):
        console.print(table)
    console.print(
        options.printable(
            "Times are medians minus the baseline, ± is the distance between the quartiles, "
            "p99 the 99th percentile. "
            "of TF, of floor: time relative to the fastest correct TensorFlow class and to the "
            "fastest single pass over the same memory; - where a time is smaller than its spread.",
            console,
        )
    )
    if any(one.kind == measure.PACKING for one in results):
        console.print(
            "pack and unpack: what TensorFlow's ops take at least to make one tensor of the small "
            "values of one shape on each device and to take it apart, with nothing added or sent."
        )
    console.print()
    console.print(_table_of_costs(results))


def _tables_of_times(results: Sequence[measure.Measurement], console: Console) -> list[Table]:
    """Makes one table, or on a narrow console one for each workload, below a line of its own."""
    if console.width >= _WIDE:
        return [_table_of_times(results, console, with_workload=True)]
    tables = []
    for group in measure.by_workload(results):
        table = _table_of_times(group, console, with_workload=False)
        table.title = ", ".join(
            f"{' '.join(name.split())} {value}"
            for name, value in zip(_WORKLOAD_COLUMNS, _workload_cells(group[0]), strict=True)
        )
        tables.append(table)
    return tables


def _table_of_times(
    results: Sequence[measure.Measurement], console: Console, with_workload: bool
) -> Table:
    padding = (0, 1, 0, 0) if with_workload else (0, 0)
    table = Table(box=box.SIMPLE_HEAD, padding=padding, pad_edge=False, title_justify="left")
    if with_workload:
        for column in _WORKLOAD_COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
    table.add_column("implementation\n", overflow="fold")
    for column in (
        "time\n(us)",
        "±\n(us)",
        "p99\n(us)",
        "algbw\n(GB/s)",
        "busbw\n(GB/s)",
        "#wrong\n",
        "of\nTF",
        "of\nfloor",
    ):
        table.add_column(options.printable(column, console), justify="right", no_wrap=True)
    for group in measure.by_workload(results):
        tensorflow = measure.fastest(group, implementations.TENSORFLOW)
        floor = measure.fastest(group, measure.FLOOR)
        for one in group:
            is_implementation = one.kind in _IMPLEMENTATIONS
            has_bandwidth = is_implementation or one.kind == measure.FLOOR
            table.add_row(
                *(_workload_cells(one) if with_workload else ()),
                short_name(one.name),
                _microseconds(one.seconds),
                f"{one.spread * 1e6:.1f}",
                "-" if one.p99 is None else _microseconds(one.p99),
                _number(one.algbw / 1e9) if has_bandwidth else "",
                _number(one.busbw / 1e9) if has_bandwidth else "",
                _wrong(one.wrong),
                _ratio(one, tensorflow) if is_implementation else "",
                _ratio(one, floor) if is_implementation else "",
                style=_STYLES.get(one.kind, "dim"),
            )
        table.add_section()
    return table


def _workload_cells(one: measure.Measurement) -> tuple[str, ...]:
    return str(one.size), str(one.count), one.dtype, _REDOP


def _microseconds(seconds: float) -> str:
    if seconds <= 0:
        return "below noise"
    value = seconds * 1e6
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _table_of_costs(results: Sequence[measure.Measurement]) -> Table:
    """Makes the table of other costs for the last workload; all sizes have similar costs."""
    *_, group = measure.by_workload(results)
    title = f"Other costs, for {group[0].size} bytes"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0), title=title, title_justify="left")
    table.add_column("implementation\n", overflow="fold")
    for column in (
        "CPU time\n(us)",
        "first call\n(s)",
        "graph nodes\n(added)",
        "peak memory\n(MB, added)",
    ):
        table.add_column(column, justify="right")
    for one in group:
        table.add_row(
            short_name(one.name),
            _microseconds(one.cpu_seconds),
            "-" if one.first_call is None else f"{one.first_call:.2f}",
            "-" if one.nodes is None else str(one.nodes),
            "-" if one.peak_memory is None else f"{one.peak_memory / 1e6:.1f}",
            style=_STYLES.get(one.kind, "dim"),
        )
    return table


def show_fit(results: Sequence[fit.FitMeasurement], console: Console) -> None:
    """Prints the table of training steps."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("model\n", "implementation\n"):
        table.add_column(column)
    for column in ("step\n(ms)", "±\n(ms)", "of\nTF", "first step\n(s)"):
        table.add_column(options.printable(column, console), justify="right")
    for model in dict.fromkeys(one.model for one in results):
        group = [one for one in results if one.model == model]
        tensorflow = min(
            (one.seconds for one in group if one.kind == implementations.TENSORFLOW),
            default=math.nan,
        )
        for one in group:
            table.add_row(
                model,
                short_name(one.name),
                f"{one.seconds * 1e3:.1f}",
                f"{one.spread * 1e3:.1f}",
                _number(one.seconds / tensorflow),
                f"{one.first_step:.1f}",
                style=_STYLES.get(one.kind, "dim"),
            )
        table.add_section()
    console.print(table)


def show_rows(results: Sequence[rows.RowsMeasurement], console: Console) -> None:
    """Prints the table of reducing rows and updating their table, of one workload."""
    first = results[0]
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{first.num_rows:,} rows on each of {first.num_devices} devices, "
        f"{first.repeat:.0%} of them on all",
        title_justify="left",
    )
    table.add_column("reduce and update\n", overflow="fold")
    for update in (rows.SGD, rows.MOMENTUM):
        for heading in (f"{update}\n(ms)", "±\n(ms)", "of\nTF"):
            table.add_column(options.printable(heading, console), justify="right", no_wrap=True)
    table.add_column("#wrong\n", justify="right", no_wrap=True)
    for name in dict.fromkeys(one.name for one in results):
        cells, wrong = [], 0
        for update in (rows.SGD, rows.MOMENTUM):
            one = next(one for one in results if (one.name, one.update) == (name, update))
            theirs = rows.fastest(results, implementations.TENSORFLOW, update)
            ratio = f"{one.seconds / theirs.seconds:.2f}" if theirs else "-"
            cells += [f"{one.seconds * 1e3:.1f}", f"{one.spread * 1e3:.1f}", ratio]
            wrong += one.wrong
        table.add_row(name, *cells, str(wrong))
    console.print(table)
    console.print(
        options.printable(
            "Times are medians of whole steps, ± is the distance between the quartiles. of TF: "
            "time relative to the fastest correct TensorFlow class. For momentum, each device "
            "first adds TensorFlow's rows of the same index, as TensorFlow's optimizers do; "
            "tfcdo's result has each row once. No step is shorter than updating alone.",
            console,
        )
    )


def show_averages(results: Sequence[measure.Measurement], console: Console) -> None:
    """Prints average bus bandwidths as nccl-tests does, tfcdo's best in the last line.

    They are averages over the sizes at which all implementations have a time above the noise.
    """
    ours = {one.name for one in results if one.kind == implementations.OURS}
    busbw = {
        (one.name, one.workload, one.size): one.busbw / 1e9
        for one in results
        if one.kind in _IMPLEMENTATIONS and not math.isnan(one.busbw)
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


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _ratio(one: measure.Measurement, other: measure.Measurement | None) -> str:
    """Formats one time as a multiple of another; "-" where either is lost in the noise."""
    if other is None or one.seconds <= 0 or other.seconds <= other.spread:
        return "-"
    return f"{one.seconds / other.seconds:.2f}"


def _wrong(count: int | None) -> Text:
    if count is None:
        return Text()
    return Text(str(count), "bold red" if count else "")
