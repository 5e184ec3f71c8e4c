"""Says which processor this machine has."""

from __future__ import annotations

import os
import pathlib
import platform


def processor_name() -> str:
    """Returns the processor's name, or its architecture if Linux does not name it.

    Example:
      >>> processor_name() != ""
      True
    """
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def num_cores() -> int | None:
    """Returns the number of cores that this process may use; outside Linux, of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
