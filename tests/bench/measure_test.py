from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from bench_testing import (
    QUICK,
    SMALL,
    TF_HIERARCHICAL,
    implementation_of,
    measurement_of,
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)

from tfcdo.bench import devices, fit, measure, steps, workloads
from tfcdo.bench.devices import choose_devices


class MeasureTest(parameterized.TestCase, tf.test.TestCase):
    def test_steps_take_turns(self):
        taken: list[str] = []
        now = 0.0

        def step_of(name: str, seconds: float) -> steps.Step:
            def step() -> None:
                nonlocal now
                now += seconds
                taken.append(name)

            return step

        compared = {"a": step_of("a", 1.0), "b": step_of("b", 0.002)}
        with (
            mock.patch.object(measure.time, "perf_counter", lambda: now),
            # As if two threads had computed all the time.
            mock.patch.object(measure.time, "process_time", lambda: 2 * now),
        ):
            times = measure.interleave(compared, measure.Settings(iterations=2, warmup=1))
        # After the first round, as many calls of the short step as fill a sample.
        self.assertEqual(taken, [*"ab", *"abbb", *"abbb"])
        self.assertAllClose(times["a"].wall, [1.0, 1.0])
        self.assertAllClose(times["b"].wall, [0.002, 0.002])
        self.assertAllClose(times["b"].cpu, [0.004, 0.004])

    def test_algbw_and_busbw(self):
        one = measurement_of("x", "tf", 2e-6)
        self.assertAllClose(one.algbw, 2e9)
        self.assertAllClose(one.busbw, 2e9 * 2 * 3 / 4)
        cast = dataclasses.replace(one, sent_size=one.size // 2)
        self.assertAllClose((one.algbw, one.busbw / 2), (cast.algbw, cast.busbw))
        for noise in (-1e-6, 1e-6):
            lost = dataclasses.replace(one, seconds=noise, spread=1e-6)
            self.assertTrue(math.isnan(lost.busbw))

    @parameterized.parameters(False, True)
    def test_a_run_measures_all_of_them(self, eager: bool):
        names = ["tfcdo.ReductionToOneDevice", TF_HIERARCHICAL]
        tracked: list[tuple[str, int]] = []

        def track(sequence: Sequence[Any], *, description: str) -> Iterable[Any]:
            for item in sequence:
                tracked.append((description, len(sequence)))
                yield item

        settings = measure.Settings(2, 1, eager)
        results = measure.run(
            SMALL,
            choose_devices(3),
            [implementation_of(name) for name in names],
            settings,
            track,
        )
        self.assertEqual(
            [(one.name, one.kind) for one in results],
            [
                (names[0], "tfcdo"),
                (names[1], "tf"),
                ("floor (XLA)", measure.FLOOR),
                ("floor (add_n)", measure.FLOOR),
                ("baseline", measure.BASELINE),
            ],
        )
        self.assertEqual(tracked, [("building and checking", 2)] * 2 + [("rounds", 3)] * 3)
        ours, theirs, *floors, baseline = results
        self.assertEqual((ours.size, ours.count, ours.num_devices), (48, 12, 3))
        self.assertEqual([one.wrong for one in (ours, *floors)], [0, 0, 0])
        # TensorFlow's class leaves a device out of an odd number, which has to show.
        self.assertNotEqual(theirs.wrong, 0)
        self.assertIsNone(baseline.wrong)
        self.assertGreater(baseline.seconds, 0.0)
        self.assertEqual([one.first_call is None for one in (ours, baseline)], [eager, eager])
        self.assertEqual([one.nodes is None for one in (ours, baseline)], [eager, eager])

    def test_the_baseline_of_the_same_round_is_subtracted(self):
        # The median of the differences, which is not the difference of the medians.
        walls = {
            "baseline": [1.0, 5.0, 9.0],
            "tfcdo.ReductionToOneDevice": [3.0, 6.0, 20.0],
            "baseline of the floor": [0.5, 0.5, 0.5],
            "floor (XLA)": [1.0, 1.5, 2.0],
            "floor (add_n)": [0.5, 0.5, 0.5],
        }
        times = {
            name: measure.Times(np.array(wall), np.array(wall) * 10) for name, wall in walls.items()
        }
        with mock.patch.object(measure, "interleave", return_value=times) as interleave:
            one = implementation_of("tfcdo.ReductionToOneDevice")
            results = measure.run(SMALL, choose_devices(2), [one], QUICK)
        self.assertSameElements(walls, interleave.call_args.args[0])
        self.assertAllClose([one.seconds for one in results], [2.0, 1.0, 0.0, 5.0])
        self.assertAllClose([one.spread for one in results], [5.0, 0.5, 0.0, 4.0])
        self.assertAllClose([one.cpu_seconds for one in results], [20.0, 10.0, 0.0, 50.0])

    def test_the_floor_adds_as_many_bytes(self):
        workload = workloads.one_value(5 * 2**20 + 8)
        data = measure.floor.place_values(workload, choose_devices(2))
        self.assertEqual(data.workload.shapes, ((2**20,), (2**18 + 2,)))
        self.assertEqual(len(set(data.devices.names)), 1)
        for name, reduce in measure.floor.single_passes(data.devices.names[0]).items():
            self.assertEqual(steps.build_graph(data, reduce).num_wrong, 0, name)


class FitTest(tf.test.TestCase):
    def test_the_second_step_of_each_round_counts(self):
        one = implementation_of("tfcdo.ReductionToOneDevice")
        # The first step, the call that traces once more, and three rounds of two steps.
        steps_of_calls = [[70.0], [60.0], [50.0, 1.0], [40.0, 4.0], [30.0, 2.0]]
        with (
            mock.patch.object(fit, "_compiled"),
            mock.patch.object(fit, "_train", side_effect=steps_of_calls),
        ):
            (found,) = fit.run("mobilenet", choose_devices(2), [one], 3)
        self.assertAllClose((found.first_step, found.seconds, found.spread), (70.0, 2.0, 1.5))


class EvaluationTest(parameterized.TestCase, tf.test.TestCase):
    def test_wrong_results_are_not_the_fastest(self):
        results = [
            measurement_of("tf.Wrong", "tf", 1.0, wrong=1),
            measurement_of("tf.Slow", "tf", 3.0),
            measurement_of("tf.Right", "tf", 2.0),
            measurement_of("tfcdo.X", "tfcdo", 0.5),
        ]
        self.assertIs(measure.fastest(results, "tf"), results[2])
        self.assertIsNone(measure.fastest(results, measure.FLOOR))

    def test_groups_by_workload(self):
        results = [
            dataclasses.replace(measurement_of(name, "tf", 1.0), size=size)
            for size in (8, 64)
            for name in "ab"
        ]
        self.assertEqual(measure.by_workload(results), [results[:2], results[2:]])

    def test_cores_of_a_system_without_affinities(self):
        with (
            mock.patch.object(os, "sched_getaffinity", create=True),
            mock.patch.object(os, "cpu_count", return_value=48),
        ):
            del os.sched_getaffinity
            found = devices.describe_environment("2 devices")
        self.assertEqual(found["machine"]["cores"], 48)


if __name__ == "__main__":
    tf.test.main()
