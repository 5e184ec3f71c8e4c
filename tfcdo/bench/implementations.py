"""Makes the all-reduces that are compared, from what a user writes in Python."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import tfcdo
from tfcdo import tf_internals
from tfcdo.bench.results import OURS, TENSORFLOW
from tfcdo.execute.numerics import on_each
from tfcdo.plan.decide import Options

# From one `PerReplica` per value to one `Mirrored` per value.
Reduce = Callable[[Sequence[Any]], Sequence[Any]]

# What a strategy uses by itself has no public class.
_STRATEGY_DEFAULT = "tf.CollectiveAllReduce"
_KNOWN = (
    "tfcdo.AutoAllReduce",
    "tfcdo.HierarchicalCopyAllReduce",
    "tfcdo.NcclAllReduce",
    "tfcdo.ReductionToOneDevice",
    "tf.HierarchicalCopyAllReduce(num_packs=0)",
    "tf.HierarchicalCopyAllReduce(num_packs=1)",
    "tf.HierarchicalCopyAllReduce(num_packs=8)",
    "tf.ReductionToOneDevice",
    "tf.NcclAllReduce",
    _STRATEGY_DEFAULT,
)
# The names that a user's Python may use: tf.X is short for tf.distribute.X.
_NAMES = {
    "tfcdo": tfcdo,
    "tf": types.SimpleNamespace(**vars(tf.distribute), distribute=tf.distribute),
}
_WANTED = "write all, tfcdo, tf, or Python such as tfcdo.AutoAllReduce() or tf.NcclAllReduce()"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation of all-reduce."""

    name: str  # As in Python, such as `tf.HierarchicalCopyAllReduce(num_packs=8)`.
    ops: tf.distribute.CrossDeviceOps | None  # None: what a strategy uses by itself.

    @property
    def package(self) -> str:
        """Returns `OURS` or `TENSORFLOW`."""
        return OURS if self.name.startswith(f"{OURS}.") else TENSORFLOW

    @property
    def wire(self) -> str | None:
        """Returns the dtype in which float32 and float64 are sent; None for their own."""
        wire = self._options.wire if self._options else None
        return wire.dtype if wire else None

    @property
    def _options(self) -> Options | None:
        """Returns the options of one of tfcdo's classes."""
        return getattr(self.ops, "_options", None)

    def reducer(self, devices: Sequence[str]) -> Reduce:
        """Returns the function that sums a batch of values over these devices."""
        batch_reduce = self.ops.batch_reduce if self.ops is not None else _default(tuple(devices))
        return lambda values: batch_reduce(
            tf.distribute.ReduceOp.SUM, [(value, value) for value in values]
        )

    def reason_not_to_run(self, devices: Sequence[str], dtype: str) -> str | None:
        """Returns the reason why this implementation cannot run."""
        ours = self._options is not None and self._options.nccl == "always"
        if not ours and not isinstance(self.ops, tf.distribute.NcclAllReduce):
            return None
        cast = self.wire if dtype in ("float32", "float64") else None
        status = tfcdo.nccl_status(devices, cast or dtype)
        return None if status.can_run else str(status)

    def check_arguments(self, devices: Sequence[str]) -> None:
        """Sums a number on each device; `ValueError` if arguments only prove wrong there."""
        if "(" not in self.name:
            return
        numbers = on_each(devices, lambda: tf.ones([]))
        try:
            self.reducer(devices)([tf_internals.per_replica(numbers)])
        except Exception as error:
            message = str(error).partition("\n")[0]
            raise ValueError(f"{self.name}: {message}") from error


# One for all workloads: a second strategy over the same devices would number its collective ops
# like the first one's, which TensorFlow takes for the same ops.
@functools.cache
def _default(devices: tuple[str, ...]) -> Callable[..., Sequence[Any]]:
    strategy = tf.distribute.MirroredStrategy(list(devices))
    reduce: Callable[..., Sequence[Any]] = strategy.extended.batch_reduce_to
    return reduce


def parse(name: str) -> list[Implementation]:
    """Makes the implementations that a name stands for: a package, or Python for one."""
    if name in (OURS, TENSORFLOW, "all"):
        known = [parse(one)[0] for one in _KNOWN]
        return [one for one in known if name in (one.package, "all")]
    if name == _STRATEGY_DEFAULT:
        return [Implementation(name, None)]
    try:
        ops = eval(name, dict(_NAMES))
        ops = ops() if isinstance(ops, type) else ops
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"{name}: {reason}; {_WANTED}") from error
    if not isinstance(ops, tf.distribute.CrossDeviceOps):
        raise ValueError(f"{name} makes no cross-device ops; {_WANTED}")
    return [Implementation(name, ops)]
