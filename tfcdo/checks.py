"""Checks arguments, so that the same mistake gives the same message."""

from __future__ import annotations

import numbers
import os
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any

LARGEST_INT = 2**63 - 1  # Of TensorFlow and numpy.


def check_int(name: str, value: object, at_least: int, at_most: int | None = None) -> None:
    """Raises unless an argument is a whole number in a range; a bool is none."""
    # A float is refused even if it is whole: to a cache, 8.0 and 8 are the same key.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; got {value!r} of type {type(value).__name__}")
    if value < at_least or (at_most is not None and value > at_most):
        accepted = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{name} must be {accepted}; got {value}")


def items_of(values: Any) -> tuple[Any, ...] | None:
    """Returns the items of a list or the like; None for one value, as a text or an array of 0-D."""
    is_one = isinstance(values, str) or getattr(values, "shape", None) == ()
    return tuple(values) if isinstance(values, Iterable) and not is_one else None


def check_device_list(devices: Any) -> tuple[str, ...]:
    """Returns the argument `devices`, a list of at least one name, as a tuple."""
    found = items_of(devices)
    if not found:
        raise ValueError(f"devices must be a list of at least one device name; got {devices!r}")
    for device in found:
        if not isinstance(device, str):
            raise ValueError(
                "each of devices must be a device name such as 'GPU:0', or '' for an unknown one; "
                f"got {device!r}"
            )
    return found


def check_number(name: str, value: object) -> float:
    """Returns the argument `name`, a number, as a float; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number; got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be at most {sys.float_info.max:.4g}; got {value}") from None


def check_path(name: str, value: Any, *suffixes: str) -> pathlib.Path:
    """Returns the argument `name`, a path that ends in one of the suffixes, if there are any."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path; got {value!r}")
    if not os.fspath(value):
        raise ValueError(f"{name} must be a path; got ''")
    path = pathlib.Path(value)
    if re.match(r"\w\w+:/", str(path)):  # Else a folder of this name is made here.
        raise ValueError(f"{name} must be in a mounted file system; got {os.fspath(value)!r}")
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"{name} must end in {' or '.join(suffixes)}; got {os.fspath(value)!r}")
    return path


def check_type(name: str, value: object, kind: type, maker: str = "") -> None:
    """Raises a TypeError unless the argument `name` is of a class, which a function may make."""
    if not isinstance(value, kind):
        made = f", as {maker} returns it" if maker else ""
        raise TypeError(f"{name} must be a {kind.__name__}{made}; got {value!r}")


def check_items(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    """Returns the argument `name`, a list of objects of a class, as a tuple."""
    items = items_of(values)
    if items is None or not all(isinstance(item, kind) for item in items):
        raise TypeError(f"{name} must be a list of {kind.__name__}; got {values!r}")
    return items


def check_optimizer(value: Any) -> None:
    """Raises a TypeError unless the argument `optimizer` is one of Keras 3, or of a class alike."""
    if isinstance(value, type) or not callable(getattr(value, "apply", None)):
        raise TypeError(f"optimizer must be a Keras 3 optimizer; got {value!r}")


def check_bool(name: str, value: object) -> None:
    """Raises a TypeError unless the argument `name` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r}")
