"""Pictures of plans: the machine with its copy trees, and the transfers over time.

matplotlib (the extra `tfcdo[plot]`) is imported when something is drawn.
"""

from __future__ import annotations

import collections
import io
import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import networkx as nx

from tfcdo.plan import simulator
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.schedule import Schedule
from tfcdo.topology.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.figure import SubFigure

_DPI = 100
_MAX_TREES = 32
_MAX_LANES = 64
# More devices leave no room for their numbers in the picture of a tree.
_MAX_NUMBERED = 12
_MAX_LINK_KINDS = 6
_NODE_SIZE = 900
_WIRE = "0.45"
_FAINT = "0.88"
# The part of a bar's colour that is left where the sum is on its way down.
_PALE = 0.45
# A bar must be this part of the whole time to have room for the number of its pack.
_ROOM_FOR_NUMBER = 0.014

_Units = Sequence[tuple[float, str]]
_BYTE_UNITS: _Units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TIME_UNITS: _Units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))

Color = tuple[float, float, float]
Positions = Mapping[int, tuple[float, float]]


def machine_and_trees(schedule: Schedule, topology: Topology, title: str = "") -> Figure:
    """Draws what joins the devices, and each copy tree on the same places.

    Devices stand on a circle, the best joined next to each other; a link is an arrow if the way
    back is none of the same kind. A tree has the colour of its root; its arrows point the way up,
    along which partial sums travel.

    Args:
      schedule: the packs and their trees.
      topology: the machine.
      title: a line above the picture.

    Returns:
      A matplotlib figure; `save` writes it to a file.

    Example:
      >>> from tfcdo.topology import preset
      >>> from tfcdo.plan import algorithms
      >>> machine = preset("pcie")
      >>> figure = machine_and_trees(algorithms.make_schedule("ring", machine, 10**6), machine)
      >>> len(figure.subfigs)
      2
    """
    from matplotlib.figure import Figure

    groups = _packs_by_tree(schedule)
    shown = list(itertools.islice(groups.items(), _MAX_TREES))
    rows = max(1, round(math.sqrt(len(shown) / 2)))
    columns = max(3, math.ceil(len(shown) / rows))
    widths = (4.8, 1.4 * columns)
    figure = Figure(
        figsize=(sum(widths), max(5.2, 1.55 * rows + 0.8)), layout="constrained", facecolor="white"
    )
    figure.suptitle(title, fontsize=14, fontweight="bold", parse_math=False)
    areas: Any = figure.subfigures(1, 2, width_ratios=widths)
    left, right = areas
    places = _circle(topology)
    _draw_machine(left, topology, places)
    colors = _colors(topology.num_devices)
    for position, (tree, packs) in enumerate(shown, 1):
        axes = right.add_subplot(rows, columns, position)
        _draw_tree(axes, tree, topology, places, colors[tree.root])
        size = sum(schedule.packs[index].size for index in packs)
        axes.set_title(f"{_pack_names(packs)}\n{format_bytes(size)}", fontsize=8)
    more = f", {len(shown)} of them shown" if len(shown) < len(groups) else ""
    right.suptitle(f"{_count(len(groups), 'copy tree')}{more}: arrows up to the root", fontsize=12)
    return figure


def gantt(schedule: Schedule, topology: Topology, title: str = "") -> Figure:
    """Draws the simulated transfers over time, one lane a link (or port, bridge, adder).

    Args:
      schedule: what is run, in bytes.
      topology: what it is run on.
      title: a line above the picture.

    Returns:
      A matplotlib figure; `save` writes it to a file.

    Example:
      >>> from tfcdo.topology import preset
      >>> from tfcdo.plan import algorithms
      >>> machine = preset("pcie")
      >>> figure = gantt(algorithms.make_schedule("ring", machine, 10**6), machine)
      >>> [label.get_text() for label in figure.axes[0].get_yticklabels()][:2]
      ['0 out', '1 in']
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timeline = simulator.simulate(schedule, topology)
    lanes = _lanes(timeline, topology)
    shown = list(itertools.islice(lanes.items(), _MAX_LANES))
    figure = Figure(
        figsize=(14, 2.0 + 0.21 * max(len(shown), 4)), layout="constrained", facecolor="white"
    )
    figure.suptitle(title, fontsize=14, fontweight="bold", parse_math=False)
    axes = figure.add_subplot()
    unit, name = _unit(timeline.seconds, _TIME_UNITS)
    colors = _colors(topology.num_devices)
    for lane, (_, tasks) in enumerate(shown):
        _draw_lane(axes, lane, tasks, schedule, colors, timeline.seconds, unit)
    axes.set_yticks(range(len(shown)), [lane for lane, _ in shown], fontsize=8, parse_math=False)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, timeline.seconds / unit or 1)
    axes.set_xlabel(f"time, {name}")
    axes.spines[["top", "right"]].set_visible(False)
    _write_busy_times(axes, [tasks for _, tasks in shown], timeline.seconds)
    bound = lower_bound(topology, schedule.size)
    entries = _explain_bars(schedule, colors)
    if 0 < bound <= timeline.seconds:
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


def save(figure: Figure, path: pathlib.Path) -> None:
    """Writes a picture; the same plan gives the same file.

    Args:
      figure: what to write.
      path: the file, .svg or .png.

    Raises:
      OSError: if it cannot be written.
    """
    import matplotlib
    from PIL import Image

    _settle(figure)
    if path.suffix == ".svg":
        for artist in figure.findobj():
            artist.set_clip_on(False)  # Nothing sticks out, and clip paths are named by address.
        with matplotlib.rc_context({"svg.hashsalt": "tfcdo"}):
            figure.savefig(path, metadata={"Date": None})
        return
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=_DPI)
    # A palette is enough for lines and a few colours, and a third of the bytes.
    Image.open(drawn).convert("RGB").quantize(256).save(path, optimize=True)


def _settle(figure: Figure) -> None:
    """Lays the figure out, to a millionth: the solver's last bits depend on addresses in memory."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = axes.get_position().bounds
        axes.set_position((round(left, 6), round(bottom, 6), round(width, 6), round(height, 6)))


def format_bytes(size: int) -> str:
    """A number of bytes for readers, in powers of 1000.

    Args:
      size: how many bytes.

    Returns:
      Three digits or more, and the unit.

    Example:
      >>> format_bytes(4_166_667), format_bytes(999), format_bytes(10**8)
      ('4.17 MB', '999 B', '100 MB')
    """
    if size < _BYTE_UNITS[-1][0]:
        return f"{size} B"
    return _with_unit(size, 3, _BYTE_UNITS)


def format_seconds(seconds: float) -> str:
    """A time for readers.

    Args:
      seconds: how long.

    Returns:
      Four digits, and the unit.

    Example:
      >>> format_seconds(0.0012604), format_seconds(8e-5), format_seconds(0)
      ('1.260 ms', '80.00 µs', '0 s')
    """
    return _with_unit(seconds, 4, _TIME_UNITS) if seconds else "0 s"


def _with_unit(value: float, digits: int, units: _Units) -> str:
    # Rounded before the unit is chosen: 999,999 bytes are 1.00 MB, not 1000 kB.
    rounded = float(f"{value:.{digits}g}")
    unit, name = _unit(rounded, units)
    scaled = rounded / unit
    number = f"{scaled:.0f}" if scaled >= 10**digits else f"{scaled:#.{digits}g}".rstrip(".")
    return f"{number} {name}"


def _unit(value: float, units: _Units) -> tuple[float, str]:
    """The largest unit of which `value` holds one, or the smallest of all."""
    return next((unit for unit in units if value >= unit[0]), units[-1])


def _packs_by_tree(schedule: Schedule) -> dict[CopyTree, list[int]]:
    """The packs of each tree, by the root of the tree."""
    found: dict[CopyTree, list[int]] = {}
    for index, pack in enumerate(schedule.packs):
        found.setdefault(pack.tree, []).append(index)
    return dict(sorted(found.items(), key=lambda item: (item[0].root, item[1])))


def _pack_names(packs: Sequence[int]) -> str:
    names = ", ".join(map(str, packs[:3])) + (", ..." if len(packs) > 3 else "")
    return f"pack {names}" if len(packs) == 1 else f"packs {names}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _circle(topology: Topology) -> Positions:
    """Places on a circle, so that no line passes over a third device."""
    devices = topology.num_devices
    order = list(range(devices))
    if devices > 3:
        # The round trip that is shortest if fast links are short.
        graph = nx.Graph()
        for source, target in itertools.combinations(range(devices), 2):
            detour = topology.link_by_pair[source, target].via_host
            speed = topology.bandwidth(source, target)
            graph.add_edge(source, target, weight=(2 if detour else 1) / speed)
        tour = nx.approximation.greedy_tsp(graph, source=0)
        order = nx.approximation.simulated_annealing_tsp(graph, tour, source=0, seed=0)[:-1]
    step = 2 * math.pi / devices
    # A flat top is where the eye looks for the first device.
    angles = {device: math.pi / 2 + step * (0.5 - place) for place, device in enumerate(order)}
    return {device: (math.cos(angle), math.sin(angle)) for device, angle in angles.items()}


def _colors(devices: int) -> list[Color]:
    """A colour for each device."""
    import matplotlib

    if devices <= 8:
        colormap = matplotlib.colormaps["tab10"]
        # Grey is for the machine, and olive is next to it.
        numbers = [0, 1, 2, 3, 4, 5, 6, 9][:devices]
    else:
        colormap = matplotlib.colormaps["turbo"].resampled(devices)
        numbers = [*range(devices)]
    return [(red, green, blue) for red, green, blue, _ in map(colormap, numbers)]


def _draw_machine(area: SubFigure, topology: Topology, places: Positions) -> None:
    axes = area.add_subplot()
    name = f"{topology.name}: {_count(topology.num_devices, 'device')}"
    area.suptitle(name, fontsize=12, parse_math=False)
    slowest_first = sorted(_wires(topology).items())
    graph = nx.Graph()
    graph.add_nodes_from(range(topology.num_devices))
    for rank, (kind, pairs) in enumerate(slowest_first):
        width = 1.2 if len(slowest_first) == 1 else 1.2 + 4.3 * rank / (len(slowest_first) - 1)
        style = "--" if kind.shared else "-"
        color = _WIRE if len(slowest_first) == 1 else str(0.7 - 0.45 * rank / len(slowest_first))
        look: dict[str, Any] = {"width": width, "style": style, "edge_color": color}
        if kind.one_way:
            # Bent, so that a way back at another speed is a line of its own.
            look |= {"connectionstyle": "arc3,rad=0.12", "arrowsize": 12 + 2 * width}
            nx.draw_networkx_edges(
                nx.DiGraph(pairs), places, edgelist=pairs, ax=axes, node_size=_NODE_SIZE, **look
            )
        else:
            nx.draw_networkx_edges(graph, places, edgelist=pairs, ax=axes, **look)
        if rank < _MAX_LINK_KINDS:
            label = kind.describe()
            axes.plot([], [], linewidth=width, linestyle=style, color=color, label=label)
    detours = _describe_detours(topology)
    if detours:
        axes.plot([], [], " ", label=detours)
    colors = _colors(topology.num_devices)
    nx.draw_networkx_nodes(graph, places, ax=axes, node_size=_NODE_SIZE, node_color=colors)
    nx.draw_networkx_labels(
        graph, places, ax=axes, font_size=15, font_color="white", font_weight="bold"
    )
    _frame(axes)
    if topology.num_devices > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), fontsize=9, frameon=False)


class _WireKind(NamedTuple):
    """What one line of the legend says of some links."""

    bandwidth: float
    shared: bool  # With links of other devices.
    half_duplex: bool  # With nothing but the way back.
    one_way: bool  # There is no direct way back, or one of another kind.

    def describe(self) -> str:
        text = _format_speed(self.bandwidth)
        if self.shared:
            text += ", shares its way with others"
        elif self.half_duplex:
            text += ", one way at a time"
        elif not self.one_way:
            text += " each way"
        return text + (", along the arrow" if self.one_way else "")


def _wires(topology: Topology) -> dict[_WireKind, list[tuple[int, int]]]:
    """The direct links by kind: a pair once if its two ways are alike, else in its direction."""
    shared = _shared_links(topology)
    kinds = {}
    for link in topology.direct_links:
        pair = (link.source, link.target)
        back = topology.link_by_pair[pair[::-1]]
        half_duplex = pair not in shared and not set(link.resources).isdisjoint(back.resources)
        kinds[pair] = _WireKind(topology.bandwidth(*pair), pair in shared, half_duplex, False)
    wires: dict[_WireKind, list[tuple[int, int]]] = collections.defaultdict(list)
    for (source, target), kind in kinds.items():
        if kinds.get((target, source)) != kind:
            wires[kind._replace(one_way=True)].append((source, target))
        elif source < target:
            wires[kind].append((source, target))
    return wires


def _describe_detours(topology: Topology) -> str:
    """What the legend says of the pairs without a direct link; empty if there are none."""
    direct = {(link.source, link.target) for link in topology.direct_links}
    detours = [pair for pair in topology.link_by_pair if pair not in direct]
    if not detours:
        return ""
    speeds = {topology.bandwidth(*pair) for pair in detours}
    against = any(pair[::-1] in direct for pair in detours)
    where = "no line, or against the arrow" if against else "no line"
    more = " or more" if len(speeds) > 1 else ""
    return f"{where}: through the host, {_format_speed(min(speeds))}{more}"


def _format_speed(bandwidth: float) -> str:
    return "no limit" if bandwidth == math.inf else f"{bandwidth / 1e9:g} GB/s"


def _shared_links(topology: Topology) -> set[tuple[int, int]]:
    """The pairs whose link holds something that others of other devices hold too."""
    users: dict[int, set[frozenset[int]]] = collections.defaultdict(set)
    for link in topology.links:
        for resource in link.resources:
            users[resource].add(frozenset((link.source, link.target)))
    return {
        (link.source, link.target)
        for link in topology.links
        if any(len(users[resource]) > 1 for resource in link.resources)
    }


def _draw_tree(
    axes: Axes,
    tree: CopyTree,
    topology: Topology,
    places: Positions,
    color: Color,
) -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(tree.num_devices))
    wires = [(link.source, link.target) for link in topology.direct_links]
    crowded = tree.num_devices > _MAX_NUMBERED
    size = 25 if crowded else 130
    nx.draw_networkx_edges(
        graph, places, edgelist=wires, ax=axes, arrows=False, edge_color=_FAINT, width=0.8
    )
    nx.draw_networkx_edges(
        graph,
        places,
        edgelist=tree.edges,
        ax=axes,
        edge_color=[color],
        width=1.8,
        arrowsize=9,
        node_size=size,
    )
    fills = [color if device == tree.root else (1.0, 1.0, 1.0) for device in graph]
    nx.draw_networkx_nodes(
        graph, places, ax=axes, node_size=size, node_color=fills, edgecolors=[color], linewidths=1.2
    )
    for device in [] if crowded else graph:
        text = "white" if device == tree.root else "black"
        axes.text(
            *places[device], str(device), fontsize=7, color=text, ha="center", va="center_baseline"
        )
    _frame(axes)


def _frame(axes: Axes) -> None:
    axes.set_aspect("equal")
    axes.set_xlim(-1.25, 1.25)
    axes.set_ylim(-1.25, 1.25)
    axes.axis("off")


def _lanes(timeline: simulator.Timeline, topology: Topology) -> dict[str, list[simulator.Task]]:
    """The tasks of each resource and each adder that is busy at all, in the machine's order."""
    names = [resource.name for resource in topology.resources]
    names += [_adder(device, topology) for device in range(topology.num_devices)]
    lanes: dict[str, list[simulator.Task]] = {name: [] for name in names}
    for task in timeline.tasks:
        if task.kind == "add":
            lanes[_adder(task.target, topology)].append(task)
            continue
        for index in topology.link_by_pair[task.source, task.target].resources:
            lanes[topology.resources[index].name].append(task)
    return {name: tasks for name, tasks in lanes.items() if _busy(tasks) > 0}


def _adder(device: int, topology: Topology) -> str:
    return "additions" if topology.serial_reduction else f"{device} adds"


def _busy(tasks: Iterable[simulator.Task]) -> float:
    return sum(task.end - task.start for task in tasks)


def _draw_lane(
    axes: Axes,
    lane: int,
    tasks: Sequence[simulator.Task],
    schedule: Schedule,
    colors: Sequence[Color],
    seconds: float,
    unit: float,
) -> None:
    fills = [_bar_color(task, schedule, colors) for task in tasks]
    axes.barh(
        [lane] * len(tasks),
        [(task.end - task.start) / unit for task in tasks],
        left=[task.start / unit for task in tasks],
        height=0.84,
        color=fills,
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
    return _paler(color) if task.kind == "broadcast" else color


def _paler(color: Color) -> Color:
    red, green, blue = (1 - _PALE * (1 - part) for part in color)
    return red, green, blue


def _write_busy_times(
    axes: Axes, lanes: Sequence[Sequence[simulator.Task]], seconds: float
) -> None:
    for lane, tasks in enumerate(lanes):
        axes.text(
            1.005,
            lane,
            f"{_busy(tasks) / seconds:.0%}",
            transform=axes.get_yaxis_transform(),
            fontsize=8,
            va="center_baseline",
        )
    axes.text(1.005, 1.0, "busy", transform=axes.transAxes, fontsize=8, va="bottom")


def _explain_bars(schedule: Schedule, colors: Sequence[Color]) -> list[Any]:
    """Entries of a legend."""
    from matplotlib.patches import Patch

    roots = sorted({pack.tree.root for pack in schedule.packs})
    pale = Patch(color=_paler((0.3, 0.3, 0.3)), label="pale: the sum, on its way down")
    return [*(Patch(color=colors[root], label=f"summed on {root}") for root in roots[:16]), pale]
