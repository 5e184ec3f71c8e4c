"""Measuring this machine: written to a file, which is used only where it is given."""

from __future__ import annotations

import math
import os
from unittest import mock

import measurement_testing
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

from tfcdo import topology
from tfcdo.topology import measured


class MeasureTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = measurement_testing.measure_briefly(self)

    def test_is_kept_and_not_used_unasked(self):
        devices = tu.device_names(3)
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
        for name in ("addition_bandwidth", "memory_bandwidth", "op_seconds"):
            self.assertGreater(getattr(found, name), 0.0)
            self.assertLess(getattr(found, name), math.inf)
        (file,) = self.folder.iterdir()
        self.assertStartsWith(file.name, "measured-3-cpu-devices-of-")
        self.assertEqual(measured.read(file).topology, found)
        self.assertEqual(measured.load(found.name), measured.read(file))
        self.assertEqual(topology.detect(devices).name, "shared_memory")

    def test_a_damaged_file(self):
        path = self.folder / "here.json"
        found = topology.measure(tu.device_names(2), path=path)
        self.assertEqual(measured.read(path).topology, found)
        text = path.read_text()
        for damaged in ("{", text.replace('"num_devices": 2', '"num_devices": 3')):
            path.write_text(damaged)
            with self.assertRaisesRegex(ValueError, f"^{path}: "):
                measured.read(path)
        kept = measured.save(measured.Measured(found, "2026-01-01"))
        kept.write_text("{")
        with self.assertLogs("absl", "WARNING") as logs:
            self.assertIsNone(measured.load(found.name))
        self.assertRegex(logs.output[0], f"ignoring .*{kept.name}, which is no measurement")

    def test_what_cannot_be_kept_is_returned_and_logged(self):
        (self.folder / "file").touch()
        nowhere = {"TFCDO_CACHE_DIR": str(self.folder / "file")}
        with mock.patch.dict(os.environ, nowhere), self.assertLogs("absl", "WARNING") as logs:
            self.assertTrue(topology.measure(tu.device_names(2)).is_measured)
        self.assertRegex(logs.output[0], "what was measured is not kept: .*TFCDO_CACHE_DIR")

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

    def test_two_names_never_share_a_file(self):
        machine = topology.preset("pcie")
        for name in ("measured 4 GPUs, A", "measured 4 GPUs. A"):
            found = measured.Measured(
                topology.Topology(name, 4, machine.resources, machine.links), "2026-01-01"
            )
            measured.save(found)
            self.assertEqual(measured.load(name), found)
        self.assertLen(list(self.folder.iterdir()), 2)


if __name__ == "__main__":
    tf.test.main()
