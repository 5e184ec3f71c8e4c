"""Draws the simulated transfers of a schedule over time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tfcdo.plan import simulator
from tfcdo.plan.lower_bound import lower_bound_seconds
from tfcdo.plan.schedule import Schedule
from tfcdo.plot.figures import Color, device_colors, make_figure, make_paler
from tfcdo.topology.topology import Topology
from tfcdo.units import format_seconds, time_unit

_MAX_LANES = 64
_MAX_ROOTS_EXPLAINED = 16
# A bar must be this part of the whole time to have room for the number of its pack.
_ROOM_FOR_NUMBER = 0.014


def draw_gantt(schedule: Schedule, topology: Topology, title: str = "") -> Figure:
    """Draws the simulated transfers over time, with a lane for each link, port, bridge or adder.

    Args:
      schedule: what is run, in bytes.
      topology: what it is run on.
      title: a line above the picture.

    Returns:
      The figure; `tfcdo.plot.figures.save_figure` writes it to a file.

    Example:
      >>> from tfcdo.topology import preset
      >>> from tfcdo.plan import algorithms
      >>> machine = preset("pcie")
      >>> figure = draw_gantt(algorithms.make_schedule("ring", machine, 10**6), machine)
      >>> [label.get_text() for label in figure.axes[0].get_yticklabels()][:2]
      ['0 out', '1 out']
    """
    timeline = simulator.simulate(schedule, topology)
    lanes = _tasks_by_lane(timeline, topology)
    shown = dict(itertools.islice(lanes.items(), _MAX_LANES))
    figure = make_figure(14, 2.0 + 0.21 * max(len(shown), 4), title)
    axes = figure.add_subplot()
    unit, unit_name = time_unit(timeline.seconds)
    colors = device_colors(topology.num_devices)
    for lane, tasks in enumerate(shown.values()):
        _draw_lane(axes, lane, tasks, schedule, colors, timeline.seconds, unit)
    axes.set_yticks(range(len(shown)), list(shown), fontsize=8, parse_math=False)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, timeline.seconds / unit or 1)
    axes.set_xlabel(f"time, {unit_name}, if no copy is disturbed")
    axes.spines[["top", "right"]].set_visible(False)
    _write_busy_shares(axes, shown.values(), topology, timeline.seconds)
    entries = _explain_bars(schedule, colors)
    bound = lower_bound_seconds(topology, schedule.size)
    if bound:
        label = f"bound {format_seconds(bound)}"
        line = axes.axvline(bound / unit, color="black", linestyle="--", linewidth=1, label=label)
        entries.append(line)
    if len(lanes) > len(shown):
        left_out = f"{len(lanes) - len(shown)} more lanes not shown"
        entries.append(Patch(color="none", label=left_out))
    figure.legend(
        handles=entries, loc="outside lower center", ncols=len(entries), fontsize=8, frameon=False,
        title="a bar is one copy of one pack, with its number", title_fontsize=8,
        handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip
    return figure


def _tasks_by_lane(
    timeline: simulator.Timeline, topology: Topology
) -> dict[str, list[simulator.Task]]:
    """Returns the tasks of each resource and adder that is ever busy, by source, then target."""
    names = _in_reading_order(topology)
    names += [_name_adder(device, topology) for device in range(topology.num_devices)]
    lanes: dict[str, list[simulator.Task]] = {name: [] for name in names}
    for task in timeline.tasks:
        if task.kind == "add":
            lanes[_name_adder(task.target, topology)].append(task)
            continue
        for resource in topology.route(task.source, task.target).resources:
            lanes[resource.name].append(task)
    return {
        name: tasks for name, tasks in lanes.items() if any(task.end > task.start for task in tasks)
    }


def _in_reading_order(topology: Topology) -> list[str]:
    """Returns the names of wires and ways out by source, then of ways in, then of what is shared.

    Rows of one device are next to each other, in any order of the resources.
    """
    sources: list[set[int]] = [set() for _ in topology.resources]
    targets: list[set[int]] = [set() for _ in topology.resources]
    for link in topology.links:
        for number in link.resources:
            sources[number].add(link.source)
            targets[number].add(link.target)

    def place(number: int) -> tuple[int, list[int], list[int], int]:
        own, others = sorted(sources[number]), sorted(targets[number])
        if len(own) == 1:
            return (0, own, others, number)
        if len(others) == 1:
            return (1, others, own, number)
        return (2, own, others, number)

    return [topology.resources[number].name for number in sorted(range(len(sources)), key=place)]


def _name_adder(device: int, topology: Topology) -> str:
    return "additions" if topology.serial_reduction else f"{device} adds"


def _busy_seconds(tasks: Iterable[simulator.Task], topology: Topology) -> float:
    """Returns the time in which bytes move or are added, without the latencies of the copies."""
    return sum(
        task.end
        - task.start
        - (0.0 if task.kind == "add" else topology.latency(task.source, task.target))
        for task in tasks
    )


def _draw_lane(
    axes: Axes,
    lane: int,
    tasks: Sequence[simulator.Task],
    schedule: Schedule,
    colors: Sequence[Color],
    seconds: float,
    unit: float,
) -> None:
    axes.barh(
        [lane] * len(tasks),
        [(task.end - task.start) / unit for task in tasks],
        left=[task.start / unit for task in tasks],
        height=0.84,
        color=[_bar_color(task, schedule, colors) for task in tasks],
        edgecolor="white",
        linewidth=0.5,
    )
    for task in tasks:
        if task.end - task.start > _ROOM_FOR_NUMBER * seconds:
            axes.text(
                (task.start + task.end) / 2 / unit,
                lane,
                str(task.pack),
                fontsize=6.5,
                ha="center",
                va="center_baseline",
                color="black" if task.kind == "broadcast" else "white",
            )


def _bar_color(task: simulator.Task, schedule: Schedule, colors: Sequence[Color]) -> Color:
    color = colors[schedule.packs[task.pack].tree.root]
    return make_paler(color) if task.kind == "broadcast" else color


def _write_busy_shares(
    axes: Axes, lanes: Iterable[Sequence[simulator.Task]], topology: Topology, seconds: float
) -> None:
    for lane, tasks in enumerate(lanes):
        axes.text(
            1.005,
            lane,
            f"{_busy_seconds(tasks, topology) / seconds:.0%}",
            transform=axes.get_yaxis_transform(),
            fontsize=8,
            va="center_baseline",
        )
    axes.text(1.005, 1.0, "busy", transform=axes.transAxes, fontsize=8, va="bottom")


def _explain_bars(schedule: Schedule, colors: Sequence[Color]) -> list[Any]:
    """Returns the entries of the legend that say what the colours mean."""
    roots = sorted({pack.tree.root for pack in schedule.packs})
    pale = Patch(color=make_paler((0.3, 0.3, 0.3)), label="pale: the sum, on its way down")
    explained = roots[:_MAX_ROOTS_EXPLAINED]
    return [*(Patch(color=colors[root], label=f"summed on {root}") for root in explained), pale]
