"""The floor: one fused pass that reads the values of K devices and writes their sum, once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
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
    return {
        "floor (XLA)": functools.partial(_sum, _add_with_xla, device),
        "floor (add_n)": functools.partial(_sum, _add_n, device),
    }


def _sum(add: Callable[..., list[tf.Tensor]], device: str, values: Sequence[Any]) -> list[Any]:
    with tf.device(device):
        totals = add([value.values for value in values])
    return [
        tf_internals.mirrored([total] * len(value.values))
        for total, value in zip(totals, values, strict=True)
    ]


@tf.function(jit_compile=True, autograph=False)
def _add_with_xla(values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    return [sum(others, start=first) for first, *others in values]


def _add_n(values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    return list(map(tf.add_n, values))
