"""Prices what devices do beside copying: packing, unpacking, adding, and the executor's ops."""

from __future__ import annotations

import math

from tfcdo.plan import simulator
from tfcdo.plan.schedule import Schedule
from tfcdo.topology.topology import Topology

# glibc keeps the memory of smaller blocks for their next use; larger ones it gives back.
_LARGE = 2**25


def device_seconds(schedule: Schedule, topology: Topology) -> float:
    """Returns how long devices pack, add and start ops, none of which the simulator counts.

    * Packing reads and writes all data of a device once, and so does unpacking. One pack is not
      packed where slices may travel alone, as on processors.
    * A device adds all that its children in a tree have sent in one op: it reads its own part and
      theirs, and writes the sum. Where the simulator prices the reading of theirs
      (`addition_bandwidth`), only the rest is priced here.
    * The memory of large tensors is new in each step, on processors (`allocation_bandwidth`).
    * Each edge of each tree is an op that hands over, and each addition is one.

    Args:
      schedule: what is run, in bytes.
      topology: what it is run on.

    Returns:
      Seconds: those of the busiest device, or of all devices where they share cores and memory.

    Example:
      >>> from tfcdo.plan import algorithms
      >>> from tfcdo.topology import preset
      >>> machine = preset("nvswitch", 4)
      >>> schedule = algorithms.make_schedule("shuffle", machine, 9 * 10**8)
      >>> f"{1e3 * device_seconds(schedule, machine):.2f} ms"  # 4 passes, and 5 of a quarter.
      '5.25 ms'
    """
    if topology.num_devices == 1 or not schedule.packs:
        return 0.0
    adds_in_simulator = math.isfinite(topology.addition_bandwidth)
    travels_as_it_is = len(schedule.packs) == 1 and adds_in_simulator
    packed = [0 if travels_as_it_is else 4 * schedule.size] * topology.num_devices
    added = [0] * topology.num_devices
    num_ops = 0 if travels_as_it_is else 2 * topology.num_devices
    for pack in schedule.packs:
        for device, children in enumerate(pack.tree.children):
            if children:
                operands = 1 if adds_in_simulator else 1 + len(children)
                added[device] += pack.size * (operands + 1)
                num_ops += 1 + len(children)
    new = _new_memory(schedule, travels_as_it_is)
    together = sum if topology.serial_reduction else max
    adding = topology.addition_bandwidth if adds_in_simulator else topology.memory_bandwidth
    return (
        together(packed) / topology.memory_bandwidth
        + together(added) / adding
        + together(new) / topology.allocation_bandwidth
        + num_ops * topology.op_seconds
    )


def _new_memory(schedule: Schedule, travels_as_it_is: bool) -> list[int]:
    """Returns the bytes that each device gets from the system: of tensors too large to be kept.

    A sum is written over an operand that nobody else needs: a part that was cut out, or a sum.
    """
    new = [0] * schedule.num_devices
    for pack in schedule.packs:
        if pack.size < _LARGE:
            continue
        for device, children in enumerate(pack.tree.children):
            first_sum = children and not any(pack.tree.children[child] for child in children)
            if not travels_as_it_is or first_sum:
                new[device] += pack.size
    if not travels_as_it_is and schedule.size >= _LARGE:
        new = [so_far + schedule.size for so_far in new]
    return new


def predicted_seconds(schedule: Schedule, topology: Topology) -> float:
    """Returns the time of an all-reduce as a clock would show it.

    Args:
      schedule: what is run, in bytes.
      topology: what it is run on.

    Returns:
      The robust time of the copies, and what the devices do before, between and after.
    """
    return simulator.robust_seconds(schedule, topology) + device_seconds(schedule, topology)
