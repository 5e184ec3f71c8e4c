"""Infers the shared resources of a machine's links, from the times of copies alone and together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from tfcdo.topology.links import Resource, link_name
from tfcdo.topology.routes import Route

Pair: TypeAlias = tuple[int, int]
# The seconds of copies that begin together: of so many bytes, over these pairs of devices.
TimeCopies: TypeAlias = Callable[[Sequence[Pair], int], float]

# Two copies share something if the second adds this part of the shorter one's time.
_SHARED = 0.5
# Links without a common device are tried together only if they are this much slower than the
# fastest: they lead through a host.
_SLOW = 0.9


class Alone(NamedTuple):
    """Seconds on top of the bytes, and bytes per second, of a copy that runs alone."""

    latency: float
    bandwidth: float


def infer_routes(
    alone: Mapping[Pair, Alone], time_copies: TimeCopies, num_bytes: int
) -> list[Route]:
    """Infers the routes of a machine whose copies can be timed.

    Pairs of links that may share something are timed together. Links every two of which slow each
    other down share a resource: they are a clique of a graph.
    """
    try:
        import networkx as nx
    except ImportError as error:
        raise ImportError(
            "measuring links needs networkx: pip install 'tfcdo[cli]' or 'tfcdo[plot]'"
        ) from error
    conflicts = nx.Graph()
    conflicts.add_nodes_from(alone)
    for one, other in itertools.combinations(sorted(alone), 2):
        if not _may_meet(one, other, alone):
            continue
        short, long = sorted(
            alone[pair].latency + num_bytes / alone[pair].bandwidth for pair in (one, other)
        )
        if time_copies([one, other], num_bytes) > long + _SHARED * short:
            conflicts.add_edge(one, other)
    shared: dict[Pair, list[Resource]] = {pair: [] for pair in alone}
    for number, clique in enumerate(_cliques_over_edges(conflicts)):
        fastest = max(alone[pair].bandwidth for pair in clique)
        resource = Resource(f"{_name(clique)} ({number})", fastest)
        for pair in clique:
            shared[pair].append(resource)
    return [
        Route(*pair, [Resource(link_name(*pair), bandwidth), *shared[pair]], latency=latency)
        for pair, (latency, bandwidth) in sorted(alone.items())
    ]


def _may_meet(one: Pair, other: Pair, alone: Mapping[Pair, Alone]) -> bool:
    if one[0] == other[0] or one[1] == other[1] or one == other[::-1]:
        return True
    slow = _SLOW * max(found.bandwidth for found in alone.values())
    return alone[one].bandwidth < slow and alone[other].bandwidth < slow


def _cliques_over_edges(conflicts: Any) -> list[list[Pair]]:
    """Covers all edges of a graph with cliques, large ones first, each as large as it can be."""
    import networkx as nx

    covered: set[frozenset[Pair]] = set()
    chosen = []
    for clique in sorted(nx.find_cliques(conflicts), key=lambda found: (-len(found), min(found))):
        edges = {frozenset(edge) for edge in itertools.combinations(clique, 2)}
        if edges - covered:
            covered |= edges
            chosen.append(sorted(clique))
    return chosen


def _name(clique: Sequence[Pair]) -> str:
    sources, targets = {pair[0] for pair in clique}, {pair[1] for pair in clique}
    if len(sources) == 1:
        return f"{sources.pop()} out"
    if len(targets) == 1:
        return f"{targets.pop()} in"
    return "shared"
