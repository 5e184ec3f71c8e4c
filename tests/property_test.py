"""Any batch, reduced in any way, is what numpy gives in float64 and complex128."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import absltest
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from testing_utils import MEAN
from testing_utils import SUM

import tfcdo
from tfcdo.plan import topology

NUM_ROWS = 5
DTYPES = (
    tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int32, tf.int64, tf.complex64,
)  # fmt: skip
SHAPES = ((), (1,), (7,), (3, 2), (0,), (2, 0, 3), (1, 16), (65,))
OWN, FIRST, OTHER, REVERSED, STRING = "own", "first", "other", "reversed", "string"


@dataclasses.dataclass(frozen=True)
class Dense:
    """A dense value: the seed of each replica's array."""

    dtype: tf.DType
    shape: tuple[int, ...]
    seed: int


@dataclasses.dataclass(frozen=True)
class Sparse:
    """Slices: the indices of each replica's rows."""

    dtype: tf.DType
    indices: tuple[tuple[int, ...], ...]
    seed: int


@dataclasses.dataclass(frozen=True)
class Batch:
    """A whole call."""

    ops: str
    count: int
    reduce_op: tf.distribute.ReduceOp
    mode: str
    values: tuple[Dense | Sparse, ...]
    destinations: tuple[str, ...]


OPS = (
    "ReductionToOneDevice()",
    "ReductionToOneDevice('/cpu:1')",
    "NcclAllReduce(3)",
    "HierarchicalCopyAllReduce()",
    "HierarchicalCopyAllReduce(0)",
    "HierarchicalCopyAllReduce(2)",
    "HierarchicalCopyAllReduce(9)",
    "AutoAllReduce()",
    "AllReduceCrossDeviceOps('ring', 3)",
    "AllReduceCrossDeviceOps('shuffle', 0, 16, 2)",
    "AllReduceCrossDeviceOps('halving_doubling', 4)",
    "AllReduceCrossDeviceOps('one_device', 1)",
    "AutoAllReduce(topology=nvswitch(count))",
    "HierarchicalCopyAllReduce(3, topology=nvswitch(count))",
    "AllReduceCrossDeviceOps('packed_trees', 3, topology=nvswitch(count))",
)


def make(ops: str, count: int) -> tf.distribute.CrossDeviceOps:
    """The cross-device ops that a batch names."""
    return eval(f"tfcdo.{ops}", {"tfcdo": tfcdo, "nvswitch": topology.nvswitch, "count": count})


@st.composite
def batches(draw: Any) -> Batch:
    """Draws a call."""
    count = draw(st.integers(1, 8))
    seed = st.integers(0, 1000)
    rows = st.tuples(
        *[st.tuples() | st.lists(st.integers(0, NUM_ROWS - 1), max_size=4).map(tuple)] * count
    )
    dense = st.builds(Dense, st.sampled_from(DTYPES), st.sampled_from(SHAPES), seed)
    sparse = st.builds(Sparse, st.sampled_from((tf.float32, tf.float64)), rows, seed)
    values = tuple(draw(st.lists(dense | dense | sparse, min_size=1, max_size=6)))
    place = st.sampled_from((OWN,) * 6 + (FIRST, OTHER, REVERSED, STRING))
    return Batch(
        draw(st.sampled_from(OPS)),
        count,
        draw(st.sampled_from((SUM, MEAN))),
        draw(st.sampled_from((tu.EAGER,) * 3 + (tu.FUNCTION,))),
        values,
        tuple(draw(place) for _ in values),
    )


def arrays_of(value: Dense | Sparse, count: int) -> list[Any]:
    """What each replica holds."""
    if isinstance(value, Dense):
        # 16 bits hold the sums of eight such values exactly, up to the one rounding.
        return [tu.numbers(value.shape, value.dtype, value.seed + rank) for rank in range(count)]
    return [
        tf.IndexedSlices(
            tf.constant(tu.numbers((len(own), 2), value.dtype, value.seed + rank)),
            tf.constant(own, tf.int64, [len(own)]),
            tf.constant([NUM_ROWS, 2], tf.int64),
        )
        for rank, own in enumerate(value.indices)
    ]


def destination(place: str, value: Any, count: int) -> tuple[Any, tuple[str, ...]]:
    """An argument `destinations`, and the devices that it means."""
    own = tu.device_names(count)
    if place == OWN:
        return value, own
    if place == STRING:
        return "/cpu:5", tu.device_names(8)[5:6]
    devices = {
        FIRST: own[:1],
        OTHER: tu.device_names(8)[3:6],
        REVERSED: own[::-1],
    }[place]
    return tu.per_replica([tf.constant(0.0)] * len(devices), devices), devices


class PropertyTest(tu.ValuesMixin, tf.test.TestCase):
    # Derandomized, so that what passes here passes there; 500 examples are a good part of a minute.
    @settings(
        max_examples=500,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(batches())
    def test_any_batch(self, batch):
        ops = make(batch.ops, batch.count)
        replicas = [arrays_of(value, batch.count) for value in batch.values]
        before = [[tu.exact(one) for one in own] for own in map(_flat, replicas)]
        values = [tu.per_replica(own) for own in replicas]
        targets = [
            destination(place, value, batch.count)
            for place, value in zip(batch.destinations, values, strict=True)
        ]
        pairs = [(value, target) for value, (target, _) in zip(values, targets, strict=True)]

        results = tu.call(batch.mode, lambda: ops.batch_reduce(batch.reduce_op, pairs))

        self.assertLen(results, len(values))
        for value, own, (_, devices), result in zip(
            batch.values, replicas, targets, results, strict=True
        ):
            self.assert_on(result, devices)
            self.assert_bitwise_equal(result.values)
            check = self._check_dense if isinstance(value, Dense) else self._check_sparse
            check(batch, devices, own, result.value)
        for old, own in zip(before, map(_flat, replicas), strict=True):
            for one, now in zip(old, own, strict=True):
                np.testing.assert_array_equal(one, tu.exact(now))  # What is given stays as it is.

    def _check_dense(
        self, batch: Batch, devices: Sequence[str], own: Sequence[Any], result: Any
    ) -> None:
        dtype = tf.as_dtype(own[0].dtype)
        # TensorFlow gives the value itself back if there is one replica and nowhere to go.
        stays = batch.count == 1 and tuple(devices) == tu.device_names(1)
        expected_dtype = dtype if stays else tu.result_dtype(batch.reduce_op, dtype)
        self.assert_exact(result, tu.oracle(batch.reduce_op, own), expected_dtype)

    def _check_sparse(
        self, batch: Batch, devices: Sequence[str], own: Sequence[Any], result: Any
    ) -> None:
        del devices  # Slices are floats here: their dtype stays wherever they go.
        expected = tu.oracle(batch.reduce_op, [tu.dense(one, NUM_ROWS) for one in own])
        self.assertEqual(own[0].values.dtype, result.values.dtype)
        self.assertAllClose(expected, tu.dense(result, NUM_ROWS), rtol=1e-6, atol=1e-6)


def _flat(own: Sequence[Any]) -> list[Any]:
    return tf.nest.flatten(list(own), expand_composites=True)


if __name__ == "__main__":
    absltest.main()
