"""Draws the links between the devices of a machine."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import networkx as nx
from matplotlib.axes import Axes

from tfcdo.plot.figures import device_colors
from tfcdo.topology.topology import Topology

Positions = Mapping[int, tuple[float, float]]

_MAX_LINK_KINDS = 6
_NODE_SIZE = 900
_LINE_COLOR = "0.45"


def place_devices(topology: Topology) -> Positions:
    """Places the devices on a circle, so that no line passes over a third device."""
    devices = topology.num_devices
    order = list(range(devices))
    if devices > 3:
        # The round trip that is shortest if fast links are short.
        graph = nx.Graph()
        for source, target in itertools.combinations(range(devices), 2):
            penalty = 2 if topology.link_by_pair[source, target].via_host else 1
            graph.add_edge(source, target, weight=penalty / topology.bandwidth(source, target))
        tour = nx.approximation.greedy_tsp(graph, source=0)
        order = nx.approximation.simulated_annealing_tsp(graph, tour, source=0, seed=0)[:-1]
    step = 2 * math.pi / devices
    # A flat top is where the eye looks for the first device.
    angles = {device: math.pi / 2 + step * (0.5 - place) for place, device in enumerate(order)}
    return {device: (math.cos(angle), math.sin(angle)) for device, angle in angles.items()}


def draw_machine(axes: Axes, topology: Topology, positions: Positions) -> None:
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
    colors = device_colors(topology.num_devices)
    nx.draw_networkx_nodes(graph, positions, ax=axes, node_size=_NODE_SIZE, node_color=colors)
    nx.draw_networkx_labels(
        graph, positions, ax=axes, font_size=15, font_color="white", font_weight="bold"
    )
    set_limits(axes)
    if topology.num_devices > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), fontsize=9, frameon=False)


def set_limits(axes: Axes) -> None:
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
    shared = _find_shared_links(topology)
    kinds = {}
    for link in topology.direct_links:
        pair = (link.source, link.target)
        back = topology.link_by_pair[pair[::-1]]
        half_duplex = pair not in shared and not set(link.resources).isdisjoint(back.resources)
        kinds[pair] = _LinkKind(topology.bandwidth(*pair), pair in shared, half_duplex, False)
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


def _find_shared_links(topology: Topology) -> set[tuple[int, int]]:
    """Returns the pairs whose link holds a resource that links of other devices hold too."""
    users: dict[int, set[frozenset[int]]] = collections.defaultdict(set)
    for link in topology.links:
        for resource in link.resources:
            users[resource].add(frozenset((link.source, link.target)))
    return {
        (link.source, link.target)
        for link in topology.links
        if any(len(users[resource]) > 1 for resource in link.resources)
    }
