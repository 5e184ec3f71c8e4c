"""What is measured: workloads, and the implementations that are compared."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from bench_testing import (
    NO_FUNCTION,
    implementation_of,
    names_of,
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)

import tfcdo
from tfcdo.bench import measure, workloads
from tfcdo.bench.devices import choose_devices


class WorkloadTest(parameterized.TestCase, tf.test.TestCase):
    def test_shapes_are_those_of_the_keras_model(self):
        variables = keras.applications.MobileNetV2(weights=None).trainable_variables
        expected = [tuple(variable.shape) for variable in variables]
        self.assertEqual(list(workloads.gradients_of("mobilenet").shapes), expected)

    @parameterized.parameters(
        # The published numbers of parameters, of BERT-base uncased.
        ("bert-base", 199, 109_482_240),
        ("resnet50", 214, 25_583_592),
        ("tiny", 500, 32_000),
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
        self.assertEqual(workloads.one_value(1, "float64").shapes, ((1,),))
        self.assertEqual(workloads.one_value(31, "float64").size, 24)

    @parameterized.parameters(*workloads.DTYPES.values())
    def test_sums_are_exact_in_every_dtype(self, dtype: str):
        workload = workloads.Workload("w", ((1000,),), dtype)
        arrays = [workloads.draw_values(workload, seed)[0] for seed in range(16)]
        exact = np.sum(arrays, axis=0, dtype=np.int64)
        summed = tf.add_n([tf.cast(array, dtype) for array in arrays])
        self.assertAllEqual(tf.cast(summed, tf.int64), exact)
        self.assertGreater(len(np.unique(exact)), 10)


class ImplementationTest(parameterized.TestCase):
    def test_all_names_both_packages(self):
        found = names_of(measure.parse("all"))
        self.assertEqual(found, names_of([*measure.parse("tfcdo"), *measure.parse("tf")]))
        self.assertContainsSubset(("tfcdo.NcclAllReduce", "tf.CollectiveAllReduce"), found)

    @parameterized.parameters(
        ("tfcdo.AllReduceCrossDeviceOps('ring', num_packs=3)", tfcdo.AllReduceCrossDeviceOps),
        ("tf.distribute.ReductionToOneDevice()", tf.distribute.ReductionToOneDevice),
        ("tf.HierarchicalCopyAllReduce", tf.distribute.HierarchicalCopyAllReduce),
    )
    def test_names_are_python(self, name: str, class_: type[Any]):
        self.assertIs(type(implementation_of(name).ops), class_)

    def test_the_default_of_a_strategy(self):
        self.assertIsNone(implementation_of("tf.CollectiveAllReduce").ops)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        self.assertEqual(
            type(strategy.extended._get_cross_device_ops(tf.constant(0.0))).__name__,
            "CollectiveAllReduce",
        )

    def test_the_dtype_on_the_wire(self):
        cast = implementation_of("tfcdo.AutoAllReduce(wire_dtype='bfloat16')")
        self.assertEqual(cast.wire("float32"), "bfloat16")
        self.assertIsNone(cast.wire("int32"))
        self.assertIsNone(implementation_of("tfcdo.AutoAllReduce").wire("float32"))
        self.assertIsNone(implementation_of("tf.ReductionToOneDevice").wire("float32"))

    @parameterized.parameters(
        ("tf.NcclAllReduce", True),
        ("tf.ReductionToOneDevice", False),
        ("tf.CollectiveAllReduce", False),
        ("tfcdo.NcclAllReduce(num_packs=2)", True),
        ("tfcdo.AutoAllReduce", False),
        ("tfcdo.AllReduceCrossDeviceOps", True),
        ("tfcdo.AllReduceCrossDeviceOps(all_reduce_alg='nccl', num_packs=2)", True),
        ("tfcdo.AllReduceCrossDeviceOps(all_reduce_alg='ring')", False),
    )
    def test_nccl_does_not_run_on_processors(self, name: str, is_nccl: bool):
        reason = implementation_of(name).reason_not_to_run(["CPU:0", "CPU:1"], "float32")
        no_kernel = "no NcclAllReduce kernel is registered for CPU"
        self.assertEqual(no_kernel in str(reason), is_nccl)
        self.assertEqual(reason is not None, is_nccl)

    @parameterized.parameters(
        # An argument that tfcdo's own check names, and one that TensorFlow has no check for.
        ("tfcdo.ReductionToOneDevice(reduce_to_device='CPU:99')", "reduce_to_device must name a"),
        ("tf.ReductionToOneDevice(reduce_to_device='x')", "Unknown attribute 'x'"),
        (NO_FUNCTION, "'int' object is not callable"),
    )
    def test_arguments_that_only_prove_wrong_when_they_are_used(self, name: str, message: str):
        pattern = f"^{re.escape(name)}: .*{re.escape(message)}.*$"
        with self.assertRaisesRegex(ValueError, pattern):  # One line.
            implementation_of(name).check_arguments(choose_devices(2).names)


if __name__ == "__main__":
    tf.test.main()
