"""The classes that users pass to a strategy: their arguments, and what each promises besides."""

from __future__ import annotations

import inspect
import re
import subprocess
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
import testing_utils as tu
import warm_python
from absl import logging
from absl.testing import parameterized
from testing_utils import MEAN, SUM

import tfcdo
from tfcdo import cross_device_ops, log
from tfcdo.plan import algorithms
from tfcdo.plan.copy_tree import chain, star

ALL_REDUCES: list[Any] = [
    tfcdo.AllReduceCrossDeviceOps,
    tfcdo.NcclAllReduce,
    tfcdo.HierarchicalCopyAllReduce,
]


class SignatureTest(parameterized.TestCase):
    @parameterized.parameters(
        (tfcdo.ReductionToOneDevice, "reduce_to_device=None, accumulation_fn=None"),
        (
            tfcdo.AllReduceCrossDeviceOps,
            "all_reduce_alg='nccl', num_packs=None, agg_small_grads_max_bytes=0, "
            "agg_small_grads_max_group=10",
        ),
        (tfcdo.NcclAllReduce, "num_packs=1"),
        (tfcdo.HierarchicalCopyAllReduce, "num_packs=1"),
    )
    def test_constructors_are_drop_in(self, cls, expected):
        *parameters, common = inspect.signature(cls).parameters.values()
        self.assertEqual(common.kind, common.VAR_KEYWORD)
        positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self.assertEqual(expected, ", ".join(f"{p.name}={p.default!r}" for p in positional))
        for parameter in parameters:
            self.assertIsNot(parameter.default, parameter.empty)

    @parameterized.parameters(tfcdo.ReductionToOneDevice, tfcdo.AutoAllReduce, *ALL_REDUCES)
    def test_options_that_several_classes_accept(self, cls):
        options: dict[str, Any] = {"sparse_as_dense": True, "sum_equal_rows": True}
        options |= {"wire_dtype": "float16", "error_feedback": True}
        documented = accepted = cross_device_ops.CommonOptions
        if cls is not tfcdo.ReductionToOneDevice:
            options["topology"] = tfcdo.topology.preset("dgx1")
            accepted = cross_device_ops.AllReduceOptions
        # As a reference or an editor shows them.
        self.assertEqual(set(accepted.__annotations__), set(options))
        made = repr(cls(**options))
        for name, value in options.items():
            self.assertIn(f"      {name}: ", f"{accepted.__doc__}{documented.__doc__}")
            self.assertIn(f"{name}={getattr(value, 'name', value)!r}", made)
        unexpected = ("wire", "topologie") if "topology" in options else ("wire", "topology")
        refusals: list[tuple[str, dict[str, Any]]] = [
            *[(f"{cls.__name__}.* unexpected .* '{name}'", {name: None}) for name in unexpected],
            ("sparse_as_dense must be True or False; got None", {"sparse_as_dense": None}),
            ("sum_equal_rows must be True or False; got 1", {"sum_equal_rows": 1}),
            ("wire_dtype must be .*'float32'", {"wire_dtype": "float32"}),
            ("wire_dtype must be .*16", {"wire_dtype": 16}),
            ("error_feedback must be False without wire_dtype", {"error_feedback": True}),
            ("error_feedback must be True or False; got 1", options | {"error_feedback": 1}),
        ]
        for message, refused in refusals:
            with self.assertRaisesRegex((TypeError, ValueError), message):
                cls(**refused)
        self.assertIn("wire_dtype='bfloat16'", repr(cls(wire_dtype=tf.bfloat16)))
        self.assertNotIn("wire", repr(cls()))

    def test_repr(self):
        dgx1 = tfcdo.topology.preset("dgx1")
        self.assertEqual(
            "AutoAllReduce(topology='dgx1', plan=None, nccl=True)",
            repr(tfcdo.AutoAllReduce(topology=dgx1)),
        )
        self.assertEqual(
            "AllReduceCrossDeviceOps(all_reduce_alg='ring', num_packs=None, "
            "agg_small_grads_max_bytes=7, agg_small_grads_max_group=10, topology=None, "
            "require_nccl=False)",
            repr(tfcdo.AllReduceCrossDeviceOps("ring", agg_small_grads_max_bytes=7)),
        )

    @parameterized.parameters("hierarchical_copy", "auto", [[chain(3), star(3)]])
    def test_nccl_is_required_of_nccl_only(self, algorithm):
        with self.assertRaisesRegex(ValueError, "require_nccl must .*which does not use NCCL"):
            tfcdo.AllReduceCrossDeviceOps(algorithm, require_nccl=True)

    def test_classes(self):
        for cls in [tfcdo.ReductionToOneDevice, *ALL_REDUCES]:
            # Between it and the abstract base there is nothing of TensorFlow.
            for base in cls.__mro__[: cls.__mro__.index(tf.distribute.CrossDeviceOps)]:
                self.assertStartsWith(base.__module__, "tfcdo.")
            is_one = cls is tfcdo.ReductionToOneDevice
            self.assertEqual(not is_one, issubclass(cls, tfcdo.AllReduceCrossDeviceOps))
        self.assertRegex(tfcdo.__version__, r"^\d+\.\d+\.\d+")


class ConstructorTest(parameterized.TestCase):
    @parameterized.parameters(
        *[(cls, "num_packs") for cls in ALL_REDUCES],
        (tfcdo.AllReduceCrossDeviceOps, "agg_small_grads_max_bytes"),
        (tfcdo.AllReduceCrossDeviceOps, "agg_small_grads_max_group"),
    )
    def test_whole_numbers(self, cls, name):
        for value in (True, 1.0, "1", [1], np.float64(3.0), -1):
            error = ValueError if value == -1 else TypeError
            with self.assertRaisesRegex(error, f"{name}.*{re.escape(repr(value))}"):
                cls(**{name: value})

    @parameterized.parameters("bogus", "", None, 3, "NCCL", (("ring",),), [[1, 2]])
    def test_unknown_algorithm(self, algorithm):
        with self.assertRaises(ValueError) as caught:
            tfcdo.AllReduceCrossDeviceOps(algorithm)
        named = ("all_reduce_alg", "nccl", "a list of tfcdo.plan.copy_tree.CopyTree")
        for known in (*named, *algorithms.ALGORITHMS):
            self.assertIn(known, str(caught.exception))
        self.assertIn(repr(algorithm), str(caught.exception))

    @parameterized.parameters("nonsense", "", 3, (["/cpu:0"],))
    def test_reduce_to_device_is_checked(self, device):
        with self.assertRaisesRegex(ValueError, "reduce_to_device"):
            tfcdo.ReductionToOneDevice(device)

    @parameterized.parameters("/cpu:77", "GPU:0", "gpu", "/job:worker/task:5/cpu:0")
    def test_there_must_be_such_a_device(self, device):
        value, ops = tu.per_replica([1.0, 2.0]), tfcdo.ReductionToOneDevice(device)
        with self.assertRaisesRegex(ValueError, f"reduce_to_device .*exists; got '{device}'"):
            ops.reduce(SUM, value, value)

    def test_making_one_does_not_start_tensorflow(self):
        # Started, it would not let its virtual devices be configured any more.
        code = (
            "import tensorflow as tf, tfcdo\n"
            "tfcdo.ReductionToOneDevice('/cpu:1')\n"
            "for name in tfcdo.__all__:\n"
            "    if name.endswith('Reduce'): getattr(tfcdo, name)()\n"
            "cpu = tf.config.list_physical_devices('CPU')[0]\n"
            "parts = [tf.config.LogicalDeviceConfiguration()] * 3\n"
            "tf.config.set_logical_device_configuration(cpu, parts)\n"
            "print(len(tf.config.list_logical_devices('CPU')))\n"
        )
        told = subprocess.check_output([warm_python.executable(), "-c", code], text=True)
        self.assertEqual("3", told.strip())

    @parameterized.parameters(
        lambda: 3.0,
        lambda: tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])),
        lambda: tf.ragged.constant([[1.0]]),
    )
    def test_accumulation_fn_must_return_a_tensor(self, make):
        value = tu.per_replica([1.0, 2.0])
        ops = tfcdo.ReductionToOneDevice(accumulation_fn=lambda _: make())
        with self.assertRaisesRegex(TypeError, "accumulation_fn must return a tensor; it returned"):
            ops.reduce(SUM, value, value)

    @parameterized.parameters(3, "add_n")
    def test_accumulation_fn_is_checked(self, function):
        with self.assertRaisesRegex(TypeError, "accumulation_fn"):
            tfcdo.ReductionToOneDevice(accumulation_fn=function)


class AccumulationTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((None, 4), ("/cpu:6", 6), ("CPU:1", 1))
    def test_accumulation_fn_and_its_device(self, device, expected):
        seen = []

        def largest(values):
            self.assertIsInstance(values, list)
            found = tf.reduce_max(tf.stack(values), axis=0)
            seen.append((len(values), found.device))
            return found

        ops = tfcdo.ReductionToOneDevice(device, largest)
        value = tu.per_replica([[1.0, 9.0], [5.0, 2.0], [3.0, 3.0]])
        others = tu.per_replica([0, 0], tu.ALL_DEVICES[4:6])
        for mode in tu.EAGER, tu.FUNCTION:
            (result,) = tu.call(mode, lambda: ops.reduce(SUM, value, others))
            self.assert_on(result, tu.ALL_DEVICES[4:6])
            self.assertAllEqual([[5.0, 9.0]] * 2, result.values)
        self.assertEqual([(3, tu.device_name(expected))] * 2, seen)

    def test_what_is_divided_must_be_a_number(self):
        value = tu.per_replica([True, False])
        ops = tfcdo.ReductionToOneDevice(accumulation_fn=lambda values: values[0] | values[1])
        self.assertAllEqual([True] * 2, ops.reduce(SUM, value, value).values)
        with self.assertRaisesRegex(ValueError, "of a dtype that TensorFlow adds; got bool"):
            ops.reduce(MEAN, value, value)

    def test_rows_go_past_it(self):
        """They are added as for any mean: in floats, as no int8 is three times as much."""
        rows = tf.IndexedSlices(tf.constant([[100], [-128]], tf.int8), tf.constant([2, 5]))
        ops = tfcdo.ReductionToOneDevice(accumulation_fn=tf.add_n, sum_equal_rows=True)
        (result,) = tu.all_reduce(ops, MEAN, [tu.per_replica([rows] * 3)])
        self.assertEqual(tf.float32, result.value.dtype)
        self.assertAllEqual([[100], [-128]], result.value.values)


class RefusalTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (lambda: tfcdo.ReductionToOneDevice("/cpu:77"), ValueError, "reduce_to_device"),
        (
            lambda: tfcdo.NcclAllReduce(require_nccl=True, sparse_as_dense=True),
            *(RuntimeError, "(?s)require_nccl.*NcclAllReduce.*CPU"),
        ),
        (
            lambda: tfcdo.AutoAllReduce(topology=tfcdo.topology.preset("nvswitch", 4)),
            *(ValueError, "topology"),
        ),
    )
    def test_nothing_is_made_before_a_refusal(self, make, error, message):
        rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([5, 2]))
        values = [tu.per_replica([own] * 3) for own in (tf.ones([2], tf.int32), rows)]

        @tf.function(autograph=False)
        def refused():
            for value in values:
                refusal = self.assertRaisesRegex(error, message)
                with tu.kernels_for(), refusal:
                    make().batch_reduce(MEAN, [(value, "/cpu:0"), (value, value)])

        self.assertEmpty(refused.get_concrete_function().graph.get_operations())

    def test_the_root_is_looked_up_once_a_batch(self):
        value = tu.per_replica([1.0, 2.0])
        ops = tfcdo.ReductionToOneDevice("/cpu:1")
        with mock.patch("tfcdo.execute.base.existing_device", return_value="/cpu:1") as found:
            ops.batch_reduce(SUM, [(value, value)] * 5)
        found.assert_called_once_with("reduce_to_device", "/cpu:1")


class OptionsTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    def test_bytes_per_pack_is_checked(self):
        def options(most):
            return tf.distribute.experimental.CommunicationOptions(bytes_per_pack=most)

        value = tu.per_replica([1.0, 2.0])
        ops = tfcdo.HierarchicalCopyAllReduce()
        self.assertAllEqual([3.0] * 2, ops.reduce(SUM, value, value, options(np.int64(8))).values)
        with self.assertRaisesRegex(TypeError, "options.bytes_per_pack must be an int; got 8.0"):
            ops.reduce(SUM, value, value, options(8.0))

    def test_bytes_per_pack_cuts(self):
        value = tu.per_replica([tf.range(100.0)] * 4)
        ops = tfcdo.HierarchicalCopyAllReduce()

        def number_of_sums(options):
            traced = tu.traced_ops(lambda: ops.reduce(SUM, value, value, options).values)
            return sum(op.type == "AddN" for op in traced)

        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=100)
        self.assertEqual(4 * number_of_sums(None), number_of_sums(options))


class NcclOnCpuTest(tf.test.TestCase):
    def test_says_once_why_it_uses_copy_trees(self):
        log.warn_once.cache_clear()
        value = tu.per_replica([1.0, 2.0, 3.0])
        with tu.kernels_for("GPU"), mock.patch.object(logging, "warning") as warning:
            for ops in 2 * [tfcdo.NcclAllReduce(), tfcdo.AllReduceCrossDeviceOps("nccl")]:
                self.assertAllEqual([6.0] * 3, ops.reduce(SUM, value, value).values)
        warning.assert_called_once()
        text = warning.call_args.args[0] % warning.call_args.args[1:]
        self.assertRegex(text, "(?s)NcclAllReduce.*CPU.*AutoAllReduce")


if __name__ == "__main__":
    tf.test.main()
