"""Draws the simulated transfers of a plan over time."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tfcdo.plan import simulator
from tfcdo.plan.lower_bound import lower_bound_seconds
from tfcdo.plan.plan import Plan
from tfcdo.plot.figures import Bar, Color, device_colors, draw_lanes, make_figure, make_paler
from tfcdo.topology.topology import Topology
from tfcdo.units import format_seconds, time_unit

_MAX_LANES = 64
_MAX_ROOTS_EXPLAINED = 16


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
    bars: list[Bar] = []
    # The time in which bytes move or are added, without the latencies of the copies.
    busy: dict[str, float] = collections.defaultdict(float)
    for task in timeline.tasks:
        for lane in _lanes_of(task, topology):
            color = colors[plan.trees[task.pack].root]
            is_down = task.kind == "broadcast"
            bars.append(Bar(lane, task.pack, task.start, task.end, color, is_down))
            busy[lane] += task.end - task.start
            if task.kind != "add":
                busy[lane] -= topology.latency(task.source, task.target)
    used = {bar.lane for bar in bars if bar.end > bar.start}
    lanes = [name for name in _in_reading_order(topology) if name in used]
    shown = lanes[:_MAX_LANES]
    figure = make_figure(14, 2.0 + 0.21 * max(len(shown), 4), title)
    axes = figure.add_subplot()
    draw_lanes(axes, shown, bars, timeline.seconds)
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
