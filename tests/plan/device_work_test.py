"""What devices do beside copying, counted by hand."""

from __future__ import annotations

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from tfcdo.plan import algorithms
from tfcdo.plan import simulator
from tfcdo.plan.device_work import device_seconds
from tfcdo.plan.device_work import predicted_seconds
from tfcdo.topology.presets import preset

_GB = 10**9


class DeviceWorkTest(parameterized.TestCase):
    @parameterized.parameters(
        # Four passes on each device, and on the busiest one the four operands and the sum.
        ("one_device", 4 + 5),
        # Each of four packs: two operands and a sum on all devices but the leaf.
        ("ring", 4 + 3 * 3 / 4),
        ("shuffle", 4 + 5 / 4),
    )
    def test_on_gpus_the_busiest_device_counts(self, algorithm, passes):
        machine = dataclasses.replace(preset("nvswitch", 4), memory_bandwidth=1e9)
        schedule = algorithms.make_schedule(algorithm, machine, _GB)
        self.assertAlmostEqual(device_seconds(schedule, machine), passes)

    @parameterized.parameters(
        # One pack travels as it is; the simulator adds three operands, here are two accesses more.
        ("one_device", 2 / 5, 3 + 1),
        # All devices in turn: four passes each, and twice as many accesses for each addition.
        ("ring", 4 * 4 / 2 + 3 * 2 / 5, 8 + 4 * (3 + 3)),
        ("shuffle", 4 * 4 / 2 + 2 / 5, 8 + 4 * (3 + 1)),
    )
    def test_on_processors_all_devices_count(self, algorithm, seconds, num_ops):
        machine = dataclasses.replace(
            preset("shared_memory", 4), addition_bandwidth=5e9, memory_bandwidth=2e9
        )
        schedule = algorithms.make_schedule(algorithm, machine, _GB)
        self.assertAlmostEqual(device_seconds(schedule, machine), seconds)
        costly = dataclasses.replace(machine, op_seconds=1.0)
        self.assertAlmostEqual(device_seconds(schedule, costly), seconds + num_ops)

    @parameterized.parameters(
        ("one_device", 100, 100),  # The sum.
        ("shuffle", 100, 4 * 100),  # The results; parts of 25 MB are kept.
        ("ring", 200, 4 * 200 + 4 * 200 + 0),  # The parts as well; sums are written over them.
        ("shuffle", 20, 0),
    )
    def test_large_tensors_get_new_memory(self, algorithm, size, megabytes):
        machine = dataclasses.replace(
            preset("shared_memory", 4), addition_bandwidth=1e30, allocation_bandwidth=1e6
        )
        schedule = algorithms.make_schedule(algorithm, machine, size * 10**6)
        self.assertAlmostEqual(device_seconds(schedule, machine), megabytes)

    def test_is_added_to_the_time_of_the_copies(self):
        machine = preset("dgx1")
        schedule = algorithms.make_schedule("hierarchical_copy", machine, 10**8)
        copies = simulator.robust_seconds(schedule, machine)
        # Four passes at 900 GB/s at least.
        self.assertGreater(predicted_seconds(schedule, machine), copies + 4e8 / 900e9)

    def test_one_device_does_nothing(self):
        machine = preset("shared_memory", 1)
        schedule = algorithms.make_schedule("ring", machine, 10**8)
        self.assertEqual(device_seconds(schedule, machine), 0.0)


if __name__ == "__main__":
    absltest.main()
