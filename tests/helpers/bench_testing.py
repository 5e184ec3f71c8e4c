"""Shared by tests of the bench: its devices, small workloads, and ops that are wrong on purpose.

A test file imports `setUpModule` and `tearDownModule` by these names, for unittest to find them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
import testing_utils as tu

from tfcdo import virtual_devices
from tfcdo.bench import measure, results, workloads

virtual_devices.configure_virtual_cpus(8)

SMALL = workloads.Workload("small", ((3, 2), (5,), ()))
NO_FUNCTION = "tf.ReductionToOneDevice(accumulation_fn=5)"
TF_HIERARCHICAL = "tf.HierarchicalCopyAllReduce(num_packs=1)"

_environment = contextlib.ExitStack()


def setUpModule() -> None:
    # Another test file of this process may have loaded NCCL's kernel for CPUs.
    _environment.enter_context(tu.kernels_for("GPU"))


def tearDownModule() -> None:
    _environment.close()


def silently(sequence: Iterable[Any], *, description: str) -> Iterable[Any]:
    """Yields the items of a sequence and shows nothing."""
    del description
    return sequence


def implementation_of(name: str) -> measure.Implementation:
    (found,) = measure.parse(name)
    return found


def names_of(found: Sequence[measure.Implementation]) -> list[str]:
    return [implementation.name for implementation in found]


def measurement_of(name: str, kind: str, seconds: float, wrong: int = 0) -> results.Measurement:
    return results.Measurement(
        name, kind, 4, seconds, 0.0, "w", 4000, 1000, wrong=wrong, first_call=1.0
    )


def forgets_the_last_device() -> tf.distribute.CrossDeviceOps:
    """Makes ops that sum all values but the last device's."""
    return tf.distribute.ReductionToOneDevice(None, lambda values: tf.add_n(values[:-1]))
