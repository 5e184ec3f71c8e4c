"""Reduction to one device, for results that go elsewhere than to the values' own devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo.execute import copy_trees
from tfcdo.execute import numerics
from tfcdo.execute import rows
from tfcdo.execute.exchange import Exchange
from tfcdo.execute.travel import Travel

Accumulate = Callable[[list[tf.Tensor]], tf.Tensor]


def reduce_on(
    values: Sequence[Any],
    device: str,
    accumulate: Accumulate,
    final_op: numerics.FinalOp,
    exchange: Exchange | None = None,
) -> Any:
    """Copies all values to one device and reduces them there.

    Args:
      values: one tensor or `tf.IndexedSlices` per replica.
      device: where to reduce.
      accumulate: adds up a list of tensors; slices are added by index instead.
      final_op: applied to the sum.
      exchange: adds what other hosts have; None for one host.

    Returns:
      The result, on `device`.
    """
    with tf.device(device):
        if isinstance(values[0], tf.IndexedSlices):
            total = rows.add(values, device)
            if exchange is not None:
                [total] = rows.across_hosts([total], exchange, device)
            return rows.finished(total, final_op, values[0].dtype)
        total = accumulate(list(values))
        if exchange is not None:
            [total] = exchange.all_reduce([total], device)
        return final_op(total, values[0].dtype)


def bring(
    values: Sequence[tf.Tensor], devices: Sequence[str], root: str, travel: Travel[Any]
) -> list[tf.Tensor]:
    """Copies tensors to one device.

    Args:
      values: one tensor per replica.
      devices: the device of each; `""` where it is not known.
      root: where to.
      travel: how they are copied.

    Returns:
      The tensors as they arrive; those on `root` as they are.
    """
    arrived = list(values)
    for rank, (value, device) in enumerate(zip(values, devices, strict=True)):
        if device != root or not root:  # Where it is not known, it may be anywhere.
            with tf.device(device or None):
                sent = travel.send([value], rank)
            with tf.device(root):
                [arrived[rank]] = travel.receive(sent)
    return arrived


def send_to(
    value: tf.Tensor, root: str, devices: Sequence[str], travel: Travel[Any]
) -> list[tf.Tensor]:
    """Copies a tensor from one device to others, which all get the same bits.

    Args:
      value: the tensor, on `root`.
      root: where it is.
      devices: where to; `root` may be one of them.
      travel: how it is copied.

    Returns:
      One tensor per device.
    """
    with tf.device(root):
        sent = travel.send([value], len(devices))
    arrived = []
    for device in devices:
        copies = copy_trees.copy(sent, device)
        with tf.device(device):
            arrived += travel.receive(copies)
    return arrived


def copy_to(value: Any, devices: Sequence[str]) -> list[Any]:
    """Copies a value to each of some devices.

    Args:
      value: a tensor or `tf.IndexedSlices`.
      devices: where to.

    Returns:
      One copy per device.
    """
    return [_copy(value, device) for device in devices]


def _copy(value: Any, device: str) -> Any:
    with tf.device(device):
        if not isinstance(value, tf.IndexedSlices):
            return tf.identity(value)
        shape = None if value.dense_shape is None else tf.identity(value.dense_shape)
        return tf.IndexedSlices(tf.identity(value.values), tf.identity(value.indices), shape)
