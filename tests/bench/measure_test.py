from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized
from bench_testing import (
    SMALL,
    TF_HIERARCHICAL,
    implementation_of,
    measurement_of,
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)

from tfcdo.bench import devices, fit, measure, results, steps, workloads
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
            samplers = {name: measure.Sampler(step) for name, step in compared.items()}
            times = results.take_turns(samplers, 2, 1, results.silently)
        # After the first round, as many calls of the short step as fill a sample.
        self.assertEqual(taken, [*"ab", *"abbb", *"abbb"])
        self.assertAllClose(times["a"], [(1.0, 2.0)] * 2)
        self.assertAllClose(times["b"], [(0.002, 0.004)] * 2)

    def test_algbw_and_busbw(self):
        one = measurement_of("x", "tf", 2e-6)
        self.assertAllClose(one.algbw, 2e9)
        self.assertAllClose(one.busbw, 2e9 * 2 * 3 / 4)
        cast = dataclasses.replace(one, sent_size=one.size // 2)
        self.assertAllClose((one.algbw, one.busbw / 2), (cast.algbw, cast.busbw))
        for noise in (-1e-6, 1e-6):
            lost = dataclasses.replace(one, seconds=noise, spread=1e-6)
            self.assertTrue(math.isnan(lost.busbw))

    def test_a_run_measures_all_of_them(self):
        names = ["tfcdo.ReductionToOneDevice", TF_HIERARCHICAL]
        tracked: list[tuple[str, int]] = []

        def track(sequence: Sequence[Any], *, description: str) -> Iterable[Any]:
            for item in sequence:
                tracked.append((description, len(sequence)))
                yield item

        compared = [implementation_of(name) for name in names]
        found = measure.run(SMALL, choose_devices(3), compared, 2, 1, track)
        self.assertEqual(
            [(one.name, one.kind) for one in found],
            [
                (names[0], "tfcdo"),
                (names[1], "tf"),
                ("floor (XLA)", results.FLOOR),
                ("floor (add_n)", results.FLOOR),
                ("baseline", results.BASELINE),
            ],
        )
        self.assertEqual(tracked, [("building and checking", 2)] * 2 + [("rounds", 3)] * 3)
        ours, theirs, *floors, baseline = found
        self.assertEqual((ours.size, ours.count, ours.num_devices), (48, 12, 3))
        self.assertEqual([one.wrong for one in (ours, *floors)], [0, 0, 0])
        # TensorFlow's class leaves a device out of an odd number, which has to show.
        self.assertNotEqual(theirs.wrong, 0)
        self.assertIsNone(baseline.wrong)
        self.assertGreater(baseline.seconds, 0.0)
        self.assertGreater(ours.first_call or 0.0, 0.0)
        self.assertGreater(ours.nodes or 0, 0)

    def test_the_baseline_of_the_same_round_is_subtracted(self):
        # The median of the differences, which is not the difference of the medians.
        walls = {
            "baseline": [1.0, 5.0, 9.0],
            "tfcdo.ReductionToOneDevice": [3.0, 6.0, 20.0],
            "baseline of the floor": [0.5, 0.5, 0.5],
            "floor (XLA)": [1.0, 1.5, 2.0],
            "floor (add_n)": [0.5, 0.5, 0.5],
        }
        taken = {name: [(one, 10 * one) for one in wall] for name, wall in walls.items()}
        with mock.patch.object(results, "take_turns", return_value=taken) as take_turns:
            one = implementation_of("tfcdo.ReductionToOneDevice")
            found = measure.run(SMALL, choose_devices(2), [one], 3, 0)
        self.assertSameElements(walls, take_turns.call_args.args[0])
        self.assertAllClose([one.seconds for one in found], [2.0, 1.0, 0.0, 5.0])
        self.assertAllClose([one.spread for one in found], [5.0, 0.5, 0.0, 4.0])
        self.assertAllClose([one.cpu_seconds for one in found], [20.0, 10.0, 0.0, 50.0])

    def test_the_floor_adds_as_many_bytes(self):
        workload = workloads.one_value(5 * 2**20 + 8)
        data = measure.floor.place_values(workload, choose_devices(2))
        self.assertEqual(data.workload.shapes, ((2**20,), (2**18 + 2,)))
        self.assertEqual(len(set(data.devices.names)), 1)
        for name, reduce in measure.floor.single_passes(data.devices.names[0]).items():
            self.assertEqual(steps.build(data, reduce).num_wrong, 0, name)


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
        self.assertAllClose((found.first_call, found.seconds, found.spread), (70.0, 2.0, 1.5))


class EvaluationTest(tf.test.TestCase):
    def test_wrong_results_are_not_the_fastest(self):
        found = [
            measurement_of("tf.Wrong", "tf", 1.0, wrong=1),
            measurement_of("tf.Slow", "tf", 3.0),
            measurement_of("tf.Right", "tf", 2.0),
            measurement_of("tfcdo.X", "tfcdo", 0.5),
        ]
        self.assertIs(results.fastest(found, "tf"), found[2])
        self.assertIsNone(results.fastest(found, results.FLOOR))

    def test_groups_by_workload(self):
        found = [
            dataclasses.replace(measurement_of(name, "tf", 1.0), size=size)
            for size in (8, 64)
            for name in "ab"
        ]
        self.assertEqual(results.by_workload(found), [found[:2], found[2:]])

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
