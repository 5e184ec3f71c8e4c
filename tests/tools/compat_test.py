from __future__ import annotations

import contextlib
import importlib
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import compat
import testing_utils as tu
from absl.testing import absltest
from compat_cases import CASES, Case, Refused

PAGE = pathlib.Path(compat.__file__).parent.parent / "docs" / "compat.md"
_LIBRARY = types.SimpleNamespace()


def _raising(error: Exception) -> Callable[[Any], Any]:
    def call(library: Any) -> Any:
        raise error

    return call


class JudgeTest(absltest.TestCase):
    def test_a_right_result(self):
        outcome = compat.judge(Case("x", lambda _: 3.0, 3.0), _LIBRARY)
        self.assertEqual(outcome, compat.Outcome("3.0", True))

    def test_a_wrong_result(self):
        outcome = compat.judge(Case("x", lambda _: 3.0, 6.0), _LIBRARY)
        self.assertEqual(outcome, compat.Outcome("3.0 instead of 6.0", False))

    def test_an_error_is_good_if_it_is_wanted_and_names_the_argument(self):
        for error, expected, good in (
            (ValueError("shape: 1, 2"), Refused("shape"), True),
            (ValueError("wrong"), Refused("shape"), False),
            (RuntimeError("shape"), Refused("shape"), False),
            (ValueError("shape"), 3.0, False),
        ):
            with self.subTest(f"{error!r}, {expected}"):
                case = Case("x", _raising(error), expected)
                outcome = compat.judge(case, _LIBRARY)
                self.assertEqual(outcome.good, good)
                self.assertStartsWith(outcome.text, f"{type(error).__name__}: ")

    def test_what_should_be_refused_and_is_not(self):
        outcome = compat.judge(Case("x", lambda _: 3.0, Refused("shape")), _LIBRARY)
        self.assertEqual(outcome, compat.Outcome("accepts it and gives 3.0", False))

    def test_a_worker_that_ends_is_an_outcome_of_the_case_that_ended_it(self):
        worker = 'import sys; print(\'{"text": "a", "good": true}\'); sys.exit(7)'
        with mock.patch.object(
            compat, "command_of_worker", lambda *_: [sys.executable, "-c", worker]
        ):
            self.assertEqual(
                compat.run_worker("tfcdo", 0),
                [compat.Outcome("a", True), compat.Outcome("the process ends (7)", False)],
            )


class PageTest(absltest.TestCase):
    def test_counts_and_cells(self):
        right, wrong = compat.Outcome("a | b", True), compat.Outcome("c", False)
        outcomes = {"TensorFlow": [wrong] * len(CASES), "tfcdo": [right] * len(CASES)}
        page = compat.table(outcomes)
        self.assertIn(f"TensorFlow's classes fail {len(CASES)} and tfcdo's 0.", page)
        self.assertIn(f"| {CASES[0].name} | ✗ c | ✓ a \\| b |", page)

    def test_the_page_shows_what_tfcdo_does(self):
        page = PAGE.read_text(encoding="utf-8")
        version = compat.tensorflow_version()
        if f"TensorFlow {version}." not in page:
            self.skipTest(f"docs/compat.md is not of TensorFlow {version}")
        tfcdo = importlib.import_module("tfcdo")
        rows = page.splitlines()
        with contextlib.ExitStack() as stack:
            # Another test file of this process may have loaded NCCL's kernel for CPUs.
            stack.enter_context(tu.kernels_for("GPU"))
            for case in CASES:
                with self.subTest(case.name):
                    outcome = compat.judge(case, tfcdo)
                    self.assertTrue(outcome.good, outcome.text)
                    (row,) = (row for row in rows if row.startswith(f"| {case.name} |"))
                    self.assertEndsWith(row, f"| {compat.cell(outcome)} |")


if __name__ == "__main__":
    absltest.main()
