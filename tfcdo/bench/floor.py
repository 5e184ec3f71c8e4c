"""What no all-reduce can be faster than.

The floor is one fused pass that reads what K devices hold and writes their sum, once: the limit of
large values. Small ones are limited by the number of tensors that go into ops and come out again:
the least that packing needs is one op that takes them and one that gives them back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.bench import implementations
from tfcdo.bench import steps
from tfcdo.bench import workloads
from tfcdo.bench.devices import Devices

# Large enough that a call costs nothing beside it. Much larger tensors would have their memory
# fetched from the system anew in each step.
_PIECE = 2**20


def place(workload: workloads.Workload, devices: Devices) -> steps.Data:
    """Makes values of the same bytes, as cheap to add as can be: in few pieces, on one device.

    Args:
      workload: says how many elements of which dtype.
      devices: how many values each sum has, and on which device all of them are.

    Returns:
      The values.
    """
    pieces = [_PIECE] * (workload.count // _PIECE)
    rest = workload.count % _PIECE
    shapes = tuple((count,) for count in [*pieces, *([rest] if rest else [])])
    return steps.place(
        dataclasses.replace(workload, shapes=shapes),
        dataclasses.replace(devices, names=devices.names[:1] * len(devices.names)),
    )


def passes(device: str) -> Mapping[str, implementations.Reduce]:
    """The ways to make such a pass; the fastest is the floor.

    Args:
      device: where the values are. Nothing leaves it: on GPUs the floor is what the memory of one
        card can do.

    Returns:
      For each way a function to use like an implementation's, by name.
    """

    def with_xla(values: Sequence[Any]) -> list[Any]:
        with tf.device(device):
            return _mirrored(_add_with_xla([value.values for value in values]), values)

    def with_add_n(values: Sequence[Any]) -> list[Any]:
        with tf.device(device):
            return _mirrored([tf.add_n(value.values) for value in values], values)

    return {"floor (XLA)": with_xla, "floor (add_n)": with_add_n}


def repack(data: steps.Data) -> implementations.Reduce:
    """The way to pack small values and to take them apart again, with nothing added or sent.

    Args:
      data: the values; those that are not read together stay as they are.

    Returns:
      A function to use like an implementation's, that gives each device its own values.
    """

    def repacked(values: Sequence[Any]) -> list[Any]:
        held = [list(own) for own in zip(*(value.values for value in values), strict=True)]
        for device, own in zip(data.devices.names, held, strict=True):
            with tf.device(device):
                for indices in data.together:
                    alike = _repack([own[index] for index in indices])
                    for index, value in zip(indices, alike, strict=True):
                        own[index] = value
        return [tf_internals.mirrored(list(value)) for value in zip(*held, strict=True)]

    return repacked


def _repack(alike: list[tf.Tensor]) -> list[tf.Tensor]:
    """With the fastest pair of ops, measured on processors."""
    if len(alike) == 1:
        return alike
    if alike[0].shape.rank == 1:
        sizes = tf.constant([alike[0].shape[0]] * len(alike), tf.int64)
        return tf.split(tf.concat(alike, axis=0), sizes)
    return tf.unstack(tf.stack(alike))


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
