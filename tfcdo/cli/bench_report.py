"""The tables and the JSON file of `tfcdo bench`."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import os
import pathlib
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfcdo.bench import fit
from tfcdo.bench import implementations
from tfcdo.bench import measure
from tfcdo.bench.devices import Devices
from tfcdo.version import __version__

_REDOP = "sum"
_WORKLOAD_COLUMNS = ("size\n(B)", "count\n(elements)", "type\n", "redop\n")
# What the table of times needs with these columns.
_WIDE = 130
_COMPARED = (implementations.OURS, implementations.TENSORFLOW)
_STYLES = {implementations.OURS: "bold", implementations.TENSORFLOW: ""}


def by_workload(
    results: Sequence[measure.Measurement],
) -> Iterator[list[measure.Measurement]]:
    """Splits measurements into those of one workload each."""
    for _, group in itertools.groupby(results, lambda one: (one.workload, one.size)):
        yield list(group)


def fastest(results: Sequence[measure.Measurement], kind: str) -> measure.Measurement | None:
    """The fastest of one kind among the measurements of a workload; None if there is none.

    What comes to a wrong result does not count.
    """
    right = [one for one in results if one.kind == kind and not one.wrong]
    return min(right, key=lambda one: one.seconds, default=None)


def short(name: str) -> str:
    """An implementation's name for a column."""
    return name.replace("num_packs=", "")


def show(results: Sequence[measure.Measurement], console: Console) -> None:
    """Prints the table of times, and that of what is paid apart.

    Args:
      results: as `measure.run` returns them, of one workload after the other.
      console: where to.
    """
    for table in _times(results, console.width):
        console.print(table)
    console.print(
        "Times are medians without the baseline's, ± is the distance between the quartiles. "
        "of TF, of floor: as a multiple of the fastest right TensorFlow class's and of the "
        "fastest single pass over the same memory; - where these are lost in their own spread."
    )
    if any(one.kind == measure.PACKING for one in results):
        console.print(
            "pack and unpack: what TensorFlow's ops take at least to make one tensor of the small "
            "values of one shape on each device and to take it apart, with nothing added or sent."
        )
    console.print()
    console.print(_apart(results))


def _times(results: Sequence[measure.Measurement], width: int) -> list[Table]:
    """One table; where that is too wide, one for each workload that has its own line above."""
    if width >= _WIDE:
        return [_table_of_times(results, with_workload=True)]
    tables = []
    for group in by_workload(results):
        table = _table_of_times(group, with_workload=False)
        table.title = ", ".join(
            f"{' '.join(name.split())} {value}"
            for name, value in zip(_WORKLOAD_COLUMNS, _workload_cells(group[0]), strict=True)
        )
        tables.append(table)
    return tables


def _table_of_times(results: Sequence[measure.Measurement], with_workload: bool) -> Table:
    between = (0, 1, 0, 0) if with_workload else (0, 0)
    table = Table(box=box.SIMPLE_HEAD, padding=between, pad_edge=False, title_justify="left")
    if with_workload:
        for column in _WORKLOAD_COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
    table.add_column("implementation\n", overflow="fold")
    for column in (
        "time\n(us)",
        "±\n(us)",
        "algbw\n(GB/s)",
        "busbw\n(GB/s)",
        "#wrong\n",
        "of\nTF",
        "of\nfloor",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for group in by_workload(results):
        tensorflow = fastest(group, implementations.TENSORFLOW)
        floor = fastest(group, measure.FLOOR)
        for one in group:
            is_net = one.kind in _COMPARED
            has_bandwidth = is_net or one.kind == measure.FLOOR
            table.add_row(
                *(_workload_cells(one) if with_workload else ()),
                short(one.name),
                _microseconds(one.seconds),
                _microseconds(one.spread),
                _number(one.algbw / 1e9) if has_bandwidth else "",
                _number(one.busbw / 1e9) if has_bandwidth else "",
                _wrong(one.wrong),
                _ratio(one, tensorflow) if is_net else "",
                _ratio(one, floor) if is_net else "",
                style=_STYLES.get(one.kind, "dim"),
            )
        table.add_section()
    return table


def _workload_cells(one: measure.Measurement) -> tuple[str, ...]:
    return str(one.size), str(one.count), one.dtype, _REDOP


def _microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


def _apart(results: Sequence[measure.Measurement]) -> Table:
    """What a step pays besides time: of the last workload, as all sizes are much alike."""
    *_, group = by_workload(results)
    title = f"Apart, for {group[0].size} bytes"
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
            short(one.name),
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
        table.add_column(column, justify="right")
    for model in dict.fromkeys(one.model for one in results):
        group = [one for one in results if one.model == model]
        tensorflow = min(
            (one.seconds for one in group if one.kind == implementations.TENSORFLOW),
            default=math.nan,
        )
        for one in group:
            table.add_row(
                model,
                short(one.name),
                f"{one.seconds * 1e3:.1f}",
                f"{one.spread * 1e3:.1f}",
                _number(one.seconds / tensorflow),
                f"{one.first_step:.1f}",
                style=_STYLES.get(one.kind, "dim"),
            )
        table.add_section()
    console.print(table)


def write_json(
    results: Sequence[measure.Measurement] | Sequence[fit.FitMeasurement],
    devices: Devices,
    path: pathlib.Path,
) -> None:
    """Writes all that was measured, with where and when.

    Args:
      results: the measurements; their fields become the keys.
      devices: what they were made on.
      path: the file.
    """
    content = {**circumstances(devices), "results": [dataclasses.asdict(one) for one in results]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def circumstances(devices: Devices) -> dict[str, Any]:
    """Where and when something was measured, and with which versions.

    Args:
      devices: what it was measured on.

    Returns:
      The keys and values that JSON files of measurements begin with.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": _num_cores(),
            "system": platform.platform(),
        },
        "devices": devices.description,
        "versions": {
            "tfcdo": __version__,
            "tensorflow": tf.__version__,
            "python": platform.python_version(),
        },
    }


def _num_cores() -> int | None:
    """How many cores this process may use; where only Linux would tell, how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _processor() -> str:
    """The processor's name; where Linux does not tell, its architecture."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _ratio(one: measure.Measurement, other: measure.Measurement | None) -> str:
    """What it is a multiple of; nothing where either is lost in the noise."""
    if other is None or one.seconds <= 0 or other.seconds <= other.spread:
        return "-"
    return f"{one.seconds / other.seconds:.2f}"


def _wrong(count: int | None) -> Text:
    if count is None:
        return Text()
    return Text(str(count), "bold red" if count else "")
