"""Remembers the plans of recent all-reduces in graphs, to set beside what a profiler saw."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfcdo.plan.batch_plan import BatchPlan
from tfcdo.plan.schedule import Pack
from tfcdo.plan.schedule import Schedule

# More all-reduces than a training step, an evaluation step and a few retracings have.
_MOST = 64


@dataclasses.dataclass(frozen=True)
class Planned:
    """Describes an all-reduce that was put into a graph.

    Attributes:
      scope: the name scope of its ops, such as "tfcdo" or "replica_1/tfcdo_2".
      devices: the devices.
      plan: the plan.
      itemsizes: bytes per element of each value.
    """

    scope: str
    devices: tuple[str, ...]
    plan: BatchPlan
    itemsizes: tuple[int, ...]

    def schedule(self) -> Schedule | None:
        """Returns the packs in bytes, as the simulator takes them; None if a size is not known."""
        packs: list[Pack] = []
        for pack in self.plan.packs:
            parts = [part for fused in pack.fused_tensors for part in fused.slices]
            if any(part.stop is None for part in parts):
                return None
            start = packs[-1].stop if packs else 0
            size = sum(part.size * self.itemsizes[part.value] for part in parts)
            if not size:
                return None
            packs.append(Pack(start, start + size, pack.tree))
        return Schedule(len(self.devices), packs[-1].stop if packs else 0, tuple(packs))


_only_explained = contextvars.ContextVar("only explained", default=False)
_recent: collections.deque[Planned] = collections.deque(maxlen=_MOST)


def remember(plan: BatchPlan, values: Sequence[tf.Tensor], devices: Sequence[str]) -> None:
    """Remembers an all-reduce whose ops come next; eager ops have no names to find them by.

    Args:
      plan: the plan.
      values: the values of one device.
      devices: the devices.
    """
    if not tf.executing_eagerly() and not _only_explained.get():
        itemsizes = tuple(value.dtype.size for value in values)
        _recent.append(Planned(tf.get_current_name_scope(), tuple(devices), plan, itemsizes))


@contextlib.contextmanager
def only_explained() -> Iterator[None]:
    """While this lasts, nothing that this thread puts into graphs is remembered: it never runs."""
    token = _only_explained.set(True)
    try:
        yield
    finally:
        _only_explained.reset(token)


def recent() -> list[Planned]:
    """Returns what was remembered, the newest first."""
    return list(_recent)[::-1]
