from __future__ import annotations

import json
import subprocess
from unittest import mock

import numpy as np
import tensorflow as tf
import warm_python
from absl.testing import parameterized
from bench_testing import (
    SMALL,
    TF_HIERARCHICAL,
    ForgetsTheLastDevice,
    broadcast,
    implementation_of,
    names_of,
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)

from tfcdo.bench import implementations, measure, steps, workloads
from tfcdo.bench.devices import choose_devices


class StepTest(parameterized.TestCase, tf.test.TestCase):
    def test_wrong_elements_are_counted(self):
        data = steps.place_values(SMALL, choose_devices(3))
        last = [variable.numpy() for variable in data.variables[-1]]
        # What is left out is missed wherever it is not 0, on each of the three devices.
        expected = 3 * sum(np.count_nonzero(array) for array in last)
        self.assertGreater(expected, 0)
        ops = ForgetsTheLastDevice()
        wrong = steps.build(
            data, lambda values: ops.batch_reduce(None, [(v, v) for v in values])
        ).num_wrong
        self.assertEqual(wrong, expected)

    def test_a_wrong_shape_is_wrong_in_every_element(self):
        data = steps.place_values(SMALL, choose_devices(2))
        values = [[tf.reshape(total, [1, -1]) for total in data.sums]] * 2
        self.assertEqual(data.num_wrong(values), 2 * SMALL.count)

    @parameterized.parameters(*names_of(implementations.parse("all")))
    def test_every_implementation_is_right_on_two_devices(self, name: str):
        devices = choose_devices(2)
        one = implementation_of(name)
        if one.reason_not_to_run(devices.names, "float32"):
            self.assertIn("Nccl", name)
            return
        built = steps.build(steps.place_values(SMALL, devices), one.reducer(devices.names))
        self.assertEqual(built.num_wrong, 0)
        self.assertIsInstance(built.first_call, float)

    def test_each_device_has_other_values(self):
        data = steps.place_values(SMALL, choose_devices(2))
        first, second = data.variables
        self.assertNotAllEqual(first[0], second[0])
        self.assertEqual([value.device for value in second], [data.devices.names[1]] * 3)
        self.assertAllEqual(first[0] + second[0], data.sums[0])

    def test_small_values_of_one_shape_are_read_together(self):
        shapes = ((2, 3), (2**14 + 1,), (5,), (2, 3), (2**14 + 1,), (5,), (), (2, 3))
        data = steps.place_values(workloads.Workload("w", shapes), choose_devices(2))
        self.assertEqual(data.coalesced, ((0, 3, 7), (1,), (2, 5), (4,), (6,)))
        values = data.read()
        self.assertEqual([value.shape for value in values[1]], list(shapes))
        for addends, total in zip(zip(*values, strict=True), data.sums, strict=True):
            self.assertAllEqual(tf.add_n(addends), total)

    def test_only_what_the_all_reduce_adds_is_counted(self):
        devices = choose_devices(3)
        data = steps.place_values(SMALL, devices)
        nodes = [
            steps.count_nodes(steps.trace(data, reduce))
            for reduce in (
                None,
                lambda values: [broadcast(value.values[0]) for value in values],
            )
        ]
        self.assertEqual(nodes[1] - nodes[0], len(SMALL.shapes) * 3)

    def test_the_graph_is_a_tenth_of_tensorflows(self):
        data = steps.place_values(workloads.gradients_of("mobilenet"), choose_devices(4))
        base = steps.count_nodes(steps.trace(data, None))

        def added(name: str) -> int:
            reduce = implementation_of(name).reducer(data.devices.names)
            return steps.count_nodes(steps.trace(data, reduce)) - base

        self.assertLessEqual(added("tfcdo.AutoAllReduce"), 0.10 * added(TF_HIERARCHICAL))


_PEAKS = """
import json
import tensorflow as tf
from bench_testing import broadcast
from tfcdo.bench import devices, measure, steps, workloads

pair = devices.choose_devices(2)
data = steps.place_values(workloads.Workload("w", ((2**20,),)), pair)

def reduce(values):
    first, second = values[0].values
    # Two temporary tensors that live at the same time, the product in the place of one.
    return [broadcast(tf.negative(first) * tf.exp(second), 2)]

built = [steps.build(data, one) for one in (reduce, None)]
print(json.dumps([measure.peak_of(one.step, pair) for one in built]))
"""


class MemoryTest(tf.test.TestCase):
    def test_peak_is_what_a_step_makes_at_the_same_time(self):
        # In a process of its own: where others have freed memory, TensorFlow's allocator may take,
        # and count, a piece that is larger than what it was asked for.
        command = [warm_python.executable(), "-c", _PEAKS]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        # Not every build of TensorFlow has an allocator for processors that counts.
        self.assertIn(json.loads(printed), ([2 * 4 * 2**20, 0], [None, None]))

    def test_peak_is_counted_from_what_was_in_use_before(self):
        in_use = [{"current": 5, "peak": 9}]
        info = mock.patch.object(
            tf.config.experimental, "get_memory_info", side_effect=lambda _: in_use[-1]
        )
        reset = mock.patch.object(tf.config.experimental, "reset_memory_stats")
        with info, reset:
            peak = measure.peak_of(
                lambda: in_use.append({"current": 6, "peak": 105}), choose_devices(2)
            )
        self.assertEqual(peak, 100)

    def test_no_count_is_no_number(self):
        error = ValueError("Allocator stats not available")
        with mock.patch.object(tf.config.experimental, "get_memory_info", side_effect=error):
            self.assertIsNone(measure.peak_of(lambda: None, choose_devices(2)))


class DevicesTest(tf.test.TestCase):
    def test_cards_are_taken_if_there_are_enough(self):
        cards = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in range(2)]

        def list_devices(kind: str) -> list[tf.config.PhysicalDevice]:
            return cards if kind == "GPU" else processors

        processors = tf.config.list_physical_devices("CPU")
        details = {"device_name": "Some Card"}
        with (
            mock.patch.object(tf.config, "list_physical_devices", list_devices),
            mock.patch.object(tf.config.experimental, "get_device_details", lambda _: details),
        ):
            two, three = choose_devices(2), choose_devices(3)
        self.assertEqual(two.description, "2 x Some Card")
        self.assertFalse(two.on_cpu)
        self.assertEndsWith(two.names[1], "device:GPU:1")
        self.assertEqual(three.description, "3 virtual CPU devices, because there are only 2 GPUs")
        self.assertEndsWith(three.names[2], "device:CPU:2")


if __name__ == "__main__":
    tf.test.main()
