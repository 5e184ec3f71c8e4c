"""Draws the picture of `tfcdo bench --plot`."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence

from matplotlib.figure import Figure

from tfcdo.bench import implementations, measure
from tfcdo.bench.devices import ChosenDevices

_LINES = {implementations.OURS: "-o", implementations.TENSORFLOW: "--s", measure.FLOOR: ":"}
_BARS = {
    implementations.OURS: "tab:blue",
    implementations.TENSORFLOW: "tab:orange",
    measure.FLOOR: "tab:gray",
}


def draw(results: Sequence[measure.Measurement], devices: ChosenDevices) -> Figure:
    """Draws busbw over size, one line for each implementation; of models, one bar for each."""
    drawn = [one for one in results if one.kind in _LINES]
    groups = measure.by_workload(drawn)
    sweep = len({one.workload for one in drawn}) == 1 and len(groups) > 1
    figure = _lines(drawn) if sweep else _bars(groups)
    figure.suptitle(f"All-reduce over {devices.description}")
    return figure


def save(
    results: Sequence[measure.Measurement], devices: ChosenDevices, path: pathlib.Path
) -> None:
    """Draws measurements, as `draw` does, and writes the picture to a file."""
    draw(results, devices).savefig(path, dpi=120)


def _lines(drawn: Sequence[measure.Measurement]) -> Figure:
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(one.name for one in drawn):
        line = [one for one in drawn if one.name == name]
        # A time below its own spread is noise, and its busbw anything up to infinity.
        busbw = [one.busbw / 1e9 if one.seconds > one.spread else math.nan for one in line]
        axes.plot(
            [one.size for one in line],
            busbw,
            _LINES[line[0].kind],
            label=_label(name),
            markersize=4,
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes on each device")
    axes.set_ylabel("busbw, GB/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _bars(groups: Sequence[Sequence[measure.Measurement]]) -> Figure:
    height = 0.8 + 0.3 * max(map(len, groups))
    figure = Figure(figsize=(10, height * len(groups)), layout="constrained")
    columns = figure.subplots(len(groups), 1, squeeze=False)
    for axes, group in zip(columns[:, 0], groups, strict=True):
        bars = axes.barh(
            [_label(one.name) for one in group],
            [max(0.0, one.seconds * 1e3) for one in group],
            xerr=[one.spread * 1e3 / 2 for one in group],
            color=[_BARS[one.kind] for one in group],
        )
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(f"{group[0].workload}, {group[0].size / 1e6:.1f} MB", loc="left")
    return figure


def _label(name: str) -> str:
    return name.replace("num_packs=", "")
