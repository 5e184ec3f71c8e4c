"""Builds what no all-reduce can be faster than.

The floor is one fused pass that reads what K devices hold and writes their sum, once: it limits
large values. Small values are limited by the number of tensors that go into ops and come out again:
packing needs at least one op that takes them and one that gives them back.
"""

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
    chunks = [_CHUNK] * (workload.count // _CHUNK)
    rest = workload.count % _CHUNK
    shapes = tuple((count,) for count in [*chunks, *([rest] if rest else [])])
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


def repack(data: steps.Data) -> implementations.Reduce:
    """Returns a function that packs and unpacks small values, and neither adds nor sends them."""

    def repacked(values: Sequence[Any]) -> list[Any]:
        components = zip(*(value.values for value in values), strict=True)
        values_by_device = [list(device_values) for device_values in components]
        for device, device_values in zip(data.devices.names, values_by_device, strict=True):
            with tf.device(device):
                for indices in data.coalesced:
                    unpacked = _repack([device_values[index] for index in indices])
                    for index, value in zip(indices, unpacked, strict=True):
                        device_values[index] = value
        return [tf_internals.mirrored(list(value)) for value in zip(*values_by_device, strict=True)]

    return repacked


def _repack(same_shape: list[tf.Tensor]) -> list[tf.Tensor]:
    """Packs and unpacks tensors of one shape by the pair of ops that is fastest on processors."""
    if len(same_shape) == 1:
        return same_shape
    if same_shape[0].shape.rank == 1:
        sizes = tf.constant([same_shape[0].shape[0]] * len(same_shape), tf.int64)
        return list(tf.split(tf.concat(same_shape, axis=0), sizes))
    return list(tf.unstack(tf.stack(same_shape)))


@tf.function(jit_compile=True, autograph=False)
def _add_with_xla(values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    totals = []
    for first, *others in values:
        total = first
        for other in others:
            total += other
        totals.append(total)
    return totals


def _mirrored(totals: Sequence[tf.Tensor], values: Sequence[Any]) -> list[Any]:
    return [
        tf_internals.mirrored([total] * len(value.values))
        for total, value in zip(totals, values, strict=True)
    ]
