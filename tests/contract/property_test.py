"""Any batch, on any number of devices, by any class, is reduced as numpy does it."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import hypothesis_batches
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import absltest
from hypothesis import strategies as st

import tfcdo
from tfcdo import topology
from tfcdo.plan import algorithms

# More than the 80 that every run does: TFCDO_EXAMPLES=5000 python tests/contract/property_test.py
EXAMPLES = int(os.environ.get("TFCDO_EXAMPLES", "80"))


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
        derandomize=EXAMPLES == 80,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(
        counted_ops=st.integers(1, tu.NUM_DEVICES).flatmap(
            lambda count: st.tuples(st.just(count), cross_device_ops(count))
        ),
        reduce_op=st.sampled_from([tu.SUM, tu.MEAN]),
        batch=st.lists(hypothesis_batches.values(), min_size=1, max_size=5),
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
                dtype_found, table = table.values.dtype, tu.dense(table, hypothesis_batches.ROWS)
            else:
                self.assertTrue(ops._options.sparse_as_dense)
                dtype_found = table.dtype
            self.assertEqual(dtype, dtype_found)
            slack = 9 * 8 * 8 * 4 * tu.unit_roundoff(dtype)
            self.assertAllClose(expected, tu.exact(table), rtol=0, atol=slack)


if __name__ == "__main__":
    absltest.main()
