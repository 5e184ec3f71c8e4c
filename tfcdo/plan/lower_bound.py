"""The lower bound: a time that no copy trees along the direct links beat."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import networkx as nx

from tfcdo.topology.topology import Topology


def lower_bound(topology: Topology, num_bytes: int) -> float:
    """Returns a time that no copy trees along direct links beat, however many packs there are.

    The largest of three bounds, all without latencies:

    * A tree over K devices has K-1 edges, so `2 (K-1)` times the data must cross the links, in as
      much time as all links together need. On a DGX-1 this is 14/48 of the time that one NVLink
      needs for the data.
    * All data must cross every cut of the machine both ways, at the rate of a maximum flow.
    * `K-1` times the data is added, by K devices unless they share one adder.

    Links via the host are left out of the first two, as long as the other links join all
    devices. A schedule that uses them as well may beat the bound, by what they add to the links'
    bandwidth: 3 % on a whole DGX-1, more on a part of one that has few links.

    Args:
      topology: the machine.
      num_bytes: how many bytes each device holds.

    Returns:
      The time in seconds.

    References:
      Cai et al., "Synthesizing Optimal Collective Algorithms", PPoPP 2021 (bounds of a DGX-1).
      Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020 (packing).

    Example:
      >>> from tfcdo.topology import preset
      >>> machine = preset("dgx1")
      >>> f"{1e3 * lower_bound(machine, 10**8):.3f} ms"
      '1.167 ms'

      Device 1 has direct links to 3 and 5, which have none to each other: many packs on the star
      along them come close to the bound, and with trees that also go through the host beat it.

      >>> from tfcdo.plan.copy_tree import CopyTree, star
      >>> from tfcdo.plan.schedule import assign, cut
      >>> from tfcdo.plan.simulator import simulate
      >>> corner = machine.subset((1, 3, 5))
      >>> trees = [star(3), star(3, 1), CopyTree((2, 0, None))]
      >>> schedule = assign(10**8, cut(10**8, 16), trees)
      >>> f"{simulate(schedule, corner).seconds / lower_bound(corner, 10**8):.3f}"
      '0.953'
    """
    return num_bytes * _seconds_per_byte(topology)


def additions_bound(topology: Topology, num_bytes: int) -> float:
    """Returns the time that the additions alone take, which is a bound that costs no flows.

    Args:
      topology: the machine.
      num_bytes: how many bytes each device holds.

    Returns:
      The time in seconds; 0 where additions cost nothing.

    Example:
      >>> from tfcdo.topology import preset
      >>> additions_bound(preset("shared_memory", 5), 10**9)
      0.4
    """
    adders = 1 if topology.serial_reduction else topology.num_devices
    return num_bytes * (topology.num_devices - 1) / adders / topology.addition_bandwidth


@functools.lru_cache(maxsize=256)
def _seconds_per_byte(topology: Topology) -> float:
    devices = topology.num_devices
    if devices == 1:
        return 0.0
    all_links = 2 * (devices - 1) / _flow(topology, range(devices), range(devices))
    return max(all_links, 1 / _least_cut(topology), additions_bound(topology, 1))


def _least_cut(topology: Topology) -> float:
    """Returns the bytes per second that can cross the cut of the machine that lets least pass."""
    direct = {(link.source, link.target) for link in topology.direct_links}
    least = math.inf
    for other in range(1, topology.num_devices):
        for pair in ((0, other), (other, 0)):
            # At least as much as the link alone carries can flow.
            if pair not in direct or topology.bandwidth(*pair) < least:
                least = min(least, _flow(topology, [pair[0]], [pair[1]]))
    return least


def _flow(topology: Topology, sources: Sequence[int], targets: Sequence[int]) -> float:
    """Returns the bytes per second that can flow from sources to targets.

    A link becomes a path through its resources, each an edge of the resource's bandwidth. Between
    one source and one target a flow may pass through the other devices; if all devices send to all,
    each device only sends and receives, so that the flow counts every link once.
    """
    graph = nx.DiGraph()
    graph.add_edges_from(("from", ("sends", device)) for device in sources)
    graph.add_edges_from((("receives", device), "to") for device in targets)
    if len(sources) == 1:
        graph.add_edges_from(
            (("receives", device), ("sends", device)) for device in range(topology.num_devices)
        )
    for link in topology.direct_links:
        ends = [(end, index) for index in link.resources for end in ("in", "out")]
        nx.add_path(graph, [("sends", link.source), *ends, ("receives", link.target)])
    for index, resource in enumerate(topology.resources):
        # To networkx, an edge without a capacity carries any amount.
        if resource.bandwidth != math.inf and graph.has_edge(("in", index), ("out", index)):
            graph.edges[("in", index), ("out", index)]["capacity"] = resource.bandwidth
    try:
        return float(nx.maximum_flow_value(graph, "from", "to"))
    except nx.NetworkXUnbounded:
        return math.inf
