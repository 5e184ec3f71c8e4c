"""Remembers the plans of recent all-reduces in graphs, to set next to a profiler's events."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfcdo.plan.plan import Plan

# More all-reduces than a training step, an evaluation step and a few retracings have.
_MOST = 64


@dataclasses.dataclass(frozen=True)
class Planned:
    """Describes an all-reduce that was put into a graph."""

    scope: str  # The name scope of its ops, such as "replica_1/tfcdo_2".
    devices: tuple[str, ...]  # Of each node.
    plan: Plan


_recent: collections.deque[Planned] = collections.deque(maxlen=_MOST)


def remember(plan: Plan, devices: Sequence[str]) -> None:
    """Remembers an all-reduce whose ops come next; eager ops have no names to find them by."""
    if not tf.executing_eagerly():
        _recent.append(Planned(tf.get_current_name_scope(), tuple(devices), plan))


def recent() -> list[Planned]:
    """Returns the remembered all-reduces, the newest first."""
    return list(_recent)[::-1]
