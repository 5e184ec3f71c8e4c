"""AutoAllReduce with a plan from a file."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile

import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo.cli.plan import evaluate
from tfcdo.plan.algorithms import resized
from tfcdo.plan.evaluation import Evaluation
from tfcdo.topology import detection
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

K = 4


class PlanFileTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    def folder(self) -> pathlib.Path:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return pathlib.Path(folder.name)

    def save(self, topology: Topology, algorithm: str, num_packs: int | None = None) -> str:
        path = self.folder() / "plan.json"
        plan = evaluate(algorithm, topology, 10**6, num_packs)
        path.write_text(plan.to_json(), encoding="utf-8")
        return str(path)

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
        planned = resized(Evaluation.read(path).plan, 10**6)
        self.assertEqual([pack.tree for pack in told.packs], [p.tree for p in planned.packs])
        self.assertEqual(
            [pack.num_bytes for pack in told.packs], [4 * p.num_bytes for p in planned.packs]
        )
        self.assertRegex(told.reason, "^the plan was given: .* trees|bundled")

    def test_a_plan_for_the_machine_at_hand_needs_no_topology(self):
        ops = tfcdo.AutoAllReduce(plan=self.save(preset("shared_memory", K), "shuffle"))
        told = ops.explain([(4000,)], devices=tu.device_names(K))
        self.assertEqual((told.algorithm, told.num_packs), ("shuffle", K))

    def test_a_plan_for_a_measurement_of_these_devices_needs_no_topology(self):
        name = str(detection.name_of_measured(tu.device_names(K)))
        machine = dataclasses.replace(preset("pcie", K), name=name)
        ops = tfcdo.AutoAllReduce(plan=self.save(machine, "shuffle"))
        told = ops.explain([(4000,)], devices=tu.device_names(K))
        self.assertEqual((told.algorithm, told.num_packs), ("shuffle", K))
        self.assertIn(f"the topology {name!r} was given", told.reason)
        with self.assertRaisesRegex(ValueError, "for 4 devices, and there are 3"):
            ops.explain([(4000,)], devices=tu.device_names(3))
        other = dataclasses.replace(machine, name=f"{name}, of another model")
        ops = tfcdo.AutoAllReduce(plan=self.save(other, "shuffle"))
        with self.assertRaisesRegex(ValueError, "of another model', and these devices are"):
            ops.explain([(4000,)], devices=tu.device_names(K))

    @parameterized.parameters(
        (
            3,
            "it was made for 4 devices, and there are 3; make one here with `tfcdo plan -t here:3 "
            "--save FILE`$",
        ),
        (
            4,
            "it was made for 'pcie', and these devices are 'shared_memory'; make one .*here:4 .*, "
            "or pass the plan's own machine as topology= to use it all the same",
        ),
    )
    def test_a_plan_for_another_machine_is_refused(self, count, reason):
        ops = tfcdo.AutoAllReduce(plan=self.save(preset("pcie", K), "ring"))
        value = tu.per_replica([tf.ones([3])] * count)
        with self.assertRaisesRegex(ValueError, f"plan must be for this machine: {reason}"):
            ops.reduce(tu.SUM, value, value)

    def test_a_plan_for_other_links_of_the_same_name_is_refused(self):
        machine = preset("pcie", K)
        ops = tfcdo.AutoAllReduce(
            plan=self.save(machine, "ring"), topology=machine.subset([0, 2, 1, 3])
        )
        with self.assertRaisesRegex(ValueError, "plan must be for this machine: .*pcie"):
            ops.explain([(3,)], devices=tu.device_names(K))

    def test_what_is_no_plan_is_refused(self):
        folder = self.folder()
        damaged = folder / "damaged.json"
        text = pathlib.Path(self.save(preset("pcie", K), "ring")).read_text()
        for content, reason in (
            ("{", "truncated"),
            ("{}", "missing required field"),
            (text.replace('"start": 0', '"start": 1'), "must begin at 0"),
            (text.replace("[null,", "[1,"), "root"),
            (text.replace('["0 out"', '["nowhere"'), "must hold names"),
        ):
            damaged.write_text(content)
            with self.assertRaisesRegex(ValueError, f"plan must be .*damaged.json: .*{reason}"):
                tfcdo.AutoAllReduce(plan=damaged)
        with self.assertRaisesRegex(ValueError, "plan must be .*none.json: No such file"):
            tfcdo.AutoAllReduce(plan=folder / "none.json")
        with self.assertRaisesRegex(TypeError, "plan must be the path of a file.*; got 5"):
            tfcdo.AutoAllReduce(plan=5)  # type: ignore[arg-type]
        with self.assertRaisesRegex(TypeError, "nccl must be True or False; got 'no'"):
            tfcdo.AutoAllReduce(nccl="no")  # type: ignore[arg-type]


if __name__ == "__main__":
    tf.test.main()
