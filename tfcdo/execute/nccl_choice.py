"""Decides where NCCL is used: where it was asked for, and where it is the better choice."""

from __future__ import annotations

import functools

import tensorflow as tf

from tfcdo import log
from tfcdo.execute import nccl
from tfcdo.execute.config import AllReduceConfig
from tfcdo.plan import algorithms
from tfcdo.plan import simulator
from tfcdo.plan.size_class import size_class
from tfcdo.topology import detection
from tfcdo.topology.measured import Measured
from tfcdo.units import format_bytes
from tfcdo.units import format_seconds


def uses_nccl(
    config: AllReduceConfig, devices: tuple[str, ...], dtype: tf.DType, num_bytes: int
) -> bool:
    """Returns whether NCCL runs; if it was requested but cannot, logs why, or raises if required.

    Args:
      config: the choices of the class; not "never" of NCCL.
      devices: the names of the devices.
      dtype: the dtype that is added.
      num_bytes: how many bytes each device holds.

    Raises:
      RuntimeError: if NCCL is required and cannot run.
    """
    if len(devices) == 1:
        return False
    status = nccl.nccl_status(devices, dtype)
    if status.can_run:
        return config.nccl == "always" or not _trees_beat_nccl(devices, num_bytes)
    if config.require_nccl:
        raise RuntimeError(f"NCCL cannot run (require_nccl=True): {status}")
    if config.nccl == "always":
        log.warn_once(f"NCCL is asked for but copy trees are used: {status}")
    else:
        log.info_once(f"auto takes copy trees, because NCCL cannot run: {status.reason}")
    return False


def check_between_hosts(config: AllReduceConfig, devices: tuple[str, ...], dtype: tf.DType) -> None:
    """Raises if NCCL is required between hosts, where copy trees are about to be used.

    Args:
      config: the choices of the class.
      devices: the names of this host's devices.
      dtype: the dtype that is added.

    Raises:
      RuntimeError: if NCCL is required and does not run.
    """
    hosts = config.across_hosts
    if hosts is None or not config.require_nccl:
        return
    status = nccl.nccl_status(devices, dtype)
    if not status.can_run:
        raise RuntimeError(f"NCCL cannot run (require_nccl=True): {status}")
    if hosts.network.hint != "nccl":
        raise RuntimeError(
            "NCCL does not run between hosts (require_nccl=True): ask for implementation NCCL in "
            "communication_options, and leave wire_between out"
        )


def _trees_beat_nccl(devices: tuple[str, ...], num_bytes: int) -> bool:
    """Returns whether a measurement of this machine says that copy trees are faster than NCCL.

    The choice is logged once for each size class. Where nothing was measured, NCCL is the safe one.
    """
    about = size_class(num_bytes)
    beat, reason = compare(devices, about)
    log.info_once(
        f"auto takes {'copy trees' if beat else 'NCCL'} for about {format_bytes(about)} "
        f"on each of {len(devices)} devices: {reason}"
    )
    return beat


def compare(devices: tuple[str, ...], num_bytes: int) -> tuple[bool, str]:
    """Compares copy trees with NCCL, by what was measured of this machine.

    Args:
      devices: the names of devices that NCCL can run over.
      num_bytes: how many bytes each device holds.

    Returns:
      Whether copy trees are faster, and the reason for the choice.
    """
    return _compare(detection.what_was_measured(devices), num_bytes)


@functools.lru_cache(maxsize=256)
def _compare(measured: Measured | None, num_bytes: int) -> tuple[bool, str]:
    by_nccl = measured.nccl_seconds(num_bytes) if measured else None
    if measured is None or by_nccl is None:
        return False, "it can run, and no measurement of this machine says that trees are faster"
    schedule = algorithms.make_schedule("auto", measured.topology, num_bytes)
    trees = simulator.robust_seconds(schedule, measured.topology)
    return trees < by_nccl, (
        f"as measured on {measured.date}, NCCL takes {format_seconds(by_nccl)} and copy trees "
        f"{format_seconds(trees)}"
    )
