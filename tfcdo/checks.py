"""Checks arguments, so that the same mistake gives the same message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def check_int(name: str, value: object, at_least: int, at_most: int | None = None) -> None:
    """Raises unless an argument is a whole number in a range; a bool is none."""
    # A float is refused even if it is whole: to a cache, 8.0 and 8 are the same key.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; got {value!r} of type {type(value).__name__}")
    if value < at_least or (at_most is not None and value > at_most):
        accepted = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{name} must be {accepted}; got {value}")


def check_device_list(devices: Any) -> tuple[Any, ...]:
    """Returns the argument `devices`, an iterable of at least one entry, as a tuple; no string."""
    listed = isinstance(devices, Iterable) and not isinstance(devices, str)
    found = tuple(devices) if listed else ()
    if not found:
        raise ValueError(f"devices must be a list of at least one device name; got {devices!r}")
    return found


def check_sizes(num_bytes: object, num_packs: object) -> None:
    """Raises unless these are the bytes of some data, and the number of its packs or None."""
    check_int("num_bytes", num_bytes, at_least=0)
    if num_packs is not None:
        check_int("num_packs", num_packs, at_least=1)


def check_bool(name: str, value: object) -> None:
    """Raises a TypeError unless the argument `name` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r}")
