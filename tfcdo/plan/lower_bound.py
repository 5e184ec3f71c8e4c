"""The lower bound: a time that no copy trees beat, however the data is cut into packs."""

from __future__ import annotations

import functools
import math

import numpy as np

from tfcdo import checks
from tfcdo.plan import tree_program
from tfcdo.topology.topology import Topology

# The bound is within this factor of the best one of its kind.
_PRECISION = 1.01


def lower_bound_seconds(topology: Topology, num_bytes: int) -> float:
    """Returns a time that no copy trees beat, however many packs there are.

    The larger of two bounds:

    * Let the largest pack have `s` bytes. Then each link pays its latency at least once for `s`
      bytes, so the rates of all spanning trees together take at least the time of a linear program
      with `1 / bandwidth + latency / s` seconds per byte. And the pack itself takes at least the
      shortest way from all devices to a root and back. One of both is long, whatever `s` is.
    * `K-1` times the data is added, by K devices unless they share one adder.

    Args:
      topology: the machine.
      num_bytes: how many bytes each device holds.

    Returns:
      The time in seconds.

    Raises:
      ValueError: if `num_bytes` is negative.
      TypeError: if it is not an int.

    References:
      Cai et al., "Synthesizing Optimal Collective Algorithms", PPoPP 2021 (bounds of a DGX-1).

    Example:
      >>> from tfcdo.topology import preset
      >>> f"{1e3 * lower_bound_seconds(preset('dgx1'), 10**8):.3f} ms"
      '1.196 ms'
    """
    checks.check_sizes(num_bytes, None)
    return max(_copies_bound(topology, num_bytes), additions_bound(topology, num_bytes))


@functools.lru_cache(maxsize=512)
def _copies_bound(topology: Topology, num_bytes: int) -> float:
    if topology.num_devices == 1 or not num_bytes:
        return 0.0
    solved = tree_program.solve(tree_program.Edges(topology, 1 / num_bytes))
    if solved is None:
        return _way_and_back(topology, 1.0)
    # One bound falls with the largest pack, the other rises: they meet between `low` and `high`.
    low, high, links = 1.0, float(num_bytes), num_bytes * solved.bound
    while high > _PRECISION * low and links < _way_and_back(topology, high):
        size = math.sqrt(low * high)
        # The last program has nearly the same trees.
        solved = tree_program.solve(tree_program.Edges(topology, 1 / size), solved.program.trees)
        assert solved is not None
        if num_bytes * solved.bound > _way_and_back(topology, size):
            low = size
        else:
            high, links = size, num_bytes * solved.bound
    return max(_way_and_back(topology, low), links)


def bandwidth_bound(topology: Topology, num_bytes: int) -> float:
    """Returns the bound without latencies, which is simpler but less tight for small sizes."""
    solved = tree_program.solve(tree_program.Edges(topology))
    copies = num_bytes * solved.bound if solved else 0.0
    return max(copies, additions_bound(topology, num_bytes))


def additions_bound(topology: Topology, num_bytes: int) -> float:
    """Returns the time of the additions alone, a bound that costs nothing to know."""
    adders = 1 if topology.serial_reduction else topology.num_devices
    return num_bytes * (topology.num_devices - 1) / adders / topology.addition_bandwidth


def _way_and_back(topology: Topology, num_bytes: float) -> float:
    """Returns the seconds of the shortest way of a pack from all devices to a root and back."""
    count = topology.num_devices
    way = np.full((count, count), np.inf)
    np.fill_diagonal(way, 0.0)
    for link in topology.links:
        pair = link.source, link.target
        way[pair] = link.latency + num_bytes / topology.bandwidth(*pair)
    back = way.copy()
    # Each copy towards the root is followed by an addition.
    way += (1 - np.eye(count)) * num_bytes / topology.addition_bandwidth
    for seconds in (way, back):
        for device in range(count):
            np.minimum(seconds, seconds[:, [device]] + seconds[[device], :], out=seconds)
    return float((way.max(0) + back.max(1)).min())
