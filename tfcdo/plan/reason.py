"""The reason for an algorithm, for people."""

from __future__ import annotations

from tfcdo.plan import algorithms
from tfcdo.plan.options import Machine, Options
from tfcdo.plan.plan import Batch
from tfcdo.topology.topology import Topology


def of_trees(
    batch: Batch,
    options: Options,
    machine: Machine,
    algorithm: algorithms.Algorithm,
    topology: Topology,
    num_bytes: int,
) -> tuple[str, str]:
    """Names the algorithm of copy trees, and says why it is that one."""
    place = f"the topology {topology.name!r} {machine.origin}"
    if options.saved is not None:
        return options.saved.resolved, f"the plan was given: {options.saved.origin}; {place}"
    if not isinstance(algorithm, str):
        return "copy trees", f"they were given; {place}"
    if options.nccl == "always" and batch.replicas > 1:
        reasons = [reason for _, reason in machine.nccl if reason] or [machine.nccl_hosts]
        return algorithm, f"NCCL cannot run: {reasons[0]}"
    if options.algorithm != "auto":
        return algorithm, f"it was asked for; {place}"
    if algorithm == "auto":
        num_packs = options.packing.num_packs or None
        algorithm = algorithms.fastest_algorithm(topology, num_bytes, num_packs)
    if options.between is not None:
        return algorithm, f"auto found it fastest for packs between hosts; {place}"
    return algorithm, f"auto found it fastest for {num_bytes:,} bytes in the simulator; {place}"
