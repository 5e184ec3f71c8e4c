"""Prints the table of `tfcdo bench --optimizer`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from tfcdo.bench import updates
from tfcdo.cli import options
from tfcdo.units import format_bytes


def show(results: Sequence[updates.UpdateMeasurement], console: Console) -> None:
    """Prints times, state and peak memory of each strategy."""
    by_kind = {one.kind: one for one in results}
    num_bytes = 4 * sum(map(math.prod, updates.SHAPES))
    first = results[0]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    table.title = (
        f"{first.num_devices} devices, all-reduce and {first.optimizer} update of "
        f"{format_bytes(num_bytes)}"
    )
    table.add_column("strategy\n")
    headings = ("step\n(ms)", "±\n(ms)", "of\nTF", "of\ntfcdo", "first step\n(s)")
    for heading in (*headings, "state\n(MB)", "peak memory\n(MB)", "differs\nby"):
        table.add_column(options.printable(heading, console), justify="right", no_wrap=True)
    for one in results:
        table.add_row(
            one.name,
            f"{one.seconds * 1e3:.0f}",
            f"{one.spread * 1e3:.0f}",
            f"{one.seconds / by_kind['tf'].seconds:.2f}",
            f"{one.seconds / by_kind['tfcdo'].seconds:.2f}",
            f"{one.first_step:.1f}",
            f"{one.state_bytes / 1e6:.0f}",
            f"{one.peak_memory / 1e6:.0f}",
            f"{one.difference:.0e}" if one.alike else "not alike",
            style="" if one.kind == "tf" else "bold red" if one.wrong else "bold",
        )
    console.print(table)
    console.print("State: the optimizer's, on all devices together.")
