"""Draws the copy trees of a plan next to the machine that they span."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import networkx as nx
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.plan import Plan
from tfcdo.plot.figures import Color, device_colors, make_figure
from tfcdo.plot.machine import Positions, draw_machine, place_devices, set_limits
from tfcdo.topology.topology import Topology
from tfcdo.units import format_bytes

_MAX_TREES = 32
# More devices leave no room for their numbers in the picture of a tree.
_MAX_NUMBERED = 12
_FAINT = "0.88"


def draw_trees(plan: Plan, topology: Topology, title: str = "") -> Figure:
    """Draws the links of the machine, and each copy tree with the devices at the same places.

    Devices stand on a circle, with the best connected ones next to each other. A tree has the
    colour of its root; its arrows point up, the direction in which partial sums are sent.

    Args:
      plan: the packs and their trees.
      topology: the machine.
      title: a line above the picture.

    Returns:
      The figure; `tfcdo.plot.figures.save_figure` writes it to a file.

    Example:
      >>> from tfcdo.topology import preset
      >>> from tfcdo.plan import algorithms
      >>> machine = preset("pcie")
      >>> figure = draw_trees(algorithms.make_plan("ring", machine, 10**6), machine)
      >>> len(figure.subfigs)
      2
    """
    groups = _packs_by_tree(plan)
    shown = list(itertools.islice(groups.items(), _MAX_TREES))
    rows = max(1, round(math.sqrt(len(shown) / 2)))
    columns = max(3, math.ceil(len(shown) / rows))
    widths = (4.8, 1.4 * columns)
    figure = make_figure(sum(widths), max(5.2, 1.55 * rows + 0.8), title)
    areas: Any = figure.subfigures(1, 2, width_ratios=widths)
    left, right = areas
    name = f"{topology.name}: {_count(topology.num_devices, 'device')}"
    left.suptitle(name, fontsize=12, parse_math=False)
    positions = place_devices(topology)
    draw_machine(left.add_subplot(), topology, positions)
    colors = device_colors(topology.num_devices)
    for place, (tree, packs) in enumerate(shown, 1):
        axes = right.add_subplot(rows, columns, place)
        _draw_tree(axes, tree, topology, positions, colors[tree.root])
        size = sum(plan.packs[index].num_sent_bytes for index in packs)
        axes.set_title(f"{_name_packs(packs)}\n{format_bytes(size)}", fontsize=8)
    more = f", {len(shown)} of them shown" if len(shown) < len(groups) else ""
    right.suptitle(f"{_count(len(groups), 'copy tree')}{more}: arrows up to the root", fontsize=12)
    return figure


def _packs_by_tree(plan: Plan) -> dict[CopyTree, list[int]]:
    """Groups the packs by tree, in the order of their numbers."""
    groups: dict[CopyTree, list[int]] = {}
    for index, tree in enumerate(plan.trees):
        groups.setdefault(tree, []).append(index)
    return groups


def _name_packs(packs: Sequence[int]) -> str:
    names = ", ".join(map(str, packs[:3])) + (", ..." if len(packs) > 3 else "")
    return f"pack {names}" if len(packs) == 1 else f"packs {names}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _draw_tree(
    axes: Axes,
    tree: CopyTree,
    topology: Topology,
    positions: Positions,
    color: Color,
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
    set_limits(axes)
