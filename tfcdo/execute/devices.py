"""Checks of device names and destinations, which become full names of devices that exist."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcdo import tf_internals


def check_device(name: str, value: Any) -> None:
    """Raises `ValueError` unless the argument `name` spells a device; does not start TensorFlow."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a device name; got {value!r}")
    try:
        tf.DeviceSpec.from_string(value)
    except ValueError as error:
        raise _not_a_device(name, value, error) from error


def devices_of(destinations: Any) -> tuple[str, ...]:
    """Returns the full names of the devices of the argument `destinations`; `""` if unknown."""
    if isinstance(destinations, tf_internals.DistributedValues):
        if not destinations.values:
            raise ValueError("destinations must name at least one device; it is empty")
        return tf_internals.devices_of_values(destinations)
    wrapped = getattr(destinations, "value", None)
    if isinstance(wrapped, tf_internals.DistributedValues) or tf_internals.is_variable(wrapped):
        return devices_of(wrapped)  # A Keras variable.
    if isinstance(destinations, str):
        device = destinations
    elif tf.is_tensor(destinations) or tf_internals.is_variable(destinations):
        device = getattr(destinations, "device", None) or ""
    else:
        raise ValueError(
            "destinations must be a tf.distribute.DistributedValues, a tf.Variable, a tensor or a "
            f"device name; got {brief(destinations)}"
        )
    if not device:
        # So a strategy names the device of a tensor that all replicas share, in a traced function
        # that got it as an argument.
        if devices := tf_internals.devices_of_strategy():
            return devices
        raise ValueError(
            f"destinations must name at least one device; got {brief(destinations)}, which has none"
        )
    return (existing_device("destinations", device),)


def existing_device(name: str, device: str) -> str:
    """Returns the full name of a device, which the argument `name` gave."""
    try:
        found = tf_internals.canonical_device(device)
    except (ValueError, AssertionError) as error:
        raise _not_a_device(name, device, error) from error
    if tf.compat.v1.executing_eagerly_outside_functions():
        known = [
            tf_internals.canonical_device(known.name) for known in tf.config.list_logical_devices()
        ]
        if found not in known:
            raise ValueError(
                f"{name} must name a device that exists; got {device!r}, there are {known}"
            )
    return found


def _not_a_device(name: str, device: str, error: Exception) -> ValueError:
    return ValueError(f"{name} must name a device; got {device!r}: {error}")


def brief(value: Any) -> str:
    """Returns the `repr` of a value, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
