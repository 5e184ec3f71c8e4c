"""The section about rows in docs/performance.md, from results that are made up."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any
from unittest import mock

import performance_rows
from absl.testing import absltest


def _result(name: str, kind: str, update: str, seconds: float, wrong: int = 0) -> dict[str, Any]:
    return {"name": name, "kind": kind, "update": update, "seconds": seconds, "wrong": wrong}


def _run(ours: float) -> dict[str, Any]:
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "results": [
            _result(name, kind, update, seconds, wrong)
            for update, factor in (("SGD", 1.0), ("momentum", 2.0))
            for name, kind, seconds, wrong in (
                ("tfcdo.A", "tfcdo", ours * factor, 0),
                ("tf.B", "tf", 0.010 * factor, 0),
                ("tf.C", "tf", 0.012 * factor, 0),
                ("tf.Wrong", "tf", 0.001, 1),
                ("updating alone", "updating alone", 0.006 * factor, 0),
            )
        ],
    }


_CASE = performance_rows.Case(0.5, {"SGD": 1.05, "momentum": 0.80})


class SectionTest(absltest.TestCase):
    def test_a_target_below_the_limit(self):
        case = performance_rows.Case(0.9, {"SGD": 0.55, "momentum": 0.65})
        section = performance_rows.section([(case, [_run(0.0075)])])
        self.assertIn("| 0.75 | 0.55 | **missed**, below the limit | 0.60 |", section)
        self.assertIn("| 0.75 | 0.65 | **missed** | 0.60 |", section)

    def test_the_largest_ratio_counts(self):
        section = performance_rows.section([(_CASE, [_run(0.0075), _run(0.0085)])])
        self.assertIn(
            "| 0.5 | SGD | 10.0, 10.0 | `tfcdo.A` | 7.5, 8.5 | 0.75, 0.85 | 1.05 | met "
            "| 0.60, 0.60 |",
            section,
        )
        self.assertIn(
            "| 0.5 | momentum | 20.0, 20.0 | `tfcdo.A` | 15.0, 17.0 | 0.75, 0.85 | 0.80 "
            "| **missed** | 0.60, 0.60 |",
            section,
        )
        self.assertIn("measured 2 times", section)
        self.assertEndsWith(section, "|\n")

    def test_the_section_is_put_in_its_place(self):
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(performance_rows, "run", lambda case: _run(0.0075)),
        ):
            page = pathlib.Path(folder, "page.md")
            page.write_text("# Page\n\n## Other\n\nother\n", encoding="utf-8")
            for _ in range(2):
                performance_rows.main(page, [_CASE], 1)
            text = page.read_text(encoding="utf-8")
        self.assertStartsWith(text, f"# Page\n\n## Other\n\nother\n\n{performance_rows.TITLE}\n")
        self.assertEqual(1, text.count(performance_rows.TITLE))


if __name__ == "__main__":
    absltest.main()
