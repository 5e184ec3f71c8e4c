"""Chooses the devices that are measured, and describes where a measurement was made."""

from __future__ import annotations

import dataclasses
import datetime
import platform
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals, virtual_devices
from tfcdo.topology.detection import num_cores, processor_name
from tfcdo.version import __version__


@dataclasses.dataclass(frozen=True)
class ChosenDevices:
    """Devices of one run: full names, a description, whether they are virtual CPU devices."""

    names: tuple[str, ...]
    description: str
    on_cpu: bool

    def wait(self) -> None:
        """Waits until the devices have done their work; ops on processors have."""
        if not self.on_cpu:
            tf.test.experimental.sync_devices()


def choose_devices(count: int | None) -> ChosenDevices:
    """Chooses GPUs if there are enough, else virtual CPU devices; None: all GPUs, or 4 of these."""
    gpus = tf.config.list_physical_devices("GPU")
    if count is None:
        count = len(gpus) if len(gpus) > 1 else 4
    on_cpu = len(gpus) < count
    if on_cpu:
        names = virtual_devices.configure_virtual_cpus(count)
        seen = "is only one GPU" if len(gpus) == 1 else f"are only {len(gpus)} GPUs"
        reason = f", because there {seen}" if gpus else ""
        description = f"{count} virtual CPU devices{reason}"
    else:
        names = [f"GPU:{number}" for number in range(count)]
        details = tf.config.experimental.get_device_details(gpus[0])
        description = f"{count} x {details.get('device_name', 'GPU')}"
    return ChosenDevices(tuple(map(tf_internals.canonical_device, names)), description, on_cpu)


def describe_environment(devices: str) -> dict[str, Any]:
    """Describes when, where and with which versions something was measured."""
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
            "tensorflow": tf.__version__,
            "python": platform.python_version(),
        },
    }
