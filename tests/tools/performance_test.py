from __future__ import annotations

import math
from typing import Any
from unittest import mock

import performance
from absl.testing import absltest, parameterized
from performance import AUTO, FASTEST, FLOOR, TF_HIERARCHICAL, Case, Target


def _result(name: str, kind: str, seconds: float, **others: Any) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "seconds": seconds,
        "spread": 0.0,
        "wrong": 0,
        "nodes": 10,
        **others,
    }


_RESULTS = (
    _result(AUTO, "tfcdo", 0.003, nodes=20),
    _result(TF_HIERARCHICAL, "tf", 0.001, wrong=5, nodes=100),
    _result("tf.ReductionToOneDevice", "tf", 0.004),
    _result("floor (XLA)", "floor", 0.0035),
    _result("floor (add_n)", "floor", 0.002),
    _result("baseline", "baseline", 0.001, wrong=None),
)


def _outcome(target: Target, *more: dict[str, Any]) -> tuple[float, float | None]:
    return performance.outcome(target, {"results": [*_RESULTS, *more]})


class OutcomeTest(parameterized.TestCase):
    def test_the_fastest_is_one_that_is_right(self):
        ratio, limit = _outcome(Target(AUTO, FASTEST, 0.75))
        self.assertAlmostEqual(ratio, 0.75)
        self.assertAlmostEqual(limit or 0.0, 0.5)

    @parameterized.parameters((0.0025, 0.625), (0.001, 0.5))
    def test_what_takes_longer_than_the_floor_is_the_limit(self, packing: float, limit: float):
        more = _result("pack and unpack", "packing", packing)
        self.assertAlmostEqual(_outcome(Target(AUTO, FASTEST, 0.75), more)[1] or 0.0, limit)

    @parameterized.parameters((-0.001, 0.004, 0.0), (0.003, 0.004, 0.005))
    def test_times_that_are_lost_in_their_spread(self, ours: float, other: float, spread: float):
        results = [
            _result(AUTO, "tfcdo", ours),
            _result("tf.ReductionToOneDevice", "tf", other, spread=spread),
        ]
        ratio, _ = performance.outcome(Target(AUTO, FASTEST, 0.75), {"results": results})
        self.assertTrue(math.isnan(ratio))

    def test_the_floor_is_the_fastest_pass_and_only_times_have_a_limit(self):
        self.assertAlmostEqual(_outcome(Target(AUTO, FLOOR, 1.15))[0], 1.5)
        self.assertEqual(_outcome(Target(AUTO, TF_HIERARCHICAL, 0.1, "nodes")), (0.2, None))

    def test_rows_are_compared_by_their_update(self):
        more = [
            _result(AUTO, "tfcdo", 0.006, update="SGD"),
            _result("tf.A", "tf", 0.008, update="SGD"),
            _result("updating alone", "updating alone", 0.004, update="SGD"),
        ]
        self.assertEqual(_outcome(Target(AUTO, FASTEST, 1.0, update="SGD"), *more), (0.75, 0.5))


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


class PageTest(absltest.TestCase):
    def test_what_is_missed_is_said(self):
        wanted = ((FASTEST, 0.75), (FLOOR, 1.15), (FASTEST, 0.3))
        case = Case("-g 4", tuple(Target(AUTO, *one) for one in wanted))
        run = {
            "date": "2026-01-02T03:04:05+00:00",
            "machine": {"processor": "Some CPU", "cores": 2, "system": "Linux"},
            "versions": {"tfcdo": "0.1.0"},
            "results": _RESULTS,
        }
        page = performance.page({case: run}, "x.png")
        self.assertIn("Some CPU with 2 cores (Linux), tfcdo 0.1.0, on 2026-01-02", page)
        start = f"| `-g 4` | time | {AUTO}"
        self.assertIn(f"{start} | {FASTEST} | 0.75 | 0.75 | 0.50 | met |", page)
        self.assertIn(f"{start} | {FLOOR} | 1.15 | 1.50 | 1.00 | **missed** |", page)
        self.assertIn("| 0.30 | 0.75 | 0.50 | **missed**, below the limit |", page)
        self.assertIn("| implementation | ms | ± | #wrong | nodes | of TF |", page)
        self.assertIn(f"| {AUTO} | 3.00 | 0.00 | 0 | 20 | 0.75 |", page)
        self.assertIn("| baseline | 1.00 | 0.00 |  | 10 | 0.25 |", page)
        self.assertIn("](x.png)", page)


if __name__ == "__main__":
    absltest.main()
