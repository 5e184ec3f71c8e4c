"""Describes the machine and the versions that a measurement was made with."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
from typing import Any

from tfcdo.version import __version__


def describe_environment(devices: str) -> dict[str, Any]:
    """Describes where, when and with which versions something was measured.

    Args:
      devices: a description of the devices.

    Returns:
      The keys and values that JSON files of measurements begin with.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": _num_cores(),
            "system": platform.platform(),
        },
        "devices": devices,
        "versions": {
            "tfcdo": __version__,
            "tensorflow": _tensorflow_version(),
            "python": platform.python_version(),
        },
    }


def _tensorflow_version() -> str:
    """Returns the version in the package's metadata: importing TensorFlow takes seconds."""
    names = importlib.metadata.packages_distributions()["tensorflow"]
    return importlib.metadata.version(names[0])


def _num_cores() -> int | None:
    """Returns the number of cores that this process may use; outside Linux, of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _processor() -> str:
    """Returns the processor's name, or its architecture if Linux does not name it."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
