from __future__ import annotations

from typing import Any

import performance
from absl.testing import absltest
from performance import AUTO, BEGIN, DEFAULT, END, Case, Target


def _result(name: str, kind: str, seconds: float, **others: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "seconds": seconds, "spread": 0.0, "wrong": 0, **others}


_RESULTS = (
    _result(AUTO, "tfcdo", 0.003, nodes=20),
    _result("tf.HierarchicalCopyAllReduce(num_packs=1)", "tf", 0.001, wrong=5, nodes=100),
    _result("tf.ReductionToOneDevice", "tf", 0.004, nodes=10),
    _result(DEFAULT, "tf", 0.005),
    _result("floor (XLA)", "floor", 0.0035),
    _result("floor (add_n)", "floor", 0.002),
)
_CASE = Case("-g 4", (Target(0.75), Target(0.3), Target(1.0, quantity="nodes")))


class PerformanceTest(absltest.TestCase):
    def test_targets_are_compared_with_the_fastest_correct_class(self):
        verdicts = [performance.verdict(target, _CASE, _RESULTS) for target in _CASE.targets]
        for line, end in zip(verdicts, ("0.75 wanted: met", "missed", "missed"), strict=True):
            self.assertEndsWith(line, end)
        self.assertIn("seconds 0.75 of", verdicts[0])
        self.assertIn("nodes 2.00 of", verdicts[2])

    def test_the_table_replaces_the_one_before(self):
        run = {
            "date": "2026-01-02T03:04:05+00:00",
            "machine": {"processor": "Some CPU", "cores": 2},
            "versions": {"tfcdo": "0.1.0"},
            "results": _RESULTS,
        }
        lines = performance.table({_CASE: run})
        page = performance.replace_table(f"before\n{BEGIN}\nold\n{END}\nafter\n", lines)
        self.assertIn("| `-g 4` | 3.0 | 4.0 | 5.0 | 2.0 |", page)
        self.assertNotIn("old", page)
        self.assertStartsWith(page, "before\n")
        self.assertEndsWith(page, "\nafter\n")
        with self.assertRaisesRegex(ValueError, "no lines"):
            performance.replace_table("without markers", lines)


if __name__ == "__main__":
    absltest.main()
