"""`explain` says what is in the graph that runs, also by a plan from a file."""

import dataclasses
import pathlib
import re
from typing import Any

import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo.cli.plan import evaluate
from tfcdo.plan.algorithms import resized
from tfcdo.plan.copy_tree import two_level
from tfcdo.plan.evaluation import Evaluation
from tfcdo.topology import detection
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology


class GraphTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    SHAPES = ((100,), (5, 10), (), (30, 20))

    @parameterized.parameters(
        (tfcdo.HierarchicalCopyAllReduce(2), "bfloat16"),
        (tfcdo.AllReduceCrossDeviceOps("ring", wire_dtype="float16"), "float32"),
        (tfcdo.ReductionToOneDevice(), "bfloat16"),
        (tfcdo.ReductionToOneDevice("/cpu:5", wire_dtype="float16"), "float32"),
        (tfcdo.AllReduceCrossDeviceOps("packed_trees", 5, topology=preset("dgx1", 3)), "float32"),
    )
    def test_packs_and_bytes_are_those_of_the_graph(self, ops, dtype):
        count = 3
        devices = tu.device_names(8)
        told = ops.explain(self.SHAPES, dtype, devices[:count])
        arrays = [
            [tu.numbers(shape, dtype, 10 * index + rank, limit=15) for rank in range(count)]
            for index, shape in enumerate(self.SHAPES)
        ]

        @tf.function(autograph=False)
        def reduce() -> Any:
            values = [*map(tu.per_replica, arrays)]
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            results = ops.batch_reduce(tu.SUM, [(value, value) for value in values])
            counts.append(len(graph.get_operations()) - before)
            return [result.values for result in results]

        counts: list[int] = []
        for own, results in zip(arrays, reduce(), strict=True):
            self.assert_exact(results[0], tu.oracle(tu.SUM, own), tf.as_dtype(dtype))
            self.assert_bitwise_equal(results)
        operations = reduce.get_concrete_function().graph.get_operations()
        names = [op.name for op in operations]
        packs = {int(found[1]) for name in names if (found := re.match(r"tfcdo/pack(\d+)/", name))}
        self.assertEqual(set(range(told.num_packs)), packs)
        copied = tu.copied_bytes(operations, told.devices)
        self.assertEqual(copied, told.bytes_by_link)
        self.assertEqual(copied, tu.copied_bytes(operations, told.devices + devices))
        self.assertEqual(counts[0], told.num_graph_ops)
        self.assertIn(f"{counts[0]:,} graph ops", str(told))
        adding = sum(len(pack.tensors) * sum(map(bool, pack.tree.children)) for pack in told.packs)
        self.assertEqual(adding, told.num_ops["AddN"])


class ExplainTest(tf.test.TestCase, parameterized.TestCase):
    SHAPES = ((100,), (5, 10), ())

    def explain(self, ops: Any, count: int = 3, **kwargs: Any) -> Any:
        return ops.explain(self.SHAPES, devices=[f"/cpu:{i}" for i in range(count)], **kwargs)

    def test_shares_of_owners(self):
        devices = tu.device_names(2)
        told = tfcdo.AutoAllReduce().explain([(30,), (10,), (10,)], devices=devices)
        self.assertEqual(told.owned_bytes, ())
        strategy = tfcdo.MirroredStrategy(devices)
        told = strategy.explain([(30,), (10,), (10,)], shard_optimizer_state=True)
        self.assertEqual(told.owned_bytes, (120, 80))
        self.assertEqual(dict(told.bytes_by_link), {(0, 1): 200, (1, 0): 200})
        self.assertRegex(str(told), "120 bytes a device instead of 200 bytes.* 1.20 of the mean")

    def test_copy_trees(self):
        told = self.explain(tfcdo.HierarchicalCopyAllReduce(num_packs=2), dtype=tf.float64)
        self.assertEqual(tu.device_names(3), told.devices)
        self.assertEqual("hierarchical_copy", told.algorithm)
        self.assertEqual([600, 608], [pack.num_bytes for pack in told.packs])
        self.assertEqual([two_level(3, 0), two_level(3, 1)], [pack.tree for pack in told.packs])
        # Up and down: 600 bytes between 0 and each of the others, 608 between 1 and each of them.
        text = str(told)
        for part in (
            "HierarchicalCopyAllReduce(num_packs=2, topology=None) on 3 devices",
            "because it was asked for; the topology 'shared_memory' was detected",
            "pack 1: 608 bytes of 3 values in 1 tensor along 1(0, 2)",
            "1,208 bytes on each of 2 links: 0 -> 1, 1 -> 0\n  608 bytes on each of 2",
            "2 AddN",
        ):
            self.assertIn(part, text)
        self.assertTrue(text.isascii())

    def test_reasons(self):
        for ops, algorithm, reason in (
            (tfcdo.AutoAllReduce(), "one_device", "auto found it fastest for 604 bytes"),
            (tfcdo.ReductionToOneDevice("/cpu:1"), "one_device", "summed on .*CPU:1"),
            (tfcdo.ReductionToOneDevice("/cpu:7"), "one_device", "everything is summed on CPU:7"),
            (tfcdo.ReductionToOneDevice(None, tf.add_n), "one_device", "accumulation_fn .*CPU:0"),
            (tfcdo.NcclAllReduce(), "hierarchical_copy", "NCCL cannot run: no NcclAllReduce"),
        ):
            with tu.kernels_for():
                told = self.explain(ops)
            self.assertEqual(algorithm, told.algorithm)
            self.assertRegex(told.reason, reason)
        with tu.kernels_for("CPU"):
            told = self.explain(tfcdo.NcclAllReduce(3))
        self.assertEqual("NCCL", told.algorithm)
        self.assertEqual([None] * 3, [pack.tree for pack in told.packs])
        self.assertEqual(9, told.num_ops["NcclAllReduce"])
        self.assertEmpty(told.bytes_by_link)

    def test_the_strategy_s_devices_by_default(self):
        ops = tfcdo.HierarchicalCopyAllReduce()
        with tf.distribute.MirroredStrategy(["/cpu:1", "/cpu:4"], cross_device_ops=ops).scope():
            told = ops.explain([(2,)])
        self.assertEqual((tu.device_name(1), tu.device_name(4)), told.devices)
        # Another test file of this process may have asked for more devices than this one.
        every_device = tu.device_names(len(tf.config.list_logical_devices("CPU")))
        self.assertEqual(every_device, ops.explain([(2,)]).devices)

    def test_bad_input(self):
        ops: Any = tfcdo.HierarchicalCopyAllReduce()
        for message, arguments in (
            (r"shapes\[1\] must be fully known; got \(None,", ([(2,), (None, 3)],)),
            ("shapes must be a list .* of each value; got 100", (100,)),
            (r"shapes\[0\] must be a shape .* got 'a'", (["a"],)),
            (r"shapes\[1\] must be a shape .* got \(-1,\): Dimension -1", ([(2,), (-1,)],)),
            ("dtype must be a dtype such as 'float32'; got 'float8'$", ([(2,)], "float8")),
            ("shard_optimizer_state must be True", ([(2,)], tf.float32, ["/cpu:0"], 3)),
            ("devices must be a list", ([(2,)], tf.float32, [])),
            ("each of devices must .*nonsense", ([(2,)], tf.float32, ["/cpu:0", "nonsense"])),
            ("adds; got string", ([(2,)], tf.string, ["/cpu:0", "/cpu:1"])),
        ):
            self.assertRaisesRegex((ValueError, TypeError), message, ops.explain, *arguments)
        with tu.kernels_for(), self.assertRaisesRegex(RuntimeError, "require_nccl"):
            self.explain(tfcdo.NcclAllReduce(require_nccl=True))
        self.assertEqual("nothing", ops.explain([]).algorithm)


K = 4  # Devices of plans.


class PlanFileTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    def save(self, topology: Topology, algorithm: str, num_packs: int | None = None) -> str:
        path = pathlib.Path(self.get_temp_dir(), "plan.json")
        plan = evaluate(algorithm, topology, 10**6, num_packs)
        path.write_text(plan.to_json(), encoding="utf-8")
        return str(path)

    def explain(self, ops: tfcdo.AutoAllReduce) -> Any:
        return ops.explain([(4000,)], devices=tu.device_names(K))

    @parameterized.parameters(("ring", 3), ("packed_trees", None))
    def test_runs_the_trees_of_the_plan(self, algorithm, num_packs):
        machine = preset("pcie", K)
        path = self.save(machine, algorithm, num_packs)
        ops = tfcdo.AutoAllReduce(plan=path, topology=machine)
        arrays = [tu.numbers((1003,), tf.float32, rank) for rank in range(K)]
        value = tu.per_replica(arrays)
        result = ops.reduce(tu.SUM, value, value)
        self.assert_exact(result.values[0], tu.oracle(tu.SUM, arrays), tf.float32)
        self.assert_bitwise_equal(result.values)
        told = ops.explain([(10**6,)], devices=tu.device_names(K))
        planned = resized(Evaluation.from_json(pathlib.Path(path).read_bytes()).plan, 10**6)
        packs = [(pack.tree, pack.num_bytes) for pack in told.packs]
        self.assertEqual(packs, [(pack.tree, 4 * pack.num_bytes) for pack in planned.packs])
        self.assertRegex(told.reason, "^the plan was given: .* trees|bundled")

    def test_a_plan_for_these_devices_needs_no_topology(self):
        name = str(detection.name_of_measured(tu.device_names(K)))
        measured = dataclasses.replace(preset("pcie", K), name=name)
        for machine in (preset("shared_memory", K), measured):
            ops = tfcdo.AutoAllReduce(plan=self.save(machine, "shuffle"))
            told = self.explain(ops)
            self.assertEqual((told.algorithm, told.num_packs), ("shuffle", K))
        self.assertIn(f"the topology {name!r} was given", told.reason)
        other = dataclasses.replace(measured, name=f"{name}, of another model")
        ops = tfcdo.AutoAllReduce(plan=self.save(other, "shuffle"))
        with self.assertRaisesRegex(ValueError, "of another model', and these devices are"):
            self.explain(ops)

    def test_a_plan_for_another_machine_is_refused(self):
        machine = preset("pcie", K)
        path = self.save(machine, "ring")
        made = "it was made for"
        other = f"{made} 'pcie', and these devices are 'shared_memory'; make one "
        for topology, count, reason in (
            (None, 3, f"{made} 4 devices, and there are 3; make one .*here:3 --save FILE`$"),
            (None, K, other + ".*here:4 .*, or pass the plan's own machine as topology="),
            (machine.subset([0, 2, 1, 3]), K, ".*pcie"),
        ):
            value = tu.per_replica([tf.ones([3])] * count)
            with self.assertRaisesRegex(ValueError, f"plan must be for this machine: {reason}"):
                tfcdo.AutoAllReduce(plan=path, topology=topology).reduce(tu.SUM, value, value)

    def test_what_is_no_plan_is_refused(self):
        damaged = pathlib.Path(self.save(preset("pcie", K), "ring"))
        text = damaged.read_text()
        seconds = re.findall(r'"\w*(?:seconds|bound)": ', text)
        self.assertLen(seconds, 3)
        for content, reason in (
            ("{", "truncated"),
            ("{}", "missing required field"),
            (text.replace('"start": 0', '"start": 1'), "must begin at 0"),
            (text.replace("[null,", "[1,"), "root"),
            (text.replace('\n  "num_devices": ', '\n  "num_devices": 9'), "num_devices must be"),
            (text.replace('["0 out"', '["nowhere"'), "must hold names"),
            *((text.replace(one, f"{one}-"), f">= 0.0.*{one[1:-3]}") for one in seconds),
            *((text.replace(one, f"{one}NaN, "), "malformed") for one in seconds),
        ):
            damaged.write_text(content)
            with self.assertRaisesRegex(ValueError, f"plan must be .*plan.json: .*{reason}"):
                tfcdo.AutoAllReduce(plan=damaged)
        with self.assertRaisesRegex(ValueError, "plan must be .*none.json: No such file"):
            tfcdo.AutoAllReduce(plan="none.json")
        with self.assertRaisesRegex(TypeError, "plan must be the path of a file.*; got 5"):
            tfcdo.AutoAllReduce(plan=5)  # type: ignore[arg-type]


if __name__ == "__main__":
    tf.test.main()
