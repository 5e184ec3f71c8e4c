from __future__ import annotations

import math
from typing import Any
from unittest import mock

import performance
import performance_page
import performance_targets
from absl.testing import absltest
from absl.testing import parameterized


def _result(name: str, kind: str, seconds: float, **others: Any) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "seconds": seconds,
        "spread": 0.0,
        "cpu_seconds": 2 * seconds,
        "size": 4000,
        "num_devices": 4,
        "wrong": 0,
        "nodes": 10,
        "first_call": 1.0,
        "peak_memory": 4_000_000,
        **others,
    }


_RESULTS = (
    _result(performance_targets.AUTO, "tfcdo", 0.003, nodes=20),
    _result(performance_targets.TF_HIERARCHICAL, "tf", 0.001, wrong=5, nodes=100),
    _result("tf.ReductionToOneDevice", "tf", 0.004),
    _result("floor (XLA)", "floor", 0.0035),
    _result("floor (add_n)", "floor", 0.002),
    _result("baseline", "baseline", 0.001, wrong=None, peak_memory=None),
)
_CASE = performance_targets.Case("resnet50", 4)


def _outcome(
    against: str, at_most: float, quantity: str = "seconds"
) -> performance_targets.Outcome:
    target = performance_targets.Target(_CASE, performance_targets.AUTO, against, at_most, quantity)
    return performance_targets.outcome(target, _RESULTS)


class OutcomeTest(parameterized.TestCase):
    def test_the_fastest_is_one_that_is_right(self):
        outcome = _outcome(performance_targets.FASTEST, 0.75)
        self.assertAlmostEqual(outcome.ratio, 0.75)
        self.assertAlmostEqual(outcome.limit or 0.0, 0.5)
        self.assertTrue(outcome.met)
        self.assertFalse(_outcome(performance_targets.FASTEST, 0.74).met)

    def test_what_takes_longer_than_the_floor_is_the_limit(self):
        target = performance_targets.Target(
            _CASE, performance_targets.AUTO, performance_targets.FASTEST, 0.75
        )
        packing = _result("pack and unpack", "packing", 0.0025)
        outcome = performance_targets.outcome(target, [*_RESULTS, packing])
        self.assertAlmostEqual(outcome.limit or 0.0, 0.625)
        quick = _result("pack and unpack", "packing", 0.001)
        self.assertAlmostEqual(
            performance_targets.outcome(target, [*_RESULTS, quick]).limit or 0.0, 0.5
        )

    @parameterized.parameters((-0.001, 0.004, 0.0), (0.003, 0.004, 0.005))
    def test_times_that_are_lost_in_their_spread(self, ours: float, other: float, spread: float):
        target = performance_targets.Target(
            _CASE, performance_targets.AUTO, performance_targets.FASTEST, 0.75
        )
        results = [
            _result(performance_targets.AUTO, "tfcdo", ours),
            _result("tf.ReductionToOneDevice", "tf", other, spread=spread),
            _result("floor (XLA)", "floor", 0.002),
        ]
        outcome = performance_targets.outcome(target, results)
        self.assertTrue(math.isnan(outcome.ratio))
        self.assertFalse(outcome.met)

    def test_the_floor_is_the_fastest_pass(self):
        self.assertAlmostEqual(_outcome(performance_targets.FLOOR, 1.15).ratio, 1.5)

    def test_other_quantities_have_no_limit(self):
        outcome = _outcome(performance_targets.TF_HIERARCHICAL, 0.1, "nodes")
        self.assertAlmostEqual(outcome.ratio, 0.2)
        self.assertIsNone(outcome.limit)

    def test_every_target_is_about_a_case_that_is_measured(self):
        self.assertContainsSubset(
            {one.case for one in performance_targets.TARGETS}, performance_targets.CASES
        )


class DisturbanceTest(parameterized.TestCase):
    @parameterized.parameters(
        ((0.0,), 3, 0.0, 1),
        ((0.1,), 3, 0.1, 1),
        ((0.5, 0.1, 0.0), 3, 0.1, 2),
        ((0.4, 0.3, 0.5, 0.0), 3, 0.3, 3),
        ((0.5, 0.0), 1, 0.5, 1),
    )
    def test_the_least_disturbed_of_a_few_counts(
        self, spreads: tuple[float, ...], max_tries: int, counted: float, tried: int
    ):
        runs = [
            {"results": [_result("a", "tfcdo", 2.0, spread=2.0 * one)], "spread": one}
            for one in spreads
        ]
        with mock.patch.object(performance, "bench", side_effect=runs) as bench:
            run = performance.bench_undisturbed(["-g", "4"], max_tries)
        self.assertEqual(run["spread"], counted)
        self.assertEqual(bench.call_args_list, [mock.call(["-g", "4"])] * tried)

    def test_who_is_faster_does_not_matter(self):
        spread = [_result("a", "tf", 1.0, spread=0.2), _result("b", "tfcdo", -3.0, spread=0.3)]
        floor = _result("floor (XLA)", "floor", 1.0, spread=9.0)
        self.assertAlmostEqual(performance.disturbance([*spread, floor]), 0.15)


class PageTest(parameterized.TestCase):
    def test_what_is_missed_is_said(self):
        run = {
            "date": "2026-01-02T03:04:05+00:00",
            "machine": {"processor": "Some CPU", "cores": 2, "system": "Linux"},
            "versions": {"tfcdo": "0.1.0"},
            "results": [
                *_RESULTS,
                _result(f"tfcdo.{performance_targets.HIERARCHICAL}", "tfcdo", 0.003),
                _result(f"tfcdo.{performance_targets.ONE_DEVICE}", "tfcdo", 0.003),
                _result(performance_targets.COLLECTIVE, "tf", 0.005),
            ],
        }
        entry = {"op": "AddN", "count": 3, "size": 5_000_000, "seconds": 0.001}
        page = performance_page.page(
            {_CASE: run}, {performance_targets.AUTO: [entry]}, _CASE, "x.png"
        )
        self.assertIn("Some CPU with 2 cores (Linux), tfcdo 0.1.0, on 2026-01-02", page)
        auto = "`tfcdo.AutoAllReduce`"
        fastest = f"| resnet50, K = 4 | time | of | {performance_targets.FASTEST}".replace(
            "of", auto
        )
        self.assertIn(f"{fastest} | 0.75 | 0.75 | 0.50 | met |", page)
        floor = f"| resnet50, K = 4 | time | {auto} | the floor"
        self.assertIn(f"{floor} | 1.15 | 1.50 | 1.00 | **missed** |", page)
        collective = f"| resnet50, K = 4 | time | {auto} | `tf.CollectiveAllReduce`"
        self.assertIn(f"{collective} | 0.18 | 0.60 | 0.40 | **missed**, below the limit |", page)
        # 4000 bytes over 4 devices in 3 ms.
        row = f"| {auto} | 3.00 | 0.00 | 6.00 | 0.00 | 0.75 | 1.50 | 0 | 20 | 1.00 | 4.0 |"
        self.assertIn(row, page)
        self.assertIn("| baseline | 1.00 | 0.00 | 2.00 |  |  |  |  | 10 | 1.00 |  |", page)
        self.assertIn("| AddN | 3 | 5.0 | 1.00 |", page)
        self.assertIn("](x.png)", page)


if __name__ == "__main__":
    absltest.main()
