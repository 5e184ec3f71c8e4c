"""Drawn batches: what a `CrossDeviceOps` may be handed, as hypothesis strategies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf
import testing_utils as tu
from hypothesis import strategies as st

REVERSED: Literal["reversed"] = "reversed"
ROWS = 5  # Slices are of tables with this many rows.

DTYPES = (
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.int32,
    tf.int64,
    tf.complex64,
)


@dataclasses.dataclass(frozen=True)
class Value:
    """One drawn value of a batch."""

    dtype: tf.DType
    shape: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...] | None
    destinations: tuple[int, ...] | int | Literal["reversed"] | None
    seed: int

    def arrays(self, count: int) -> list[Any]:
        """Makes what each replica holds: an array, or `tf.IndexedSlices`."""
        if self.rows is None:
            return [tu.numbers(self.shape, self.dtype, self.seed + rank) for rank in range(count)]
        return [
            tf.IndexedSlices(
                tf.constant(
                    tu.numbers((len(own), *self.shape), self.dtype, self.seed + rank), self.dtype
                ),
                tf.constant(own, tf.int64),
                tf.constant((ROWS, *self.shape), tf.int64),
            )
            for rank, own in enumerate(self.rows[:count])
        ]

    def destinations_for(self, value: Any, count: int) -> Any:
        """The argument `destinations`, given the `PerReplica` that was made of the value."""
        if self.destinations is None:
            return value
        if isinstance(self.destinations, int):
            return f"/cpu:{self.destinations}"
        devices = self.devices(count)
        return tu.per_replica([0] * len(devices), devices)

    def devices(self, count: int) -> tuple[str, ...]:
        """The devices that the result must be on."""
        if self.destinations is None:
            return tu.device_names(count)
        if isinstance(self.destinations, str):
            return tu.device_names(count)[::-1]
        if isinstance(self.destinations, int):
            return (tu.device_name(self.destinations),)
        return tuple(map(tu.device_name, self.destinations))

    def expected(self, reduce_op: tf.distribute.ReduceOp, arrays: Sequence[Any]) -> np.ndarray:
        """The exact result, dense."""
        if self.rows is not None:
            arrays = [tu.dense(own, ROWS) for own in arrays]
        return tu.oracle(reduce_op, arrays)


def values(dtypes: Sequence[tf.DType] = DTYPES, own_only: bool = False) -> Any:
    """Draws a `Value`."""
    device = st.integers(0, tu.NUM_DEVICES - 1)
    others = st.none() if own_only else st.none() | device | _several(device) | st.just(REVERSED)
    rows = st.lists(st.integers(0, ROWS - 1), max_size=8).map(tuple)
    return st.builds(
        Value,
        dtype=st.sampled_from(dtypes),
        shape=st.lists(st.sampled_from([0, 1, 2, 3, 7]), max_size=3).map(tuple),
        rows=st.none() | st.none() | st.tuples(*[rows] * tu.NUM_DEVICES),
        destinations=others,
        seed=st.integers(0, 10**6),
    )


def _several(device: Any) -> Any:
    return st.lists(device, min_size=2, max_size=4, unique=True).map(tuple)
