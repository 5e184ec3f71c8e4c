"""What is measured: values and gradients."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfcdo.bench import workloads


class WorkloadTest(parameterized.TestCase, tf.test.TestCase):
    def test_shapes_are_those_of_the_keras_model(self):
        variables = keras.applications.MobileNetV2(weights=None).trainable_variables
        expected = [tuple(variable.shape) for variable in variables]
        self.assertEqual(list(workloads.gradients_of("mobilenet").shapes), expected)

    @parameterized.parameters(
        # The published numbers of parameters, of BERT-base uncased.
        ("bert-base", 199, 109_482_240),
        ("resnet50", 214, 25_583_592),
        ("tiny-matrices", 500, 32_000),
    )
    def test_number_of_values_and_elements(self, name: str, num_values: int, count: int):
        workload = workloads.gradients_of(name, "float16")
        self.assertLen(workload.shapes, num_values)
        self.assertEqual((workload.count, workload.size), (count, 2 * count))

    def test_sizes(self):
        self.assertEqual(list(workloads.sizes(8, 512, 4)), [8, 32, 128, 512])
        self.assertEqual(list(workloads.sizes(8, 500, 4)), [8, 32, 128])
        # A value holds whole elements.
        self.assertEqual(workloads.one_value(31, "float64").size, 24)

    @parameterized.parameters(*workloads.DTYPES.values())
    def test_sums_are_exact_in_every_dtype(self, dtype: str):
        workload = workloads.Workload("w", ((1000,),), dtype)
        arrays = [workloads.draw_values(workload, seed)[0] for seed in range(16)]
        exact = np.sum(arrays, axis=0, dtype=np.int64)
        summed = tf.add_n([tf.cast(array, dtype) for array in arrays])
        self.assertAllEqual(tf.cast(summed, tf.int64), exact)
        self.assertGreater(len(np.unique(exact)), 10)


if __name__ == "__main__":
    tf.test.main()
