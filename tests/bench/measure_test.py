from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import timeit
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from bench_testing import (
    SMALL,
    TF_HIERARCHICAL,
    forgets_the_last_device,
    implementation_of,
    measurement_of,
    names_of,
    setUpModule,  # noqa: F401
    silently,
    tearDownModule,  # noqa: F401
)
from cli_testing import run_tfcdo

from tfcdo.bench import devices, measure, results, updates, workloads
from tfcdo.bench.devices import choose_devices


class MeasureTest(parameterized.TestCase, tf.test.TestCase):
    def test_steps_take_turns(self):
        taken: list[str] = []
        now = 0.0

        def step(name: str, seconds: float) -> None:
            nonlocal now
            now += seconds
            taken.append(name)

        compared = {"a": 1.0, "b": 0.002}
        timer = functools.partial(timeit.timeit, timer=lambda: now)
        with mock.patch.object(measure.timeit, "timeit", timer):
            samples = {
                name: measure.TimedStep(functools.partial(step, name, seconds), 0.0, None).sample
                for name, seconds in compared.items()
            }
            times = results.take_turns(samples, 2, 1, silently)
        # After the first round, as many calls of the short step as fill a sample.
        self.assertEqual("".join(taken), "ab" + 2 * "abbb")
        self.assertAllClose(times, {name: [one] * 2 for name, one in compared.items()})

    def test_algbw_and_busbw(self):
        one = measurement_of("x", "tf", 2e-6)
        self.assertAllClose(one.algbw, 2e9)
        self.assertAllClose(one.busbw, 2e9 * 2 * 3 / 4)
        cast = dataclasses.replace(one, sent_size=one.size // 2)
        self.assertAllClose((one.algbw, one.busbw / 2), (cast.algbw, cast.busbw))
        for noise in (-1e-6, 1e-6):
            lost = dataclasses.replace(one, seconds=noise, spread=1e-6)
            self.assertTrue(math.isnan(lost.busbw))

    def test_the_baseline_of_the_same_round_is_subtracted(self):
        # The median of the differences, which is not the difference of the medians.
        name = "tfcdo.ReductionToOneDevice"
        walls = {"baseline": [1.0, 5.0, 9.0], name: [3.0, 6.0, 20.0]}
        track = mock.Mock(side_effect=silently)
        with mock.patch.object(results, "take_turns", return_value=walls) as take_turns:
            compared = [implementation_of(name)]
            found = measure.run(SMALL, choose_devices(2), compared, 3, 0, track)
        self.assertSameElements(walls, take_turns.call_args.args[0])
        self.assertEqual(take_turns.call_args.args[1:], (3, 0, track))
        track.assert_called_once_with(compared, description="building and checking")
        self.assertAllClose([one.seconds for one in found], [2.0, 5.0])
        self.assertAllClose([one.spread for one in found], [5.0, 4.0])
        ours, baseline = found
        self.assertEqual((ours.size, ours.count, ours.num_devices), (48, 12, 2))
        self.assertEqual([one.kind for one in found], [ours.name[:5], results.BASELINE])
        self.assertEqual((ours.wrong, baseline.wrong), (0, None))
        self.assertGreater(ours.first_call or 0.0, 0.0)


def _count_nodes(data: measure.Data, compared: measure.Implementation | None) -> int:
    """Counts the ops in the graph of a step and in the functions it calls."""
    function = measure._function(data, compared, returns=False).get_concrete_function()
    graph = function.graph.as_graph_def()
    return len(graph.node) + sum(len(inner.node_def) for inner in graph.library.function)


class StepTest(parameterized.TestCase, tf.test.TestCase):
    def test_wrong_elements_are_counted(self):
        data = measure.Data(SMALL, choose_devices(3))
        first, second, last = ([one.numpy() for one in variables] for variables in data.variables)
        # Each device has other values.
        self.assertNotAllEqual(first[0], second[0])
        self.assertEqual([one.device for one in data.variables[1]], [data.devices.names[1]] * 3)
        self.assertAllEqual(first[0] + second[0] + last[0], data.sums[0])
        # What is left out is missed wherever it is not 0, on each of the three devices.
        expected = 3 * sum(np.count_nonzero(array) for array in last)
        self.assertGreater(expected, 0)
        ops = measure.Implementation("wrong", forgets_the_last_device())
        wrong = measure.build(data, ops).num_wrong
        self.assertEqual(wrong, expected)
        # A wrong shape is wrong in every element.
        values = [[tf.reshape(total, [1, -1]) for total in data.sums]] * 3
        self.assertEqual(data.num_wrong(values), 3 * SMALL.count)

    @parameterized.parameters(*names_of(measure.parse("all")))
    def test_every_implementation_is_right_on_two_devices(self, name: str):
        devices = choose_devices(2)
        one = implementation_of(name)
        if one.reason_not_to_run(devices.names, "float32"):
            self.assertIn("Nccl", name)
            return
        built = measure.build(measure.Data(SMALL, devices), one)
        self.assertEqual(built.num_wrong, 0)
        self.assertIsInstance(built.first_call, float)

    def test_small_values_of_one_shape_are_read_together(self):
        shapes = ((2, 3), (2**14 + 1,), (5,), (2, 3), (2**14 + 1,), (5,), (), (2, 3))
        data = measure.Data(workloads.Workload("w", shapes), choose_devices(2))
        self.assertEqual(data.coalesced, [[0, 3, 7], [1], [2, 5], [4], [6]])
        values = data.read()
        self.assertEqual([value.shape for value in values[1]], list(shapes))
        for addends, total in zip(zip(*values, strict=True), data.sums, strict=True):
            self.assertAllEqual(tf.add_n(addends), total)

    def test_the_graph_is_a_tenth_of_tensorflows(self):
        data = measure.Data(workloads.gradients_of("mobilenet"), choose_devices(4))
        base = _count_nodes(data, None)

        def added(name: str) -> int:
            return _count_nodes(data, implementation_of(name)) - base

        self.assertLessEqual(added("tfcdo.AutoAllReduce"), 0.10 * added(TF_HIERARCHICAL))


class UpdatesTest(tf.test.TestCase):
    def test_steps_of_all_reduce_plus_update_take_turns(self):
        names = ["tf.distribute.MirroredStrategy", "tfcdo.MirroredStrategy"]
        names += ["shard_optimizer_state=True"]
        path = pathlib.Path(self.get_temp_dir(), "found.json")
        # Halves for two devices.
        shapes = mock.patch.object(updates, "_SHAPES", ((40, 50), (2000,)))
        turns = mock.patch.object(results, "take_turns", wraps=results.take_turns)
        with shapes, turns as take_turns:
            arguments = ("--optimizer", "adam", "-g", "2", "-n", "2", "-w", "0", "-J", str(path))
            status, output, errors = run_tfcdo("bench", *arguments)
        self.assertEqual(status, 0, errors)
        self.assertIn("2 devices, all-reduce and adam update of 16.0 kB", output)
        self.assertEqual([*take_turns.call_args.args[0]], names)
        found = json.loads(path.read_text())["results"]
        self.assertEqual([one["kind"] for one in found], ["tf", "tfcdo", "tfcdo"])
        for one, name in zip(found, names, strict=True):
            self.assertIn(name, output)
            self.assertEqual((one["name"], one["size"], one["num_devices"]), (name, 16_000, 2))
            # Tracing takes longer than a step.
            self.assertGreater(one["first_call"], one["seconds"])
        # Two slots of 16 kB on each of two devices, or half of them on each; and some counters.
        states = [one["state_bytes"] for one in found]
        self.assertAllClose(states, [64_000, 64_000, 32_000], atol=100)


class DevicesTest(tf.test.TestCase):
    def test_cards_are_taken_if_there_are_enough(self):
        devices = [
            *(tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in range(2)),
            *tf.config.list_physical_devices("CPU"),
        ]
        with (
            mock.patch.object(
                tf.config,
                "list_physical_devices",
                lambda kind: [one for one in devices if one.device_type == kind],
            ),
            mock.patch.object(
                tf.config.experimental, "get_device_details", lambda _: {"device_name": "A Card"}
            ),
        ):
            two, three = choose_devices(2), choose_devices(3)
        self.assertEqual((two.description, two.on_cpu), ("2 x A Card", False))
        self.assertEndsWith(two.names[1], "device:GPU:1")
        self.assertEqual(three.description, "3 virtual CPU devices, because there are only 2 GPUs")
        self.assertEndsWith(three.names[2], "device:CPU:2")


class EvaluationTest(tf.test.TestCase):
    def test_wrong_results_are_not_the_fastest(self):
        wrong, slow, right = (
            measurement_of(name, "tf", seconds, wrong=name == "tf.Wrong")
            for name, seconds in (("tf.Wrong", 1.0), ("tf.Slow", 3.0), ("tf.Right", 2.0))
        )
        found = [wrong, slow, right, measurement_of("tfcdo.X", "tfcdo", 0.5)]
        self.assertIs(results.fastest(found, "tf"), right)
        self.assertIsNone(results.fastest(found, results.BASELINE))

    def test_cores_of_a_system_without_affinities(self):
        self.enter_context(mock.patch.object(os, "sched_getaffinity", create=True))
        del os.sched_getaffinity
        with mock.patch.object(os, "cpu_count", return_value=48):
            self.assertEqual(devices.describe_environment("2 devices")["machine"]["cores"], 48)


if __name__ == "__main__":
    tf.test.main()
