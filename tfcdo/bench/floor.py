"""The floor: one fused pass that reads the values of K devices and writes their sum, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.bench import implementations, steps, workloads
from tfcdo.bench.devices import ChosenDevices

# Elements of a tensor: enough that the cost of a call does not count. The memory of much larger
# tensors would be requested from the system again in each step.
_CHUNK = 2**20


def place_values(workload: workloads.Workload, devices: ChosenDevices) -> steps.Data:
    """Places as many bytes where they are cheapest to add: in few chunks, on one device."""
    full, rest = divmod(workload.count, _CHUNK)
    shapes = tuple((count,) for count in [_CHUNK] * full + [rest] if count)
    return steps.place_values(
        dataclasses.replace(workload, shapes=shapes),
        dataclasses.replace(devices, names=devices.names[:1] * len(devices.names)),
    )


def single_passes(device: str) -> Mapping[str, implementations.Reduce]:
    """Returns functions that sum in a single pass; the fastest is the floor."""

    def with_xla(values: Sequence[Any]) -> list[Any]:
        with tf.device(device):
            return _mirrored(_add_with_xla([value.values for value in values]), values)

    def with_add_n(values: Sequence[Any]) -> list[Any]:
        with tf.device(device):
            return _mirrored([tf.add_n(value.values) for value in values], values)

    return {"floor (XLA)": with_xla, "floor (add_n)": with_add_n}


@tf.function(jit_compile=True, autograph=False)
def _add_with_xla(values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    return [sum(others, start=first) for first, *others in values]


def _mirrored(totals: Sequence[tf.Tensor], values: Sequence[Any]) -> list[Any]:
    return [
        tf_internals.mirrored([total] * len(value.values))
        for total, value in zip(totals, values, strict=True)
    ]
