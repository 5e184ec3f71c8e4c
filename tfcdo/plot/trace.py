"""Traces all-reduces while they run, and draws them next to their plan."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tfcdo.topology.topology import Topology
from tfcdo.tracing import chrome
from tfcdo.tracing.edges import BROADCAST
from tfcdo.tracing.recording import Profiler, Recording
from tfcdo.tracing.summary import Summary
from tfcdo.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_LANES = 48
# A step that took next to no time still gets an axis.
_SHORTEST = 1e-9


class Trace:
    """Result of `trace`: the recording, once the block has ended."""

    recording: Recording | None = None

    @property
    def summary(self) -> Summary:
        """Returns the share of all-reduces in a step, the exposed share, and the slowest edge.

        Raises:
          RuntimeError: before the block has ended.
        """
        if self.recording is None:
            raise RuntimeError("a trace is there when its block has ended")
        return self.recording.summary


@contextlib.contextmanager
def trace(
    path: str | os.PathLike[str],
    *,
    draw: str | os.PathLike[str] | None = None,
    topology: Topology | None = None,
) -> Iterator[Trace]:
    """Writes the all-reduces of a block, edge by edge, as a Chrome trace.

    Record few steps, after one or two that trace graphs and fill caches. Ops that run eagerly have
    no names, so only all-reduces in a `tf.function`, as in Keras's `fit`, are found.

    Args:
      path: the file to write, which chrome://tracing and ui.perfetto.dev show; it ends in .json.
      draw: a picture to write too, .png or .svg: a typical step next to its plan.
      topology: the machine that the plan is simulated on; None: detect automatically.

    Yields:
      An object whose `summary` is there, and can be printed, when the block has ended.

    Raises:
      ValueError: if a file's name ends otherwise.
      TypeError: if `topology` is not a topology.
      FileNotFoundError: if a file's folder does not exist.
      ModuleNotFoundError: if there is something to draw and no matplotlib.
      tf.errors.AlreadyExistsError: if this process is being profiled already.

    Example:
      >>> import tempfile, tensorflow as tf
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with trace(folder + "/out.json") as traced:
      ...         total = tf.function(lambda: tf.add(1, 2))()
      >>> traced.summary.num_steps
      0
    """
    written = _checked_path("path", path, (".json",))
    drawn = None if draw is None else _checked_path("draw", draw, (".png", ".svg"))
    if drawn:
        importlib.import_module("matplotlib")
    if topology is not None and not isinstance(topology, Topology):
        raise TypeError(f"topology must be a tfcdo.topology.Topology or None; got {topology!r}")
    profiler, traced = Profiler(topology), Trace()
    profiler.start()
    try:
        yield traced
    finally:
        # The time before an error is worth a look, too.
        traced.recording = profiler.stop()
        chrome.write(traced.recording, written)
        if drawn:
            from tfcdo.plot.figures import save_figure

            save_figure(draw_trace(traced.recording), drawn)


def _checked_path(
    name: str, path: str | os.PathLike[str], suffixes: tuple[str, ...]
) -> pathlib.Path:
    checked = pathlib.Path(path)
    if checked.suffix not in suffixes:
        raise ValueError(f"{name} must end in {' or '.join(suffixes)}; got {os.fspath(path)!r}")
    if not checked.parent.is_dir():
        raise FileNotFoundError(f"{name} must be in a folder that exists; got {os.fspath(path)!r}")
    return checked


def draw_trace(recording: Recording) -> Figure:
    """Draws the edges of a typical step over time, and below them the plan."""
    from tfcdo.plot import figures

    pictures: list[tuple[str, list[figures.Bar]]] = []
    for scope, runs in recording.runs_of_step().items():
        planned = recording.planned_runs(runs)
        colors = figures.device_colors(1 + max(run.pack for run in [*runs, *planned]))
        for title, shown in (("what ran", runs), ("what was planned", planned)):
            begin = min((run.start for run in shown), default=0.0)
            bars = [
                figures.Bar(
                    run.lane, run.pack, run.start - begin, run.end - begin,
                    colors[run.pack], run.kind == BROADCAST,
                )
                for run in shown
            ]  # fmt: skip
            pictures.append((f"{scope}: {title}", bars))
    heights = [max(2, min(_MAX_LANES, len({bar.lane for bar in bars}))) for _, bars in pictures]
    figure = figures.make_figure(14, 1.5 + sum(0.22 * height + 0.9 for height in heights), "")
    figure.suptitle(str(recording.summary), fontsize=11)
    # One scale for all, so that plan and run can be compared.
    seconds = max((bar.end for _, bars in pictures for bar in bars), default=0.0) or _SHORTEST
    rows = len(pictures)
    grid: Any = figure.subplots(rows, squeeze=False, height_ratios=heights)[:, 0] if rows else []
    for axes, (title, bars) in zip(grid, pictures, strict=True):
        lanes = sorted({bar.lane for bar in bars})
        figures.draw_lanes(axes, lanes[:_MAX_LANES], bars, seconds)
        took = f", {format_seconds(max(bar.end for bar in bars))}" if bars else ": not known"
        hidden = max(0, len(lanes) - _MAX_LANES)
        more = f", {hidden} more edges not shown" if hidden else ""
        axes.set_title(f"{title}{took}{more}", fontsize=9, loc="left", parse_math=False)
    return figure
