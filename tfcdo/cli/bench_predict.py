"""`tfcdo bench --predict`: prints simulated and measured times side by side."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from tfcdo import topology
from tfcdo.bench import machine
from tfcdo.bench import measure
from tfcdo.bench import predict
from tfcdo.bench import tracking
from tfcdo.bench.devices import Devices
from tfcdo.cli import options
from tfcdo.units import format_bytes
from tfcdo.units import format_seconds


def bench_predict(
    sizes: Sequence[int],
    devices: Devices,
    settings: measure.Settings,
    json_file: pathlib.Path | None,
    console: Console,
    track: tracking.Track,
) -> int:
    """Measures the machine, then all algorithms, and prints how well they were predicted.

    Args:
      sizes: the bytes on each device.
      devices: the devices.
      settings: how to measure.
      json_file: where to write what was found; None for nowhere.
      console: where to print.
      track: shows the progress.

    Returns:
      The exit status: 1 if a result was wrong.
    """
    comparisons = predict.run(
        sizes, devices, lambda: topology.measure(devices.names), settings, track
    )
    console.print(f"Simulated on: {comparisons[0].topology.name}", soft_wrap=True)
    console.print(_table(comparisons, console))
    for one in comparisons:
        console.print(_verdict(one))
    console.print(f"Median of simulated over measured: {predict.median_ratio(comparisons):.2f}")
    if json_file:
        _write_json(comparisons, devices, json_file)
    return int(any(one.wrong for found in comparisons for one in found.predictions))


def _table(comparisons: Sequence[predict.Comparison], console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("size", "algorithm"):
        table.add_column(column, overflow="fold")
    for column in ("packs", "simulated", "measured", "±", "ratio", "ranks"):
        table.add_column(options.printable(column, console), justify="right")
    for comparison in comparisons:
        shown = comparison.predictions
        by_simulation = sorted(shown, key=lambda one: one.simulated)
        by_clock = sorted(shown, key=lambda one: one.measured)
        for one in shown:
            cells = (format_seconds(one.simulated), format_seconds(max(one.measured, 0.0)))
            table.add_row(
                format_bytes(one.size),
                ", ".join(one.names),
                str(one.num_packs),
                *(options.printable(cell, console) for cell in cells),
                options.printable(format_seconds(one.spread), console),
                f"{one.ratio:.2f}",
                f"{by_simulation.index(one) + 1}, {by_clock.index(one) + 1}",
                style="bold" if "auto" in one.names else None,
            )
        table.add_section()
    return table


def _verdict(one: predict.Comparison) -> str:
    auto, fastest = one.chosen.names[0], one.fastest.names[0]
    outcome = "the fastest" if not one.loss else f"{one.loss:.0%} slower than {fastest}"
    return (
        f"{format_bytes(one.chosen.size)}: auto takes {auto}, {outcome}; "
        f"{one.agreement:.0%} of the pairs are ranked alike"
    )


def _write_json(
    comparisons: Sequence[predict.Comparison],
    devices: Devices,
    path: pathlib.Path,
) -> None:
    found = {
        "topology": comparisons[0].topology.name,
        "median_ratio": predict.median_ratio(comparisons),
        "sizes": [
            {
                "size": one.chosen.size,
                "chosen": one.chosen.names[0],
                "fastest": one.fastest.names[0],
                "loss": one.loss,
                "agreement": one.agreement,
                "costs": {
                    cost: value for cost, value in one.topology.costs.items() if value < math.inf
                },
                "predictions": [
                    {**dataclasses.asdict(prediction), "ratio": prediction.ratio}
                    for prediction in one.predictions
                ],
            }
            for one in comparisons
        ],
    }
    machine.write_json(path, devices.description, found)
