"""AutoAllReduce with a plan from a file."""

from __future__ import annotations

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
from tfcdo.plan.evaluation import Evaluation
from tfcdo.topology import detection
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

K = 4


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
        self.assertEqual([pack.tree for pack in told.packs], [p.tree for p in planned.packs])
        self.assertEqual(
            [pack.num_bytes for pack in told.packs], [4 * p.num_bytes for p in planned.packs]
        )
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
        other = "it was made for 'pcie', and these devices are 'shared_memory'; make one "
        for topology, count, reason in (
            (
                None,
                3,
                "it was made for 4 devices, and there are 3; make one .*here:3 --save FILE`$",
            ),
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
