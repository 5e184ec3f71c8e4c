"""Saying in words where two hosts differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST = 3  # Differences that a message names.


def between(
    left: Mapping[str, Any], left_name: str, right: Mapping[str, Any], right_name: str
) -> str:
    """Says where two descriptions, JSON values by name, differ; of lists, in which element."""
    found = [
        _one(key, left[key], left_name, right[key], right_name)
        for key in left
        if key in right and left[key] != right[key]
    ]
    if not found:  # A name that only one of them has counts if they agree in all others.
        for key in sorted(left.keys() ^ right.keys()):
            here, there = (side.get(key, "nothing") for side in (left, right))
            found.append(_one(key, here, left_name, there, right_name))
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return "; ".join(found[:_MOST]) + more


def _one(key: str, left: Any, left_name: str, right: Any, right_name: str) -> str:
    if isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            return f"{key}: {len(left)} on {left_name}, {len(right)} on {right_name}"
        index = next(i for i, pair in enumerate(zip(left, right)) if pair[0] != pair[1])
        key, left, right = f"{key}, element {index} of {len(left)}", left[index], right[index]
    return f"{key}: {left} on {left_name}, {right} on {right_name}"
