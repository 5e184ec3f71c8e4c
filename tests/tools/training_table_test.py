"""The arithmetic of the table of trainings; docs/compat.md shows the trainings themselves."""

from __future__ import annotations

import pathlib
import tempfile
from unittest import mock

import compat
import training_table
from absl.testing import absltest
from training_cases import Training, dense
from training_runs import judge


class JudgeTest(absltest.TestCase):
    def test_the_largest_difference_counts(self):
        row = judge(Training("x", dense), {2: (1e-8, 0.0), 3: (2e-7, 1e-6), 5: (0.0, 3e-8)})
        self.assertEqual(row, {"name": "x", "mark": "✓", "text": "2e-07, 1e-06"})

    def test_either_difference_is_too_large(self):
        for pair in ((1e-3, 0.0), (0.0, 1e-3), (float("nan"), 0.0), (0.0, float("nan"))):
            with self.subTest(pair):
                self.assertEqual(judge(Training("x", dense), {2: pair})["mark"], "✗")

    def test_a_reason(self):
        row = judge(Training("x", dense, reason="so"), {2: (0.5, 0.0)})
        self.assertEqual((row["mark"], row["text"]), ("~", "5e-01, 0: so"))
        self.assertEqual(judge(Training("x", dense, reason="so"), {2: (0.0, 0.0)})["mark"], "✓")

    def test_errors_say_where(self):
        everywhere = judge(Training("x", dense), {2: "E: a", 3: "E: a"})
        self.assertEqual((everywhere["mark"], everywhere["text"]), ("✗", "E: a"))
        somewhere = judge(Training("x", dense), {2: (0.0, 0.0), 3: "E: a", 5: "E: b"})
        self.assertEqual(somewhere["text"], "E: a (3 and 5 replicas)")


class SectionTest(absltest.TestCase):
    def test_one_line_a_training(self):
        rows = {
            "TensorFlow": [{"name": "x", "mark": "✗", "text": "a | b"}],
            "tfcdo": [{"name": "x", "mark": "✓", "text": "0, 0"}],
        }
        section = training_table.section(rows, {"version": "3.1", "tensorflow": "2.2"})
        self.assertIn("| Keras 3.1 | TensorFlow 2.2 | tfcdo |\n|---|---|---|\n", section)
        self.assertEndsWith(section, "| x | ✗ a \\| b | ✓ 0, 0 |\n")

    def test_a_process_that_ends_is_noted_and_another_one_goes_on(self):
        worker = """
import json, sys
if sys.argv[1] == "--names":
    for name in "abc":
        print(json.dumps({"name": name}))
elif sys.argv[2] == "0":
    print(json.dumps({"name": "a"})); sys.exit(7)
else:
    print(json.dumps({"name": "c"}))
"""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "worker.py")
            path.write_text(worker, encoding="utf-8")
            with mock.patch.object(training_table, "_RUNS", path):
                rows = training_table.run("tfcdo")
        self.assertEqual([row["name"] for row in rows], ["a", "b", "c"])
        self.assertEqual(rows[1]["text"], "the process ends or hangs")

    def test_first_words_have_neither_colors_nor_stacks(self):
        message = "Bad \033[1mcall\033[0m. Node x defined at (most recent call last): /y"
        self.assertEqual(compat.first_words(message), "Bad call. Node x")


if __name__ == "__main__":
    absltest.main()
