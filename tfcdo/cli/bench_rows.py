"""`tfcdo bench --sparse`: the table of reducing rows and updating what they are rows of."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from tfcdo.bench import implementations
from tfcdo.bench import rows
from tfcdo.cli import options


def show(results: Sequence[rows.RowsMeasurement], console: Console) -> None:
    """Prints the table.

    Args:
      results: as `rows.run` returns them, of one workload.
      console: where.
    """
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
            "Times are medians of whole steps, ± is the distance between the quartiles. of TF: as "
            "a multiple of the fastest right TensorFlow class's. For momentum, each device first "
            "adds TensorFlow's rows of equal index, as TensorFlow's optimizers do; of tfcdo's "
            "result there is one of each. No step is shorter than updating alone.",
            console,
        )
    )
