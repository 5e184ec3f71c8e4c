"""Handles that the parts of an all-reduce share: group keys, order of collectives, counters."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import tensorflow as tf

from tfcdo import tf_internals

# Group keys of ours, far from those that TensorFlow's strategies count up from 1.
_GROUP_KEYS = {"CPU": 7_001_000, "GPU": 7_002_000}
_ALL_DEVICES_KEYS = {"CPU": 7_003_000, "GPU": 7_004_000}
_lock = threading.Lock()


@functools.lru_cache(maxsize=1024)
def device_number(device: str) -> str:
    """Returns the name of a device on every host, such as "CPU:0"; "" for an unknown device."""
    if not device:
        return ""
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"


def group_key(*devices: str) -> int:
    """Returns the key of the group of these devices and those with their numbers on other hosts."""
    spec = tf.DeviceSpec.from_string(devices[0])
    if len(devices) > 1:
        return _ALL_DEVICES_KEYS[spec.device_type] + len(devices)
    return _GROUP_KEYS[spec.device_type] + int(spec.device_index)


def ordering_token(device: str, line: str = "") -> tf.Tensor:
    """Returns the resource by which TensorFlow runs the collectives of a device one by one."""
    # On a CPU, those of one `line` need not wait for the others. NCCL needs one order for all.
    is_cpu = tf.DeviceSpec.from_string(device).device_type == "CPU"
    name = f"order_{device_number(device)}_{line if is_cpu else ''}"
    return tf_internals.captured(bare_variable(name, device, tf.float32))


def bare_variable(name: str, device: str, dtype: tf.DType, shape: Sequence[int] = ()) -> tf.Tensor:
    """Returns the handle of a variable that is made once, of zeros; a strategy would mirror one."""
    with _lock:  # All threads must get the same tensor.
        return _make_variable(name, device, dtype, tuple(shape))


@functools.cache
def _make_variable(name: str, device: str, dtype: tf.DType, shape: tuple[int, ...]) -> tf.Tensor:
    with tf.init_scope(), tf.device(device):
        handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=f"tfcdo_{name}")
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros(shape, dtype))
        return handle
