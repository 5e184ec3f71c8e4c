"""Workloads, the implementations that are compared, and how they are timed and checked."""

import dataclasses
import functools
import json
import math
import pathlib
import timeit
from unittest import mock

import bench_testing
import numpy as np
import tensorflow as tf
import tensorflow_quirks
from absl.testing import parameterized
from bench_testing import TF_HIERARCHICAL, forgets_the_last_device, measurement_of
from cli_testing import run_tfcdo

from tfcdo.bench import measure, results, updates, workloads
from tfcdo.bench.devices import choose_devices

setUpModule, tearDownModule = bench_testing.set_up, bench_testing.tear_down
_SMALL = workloads.Workload("small", ((3, 2), (5,), (), (3, 2)))


class WorkloadTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        # The published numbers of trainable parameters, of BERT-base uncased.
        ("bert-base", 199, 109_482_240), ("resnet50", 214, 25_583_592),
        ("mobilenet", 158, 3_504_872), ("tiny-matrices", 500, 32_000),
    )  # fmt: skip
    def test_number_of_values_and_elements(self, name: str, num_values: int, count: int):
        workload = workloads.gradients_of(name, "float16")
        self.assertLen(workload.shapes, num_values)
        self.assertEqual((workload.count, workload.size), (count, 2 * count))

    @parameterized.parameters(*workloads.DTYPES.values())
    def test_sums_are_exact_in_every_dtype(self, dtype: str):
        workload = workloads.Workload("w", ((1000,),), dtype)
        arrays = [workloads.draw_values(workload, seed)[0] for seed in range(16)]
        exact = np.sum(arrays, axis=0, dtype=np.int64)
        summed = tf.add_n([tf.cast(array, dtype) for array in arrays])
        self.assertAllEqual(tf.cast(summed, tf.int64), exact)
        self.assertGreater(len(np.unique(exact)), 10)


class MeasureTest(tf.test.TestCase):
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
            times = results.take_turns(samples, 2, 1, lambda rounds, **_: rounds)
        # After the first round, as many calls of the short step as fill a sample.
        self.assertEqual("".join(taken), "ab" + 2 * "abbb")
        self.assertAllClose(times, {name: [one] * 2 for name, one in compared.items()})

    def test_algbw_and_busbw(self):
        one = measurement_of("x", "tf", 2e-6)
        self.assertAllClose((one.algbw, one.busbw), (2e9, 2e9 * 2 * 3 / 4))
        cast = dataclasses.replace(one, sent_size=one.size // 2)
        self.assertAllClose((one.algbw, one.busbw / 2), (cast.algbw, cast.busbw))
        for noise in (-1e-6, 1e-6):
            self.assertTrue(math.isnan(dataclasses.replace(one, seconds=noise, spread=1e-6).busbw))

    def test_the_baseline_of_the_same_round_is_subtracted(self):
        # The median of the differences, which is not the difference of the medians.
        name = "tfcdo.ReductionToOneDevice"
        walls = {"baseline": [1.0, 5.0, 9.0], name: [3.0, 6.0, 20.0]}
        with mock.patch.object(results, "take_turns", return_value=walls) as take_turns:
            compared = measure.parse(name)
            found = measure.run(_SMALL, choose_devices(2), compared, 3, 0, lambda one, **_: one)
        self.assertSameElements(walls, take_turns.call_args.args[0])
        self.assertAllClose([one.seconds for one in found], [2.0, 5.0])
        self.assertAllClose([one.spread for one in found], [5.0, 4.0])
        ours, baseline = found
        self.assertEqual((ours.size, ours.count, ours.num_devices), (72, 18, 2))
        self.assertEqual((ours.wrong, baseline.wrong), (0, None))
        self.assertGreater(ours.first_call or 0.0, 0.0)

    def test_wrong_elements_are_counted(self):
        data = measure.Data(_SMALL, choose_devices(3))
        first, second, last = ([one.numpy() for one in variables] for variables in data.variables)
        self.assertNotAllEqual(first[0], second[0])
        self.assertEqual([one.device for one in data.variables[1]], [data.devices.names[1]] * 3)
        # What is left out is missed wherever it is not 0, on each of the three devices.
        expected = 3 * sum(np.count_nonzero(array) for array in last)
        self.assertGreater(expected, 0)
        ops = measure.Implementation("wrong", forgets_the_last_device())
        self.assertEqual(measure.build(data, ops).num_wrong, expected)
        values = [[tf.reshape(total, [1, -1]) for total in data.sums]] * 3
        self.assertEqual(data.num_wrong(values), 3 * _SMALL.count)

    def test_each_implementation_is_correct_unless_it_needs_nccl(self):
        chosen, by_nccl = choose_devices(2), []
        names = (
            *("tf.distribute.ReductionToOneDevice()", "tfcdo.NcclAllReduce(num_packs=2)"),
            *("tfcdo.AllReduceCrossDeviceOps", "tfcdo.AllReduceCrossDeviceOps('ring')"),
        )
        for one in [one for name in ("all", *names) for one in measure.parse(name)]:
            if reason := one.reason_not_to_run(chosen.names, "float32"):
                self.assertIn("no NcclAllReduce kernel is registered for CPU", reason)
                by_nccl.append(one.name)
            else:
                step = measure.build(measure.Data(_SMALL, chosen), one)
                self.assertEqual(step.num_wrong, 0, one.name)
        self.assertEqual(by_nccl, ["tfcdo.NcclAllReduce", "tf.NcclAllReduce", *names[1:3]])

    def test_the_graph_is_a_tenth_of_tensorflows(self):
        data = measure.Data(workloads.gradients_of("mobilenet"), choose_devices(4))

        def nodes(compared: measure.Implementation | None) -> int:
            """Counts the ops in the graph of a step and in the functions it calls."""
            function = measure._function(data, compared, returns=False).get_concrete_function()
            graph = function.graph.as_graph_def()
            return len(graph.node) + sum(len(inner.node_def) for inner in graph.library.function)

        compared = (measure.parse(name)[0] for name in ("tfcdo.AutoAllReduce", TF_HIERARCHICAL))
        ours, theirs = map(nodes, compared)
        self.assertLessEqual(ours - nodes(None), 0.10 * (theirs - nodes(None)))


class UpdatesTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self):
        super().setUp()
        tensorflow_quirks.keep_collectives_apart()  # Where pytest does not, by its conftest.py.

    @parameterized.parameters("adam", "lamb")
    def test_steps_of_all_reduce_plus_update_take_turns(self, name):
        names = ["tf.distribute.MirroredStrategy", "tfcdo.MirroredStrategy"]
        names += ["shard_optimizer_state=True"]
        path = pathlib.Path(self.get_temp_dir(), "found.json")
        turns = mock.patch.object(results, "take_turns", wraps=results.take_turns)
        with mock.patch.object(updates, "_SHAPES", ((40, 50), (2000,))), turns as take_turns:
            arguments = ("--optimizer", name, "-g", "2", "-n", "2", "-w", "0", "-J", str(path))
            status, output, errors = run_tfcdo("bench", *arguments)
        self.assertEqual(status, 0, errors)
        self.assertIn(f"2 devices, all-reduce and {name} update of 16.0 kB", output)
        self.assertEqual([*take_turns.call_args.args[0]], names)
        found = json.loads(path.read_text())["results"]
        self.assertEqual([one["name"] for one in found], names)
        self.assertEqual([one["kind"] for one in found], ["tf", "tfcdo", "tfcdo"])
        for one in found:
            self.assertIn(one["name"], output)
            self.assertGreater(one["first_call"], one["seconds"])
        # Two slots of 16 kB on each of two devices, or half of them on each; and some counters.
        states = [one["state_bytes"] for one in found]
        self.assertAllClose(states, [64_000, 64_000, 32_000], atol=100)


class DevicesTest(tf.test.TestCase):
    def test_cards_are_taken_if_there_are_enough(self):
        cards = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in range(2)]
        kinds = {"GPU": cards, "CPU": tf.config.list_physical_devices("CPU")}
        details = {"device_name": "A Card"}
        with (
            mock.patch.object(tf.config, "list_physical_devices", kinds.get),
            mock.patch.object(tf.config.experimental, "get_device_details", lambda _: details),
        ):
            two, three = choose_devices(2), choose_devices(3)
        self.assertEqual((two.description, two.on_cpu), ("2 x A Card", False))
        self.assertEndsWith(two.names[1], "device:GPU:1")
        self.assertEqual(three.description, "3 virtual CPU devices, because there are only 2 GPUs")
        self.assertEndsWith(three.names[2], "device:CPU:2")


if __name__ == "__main__":
    tf.test.main()
