"""Describes the machine and the versions that a measurement was made with, and writes both."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

from tfcdo.topology.processor import num_cores
from tfcdo.topology.processor import processor_name
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
            "processor": processor_name(),
            "cores": num_cores(),
            "system": platform.platform(),
        },
        "devices": devices,
        "versions": {
            "tfcdo": __version__,
            "tensorflow": _tensorflow_version(),
            "python": platform.python_version(),
        },
    }


def write_json(path: pathlib.Path, devices: str, found: Mapping[str, Any]) -> None:
    """Writes what was measured, behind where, when and with which versions.

    Args:
      path: the file.
      devices: a description of the devices.
      found: what was measured; its keys stand beside those of the environment.
    """
    content = {**describe_environment(devices), **found}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _tensorflow_version() -> str:
    """Returns the version in the package's metadata: importing TensorFlow takes seconds."""
    names = importlib.metadata.packages_distributions()["tensorflow"]
    return importlib.metadata.version(names[0])
