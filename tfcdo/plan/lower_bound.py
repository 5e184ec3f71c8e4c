"""The lower bound: a time that no copy trees beat."""

from __future__ import annotations

from tfcdo.plan import spanning_trees_lp
from tfcdo.topology.topology import Topology


def lower_bound(topology: Topology, num_bytes: int, *, direct: bool = False) -> float:
    """Returns a time that no copy trees beat, however many packs there are.

    The larger of two bounds, both without latencies:

    * The rates of all spanning trees together, each of which loads its links up and down, overload
      no resource; `tfcdo.plan.spanning_trees_lp` has the largest sum of rates.
    * `K-1` times the data is added, by K devices unless they share one adder.

    Args:
      topology: the machine.
      num_bytes: how many bytes each device holds.
      direct: count only trees along direct links, as long as those join all devices. This is the
        bound that the literature gives for a DGX-1, 14/48 of the time that one NVLink needs for the
        data. Trees that use links via the host as well may beat it.

    Returns:
      The time in seconds.

    References:
      Cai et al., "Synthesizing Optimal Collective Algorithms", PPoPP 2021 (bounds of a DGX-1).
      Nash-Williams, "Edge-disjoint spanning trees of finite graphs", 1961, and Tutte, "On the
      problem of decomposing a graph into n connected factors", 1961 (packing spanning trees).

    Example:
      >>> from tfcdo.topology import preset
      >>> machine = preset("dgx1")
      >>> f"{1e3 * lower_bound(machine, 10**8):.3f} ms"
      '1.148 ms'
      >>> f"{1e3 * lower_bound(machine, 10**8, direct=True):.3f} ms"
      '1.167 ms'
    """
    copies = spanning_trees_lp.seconds_per_byte(topology, direct)
    return max(num_bytes * copies, additions_bound(topology, num_bytes))


def additions_bound(topology: Topology, num_bytes: int) -> float:
    """Returns the time that the additions alone take, which is a bound that costs nothing to know.

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
