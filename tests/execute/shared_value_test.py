"""A value that is one and the same object on all replicas counts once for each of them."""

from __future__ import annotations

import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo


class SharedValueTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        make=(tfcdo.HierarchicalCopyAllReduce, tfcdo.ReductionToOneDevice), count=(1, 3, 4)
    )
    def test_a_captured_tensor(self, make, count):
        strategy = tf.distribute.MirroredStrategy(tu.device_names(count), cross_device_ops=make())
        shared = tf.constant([1.0, 2.0])

        def reduce(op: tf.distribute.ReduceOp) -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce(op, shared)

        for op, expected in ((tu.SUM, [1.0 * count, 2.0 * count]), (tu.MEAN, [1.0, 2.0])):
            run = tf.function(lambda op=op: strategy.run(reduce, (op,)))
            for result in strategy.experimental_local_results(run()):
                self.assertAllEqual(expected, result)


if __name__ == "__main__":
    tf.test.main()
