"""Where TensorFlow's classes are right, tfcdo's give the same: types, devices, dtypes, values.

Left out is what the compatibility table is about: odd device counts and mixed dtypes for the
all-reduces, 16-bit sums, which TensorFlow rounds several times, and empty batches.
"""

from __future__ import annotations

from typing import Any

import drawing
import hypothesis
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from hypothesis import strategies as st

import tfcdo
from tfcdo import tf_internals

# Of one name, TensorFlow's and tfcdo's. TensorFlow's NcclAllReduce needs a GPU.
REDUCTION_TO_ONE_DEVICE = st.builds(
    lambda device: (
        tf.distribute.ReductionToOneDevice(device),
        tfcdo.ReductionToOneDevice(device),
    ),
    st.sampled_from([None, "/cpu:0", "/cpu:2"]),
)
HIERARCHICAL_COPY = st.builds(
    lambda num_packs: (
        tf.distribute.HierarchicalCopyAllReduce(num_packs),
        tfcdo.HierarchicalCopyAllReduce(num_packs),
    ),
    st.integers(0, 4),
)
EXACT_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64, tf.complex64)

settings = hypothesis.settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)


class DifferentialTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @settings
    @hypothesis.given(
        both=REDUCTION_TO_ONE_DEVICE,
        reduce_op=st.sampled_from([tu.SUM, tu.MEAN]),
        count=st.integers(1, tu.NUM_DEVICES),
        batch=st.lists(drawing.values(EXACT_DTYPES), min_size=1, max_size=4),
        mode=st.sampled_from([tu.EAGER, tu.FUNCTION]),
    )
    def test_reduction_to_one_device(self, both, reduce_op, count, batch, mode):
        self.compare(both, reduce_op, count, batch, mode)

    @settings
    @hypothesis.given(
        both=HIERARCHICAL_COPY,
        reduce_op=st.sampled_from([tu.SUM, tu.MEAN]),
        count=st.sampled_from([2, 4, 6, 8]),
        batch=st.sampled_from(EXACT_DTYPES).flatmap(
            lambda dtype: st.lists(drawing.values([dtype], own_only=True), min_size=1, max_size=4)
        ),
        mode=st.sampled_from([tu.EAGER, tu.FUNCTION]),
    )
    def test_hierarchical_copy(self, both, reduce_op, count, batch, mode):
        # TensorFlow cuts packs of as many elements each, and fails where there are not enough.
        elements = sum(int(np.prod(value.shape)) for value in batch if value.rows is None)
        hypothesis.assume(both[0]._num_packs <= elements)
        self.compare(both, reduce_op, count, batch, mode)

    @settings
    @hypothesis.given(
        both=HIERARCHICAL_COPY,
        reduce_op=st.sampled_from([tu.SUM, tu.MEAN]),
        count=st.integers(1, tu.NUM_DEVICES),
        value=drawing.values(EXACT_DTYPES),
        mode=st.sampled_from([tu.EAGER, tu.FUNCTION]),
    )
    def test_elsewhere_than_the_values_are(self, both, reduce_op, count, value, mode):
        # A batch's all-reduce is returned by TensorFlow in the order of the values, not of the
        # destinations.
        hypothesis.assume(value.destinations not in (None, drawing.REVERSED))
        hypothesis.assume(value.devices(count) != tu.device_names(count) or count == 1)
        self.compare(both, reduce_op, count, [value], mode)

    def compare(self, both, reduce_op, count, batch, mode):
        given = [tu.per_replica(value.arrays(count)) for value in batch]
        theirs, ours = (
            tu.call(
                mode,
                lambda: ops.batch_reduce(  # noqa: B023
                    reduce_op,
                    [
                        (one, value.destinations_for(one, count))
                        for one, value in zip(given, batch, strict=True)
                    ],
                ),
            )
            for ops in both
        )
        for their, our in zip(theirs, ours, strict=True):
            self.assert_alike(their, our)

    def assert_alike(self, theirs: tu.Result, ours: tu.Result) -> None:
        self.assertEqual(theirs.mirrored, ours.mirrored)
        self.assertEqual(theirs.devices, ours.devices)
        for their, our in zip(theirs.values, ours.values, strict=True):
            self.assertEqual(isinstance(their, tf.IndexedSlices), isinstance(our, tf.IndexedSlices))
            for one, other in zip(
                tf.nest.flatten(their, True), tf.nest.flatten(our, True), strict=True
            ):
                self.assertEqual(one.dtype, other.dtype)
                self.assertEqual(one.shape, other.shape)
                self.assertAllClose(one, other, rtol=4 * tu.unit_roundoff(one.dtype), atol=0)

    @parameterized.product(
        count=(1, 2, 3, 8), to=("own", "/cpu:5", "others"), mode=(tu.EAGER, tu.FUNCTION)
    )
    def test_broadcast(self, count, to, mode):
        destinations: Any = {
            "own": tu.per_replica([0] * count),
            "others": tu.per_replica([0] * 2, tu.ALL_DEVICES[6:]),
        }.get(to, to)
        row = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2]))
        for tensor in tf.constant([1.0, 2.0]), tf.constant("text"), 3, row:
            pairs: Any = [
                (tf.distribute.ReductionToOneDevice(), tfcdo.ReductionToOneDevice()),
                (tf.distribute.HierarchicalCopyAllReduce(), tfcdo.HierarchicalCopyAllReduce()),
            ]
            for both in pairs:
                theirs, ours = (
                    tu.call(mode, lambda: ops.broadcast(tensor, destinations))[0]  # noqa: B023
                    for ops in both
                )
                self.assertEqual((theirs.mirrored, theirs.devices), (ours.mirrored, ours.devices))
                self.assert_bitwise_equal([*theirs.values, *ours.values])

    @parameterized.product(
        count=(1, 2, 3, 8), axis=(0, 1, -1), mode=(tu.EAGER, tu.FUNCTION), own=(True, False)
    )
    def test_gather(self, count, axis, mode, own):
        shapes: Any = np.full([count, 3], 2)
        shapes[:, axis] = np.arange(count) % 3
        value = tu.per_replica(
            [tu.numbers(shape, tf.float32, rank) for rank, shape in enumerate(shapes)]
        )
        pairs: Any = [
            (tf.distribute.ReductionToOneDevice(), tfcdo.ReductionToOneDevice()),
            (tf.distribute.HierarchicalCopyAllReduce(), tfcdo.HierarchicalCopyAllReduce()),
        ]
        for both in pairs:
            theirs, ours = (
                tu.call(mode, lambda: ops._gather(value, value if own else "/cpu:3", axis))[0]  # noqa: B023
                for ops in both
            )
            self.assert_alike(theirs, ours)

    @parameterized.parameters(
        tf.int8, tf.uint8, tf.int16, tf.uint16, tf.uint32, tf.uint64, tf.complex128, tf.float16
    )
    def test_other_dtypes(self, dtype):
        """Two replicas, so that TensorFlow rounds 16-bit sums once as well."""
        own = [tu.numbers((5,), dtype, rank, limit=60) for rank in range(2)]
        value = tu.per_replica(own)
        for reduce_op in tu.SUM, tu.MEAN:
            for to in value, "/cpu:4":
                theirs, ours = (
                    tu.call(tu.EAGER, lambda: ops.reduce(reduce_op, value, to))[0]  # noqa: B023
                    for ops in (
                        tf.distribute.ReductionToOneDevice(),
                        tfcdo.ReductionToOneDevice(),
                    )
                )
                self.assert_alike(theirs, ours)

    def test_values_that_are_not_distributed(self):
        for value in tf.constant([1.5, 2.0]), tf.constant(3), 2.5, np.float32(1.0):
            for to in "/cpu:3", tu.per_replica([0] * 3):
                for reduce_op in tu.SUM, tu.MEAN:
                    theirs, ours = (
                        tu.call(tu.EAGER, lambda: ops.reduce(reduce_op, value, to))[0]  # noqa: B023
                        for ops in (
                            tf.distribute.ReductionToOneDevice(),
                            tfcdo.ReductionToOneDevice(),
                        )
                    )
                    self.assert_alike(theirs, ours)

    def test_variables(self):
        variables = []
        for rank in range(2):
            with tf.device(tu.device_name(rank)):
                variables.append(tf.Variable([1.0 + rank, 2.0]))
        value = tu.per_replica([[3.0, 4.0], [5.0, 6.0]])
        for to in variables[1], tf_internals.mirrored(variables):
            theirs, ours = (
                tu.call(tu.EAGER, lambda: ops.reduce(tu.MEAN, value, to))[0]  # noqa: B023
                for ops in (
                    tf.distribute.HierarchicalCopyAllReduce(),
                    tfcdo.HierarchicalCopyAllReduce(),
                )
            )
            self.assert_alike(theirs, ours)


if __name__ == "__main__":
    tf.test.main()
