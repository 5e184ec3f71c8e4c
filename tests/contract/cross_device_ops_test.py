"""The classes that users pass to a strategy: their arguments, and what each promises besides."""

import inspect
import re
import subprocess
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
import warm_python
from absl.testing import parameterized
from testing_utils import MEAN, SUM

import tfcdo
from tfcdo import log
from tfcdo.plan.copy_tree import chain, star

ALL_REDUCES: list[Any] = [
    tfcdo.AllReduceCrossDeviceOps,
    tfcdo.NcclAllReduce,
    tfcdo.HierarchicalCopyAllReduce,
]


class ConstructorTest(parameterized.TestCase):
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
    def test_they_are_drop_in(self, cls, expected):
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
        unexpected = "topology"
        if cls is not tfcdo.ReductionToOneDevice:
            unexpected = "topologie"
            options["topology"] = tfcdo.topology.preset("dgx1")
        made = repr(cls(**options))
        for name, value in options.items():
            self.assertIn(f"{name}={getattr(value, 'name', value)!r}", made)
        self.assertIn("wire_dtype='bfloat16'", repr(cls(wire_dtype=tf.bfloat16)))
        self.assertNotIn("wire", repr(cls()))
        refusals: list[tuple[str, dict[str, Any]]] = [
            (f"{cls.__name__}.* unexpected .* '{unexpected}'", {unexpected: None}),
            ("sparse_as_dense must be True or False; got None", {"sparse_as_dense": None}),
            ("sum_equal_rows must be True or False; got 1", {"sum_equal_rows": 1}),
            ("wire_dtype must be .*'float32'", {"wire_dtype": "float32"}),
            ("wire_dtype must be .*16", {"wire_dtype": 16}),
            ("error_feedback must be False without wire_dtype", {"error_feedback": True}),
            ("error_feedback must be True or False; got 1", options | {"error_feedback": 1}),
        ]
        for message, refused in refusals:
            self.assertRaisesRegex((TypeError, ValueError), message, cls, **refused)

    def test_bad_arguments(self):
        make, one_device = tfcdo.AllReduceCrossDeviceOps, tfcdo.ReductionToOneDevice
        counts = [(cls, "num_packs") for cls in ALL_REDUCES]
        counts += [(make, "agg_small_grads_max_bytes"), (make, "agg_small_grads_max_group")]
        calls: list[tuple[str, Any, dict[str, Any]]] = []
        value: Any
        for value in (True, 1.0, "1", [1], np.float64(3.0), -1):
            for cls, name in counts:
                calls.append((f"{name}.*{re.escape(repr(value))}", cls, {name: value}))
        named = "nccl.* or a list of tfcdo.plan.copy_tree.CopyTree"
        for value in ("bogus", "", None, 3, "NCCL", ("ring",), [[1, 2]]):
            message = f"all_reduce_alg .*{named}.*{re.escape(repr(value))}"
            calls.append((message, make, {"all_reduce_alg": value}))
        for value in ("hierarchical_copy", "auto", [chain(3), star(3)]):
            arguments = {"all_reduce_alg": value, "require_nccl": True}
            calls.append(("require_nccl must .*which does not use NCCL", make, arguments))
        for value in ("nonsense", "", 3, ["/cpu:0"]):
            calls.append(("reduce_to_device", one_device, {"reduce_to_device": value}))
        for cls, name in (
            (tfcdo.AutoAllReduce, "num_packs"),
            (tfcdo.NcclAllReduce, "agg_small_grads_max_bytes"),
            (tfcdo.HierarchicalCopyAllReduce, "agg_small_grads_max_group"),
        ):
            calls.append((f"{cls.__name__}.* unexpected .* '{name}'", cls, {name: 1}))
        for cls in (tfcdo.NcclAllReduce, tfcdo.HierarchicalCopyAllReduce):
            calls.append(("num_packs must be an int; got None", cls, {"num_packs": None}))
        calls.append(("nccl must be True or False; got 'no'", tfcdo.AutoAllReduce, {"nccl": "no"}))
        for value in (3, "add_n"):
            calls.append(("accumulation_fn", one_device, {"accumulation_fn": value}))
        for message, cls, arguments in calls:
            self.assertRaisesRegex((TypeError, ValueError), message, cls, **arguments)

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


class OneDeviceTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((None, 4), ("/cpu:2", 2), ("CPU:6", 6))
    def test_accumulation_fn_and_its_device(self, device, expected):
        seen = []

        def difference(values):
            self.assertIsInstance(values, list)
            found = values[0] - values[1] - 2 * values[2]
            seen.append(found.device)
            return found

        ops = tfcdo.ReductionToOneDevice(device, difference)
        value = tu.per_replica([[1.0, 9.0], [5.0, 2.0], [3.0, 3.0]])
        others = tu.per_replica([0, 0], tu.ALL_DEVICES[4:6])
        for mode in tu.EAGER, tu.FUNCTION:
            (result,) = tu.call(mode, lambda: ops.reduce(SUM, value, others))
            self.assert_on(result, tu.ALL_DEVICES[4:6])
            self.assertAllEqual([[-10.0, 1.0]] * 2, result.values)
        self.assertEqual([tu.device_name(expected)] * 2, seen)

    def test_replicas_are_added_in_their_order(self):
        value = tu.per_replica([1.0, 1.0, 2.0**24])
        total = tfcdo.ReductionToOneDevice("/cpu:2").reduce(SUM, value, value).values[0]
        self.assertEqual(2.0**24 + 2, total.numpy())  # Added to a float32 of 2**24, 1 is lost.

    def test_accumulation_fn_must_return_a_tensor(self):
        value = tu.per_replica([1.0, 2.0])
        rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
        for result in (3.0, rows, tf.ragged.constant([[1.0]])):
            ops = tfcdo.ReductionToOneDevice(accumulation_fn=lambda _, result=result: result)  # type: ignore[misc]
            with self.assertRaisesRegex(TypeError, "accumulation_fn must return a tensor; it ret"):
                ops.reduce(SUM, value, value)

    def test_accumulation_fn_may_take_booleans(self):
        value = tu.per_replica([True, False])
        ops = tfcdo.ReductionToOneDevice(accumulation_fn=lambda values: values[0] | values[1])
        self.assertAllEqual([True] * 2, ops.reduce(SUM, value, value).values)

    def test_rows_go_past_it(self):
        """They are added as for any mean: in floats, as no int8 is three times as much."""
        rows = tf.IndexedSlices(tf.constant([[100], [-128]], tf.int8), tf.constant([2, 5]))
        ops = tfcdo.ReductionToOneDevice(accumulation_fn=tf.add_n, sum_equal_rows=True)
        (result,) = tu.all_reduce(ops, MEAN, [tu.per_replica([rows] * 3)])
        self.assertEqual(tf.float32, result.value.dtype)
        self.assertAllEqual([[100], [-128]], result.value.values)


class AllReduceTest(tf.test.TestCase):
    def test_bytes_per_pack(self):
        value = tu.per_replica([tf.range(100.0)] * 4)
        ops = tfcdo.HierarchicalCopyAllReduce()

        def number_of_sums(options):
            traced = tu.traced_ops(lambda: ops.reduce(SUM, value, value, options).values)
            return sum(op.type == "AddN" for op in traced)

        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=np.int64(100))
        self.assertEqual(4 * number_of_sums(None), number_of_sums(options))

    def test_says_once_why_nccl_is_not_used(self):
        log.warn_once.cache_clear()
        value = tu.per_replica([1.0, 2.0, 3.0])
        with tu.kernels_for("GPU"), self.assertLogs("absl", "WARNING") as logs:
            for ops in 2 * [tfcdo.NcclAllReduce(), tfcdo.AllReduceCrossDeviceOps("nccl")]:
                self.assertAllEqual([6.0] * 3, ops.reduce(SUM, value, value).values)
        [text] = logs.output
        self.assertRegex(text, "(?s)NcclAllReduce.*CPU.*AutoAllReduce")


if __name__ == "__main__":
    tf.test.main()
