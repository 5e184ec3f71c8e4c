"""tfcdo's classes and TensorFlow's give the same, wherever TensorFlow's are right."""

from __future__ import annotations

from typing import Any

import property_test as cases
import tensorflow as tf
import testing_utils as tu
from absl.testing import absltest
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

import tfcdo

# What TensorFlow's classes get right: even counts of devices (and one), one dtype in a batch, no
# 16-bit sums that need more than 16 bits (these values do not, in float16).
COUNTS = (1, 2, 4, 6, 8)
DTYPES = (tf.float32, tf.float16, tf.float64, tf.int32, tf.int64, tf.complex64)
OPS = (
    ("ReductionToOneDevice", ()),
    ("ReductionToOneDevice", ("/job:localhost/replica:0/task:0/device:CPU:1",)),
    ("HierarchicalCopyAllReduce", (0,)),
    ("HierarchicalCopyAllReduce", (1,)),
    ("HierarchicalCopyAllReduce", (3,)),
)


@st.composite
def calls(draw: Any) -> tuple[tuple[str, tuple[Any, ...]], cases.Batch]:
    """Draws the class, its arguments and a call of one dtype."""
    batch = draw(cases.batches())
    dtype = draw(st.sampled_from(DTYPES))
    values = tuple(
        cases.Dense(dtype, value.shape, value.seed) if isinstance(value, cases.Dense) else value
        for value in batch.values
    )
    count = draw(st.sampled_from(COUNTS))
    values = tuple(
        value if isinstance(value, cases.Dense) else _with_replicas(value, count)
        for value in values
    )
    # TensorFlow's batches return an all-reduce in the order of the values, its single reductions in
    # the order of the destinations. Ours are always in the order of the destinations.
    places = tuple(cases.OWN if one == cases.REVERSED else one for one in batch.destinations)
    own = cases.Batch("", count, batch.reduce_op, batch.mode, values, places)
    return draw(st.sampled_from(OPS)), own


def _with_replicas(value: cases.Sparse, count: int) -> cases.Sparse:
    rows = value.indices or ((),)
    indices = tuple(rows[rank % len(rows)] for rank in range(count))
    return cases.Sparse(value.dtype, indices, value.seed)


class DifferentialTest(tu.ValuesMixin, tf.test.TestCase):
    @settings(
        max_examples=150,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls())
    def test_same_as_tensorflow(self, call):
        (name, arguments), batch = call
        results = [
            self._run(getattr(library, name)(*arguments), batch)
            for library in (tf.distribute, tfcdo)
        ]
        for theirs, ours in zip(*results, strict=True):
            self.assertEqual(theirs.mirrored, ours.mirrored)
            self.assertEqual(theirs.devices, ours.devices)
            for one, other in zip(theirs.values, ours.values, strict=True):
                self.assertEqual(
                    isinstance(one, tf.IndexedSlices), isinstance(other, tf.IndexedSlices)
                )
                for a, b in zip(
                    tf.nest.flatten(one, expand_composites=True),
                    tf.nest.flatten(other, expand_composites=True),
                    strict=True,
                ):
                    self.assertEqual(a.dtype, b.dtype)
                    self.assertAllClose(a, b, rtol=1e-6, atol=0)

    def _run(self, ops: tf.distribute.CrossDeviceOps, batch: cases.Batch) -> list[tu.Result]:
        values = [tu.per_replica(cases.arrays_of(value, batch.count)) for value in batch.values]
        pairs = [
            (value, cases.destination(place, value, batch.count)[0])
            for place, value in zip(batch.destinations, values, strict=True)
        ]
        return tu.call(batch.mode, lambda: ops.batch_reduce(batch.reduce_op, pairs))


if __name__ == "__main__":
    absltest.main()
