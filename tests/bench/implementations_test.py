from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo import virtual_devices
from tfcdo.bench import implementations
from tfcdo.bench import measure
from tfcdo.bench import steps
from tfcdo.bench import workloads
from tfcdo.bench.devices import choose_devices

virtual_devices.configure_virtual_cpus(8)

_environment = contextlib.ExitStack()


def setUpModule() -> None:
    # Another test file of this process may have loaded NCCL's kernel for CPUs.
    _environment.enter_context(tu.kernels_for("GPU"))


def tearDownModule() -> None:
    _environment.close()


_SMALL = workloads.Workload("small", ((3, 2), (5,), ()))
_QUICK = measure.Settings(iterations=2, warmup=1)
_NO_FUNCTION = "tf.ReductionToOneDevice(accumulation_fn=5)"
_TF_HIERARCHICAL = "tf.HierarchicalCopyAllReduce(num_packs=1)"


def _implementation(name: str) -> implementations.Implementation:
    (found,) = implementations.parse(name)
    return found


def _names(found: list[implementations.Implementation]) -> list[str]:
    return [implementation.name for implementation in found]


class ImplementationTest(parameterized.TestCase):
    def test_all_names_both_packages(self):
        found = _names(implementations.parse("all"))
        self.assertEqual(
            found, _names([*implementations.parse("tfcdo"), *implementations.parse("tf")])
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
        ops = _implementation("tfcdo.AllReduceCrossDeviceOps(all_reduce_alg='ring', num_packs=3)")
        made = ops.cross_device_ops()
        self.assertIsInstance(made, tfcdo.AllReduceCrossDeviceOps)
        self.assertEqual(dict(ops.arguments), {"all_reduce_alg": "ring", "num_packs": 3})

    def test_the_long_name_of_a_tensorflow_class(self):
        made = _implementation("tf.distribute.ReductionToOneDevice()").cross_device_ops()
        self.assertIs(type(made), tf.distribute.ReductionToOneDevice)

    def test_the_default_of_a_strategy(self):
        strategy = _implementation("tf.CollectiveAllReduce").strategy(["CPU:0", "CPU:1"])
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
        reason_not_to_run = _implementation(name).reason_not_to_run(["CPU:0", "CPU:1"], "float32")
        if is_nccl:
            self.assertIn("no NcclAllReduce kernel is registered for CPU", str(reason_not_to_run))
        else:
            self.assertIsNone(reason_not_to_run)

    @parameterized.parameters(
        # An argument that tfcdo's own check names, and one that TensorFlow has no check for.
        ("tfcdo.ReductionToOneDevice(reduce_to_device='CPU:99')", "reduce_to_device must name a"),
        ("tf.ReductionToOneDevice(reduce_to_device='x')", "Unknown attribute 'x'"),
        (_NO_FUNCTION, "'int' object is not callable"),
    )
    def test_arguments_that_only_prove_wrong_when_they_are_used(self, name: str, message: str):
        data = steps.place_values(_SMALL, choose_devices(2))
        for build in (steps.build_graph, steps.build_eager):
            with self.assertRaises(implementations.UnusableArgumentsError) as caught:
                _build(_implementation(name), build, data)
            self.assertStartsWith(str(caught.exception), f"{name}: ")
            self.assertIn(message, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))

    @parameterized.parameters("tfcdo", "tf")
    def test_a_bug_is_not_blamed_on_the_arguments(self, package: str):
        implementation = implementations.Implementation("x", package, "x", (("num_packs", 1),))

        def build(_: implementations.Implementation) -> None:
            raise ValueError("a bug")

        with self.assertRaisesRegex(ValueError, "^a bug$"):
            implementation.build_with(build)

    @parameterized.parameters("tfcdo.ReductionToOneDevice", "tf.ReductionToOneDevice")
    def test_without_arguments_no_error_is_about_them(self, name: str):
        build = mock.Mock(side_effect=[TypeError("reduce_to_device must be"), None])
        with self.assertRaisesRegex(TypeError, "^reduce_to_device must be$"):
            _implementation(name).build_with(build)
        build.assert_called_once()


def _build(
    implementation: implementations.Implementation, build: Any, data: steps.Data
) -> steps.TimedStep:
    return implementation.build_with(lambda built: build(data, built.reducer(data.devices.names)))


if __name__ == "__main__":
    tf.test.main()
