"""Asks topologies what several tests want to know."""

from __future__ import annotations

from tfcdo.topology.topology import Topology


def gigabytes(topology: Topology, source: int, target: int) -> float:
    return topology.bandwidth(source, target) / 1e9


def meet(topology: Topology, one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Returns whether two transfers share a resource, so that one has to wait for the other."""
    links = topology.link_by_pair
    return not set(links[one].resources).isdisjoint(links[other].resources)
