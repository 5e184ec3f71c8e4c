"""`tfcdo bench --predict` and `tfcdo plan -t here`: this machine, measured."""

from __future__ import annotations

import json

import cli_testing
import measurement_testing
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

from tfcdo.bench import predict
from tfcdo.plan import algorithms
from tfcdo.topology import detection
from tfcdo.topology.presets import preset


class HereTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = measurement_testing.measure_briefly(self)

    def run_tfcdo(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        found, output, errors = cli_testing.run_tfcdo(*arguments)
        self.assertEqual(found, status, errors)
        return output, errors

    def test_plans_for_this_machine_and_measures_it_once(self):
        arguments = ("plan", "-t", "here:3", "-b", "1MB")
        output, errors = self.run_tfcdo(*arguments)
        name = detection.name_of_measured(tu.device_names(3))
        self.assertStartsWith(name, "measured 3 CPU devices of ")
        self.assertIn(name, " ".join(output.split()))
        # Before it, absl logs where it is kept, unless it is told to log warnings only.
        self.assertEqual(errors.splitlines()[-1], f"{name}: measured now, and kept")
        (file,) = self.folder.glob("measured-*")
        content = file.read_text()
        plan, errors = self.run_tfcdo(*arguments, "--json")
        self.assertIn("--measure measures again", errors)
        self.assertEqual(json.loads(plan)["topology"]["name"], name)
        self.assertEqual(file.read_text(), content)
        self.run_tfcdo(*arguments, "--measure")
        self.assertNotEqual(file.read_text(), content)

    def test_only_this_machine_can_be_measured(self):
        _, errors = self.run_tfcdo("plan", "-t", "dgx1", "--measure", status=2)
        self.assertIn("--measure measures this machine: it needs -t here", errors)

    def test_every_algorithm_and_size_is_predicted_and_measured(self):
        path = self.folder / "found.json"
        output, _ = self.run_tfcdo(
            *("bench", "--predict", "-b", "8K", "-e", "64K", "-f", "8", "-g", "3"),
            *("-n", "2", "-w", "0", "--json", str(path)),
        )
        found = json.loads(path.read_text())
        self.assertEqual([one["size"] for one in found["sizes"]], [8192, 65536])
        ratios = []
        for size in found["sizes"]:
            rows = size["predictions"]
            names = [name for row in rows for name in row["names"]]
            self.assertCountEqual(names, algorithms.ALGORITHMS)
            for row in rows:
                self.assertEqual(row["wrong"], 0)
                self.assertAlmostEqual(row["ratio"], row["simulated"] / row["measured"])
                ratios.append(row["ratio"])
            (chosen,) = (row for row in rows if "auto" in row["names"])
            least = min(row["measured"] for row in rows)
            self.assertAlmostEqual(size["loss"], chosen["measured"] / least - 1)
        # The machine was measured anew before each size.
        self.assertNotEqual(*(size["costs"] for size in found["sizes"]))
        middle = sorted(ratios)[(len(ratios) - 1) // 2 : len(ratios) // 2 + 1]
        self.assertAlmostEqual(found["median_ratio"], sum(middle) / len(middle))
        self.assertIn(f"simulated over measured: {found['median_ratio']:.2f}", output)
        self.assertIn("auto takes", output)

    @parameterized.parameters(
        ("--model", "tiny"), ("--eager",), ("--fit",), ("--datatype", "half"), ("--ops", "tf")
    )
    def test_other_options_are_refused(self, *arguments):
        _, errors = self.run_tfcdo("bench", "--predict", *arguments, status=2)
        self.assertIn(f"{arguments[0]} cannot be given beside --predict", errors)


class ComparisonTest(parameterized.TestCase):
    def test_ranks_and_losses(self):
        def one(name: str, simulated: float, measured: float) -> predict.Prediction:
            return predict.Prediction((name,), 8, 1, simulated, measured, 0.0, 0)

        found = predict.Comparison(
            (one("ring", 3, 4), one("auto", 1, 2.2), one("shuffle", 2, 2)), preset("pcie")
        )
        self.assertEqual((found.chosen.names, found.fastest.names), (("auto",), ("shuffle",)))
        self.assertAlmostEqual(found.loss, 0.1)
        # Only auto and shuffle change places.
        self.assertAlmostEqual(found.agreement, 2 / 3)
        self.assertAlmostEqual(predict.median_ratio([found]), 0.75)


if __name__ == "__main__":
    tf.test.main()
