"""Infers the shared resources of a machine's links, from the times of copies alone and together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from tfcdo.topology.links import Resource
from tfcdo.topology.routes import Route

Pair: TypeAlias = tuple[int, int]
# The seconds of copies that begin together: of so many bytes, over these pairs of devices.
TimeCopies: TypeAlias = Callable[[Sequence[Pair], int], float]

# Two copies share something if the second adds this part of the shorter one's time.
_SHARED = 0.5
# Links without a common device are tried together only if they are this much slower than the
# fastest: they lead through a host.
_SLOW = 0.9


def infer_routes(alone: Sequence[Route], time_copies: TimeCopies, num_bytes: int) -> list[Route]:
    """Adds the resources that links share to routes that hold a wire each, by timing copies.

    Pairs of links that may share something are timed together. Links every two of which slow each
    other down share a resource: they are a clique of a graph.
    """
    bandwidths = {route[:2]: route.resources[0].bandwidth for route in alone}
    seconds = {route[:2]: route.latency + num_bytes / bandwidths[route[:2]] for route in alone}
    slow = _SLOW * max(bandwidths.values())
    conflicts = []
    for one, other in itertools.combinations(sorted(bandwidths), 2):
        ends_meet = one[0] == other[0] or one[1] == other[1] or one == other[::-1]
        if ends_meet or max(bandwidths[one], bandwidths[other]) < slow:
            short, long = sorted((seconds[one], seconds[other]))
            if time_copies([one, other], num_bytes) > long + _SHARED * short:
                conflicts.append((one, other))
    resources = {route[:2]: [*route.resources] for route in alone}
    for number, clique in enumerate(_cliques_over_edges(conflicts)):
        fastest = max(bandwidths[pair] for pair in clique)
        for pair in clique:
            resources[pair].append(Resource(f"{_name(clique)} ({number})", fastest))
    return [route._replace(resources=resources[route[:2]]) for route in alone]


def _cliques_over_edges(edges: Sequence[tuple[Pair, Pair]]) -> Iterator[list[Pair]]:
    """Covers all edges of a graph with cliques, large ones first, each as large as it can be."""
    try:
        import networkx as nx
    except ImportError as error:
        raise ImportError(
            "measuring links needs networkx: pip install 'tfcdo[cli]' or 'tfcdo[plot]'"
        ) from error
    covered: set[Sequence[Pair]] = set()
    cliques = map(sorted, nx.find_cliques(nx.Graph(edges)))
    for clique in sorted(cliques, key=lambda pairs: (-len(pairs), pairs[0])):
        inside = set(itertools.combinations(clique, 2))
        if inside - covered:
            covered |= inside
            yield clique


def _name(clique: Sequence[Pair]) -> str:
    sources, targets = {pair[0] for pair in clique}, {pair[1] for pair in clique}
    if len(sources) == 1:
        return f"{sources.pop()} out"
    if len(targets) == 1:
        return f"{targets.pop()} in"
    return "shared"
