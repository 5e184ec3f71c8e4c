"""Any batch, on any number of devices, by any class, is reduced as numpy does it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Literal

import hypothesis
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import absltest
from hypothesis import strategies as st

import tfcdo
from tfcdo import topology
from tfcdo.plan import algorithms

# More than the 40 that every run does: TFCDO_EXAMPLES=5000 python tests/contract/property_test.py
EXAMPLES = int(os.environ.get("TFCDO_EXAMPLES", "40"))


REVERSED: Literal["reversed"] = "reversed"
ROWS = 5  # Slices are of tables with this many rows.

_DTYPES = (
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


def values() -> Any:
    """Draws a `Value`."""
    device = st.integers(0, tu.NUM_DEVICES - 1)
    others = st.none() | device | _several(device) | st.just(REVERSED)
    rows = st.lists(st.integers(0, ROWS - 1), max_size=8).map(tuple)
    return st.builds(
        Value,
        dtype=st.sampled_from(_DTYPES),
        shape=st.lists(st.sampled_from([0, 1, 2, 3, 7]), max_size=3).map(tuple),
        rows=st.none() | st.none() | st.tuples(*[rows] * tu.NUM_DEVICES),
        destinations=others,
        seed=st.integers(0, 10**6),
    )


def _several(device: Any) -> Any:
    return st.lists(device, min_size=2, max_size=4, unique=True).map(tuple)


def cross_device_ops(count: int) -> Any:
    """Draws cross-device ops for some number of devices."""
    topologies = st.none() | st.just(topology.preset("nvswitch", count))
    sparse = {
        "sparse_as_dense": st.sampled_from([False, False, False, True]),
        "sum_equal_rows": st.booleans(),
    }
    return st.one_of(
        st.builds(
            tfcdo.ReductionToOneDevice,
            st.sampled_from([None, "/cpu:0", "/cpu:2", "/cpu:7"]),
            **sparse,
        ),
        st.builds(
            tfcdo.HierarchicalCopyAllReduce, st.integers(0, 6), topology=topologies, **sparse
        ),
        st.builds(tfcdo.NcclAllReduce, st.integers(0, 3), **sparse),
        st.builds(tfcdo.AutoAllReduce, topology=topologies, **sparse),
        st.builds(
            tfcdo.AllReduceCrossDeviceOps,
            st.sampled_from(("nccl", "packed_trees", *algorithms.CLASSICS)),
            st.sampled_from([0, 0, 1, 2, 20]),
            st.sampled_from([0, 10, 50, 10**6]),
            st.sampled_from([0, 1, 2, 10]),
            topology=topologies,
            **sparse,
        ),
    )


OPTIONS = st.sampled_from([0, 0, 0, 1, 16, 100]).map(
    lambda cap: tf.distribute.experimental.CommunicationOptions(bytes_per_pack=cap) if cap else None
)


class BatchReduceTest(tu.ValuesMixin, tf.test.TestCase):
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=EXAMPLES == 40,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(
        counted_ops=st.integers(1, tu.NUM_DEVICES).flatmap(
            lambda count: st.tuples(st.just(count), cross_device_ops(count))
        ),
        reduce_op=st.sampled_from([tu.SUM, tu.MEAN]),
        batch=st.lists(values(), min_size=1, max_size=5),
        options=OPTIONS,
        mode=st.sampled_from([tu.EAGER, tu.EAGER, tu.FUNCTION, tu.ARGUMENTS]),
    )
    def test_any_batch(self, counted_ops, reduce_op, batch, options, mode):
        count, ops = counted_ops
        arrays = [value.arrays(count) for value in batch]
        given = [tu.per_replica(own) for own in arrays]

        def reduce(*own):
            pairs = [
                (one, value.destinations_for(one, count))
                for one, value in zip(own, batch, strict=True)
            ]
            return ops.batch_reduce(reduce_op, pairs, options)

        results = tu.call(mode, reduce, *given)

        self.assertLen(results, len(batch))
        for value, own, one, result in zip(batch, arrays, given, results, strict=True):
            # What is given stays as it is.
            self.assert_bitwise_equal([one.values, tu.per_replica(value.arrays(count)).values])
            devices = value.devices(count)
            if mode != tu.ARGUMENTS or value.destinations is not None:
                self.assert_on(result, devices)
            self.assertLen(result.values, len(devices))
            self.assert_bitwise_equal(result.values)
            expected = value.expected(reduce_op, own)
            # One replica's value that stays where it is keeps its dtype, as in TensorFlow.
            # (In a function that takes it as an argument, nobody knows that it does.)
            seen = mode != tu.ARGUMENTS or value.destinations is None
            stays = count == 1 and devices == tu.device_names(1) and seen
            dtype = value.dtype if stays else tu.result_dtype(reduce_op, value.dtype)
            if value.rows is None:
                self.assert_exact(result.value, expected, dtype)
                continue
            # Replicas add up to 8 rows of an index before they round, as a table of their own.
            table = result.value
            if isinstance(table, tf.IndexedSlices):
                self.assertEqual(own[0].indices.dtype, table.indices.dtype)
                self.assertAllEqual(own[0].dense_shape, table.dense_shape)
                indices = [row for rows in value.rows[:count] for row in rows]
                if ops._options.sum_equal_rows:
                    indices = np.unique(indices).tolist()
                self.assertAllEqual(indices, table.indices)
                dtype_found, table = table.values.dtype, tu.dense(table, ROWS)
            else:
                self.assertTrue(ops._options.sparse_as_dense)
                dtype_found = table.dtype
            self.assertEqual(dtype, dtype_found)
            slack = 9 * 8 * 8 * 4 * tu.unit_roundoff(dtype)
            self.assertAllClose(expected, tu.exact(table), rtol=0, atol=slack)


if __name__ == "__main__":
    absltest.main()
