"""Where TensorFlow's classes are right, tfcdo's give the same: types, devices, dtypes, values.

Left out is what the compatibility table is about: odd device counts and mixed dtypes for the
all-reduces, 16-bit sums, which TensorFlow rounds several times, and empty batches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis_batches
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from hypothesis import strategies as st

import tfcdo
from tfcdo import tf_internals

Both = tuple[tf.distribute.CrossDeviceOps, tf.distribute.CrossDeviceOps]


def both_of(name: str, *arguments: Any) -> Both:
    """TensorFlow's class and tfcdo's of the same name, made with the same arguments."""
    return getattr(tf.distribute, name)(*arguments), getattr(tfcdo, name)(*arguments)


# TensorFlow's NcclAllReduce needs a GPU.
NAMES = ("ReductionToOneDevice", "HierarchicalCopyAllReduce")
REDUCTION_TO_ONE_DEVICE = st.builds(
    functools.partial(both_of, "ReductionToOneDevice"),
    st.sampled_from([None, "/cpu:0", "/cpu:2"]),
)
HIERARCHICAL_COPY = st.builds(
    functools.partial(both_of, "HierarchicalCopyAllReduce"), st.integers(0, 4)
)
EXACT_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64, tf.complex64)

settings = hypothesis.settings(
    max_examples=30,
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
        batch=st.lists(hypothesis_batches.values(EXACT_DTYPES), min_size=1, max_size=4),
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
            lambda dtype: st.lists(
                hypothesis_batches.values([dtype], own_only=True), min_size=1, max_size=4
            )
        ),
        mode=st.sampled_from([tu.EAGER, tu.FUNCTION]),
    )
    def test_hierarchical_copy(self, both, reduce_op, count, batch, mode):
        # TensorFlow cuts packs of as many elements each, and fails where there are not enough.
        elements = sum(int(np.prod(value.shape)) for value in batch if value.rows is None)
        hypothesis.assume(both[0]._num_packs <= elements)
        self.compare(both, reduce_op, count, batch, mode)

    def compare(self, both, reduce_op, count, batch, mode):
        given = [tu.per_replica(value.arrays(count)) for value in batch]

        def reduce(ops: tf.distribute.CrossDeviceOps) -> Any:
            pairs = [
                (one, value.destinations_for(one, count))
                for one, value in zip(given, batch, strict=True)
            ]
            return ops.batch_reduce(reduce_op, pairs)

        self.check(both, reduce, mode)

    def check_reduce(self, value: Any, destinations: Sequence[Any]) -> None:
        for to, name, reduce_op in itertools.product(destinations, NAMES, (tu.SUM, tu.MEAN)):
            self.check(both_of(name), lambda ops: ops.reduce(reduce_op, value, to))  # noqa: B023

    def check(
        self, both: Both, body: Callable[[Any], Any], mode: str = tu.EAGER
    ) -> list[tuple[tu.Result, tu.Result]]:
        """Checks that `body` gets the same of TensorFlow's ops and of tfcdo's, and returns both."""
        theirs, ours = (tu.call(mode, functools.partial(body, ops)) for ops in both)
        self.assertNotEmpty(ours)
        results = list(zip(theirs, ours, strict=True))
        for their, our in results:
            self.assert_alike(their, our)
        return results

    def assert_alike(self, theirs: tu.Result, ours: tu.Result) -> None:
        self.assertEqual(theirs.mirrored, ours.mirrored)
        self.assertEqual(theirs.devices, ours.devices)
        for their, our in zip(theirs.values, ours.values, strict=True):
            self.assertEqual(isinstance(their, tf.IndexedSlices), isinstance(our, tf.IndexedSlices))
            magnitude = 0.0
            if isinstance(their, tf.IndexedSlices):
                # TensorFlow divides rows for a mean, each rounded, and leaves adding to optimizers.
                magnitude = np.sum(np.abs(tu.exact(their.values)))
                their = tu.rows_added(their)
            for one, other in zip(
                tf.nest.flatten(their, True), tf.nest.flatten(our, True), strict=True
            ):
                self.assertEqual(one.dtype, other.dtype)
                self.assertEqual(one.shape, other.shape)
                if one.dtype.is_floating or one.dtype.is_complex:
                    tolerance = 4 * tu.unit_roundoff(one.dtype)
                    self.assertAllClose(one, other, rtol=tolerance, atol=tolerance * magnitude)
                else:
                    self.assertAllEqual(one, other)

    @parameterized.product(
        count=(1, 3), to=("own", "/cpu:5", "others"), mode=(tu.EAGER, tu.FUNCTION)
    )
    def test_broadcast(self, count, to, mode):
        destinations: Any = {
            "own": tu.per_replica([0] * count),
            "others": tu.per_replica([0] * 2, tu.ALL_DEVICES[6:]),
        }.get(to, to)
        row = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2]))
        for tensor in tf.constant([1.0, 2.0]), tf.constant("text"), 3, row:
            for name in NAMES:
                ((theirs, ours),) = self.check(
                    both_of(name),
                    lambda ops: ops.broadcast(tensor, destinations),  # noqa: B023
                    mode,
                )
                self.assert_bitwise_equal([*theirs.values, *ours.values])

    @parameterized.product(
        count=(1, 3), axis=(0, -1), mode=(tu.EAGER, tu.FUNCTION), own=(True, False)
    )
    def test_gather(self, count, axis, mode, own):
        shapes: Any = np.full([count, 3], 2)
        shapes[:, axis] = np.arange(count) % 3
        value = tu.per_replica(
            [tu.numbers(shape, tf.float32, rank) for rank, shape in enumerate(shapes)]
        )
        to = value if own else "/cpu:3"
        for name in NAMES:
            self.check(both_of(name), lambda ops: ops._gather(value, to, axis), mode)

    @parameterized.parameters(
        tf.int8, tf.uint8, tf.int16, tf.uint16, tf.uint32, tf.uint64, tf.complex128, tf.float16
    )
    def test_other_dtypes(self, dtype):
        """Two replicas, so that TensorFlow rounds 16-bit sums once as well."""
        value = tu.per_replica([tu.numbers((5,), dtype, rank, limit=60) for rank in range(2)])
        self.check_reduce(value, (value, "/cpu:4"))

    def test_variables(self):
        variables = []
        for rank in range(2):
            with tf.device(tu.device_name(rank)):
                variables.append(tf.Variable([1.0 + rank, 2.0]))
        value = tu.per_replica([[3.0, 4.0], [5.0, 6.0]])
        self.check_reduce(value, (variables[1], tf_internals.mirrored(variables)))


if __name__ == "__main__":
    tf.test.main()
