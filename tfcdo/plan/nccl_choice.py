"""The choice between NCCL and copy trees."""

from __future__ import annotations

import functools

from tfcdo import log
from tfcdo.exchange.casts import Cast
from tfcdo.plan import algorithms, simulator
from tfcdo.plan.options import Machine, Options
from tfcdo.plan.plan import Batch, size_class
from tfcdo.topology.measured import Measured
from tfcdo.units import format_bytes, format_seconds


def takes_nccl(
    batch: Batch, dtype: str, options: Options, machine: Machine, wire: Cast | None
) -> bool:
    """Returns whether NCCL adds values of a dtype; says why it does not where it was requested."""
    between = options.between
    if between is not None and between.flat:
        return True
    if options.nccl == "never" or batch.replicas == 1:
        return False
    # NCCL adds encoded values in 16 bits, so only a user who asks for NCCL gets that.
    if between is None and options.nccl == "auto" and wire is not None:
        return False
    problem = machine.nccl_hosts if between else dict(machine.nccl)[wire.dtype if wire else dtype]
    if problem and options.require_nccl:
        raise RuntimeError(f"NCCL cannot run (require_nccl=True): {problem}")
    if between is not None:
        return False
    if problem and options.nccl == "always":
        log.warn_once(f"NCCL was requested but is not available; using copy trees: {problem}")
    elif problem:
        log.info_once(f"auto takes copy trees, because NCCL cannot run: {problem.split('; ')[0]}")
    elif options.nccl == "auto":
        about = size_class(batch.num_bytes)
        beat, reason = _compare(options.measured, about)
        log.info_once(
            f"auto takes {'copy trees' if beat else 'NCCL'} for about {format_bytes(about)} "
            f"on each of {batch.replicas} devices: {reason}"
        )
        return not beat
    return not problem


def why_nccl(batch: Batch, options: Options) -> str:
    """Returns the reason why NCCL adds the values of a batch."""
    if options.between is not None:
        return "it runs between hosts, over all devices of all of them"
    if options.nccl == "always":
        return "an NcclAllReduce kernel is registered for these devices"
    return _compare(options.measured, size_class(batch.num_bytes))[1]


def refuse_owners(options: Options) -> None:
    """Says, once, that NCCL does not sum on the owners of variables where it was requested."""
    reason = "with shard_optimizer_state each sum is formed on one device, along a copy tree"
    if options.require_nccl:
        raise RuntimeError(f"NCCL cannot run (require_nccl=True): {reason}")
    if options.nccl == "always":
        log.warn_once(f"NCCL was requested but is not used; using copy trees: {reason}")


@functools.lru_cache(maxsize=256)
def _compare(measured: Measured | None, num_bytes: int) -> tuple[bool, str]:
    by_nccl = measured.nccl_seconds(num_bytes) if measured else None
    if measured is None or by_nccl is None:
        return False, "it can run, and topology= has no measurement of it"
    plan = algorithms.make_plan("auto", measured.topology, num_bytes)
    trees = simulator.robust_seconds(plan, measured.topology)
    return trees < by_nccl, (
        f"as measured on {measured.date}, NCCL takes {format_seconds(by_nccl)} and copy trees "
        f"{format_seconds(trees)}"
    )
