"""The choice between NCCL and copy trees."""

from __future__ import annotations

import functools

from tfcdo import log
from tfcdo.plan import algorithms, dtypes, simulator
from tfcdo.plan.options import Machine, Options
from tfcdo.plan.plan import Batch, Codec
from tfcdo.plan.schedule import size_class
from tfcdo.topology.measured import Measured
from tfcdo.units import format_bytes, format_seconds


def uses_nccl(batch: Batch, dtype: str, options: Options, machine: Machine, codec: Codec) -> bool:
    """Returns whether NCCL adds values of a dtype; says why not, once, where it was requested."""
    if options.nccl == "never" or batch.replicas == 1:
        return False
    if options.between is not None:
        if options.between.flat:
            return False  # One collective over all hosts; see `PlannedPack.over_hosts`.
        if options.require_nccl and machine.nccl_hosts:
            raise RuntimeError(f"NCCL cannot run (require_nccl=True): {machine.nccl_hosts}")
        return False
    # NCCL adds encoded values in 16 bits, so only a user who asks for NCCL gets that.
    if options.nccl == "auto" and codec.dtype is not None:
        return False
    reason = machine.why_no_nccl(codec.dtype or dtype)
    if not reason:
        return options.nccl == "always" or not trees_beat_nccl(batch, options)[0]
    if options.require_nccl:
        raise RuntimeError(f"NCCL cannot run (require_nccl=True): {reason}")
    if options.nccl == "always":
        log.warn_once(f"NCCL was requested but is not available; using copy trees: {reason}")
    else:
        log.info_once(f"auto takes copy trees, because NCCL cannot run: {reason.split('; ')[0]}")
    return False


def refuse_owners(options: Options) -> None:
    """Says, once, that NCCL does not sum on the owners of variables where it was requested."""
    reason = "with shard_optimizer_state each sum is formed on one device, along a copy tree"
    if options.require_nccl:
        raise RuntimeError(f"NCCL cannot run (require_nccl=True): {reason}")
    if options.nccl == "always":
        log.warn_once(f"NCCL was requested but is not used; using copy trees: {reason}")


def trees_beat_nccl(batch: Batch, options: Options) -> tuple[bool, str]:
    """Returns whether copy trees are faster by the measurement that was given, and the reason."""
    sizes = [(request.value.size or 0, request.value.dtype) for request in batch.requests]
    about = size_class(sum(size * dtypes.itemsize(dtype) for size, dtype in sizes))
    beat, reason = _compare(options.measured, about)
    log.info_once(
        f"auto takes {'copy trees' if beat else 'NCCL'} for about {format_bytes(about)} "
        f"on each of {batch.replicas} devices: {reason}"
    )
    return beat, reason


@functools.lru_cache(maxsize=256)
def _compare(measured: Measured | None, num_bytes: int) -> tuple[bool, str]:
    by_nccl = measured.nccl_seconds(num_bytes) if measured else None
    if measured is None or by_nccl is None:
        return False, "it can run, and topology= has no measurement of it"
    schedule = algorithms.make_schedule("auto", measured.topology, num_bytes)
    trees = simulator.robust_seconds(schedule, measured.topology)
    return trees < by_nccl, (
        f"as measured on {measured.date}, NCCL takes {format_seconds(by_nccl)} and copy trees "
        f"{format_seconds(trees)}"
    )
