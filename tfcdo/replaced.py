"""Replacing an attribute of one object for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_MISSING = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of one object for a while."""
    # By way of `vars`, as Keras's optimizers track their attributes.
    attributes = vars(owner)
    before = attributes.get(name, _MISSING)
    attributes[name] = value
    try:
        yield
    finally:
        if before is _MISSING:
            del attributes[name]
        else:
            attributes[name] = before
