"""Measuring this machine: in a file, and used where it is passed."""

from __future__ import annotations

import json
import math

import cli_testing
import measurement_testing
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo import topology
from tfcdo.topology import detection


class MeasureTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = measurement_testing.measure_briefly(self)

    def test_is_not_used_unasked(self):
        devices = tu.device_names(3)
        self.assertEqual(topology.detect(devices).name, "shared_memory")
        parts: list[float] = []
        found = topology.measure(devices, progress=lambda done, what: parts.append(done))
        self.assertEqual(parts, sorted(parts))
        self.assertEqual((parts[0], parts[-1]), (0.0, 1.0))
        self.assertRegex(found.name, "^measured 3 CPU devices of .* with [0-9]+ cores$")
        self.assertTrue(found.is_measured)
        # Virtual devices hand tensors over, and add with the same cores.
        self.assertEqual((found.bandwidth(0, 2), found.latency(1, 0)), (math.inf, 0.0))
        self.assertTrue(found.serial_reduction)
        # How large they are is not asserted: so little is timed that a busy machine could upset it.
        self.assertBetween(found.addition_bandwidth, 1.0, 1e15)
        self.assertEmpty(list(self.folder.iterdir()))
        detection.detect_with_reason.cache_clear()
        self.assertEqual(topology.detect(devices).name, "shared_memory")
        reason = tfcdo.AutoAllReduce(nccl=False).explain([(3,)], devices=devices).reason
        self.assertIn("the topology 'shared_memory' was detected", reason)

    def test_is_used_where_it_is_passed(self):
        devices, path = tu.device_names(3), self.folder / "mine.json"
        found = topology.measure(devices, path=path)
        self.assertEqual([path], list(self.folder.iterdir()))
        written = self.folder / "topology.json"
        written.write_text(found.to_json())
        for given in (path, str(path), written, found):
            ops = tfcdo.HierarchicalCopyAllReduce(topology=given)
            told = ops.explain([(3,)], devices=devices)
            self.assertIn(f"the topology {found.name!r} was given", told.reason)
            self.assertIn(found.name, repr(ops))

    def test_a_command_plans_for_this_machine(self):
        arguments = ("plan", "-t", "here:3", "-b", "1MB", "--save", str(self.folder / "plan.json"))
        status, output, errors = cli_testing.run_tfcdo(*arguments)
        self.assertEqual(status, 0, errors)
        name = detection.name_of_measured(tu.device_names(3)) or ""
        self.assertStartsWith(name, "measured 3 CPU devices of ")
        self.assertIn(name, " ".join(output.split()))
        self.assertIn("0% additions", errors)
        plan = json.loads((self.folder / "plan.json").read_text())
        self.assertEqual(plan["topology"]["name"], name)

    def test_other_files_are_refused(self):
        damaged = self.folder / "damaged.json"
        for content, reason in (
            ("{", "not a JSON text"),
            ("{}", "not a topology"),
            ('{"date": "2026-01-01"}', "missing required field `topology`"),
            (b"\xff", "codec can't decode"),
        ):
            damaged.write_bytes(content if isinstance(content, bytes) else content.encode())
            with self.assertRaisesRegex(ValueError, f"topology must be .*damaged.json: .*{reason}"):
                tfcdo.AutoAllReduce(topology=damaged)
        with self.assertRaisesRegex(
            ValueError, "topology must be a file .*none.json: No such file"
        ):
            tfcdo.AutoAllReduce(topology=self.folder / "none.json")
        with self.assertRaisesRegex(TypeError, "topology must be a .*, the path of .*; got 5"):
            tfcdo.AutoAllReduce(topology=5)  # type: ignore[arg-type]
        with self.assertRaises(OSError):
            topology.measure(tu.device_names(2), path=damaged / "mine.json")

    @parameterized.parameters(
        ([], "at least one device"),
        (["CPU:0", "CPU:0"], "different CPUs or GPUs of this host; got .*CPU:0"),
        (["CPU:0", "GPU:0"], "different CPUs or GPUs"),
        (["TPU:0"], "different CPUs or GPUs"),
        (["/job:w/task:0/device:CPU:0", "/job:w/task:1/device:CPU:0"], "of this host"),
        ([f"CPU:{number}" for number in range(17)], "at most 16; got 17"),
    )
    def test_other_devices_are_refused(self, devices, message):
        with self.assertRaisesRegex(ValueError, f"devices must be .*{message}"):
            topology.measure(devices)


if __name__ == "__main__":
    tf.test.main()
