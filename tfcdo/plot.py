"""Draws the copy trees of a plan next to the machine that they span, and saves pictures."""

from __future__ import annotations

import collections
import io
import itertools
import math
import os
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import matplotlib
import networkx as nx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from tfcdo import checks
from tfcdo.log import format_bytes, format_count
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.plan import Plan
from tfcdo.plan.simulator import check_plan
from tfcdo.topology.topology import Topology

__all__ = ["draw_trees", "save_figure"]

Color = tuple[float, float, float]
Positions = Mapping[int, tuple[float, float]]

_DPI = 100
# Width of a title in its bold font.
_LETTERS_PER_INCH = 7.5
_MAX_TREES = 32
# More devices leave no room for their numbers in the picture of a tree.
_MAX_NUMBERED = 12
_FAINT = "0.88"
_MAX_LINK_KINDS = 6
_NODE_SIZE = 900
_LINE_COLOR = "0.45"


def draw_trees(plan: Plan, topology: Topology, title: str = "") -> Figure:
    """Draws the links of the machine, and each copy tree with the devices at the same places.

    Devices stand on a circle, with the best connected ones next to each other. A tree has the
    colour of its root; its arrows point up, the direction in which partial sums are sent.

    Args:
      plan: the packs and their trees.
      topology: the machine.
      title: a line above the picture.

    Returns:
      The figure; `tfcdo.plot.save_figure` writes it to a file.

    Raises:
      TypeError: if an argument is of another type.
      ValueError: if the plan and the topology differ in the number of devices.

    Example:
      >>> from tfcdo.topology import preset
      >>> from tfcdo.plan import algorithms
      >>> machine = preset("pcie")
      >>> figure = draw_trees(algorithms.make_plan("ring", machine, 10**6), machine)
      >>> len(figure.subfigs)
      2
    """
    check_plan(plan, topology)
    checks.check_type("title", title, str)
    groups: dict[CopyTree, list[int]] = {}
    for index, tree in enumerate(plan.trees):
        groups.setdefault(tree, []).append(index)
    shown = list(itertools.islice(groups.items(), _MAX_TREES))
    rows = max(1, round(math.sqrt(len(shown) / 2)))
    columns = max(3, math.ceil(len(shown) / rows))
    widths = (4.8, 1.4 * columns)
    size = sum(widths), max(5.2, 1.55 * rows + 0.8)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    wrapped = textwrap.fill(title, round(_LETTERS_PER_INCH * sum(widths)))
    figure.suptitle(wrapped, fontsize=14, fontweight="bold", parse_math=False)
    areas: Any = figure.subfigures(1, 2, width_ratios=widths)
    left, right = areas
    name = f"{topology.name}: {format_count(topology.num_devices, 'device')}"
    left.suptitle(name, fontsize=12, parse_math=False)
    positions = _place_devices(topology)
    _draw_machine(left.add_subplot(), topology, positions)
    colors = _device_colors(topology.num_devices)
    for place, (tree, packs) in enumerate(shown, 1):
        axes = right.add_subplot(rows, columns, place)
        _draw_tree(axes, tree, topology, positions, colors[tree.root])
        num_bytes = sum(plan.packs[index].num_sent_bytes for index in packs)
        names = ", ".join(map(str, packs[:3])) + (", ..." if len(packs) > 3 else "")
        label = f"pack {names}" if len(packs) == 1 else f"packs {names}"
        axes.set_title(f"{label}\n{format_bytes(num_bytes)}", fontsize=8)
    trees = format_count(len(groups), "copy tree")
    more = f", {len(shown)} of them shown" if len(shown) < len(groups) else ""
    right.suptitle(f"{trees}{more}: arrows up to the root", fontsize=12)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a figure to a file; the same plan gives the same file.

    Args:
      figure: a figure of `draw_trees`, or another one of Matplotlib.
      path: the file, which ends in .svg or .png.

    Raises:
      TypeError: if `figure` is not a figure, or `path` not a path.
      ValueError: if the file's name ends otherwise.
      OSError: if the file cannot be written.
    """
    path = checks.check_path("path", path, ".svg", ".png")
    checks.check_type("figure", figure, Figure, "tfcdo.plot.draw_trees")
    # Laid out to a millionth: the solver's last bits depend on addresses in memory.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = axes.get_position().bounds
        axes.set_position((round(left, 6), round(bottom, 6), round(width, 6), round(height, 6)))
    if path.suffix == ".svg":
        for artist in figure.findobj():
            artist.set_clip_on(False)  # Nothing sticks out, and clip paths are named by address.
        with matplotlib.rc_context({"svg.hashsalt": "tfcdo"}):
            figure.savefig(path, metadata={"Date": None})
        return
    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=_DPI)
    # A palette is enough for lines and a few colours, and a third of the bytes.
    Image.open(pixels).convert("RGB").quantize(256).save(path, optimize=True)


def _device_colors(num_devices: int) -> list[Color]:
    """Chooses a colour for each device."""
    if num_devices <= 8:
        colormap = matplotlib.colormaps["tab10"]
        # Grey is for the machine, and olive is next to it.
        numbers = [0, 1, 2, 3, 4, 5, 6, 9][:num_devices]
    else:
        colormap = matplotlib.colormaps["turbo"].resampled(num_devices)
        numbers = [*range(num_devices)]
    return [(red, green, blue) for red, green, blue, _ in map(colormap, numbers)]


def _draw_tree(
    axes: Axes, tree: CopyTree, topology: Topology, positions: Positions, color: Color
) -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(tree.num_devices))
    direct = [(link.source, link.target) for link in topology.direct_links]
    crowded = tree.num_devices > _MAX_NUMBERED
    size = 25 if crowded else 130
    nx.draw_networkx_edges(
        graph, positions, edgelist=direct, ax=axes, arrows=False, edge_color=_FAINT, width=0.8
    )
    nx.draw_networkx_edges(
        graph,
        positions,
        edgelist=tree.edges,
        ax=axes,
        edge_color=[color],
        width=1.8,
        arrowsize=9,
        node_size=size,
    )
    fills = [color if device == tree.root else (1.0, 1.0, 1.0) for device in graph]
    nx.draw_networkx_nodes(
        graph,
        positions,
        ax=axes,
        node_size=size,
        node_color=fills,
        edgecolors=[color],
        linewidths=1.2,
    )
    for device in [] if crowded else graph:
        axes.text(
            *positions[device],
            str(device),
            fontsize=7,
            color="white" if device == tree.root else "black",
            ha="center",
            va="center_baseline",
        )
    _set_limits(axes)


def _place_devices(topology: Topology) -> Positions:
    """Places the devices on a circle, so that no line passes over a third device."""
    devices = topology.num_devices
    order = list(range(devices))
    if devices > 3:
        # The round trip that is shortest if fast links are short.
        graph = nx.Graph()
        for source, target in itertools.combinations(range(devices), 2):
            penalty = 2 if topology.link_by_pair[source, target].via_host else 1
            graph.add_edge(source, target, weight=penalty / topology.bandwidth(source, target))
        order = nx.approximation.simulated_annealing_tsp(graph, "greedy", source=0, seed=0)[:-1]
    step = 2 * math.pi / devices
    # A flat top is where the eye looks for the first device.
    angles = {device: math.pi / 2 + step * (0.5 - place) for place, device in enumerate(order)}
    return {device: (math.cos(angle), math.sin(angle)) for device, angle in angles.items()}


def _draw_machine(axes: Axes, topology: Topology, positions: Positions) -> None:
    """Draws the devices, the links between them, and a legend of the kinds of links."""
    graph = nx.Graph()
    graph.add_nodes_from(range(topology.num_devices))
    slowest_first = sorted(_pairs_by_kind(topology).items())
    for rank, (kind, pairs) in enumerate(slowest_first):
        # The faster, the wider and the darker.
        width = 1.2 if len(slowest_first) == 1 else 1.2 + 4.3 * rank / (len(slowest_first) - 1)
        style = "--" if kind.shared else "-"
        gray = str(0.7 - 0.45 * rank / len(slowest_first))
        color = _LINE_COLOR if len(slowest_first) == 1 else gray
        look: dict[str, Any] = {"width": width, "style": style, "edge_color": color}
        if kind.one_way:
            # Bent, so that a link back at another speed is a line of its own.
            look |= {"connectionstyle": "arc3,rad=0.12", "arrowsize": 12 + 2 * width}
            nx.draw_networkx_edges(
                nx.DiGraph(pairs), positions, edgelist=pairs, ax=axes, node_size=_NODE_SIZE, **look
            )
        else:
            nx.draw_networkx_edges(graph, positions, edgelist=pairs, ax=axes, **look)
        if rank < _MAX_LINK_KINDS:
            label = kind.describe()
            axes.plot([], [], linewidth=width, linestyle=style, color=color, label=label)
    via_host = _describe_links_via_host(topology)
    if via_host:
        axes.plot([], [], " ", label=via_host)
    colors = _device_colors(topology.num_devices)
    nx.draw_networkx_nodes(graph, positions, ax=axes, node_size=_NODE_SIZE, node_color=colors)
    nx.draw_networkx_labels(
        graph, positions, ax=axes, font_size=15, font_color="white", font_weight="bold"
    )
    _set_limits(axes)
    if topology.num_devices > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), fontsize=9, frameon=False)


def _set_limits(axes: Axes) -> None:
    """Shows the unit circle and a margin, without a frame."""
    axes.set_aspect("equal")
    axes.set_xlim(-1.25, 1.25)
    axes.set_ylim(-1.25, 1.25)
    axes.axis("off")


class _LinkKind(NamedTuple):
    """Holds one line of the legend, about some links."""

    bandwidth: float
    shared: bool  # With links of other devices.
    half_duplex: bool  # With nothing but the link back.
    one_way: bool  # There is no direct link back, or one of another kind.

    def describe(self) -> str:
        """Returns the words of the legend."""
        text = _format_bandwidth(self.bandwidth)
        if self.shared:
            text += ", shares its path with others"
        elif self.half_duplex:
            text += ", one way at a time"
        elif not self.one_way:
            text += " each way"
        return text + (", along the arrow" if self.one_way else "")


def _pairs_by_kind(topology: Topology) -> dict[_LinkKind, list[tuple[int, int]]]:
    """Groups the direct links: a pair is there once if both its links are alike, else directed."""
    users: dict[int, set[frozenset[int]]] = collections.defaultdict(set)
    for link in topology.links:
        for resource in link.resources:
            users[resource].add(frozenset((link.source, link.target)))
    kinds = {}
    for link in topology.direct_links:
        pair = (link.source, link.target)
        back = topology.link_by_pair[pair[::-1]]
        shared = any(len(users[resource]) > 1 for resource in link.resources)
        half_duplex = not shared and not set(link.resources).isdisjoint(back.resources)
        kinds[pair] = _LinkKind(topology.bandwidth(*pair), shared, half_duplex, False)
    pairs: dict[_LinkKind, list[tuple[int, int]]] = collections.defaultdict(list)
    for (source, target), kind in kinds.items():
        if kinds.get((target, source)) != kind:
            pairs[kind._replace(one_way=True)].append((source, target))
        elif source < target:
            pairs[kind].append((source, target))
    return pairs


def _describe_links_via_host(topology: Topology) -> str:
    """Returns the legend's line for the pairs without a direct link; "" if there are none."""
    direct = {(link.source, link.target) for link in topology.direct_links}
    via_host = [pair for pair in topology.link_by_pair if pair not in direct]
    if not via_host:
        return ""
    bandwidths = {topology.bandwidth(*pair) for pair in via_host}
    against = any(pair[::-1] in direct for pair in via_host)
    where = "no line, or against the arrow" if against else "no line"
    more = " or more" if len(bandwidths) > 1 else ""
    return f"{where}: through the host, {_format_bandwidth(min(bandwidths))}{more}"


def _format_bandwidth(bandwidth: float) -> str:
    return "no limit" if bandwidth == math.inf else f"{bandwidth / 1e9:g} GB/s"
