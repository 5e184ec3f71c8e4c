"""Prices what devices do beside copying: packing, unpacking, adding, and the executor's ops."""

from __future__ import annotations

import math

from tfcdo.plan import simulator
from tfcdo.plan.schedule import Schedule
from tfcdo.topology.topology import Topology


def device_seconds(schedule: Schedule, topology: Topology) -> float:
    """Returns how long devices pack, add and start ops, none of which the simulator counts.

    * Packing reads and writes all data of a device once, and so does unpacking. One pack is not
      packed where slices may travel alone, as on processors.
    * A device adds all that its children in a tree have sent in one op: it reads its own part and
      theirs, and writes the sum. Where the simulator prices the reading of theirs
      (`addition_bandwidth`), only the rest is priced here.
    * Each edge of each tree is an op and its hand-over up, and the same down.

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
    accessed = [0 if travels_as_it_is else 4 * schedule.size] * topology.num_devices
    num_ops = 0 if travels_as_it_is else 2 * topology.num_devices
    for pack in schedule.packs:
        for device, children in enumerate(pack.tree.children):
            if children:
                operands = 1 if adds_in_simulator else 1 + len(children)
                accessed[device] += pack.size * (operands + 1)
                num_ops += 1 + len(children)
    busiest = sum(accessed) if topology.serial_reduction else max(accessed)
    return busiest / topology.memory_bandwidth + num_ops * topology.op_seconds


def predicted_seconds(schedule: Schedule, topology: Topology) -> float:
    """Returns the time of an all-reduce as a clock would show it.

    Args:
      schedule: what is run, in bytes.
      topology: what it is run on.

    Returns:
      The robust time of the copies, and what the devices do before, between and after.
    """
    return simulator.robust_seconds(schedule, topology) + device_seconds(schedule, topology)
