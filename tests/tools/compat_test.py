"""The table of what TensorFlow's classes and tfcdo's do, and the page that shows it."""

from __future__ import annotations

import pathlib

import compat
from absl.testing import absltest

PAGE = pathlib.Path(compat.__file__).parent.parent / "docs" / "compat.md"


class CompatTest(absltest.TestCase):
    outcomes: dict[str, list[compat.Outcome]]

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.outcomes = {library: compat.run(library) for library in compat.LIBRARIES}

    def test_there_are_many_cases(self):
        self.assertGreaterEqual(len(compat.CASES), 20)

    def test_tfcdo_is_right_in_every_case(self):
        for case, outcome in zip(compat.CASES, self.outcomes["tfcdo"], strict=True):
            with self.subTest(case.name):
                self.assertTrue(outcome.good, outcome.text)

    def test_cases_can_fail(self):
        # TensorFlow's classes are wrong at odd device counts: a judge who is never unhappy is none.
        wrong = [
            case.name
            for case, outcome in zip(compat.CASES, self.outcomes["TensorFlow"], strict=True)
            if not outcome.good
        ]
        self.assertIn("3 devices holding 1, 2, 3", wrong)
        self.assertNotIn("4 devices holding 1, 2, 3, 4", wrong)

    def test_the_page_is_what_the_cases_give(self):
        page = PAGE.read_text(encoding="utf-8")
        if f"TensorFlow {compat._tensorflow_version()}." not in page:
            self.assertTrue(page)  # Another version of TensorFlow may well do other things.
            return
        self.assertEqual(page, compat.table(self.outcomes))

    def test_a_case_that_ends_its_process_is_an_outcome(self):
        self.assertEqual(compat._run_worker("no such library", 0)[-1].good, False)


if __name__ == "__main__":
    absltest.main()
