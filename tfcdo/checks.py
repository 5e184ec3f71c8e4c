"""Checks what callers pass, so that the same mistake gives the same message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def check_int(name: str, value: object, at_least: int, at_most: int | None = None) -> None:
    """Raises unless an argument is a whole number in a range.

    A float is refused even if it is whole: to a cache, 8.0 and 8 are the same key, and what was
    planned with floats would be handed to those who ask with ints.

    Args:
      name: what the error message calls the argument.
      value: what was given.
      at_least: the smallest number that is accepted.
      at_most: the largest one; None for no limit.

    Raises:
      TypeError: if `value` is not an int; a bool is refused, too.
      ValueError: if `value` is out of range.

    Example:
      >>> check_int("root", 3, at_least=0, at_most=2)
      Traceback (most recent call last):
      ValueError: root must be from 0 to 2; got 3
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; got {value!r} of type {type(value).__name__}")
    if value < at_least or (at_most is not None and value > at_most):
        accepted = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{name} must be {accepted}; got {value}")


def check_device_list(devices: Any) -> tuple[Any, ...]:
    """Returns the argument `devices` as a tuple, if it lists at least one.

    What it lists is not checked.

    Args:
      devices: any iterable, read once. Strings are rejected.

    Returns:
      Its entries.

    Raises:
      ValueError: if `devices` is not iterable, or empty.

    Example:
      >>> check_device_list(f"/cpu:{number}" for number in range(2))
      ('/cpu:0', '/cpu:1')
    """
    listed = isinstance(devices, Iterable) and not isinstance(devices, str)
    found = tuple(devices) if listed else ()
    if not found:
        raise ValueError(f"devices must be a list of at least one device name; got {devices!r}")
    return found


def check_devices_or_none(devices: Any) -> None:
    """Raises `TypeError` unless the argument `devices` is None or several of something.

    What it holds is not checked. An empty list is let through: to TensorFlow's strategies it says
    as little as None, and scripts give them what `tf.config.list_logical_devices("GPU")` found.

    Example:
      >>> check_devices_or_none("/cpu:0")
      Traceback (most recent call last):
      TypeError: devices must be a list of device names or None; got '/cpu:0'
    """
    if devices is not None and (isinstance(devices, str) or not isinstance(devices, Iterable)):
        raise TypeError(f"devices must be a list of device names or None; got {devices!r}")


def check_sizes(num_bytes: object, num_packs: object) -> None:
    """Raises unless these can be the size of some data and the number of packs to cut it into.

    Args:
      num_bytes: how many bytes each device holds.
      num_packs: how many packs; None for as many as suit the algorithm.

    Raises:
      TypeError: if one of them is not an int.
      ValueError: if `num_bytes` is negative or `num_packs` is below 1.
    """
    check_int("num_bytes", num_bytes, at_least=0)
    if num_packs is not None:
        check_int("num_packs", num_packs, at_least=1)
