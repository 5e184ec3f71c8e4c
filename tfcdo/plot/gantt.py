"""Draws the simulated transfers of a plan over time."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tfcdo.log import format_seconds, time_unit
from tfcdo.plan import simulator
from tfcdo.plan.plan import Plan
from tfcdo.plan.tree_program import lower_bound_seconds
from tfcdo.plot.figures import Color, device_colors, make_figure, make_paler
from tfcdo.topology.topology import Topology

_MAX_LANES = 64
_MAX_ROOTS_EXPLAINED = 16
# A bar must be this part of the whole time to have room for the number of its pack.
_ROOM_FOR_NUMBER = 0.014


def draw_gantt(plan: Plan, topology: Topology, title: str = "") -> Figure:
    """Draws the simulated transfers over time, with a lane for each link, port, bridge or adder.

    Args:
      plan: the plan, of known sizes.
      topology: the machine.
      title: a line above the picture.

    Returns:
      The figure; `tfcdo.plot.figures.save_figure` writes it to a file.

    Example:
      >>> from tfcdo.topology import preset
      >>> from tfcdo.plan import algorithms
      >>> machine = preset("pcie")
      >>> figure = draw_gantt(algorithms.make_plan("ring", machine, 10**6), machine)
      >>> [label.get_text() for label in figure.axes[0].get_yticklabels()][:2]
      ['0 out', '1 out']
    """
    timeline = simulator.simulate(plan, topology)
    colors = device_colors(topology.num_devices)
    bars: list[_Bar] = []
    # The time in which bytes move or are added, without the latencies of the copies.
    busy: dict[str, float] = collections.defaultdict(float)
    for task in timeline.tasks:
        for lane in _lanes_of(task, topology):
            color = colors[plan.trees[task.pack].root]
            is_down = task.kind == "broadcast"
            bars.append(_Bar(lane, task.pack, task.start, task.end, color, is_down))
            busy[lane] += task.end - task.start
            if task.kind != "add":
                busy[lane] -= topology.latency(task.source, task.target)
    used = {bar.lane for bar in bars if bar.end > bar.start}
    lanes = [name for name in _in_reading_order(topology) if name in used]
    shown = lanes[:_MAX_LANES]
    figure = make_figure(14, 2.0 + 0.21 * max(len(shown), 4), title)
    axes = figure.add_subplot()
    _draw_lanes(axes, shown, bars, timeline.seconds)
    unit, unit_name = time_unit(timeline.seconds)
    axes.set_xlabel(f"time, {unit_name}, if no copy is disturbed")
    style: dict[str, Any] = {"fontsize": 8, "transform": axes.get_yaxis_transform()}
    for place, lane in enumerate(shown):
        share = f"{busy[lane] / timeline.seconds:.0%}"
        axes.text(1.005, place, share, va="center_baseline", **style)
    axes.text(1.005, 1.0, "busy", transform=axes.transAxes, fontsize=8, va="bottom")
    entries = _explain_bars(plan, colors)
    bound = lower_bound_seconds(topology, plan.num_sent_bytes)
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


class _Bar(NamedTuple):
    """A bar in a lane: an addition, or a copy of a pack up or down its tree."""

    lane: str
    pack: int
    start: float  # In seconds.
    end: float
    color: Color
    is_down: bool


def _draw_lanes(axes: Axes, lanes: Sequence[str], bars: Iterable[_Bar], seconds: float) -> None:
    """Draws bars in the lanes that are named, over a time from 0 on, with their packs' numbers."""
    unit, unit_name = time_unit(seconds)
    places = {lane: place for place, lane in enumerate(lanes)}
    shown = [bar for bar in bars if bar.lane in places]
    axes.barh(
        [places[bar.lane] for bar in shown],
        [(bar.end - bar.start) / unit for bar in shown],
        left=[bar.start / unit for bar in shown],
        height=0.84,
        color=[make_paler(bar.color) if bar.is_down else bar.color for bar in shown],
        edgecolor="white",
        linewidth=0.5,
    )
    for bar in shown:
        if bar.end - bar.start > _ROOM_FOR_NUMBER * seconds:
            axes.text(
                (bar.start + bar.end) / 2 / unit,
                places[bar.lane],
                str(bar.pack),
                fontsize=6.5,
                ha="center",
                va="center_baseline",
                color="black" if bar.is_down else "white",
            )
    axes.set_yticks(range(len(lanes)), lanes, fontsize=8, parse_math=False)
    axes.set_ylim(max(len(lanes), 1) - 0.4, -0.6)
    axes.set_xlim(0, seconds / unit or 1)
    axes.set_xlabel(f"time, {unit_name}", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _lanes_of(task: simulator.Task, topology: Topology) -> list[str]:
    """Returns the names of the resources that a copy holds, or of the adder."""
    if task.kind == "add":
        return [_name_adder(task.target, topology)]
    return [resource.name for resource in topology.route(task.source, task.target).resources]


def _in_reading_order(topology: Topology) -> list[str]:
    """Returns the names of wires and ways out by source, of ways in, of shared ones, of adders."""
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

    names = [topology.resources[number].name for number in sorted(range(len(sources)), key=place)]
    adders = (_name_adder(device, topology) for device in range(topology.num_devices))
    return list(dict.fromkeys([*names, *adders]))


def _name_adder(device: int, topology: Topology) -> str:
    return "additions" if topology.serial_reduction else f"{device} adds"


def _explain_bars(plan: Plan, colors: Sequence[Color]) -> list[Any]:
    """Returns the legend's entries for the colours."""
    roots = sorted({tree.root for tree in plan.trees})
    pale = Patch(color=make_paler((0.3, 0.3, 0.3)), label="pale: the sum, on its way down")
    explained = roots[:_MAX_ROOTS_EXPLAINED]
    return [*(Patch(color=colors[root], label=f"summed on {root}") for root in explained), pale]
