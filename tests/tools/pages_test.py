"""The tools that make pages of the documentation, on small trainings."""

import os
import pathlib
import sys
import tempfile
from typing import Any
from unittest import mock

import compat
import figures
import pages
import performance
import tensorflow as tf
import tested_versions
import testing_utils as tu
import third_party
import warm_python
from absl.testing import absltest, parameterized
from bench_testing import TF_HIERARCHICAL, measurement_of
from compat import CASES, Case
from compat_trainings import TRAININGS, Training

import tfcdo

PAGE = pages.ROOT / "docs" / "compat.md"


class JudgeTest(parameterized.TestCase):
    @parameterized.parameters(
        (3.0, {"expected": 3.0}, "✓", "3.0"),
        (3.0, {"expected": 6.0}, "✗", "3.0 instead of 6.0"),
        (3.0, {"refused": "shape"}, "✗", "accepts it and gives 3.0"),
        (ValueError("shape: 1, 2"), {"refused": "shape"}, "✓", "ValueError: shape: 1, 2"),
        (ValueError("wrong"), {"refused": "shape"}, "✗", "ValueError: wrong"),
        (ValueError("shape"), {"expected": 3.0}, "✗", "ValueError: shape"),
    )
    def test_calls(self, result: Any, wanted: Any, mark: str, text: str):
        # An iterable's errors are raised, and its other items returned.
        call = mock.Mock(side_effect=[result])
        self.assertEqual(Case(None, **wanted, call=call).row("tfcdo"), (mark, text))

    @parameterized.parameters(
        # The largest difference counts, of weights or of reported numbers.
        ({2: (1e-8, 0.0), 3: (2e-7, 1e-6), 5: (0.0, 3e-8)}, "", "✓", "2e-07, 1e-06"),
        ({2: (1e-3, 0.0)}, "", "✗", "1e-03, 0"),
        ({2: (0.0, 0.0), 3: (0.0, float("nan"))}, "", "✗", "0, nan"),
        ({2: (0.5, 0.0)}, "so", "~", "5e-01, 0: so"),
        ({2: (0.0, 0.0), 3: "E: a", 5: "E: b"}, "", "✗", "E: a (3 and 5 replicas)"),
    )
    def test_trainings(self, differences: Any, reason: str, mark: str, text: str):
        self.assertEqual(Training(reason=reason).judge(differences), (mark, text))


class PagesTest(absltest.TestCase):
    def test_an_error_differs_in_no_run(self):
        for order in ('shared_name="c0", reduction="sum"', 'reduction="sum", shared_name="c1"'):
            error = ValueError(f"No \033[31mkernel\033[0m of X with these attrs: [{order}]")
            self.assertEqual(pages.error_text(error), "ValueError: No kernel of X")

    def test_a_process_that_ends_is_noted_and_another_one_goes_on(self):
        folder = self.enter_context(tempfile.TemporaryDirectory())
        pathlib.Path(folder, "served.py").write_text("import os\ndef run(code): return eval(code)")
        variables = {"X": "x", "PYTHONPATH": os.pathsep.join([folder, *filter(None, sys.path)])}
        self.enter_context(mock.patch.object(sys, "executable", warm_python.executable()))
        calls = [{"code": code} for code in ("os.environ['X']", "os._exit(7)", "2")]
        results = pages.call_apart("served", calls, 99.0, **variables)
        self.assertEqual([*results], ["x", None, 2])

    def test_the_page_is_made_from_the_record(self):
        record = tested_versions.read_record()
        self.assertNotEmpty(record)
        page = (pages.ROOT / "docs" / "versions.md").read_text("utf-8")
        self.assertEndsWith(page, "\n".join([*tested_versions.table(record), "<!-- end -->\n"]))
        self.assertContainsSubset({"2.16.2"}, {entry["tensorflow"] for entry in record})

    def test_counts_and_cells(self):
        rows = {name: (pages.Row("✗", "✗ | x"), pages.Row("✓", "✓, x")) for name in compat.WORK}
        parts = {name: "\n".join(lines) for name, lines in compat.parts(rows).items()}
        summary = " ".join(parts["counts"].split())
        of_all = f"in {len(TRAININGS)} of {len(TRAININGS)} trainings"
        self.assertRegex(summary, f"{of_all}.* TensorFlow's strategy in 0\\.")
        self.assertIn(f"tfcdo's classes pass {len(CASES)} and TensorFlow's 0.", summary)
        for part, names in (("calls", CASES), ("trainings", TRAININGS)):
            for name in names:
                self.assertIn(f"\n| {name} | ✗ ✗ \\| x | ✓ ✓, x |\n", parts[part])
        self.assertIn("| Execution | TensorFlow: 0 of 3 | tfcdo: 3 of 3 |", parts["trainings"])
        readme = [*compat.readme_rows(rows)]
        self.assertEqual(readme[0], ("`global_clipnorm`", "✗ | x", "✓"))
        self.assertLen(readme, 5)
        kept = PAGE.read_text(encoding="utf-8")
        for name in compat.WORK:
            self.assertIn(f"\n| {name} | ", kept)
        for name in parts:
            self.assertIn(f"\n<!-- made by tools/compat.py, {name}: begin -->\n", kept)

    def test_the_page_shows_what_tfcdo_does(self):
        page = PAGE.read_text(encoding="utf-8")
        if f"TensorFlow {tf.__version__}," not in page:
            self.skipTest(f"docs/compat.md is not of TensorFlow {tf.__version__}")
        self.enter_context(tu.kernels_for("GPU"))
        for name, case in CASES.items():
            with self.subTest(name):
                row = case.row("tfcdo")
                self.assertEqual(row.mark, "✓", row.text)
                (line,) = (line for line in page.splitlines() if line.startswith(f"| {name} |"))
                self.assertEndsWith(line, f"| {row.cell} |")

    def test_rows_of_the_performance_page(self):
        slow = measurement_of("tf.X", "tf", 0.004)
        compared = (
            measurement_of(performance.AUTO, "tfcdo", 0.003),
            measurement_of(TF_HIERARCHICAL, "tf", 0.001, wrong=5),
            slow,
            measurement_of(performance.DEFAULT, "tf", 0.005),
        )
        with mock.patch.object(performance, "floor_seconds", return_value=0.002) as floor:
            row = performance.row("-g 4", compared)
        self.assertEqual(row, ["`-g 4`", "3.0", "4.0", "5.0", "2.0"])
        floor.assert_called_once_with(4, 4000)
        kinds = {performance.HOSTS: 0.003, performance.ALONE: 0.001}
        hosts = [slow, *(measurement_of(kind, kind, seconds) for kind, seconds in kinds.items())]
        row = performance.row("workers 2", hosts)
        self.assertEqual(row, ["`workers 2`", "3.0", "4.0", "", "1.0"])

    def test_lines_replace_the_ones_before(self):
        path = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "page.md")
        begin, end = "<!-- made by tools/a.py: begin -->", "<!-- end -->"
        path.write_text(f"before\n{begin}\nold\n{end}\nafter\n", encoding="utf-8")
        pages.replace(path, "a.py", ["new", "lines"])
        self.assertEqual(path.read_text("utf-8"), f"before\n{begin}\nnew\nlines\n{end}\nafter\n")
        self.assertRaisesRegex(ValueError, "has no lines", pages.replace, path, "b.py", [])

    def test_error_feedback_descends_where_rounding_stops(self):
        names = ("bfloat16", "bfloat16, error feedback")
        losses = {name: figures.badly_scaled_losses(name, 150) for name in names}
        without, fed_back = (descent[-1] for descent in losses.values())
        self.assertLess(fed_back, without / 5)
        drawn = figures.draw("wire", {**losses, "float32": losses[names[1]]})
        self.assertLen(drawn.axes[0].lines, 3)


class ThirdPartyTest(parameterized.TestCase):
    """The quick part of `make third-party`."""

    @parameterized.parameters(("sonnet",), *tu.nightly("tf_keras"))
    def test_ends_as_on_one_device(self, name: str):
        train = third_party.PROGRAMS[name]
        several = tfcdo.MirroredStrategy(tu.device_names(third_party.NUM_DEVICES))
        one = tf.distribute.MirroredStrategy(tu.device_names(1))
        row = third_party.row(train(several), train(one))
        self.assertEqual(row.mark, "✓", row.text)
        self.assertEqual(third_party.row([[9.0]], [[1.0]]), ("✗", "8e+00"))


if __name__ == "__main__":
    tf.test.main()
