"""Widening: machines as they are for values that travel in fewer bytes than they are added in."""

from __future__ import annotations

import dataclasses
import functools

from tfcdo.topology.topology import Topology


@functools.lru_cache(maxsize=64)
def widened(topology: Topology, factor: float) -> Topology:
    """Returns a machine on which what travels is added in a wider dtype.

    Args:
      topology: the machine.
      factor: how many bytes are added for each byte that travels: 2 where float32 travels as
        bfloat16.

    Returns:
      The machine whose additions take so much longer; the same object for a factor of 1.

    Example:
      >>> from tfcdo.topology import preset
      >>> cpu = preset("shared_memory", 4)
      >>> cpu.addition_bandwidth / widened(cpu, 2).addition_bandwidth
      2.0
    """
    if factor == 1:
        return topology
    return dataclasses.replace(topology, addition_bandwidth=topology.addition_bandwidth / factor)
