from __future__ import annotations

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
from tfcdo.bench import implementations
from tfcdo.bench.devices import choose_devices


class ImplementationTest(parameterized.TestCase):
    def test_all_names_both_packages(self):
        found = names_of(implementations.parse("all"))
        self.assertEqual(
            found, names_of([*implementations.parse("tfcdo"), *implementations.parse("tf")])
        )
        self.assertContainsSubset(
            [
                "tfcdo.ReductionToOneDevice",
                "tfcdo.HierarchicalCopyAllReduce",
                "tfcdo.NcclAllReduce",
                "tf.HierarchicalCopyAllReduce(num_packs=0)",
                "tf.HierarchicalCopyAllReduce(num_packs=8)",
                "tf.ReductionToOneDevice",
                "tf.NcclAllReduce",
                "tf.CollectiveAllReduce",
            ],
            found,
        )

    def test_parses_a_call_with_its_arguments(self):
        ops = implementation_of("tfcdo.AllReduceCrossDeviceOps(all_reduce_alg='ring', num_packs=3)")
        made = ops.cross_device_ops()
        self.assertIsInstance(made, tfcdo.AllReduceCrossDeviceOps)
        self.assertEqual(dict(ops.arguments), {"all_reduce_alg": "ring", "num_packs": 3})

    def test_the_long_name_of_a_tensorflow_class(self):
        made = implementation_of("tf.distribute.ReductionToOneDevice()").cross_device_ops()
        self.assertIs(type(made), tf.distribute.ReductionToOneDevice)

    def test_the_default_of_a_strategy(self):
        strategy = implementation_of("tf.CollectiveAllReduce").strategy(["CPU:0", "CPU:1"])
        self.assertEqual(
            type(strategy.extended._get_cross_device_ops(tf.constant(0.0))).__name__,
            "CollectiveAllReduce",
        )

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
        reason_not_to_run = implementation_of(name).reason_not_to_run(["CPU:0", "CPU:1"], "float32")
        if is_nccl:
            self.assertIn("no NcclAllReduce kernel is registered for CPU", str(reason_not_to_run))
        else:
            self.assertIsNone(reason_not_to_run)

    @parameterized.parameters(
        # An argument that tfcdo's own check names, and one that TensorFlow has no check for.
        ("tfcdo.ReductionToOneDevice(reduce_to_device='CPU:99')", "reduce_to_device must name a"),
        ("tf.ReductionToOneDevice(reduce_to_device='x')", "Unknown attribute 'x'"),
        (NO_FUNCTION, "'int' object is not callable"),
    )
    def test_arguments_that_only_prove_wrong_when_they_are_used(self, name: str, message: str):
        with self.assertRaises(ValueError) as caught:
            implementation_of(name).check_arguments(choose_devices(2).names)
        self.assertStartsWith(str(caught.exception), f"{name}: ")
        self.assertIn(message, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))


if __name__ == "__main__":
    tf.test.main()
