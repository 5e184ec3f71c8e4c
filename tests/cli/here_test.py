"""`tfcdo plan -t here`: this machine, measured."""

from __future__ import annotations

import json

import cli_testing
import measurement_testing
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

from tfcdo.topology import detection


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
        name = detection.name_of_measured(tu.device_names(3)) or ""
        self.assertStartsWith(name, "measured 3 CPU devices of ")
        self.assertIn(name, " ".join(output.split()))
        # Before it, absl logs where it is kept, unless it is told to log warnings only.
        self.assertEqual(errors.splitlines()[-1], f"{name}: measured now, and kept")
        (file,) = self.folder.glob("measured-*")
        content = file.read_text()
        _, errors = self.run_tfcdo(*arguments, "--save", str(self.folder / "plan.json"))
        self.assertIn("--measure measures again", errors)
        plan = json.loads((self.folder / "plan.json").read_text())
        self.assertEqual(plan["topology"]["name"], name)
        self.assertEqual(file.read_text(), content)
        self.run_tfcdo(*arguments, "--measure")
        self.assertNotEqual(file.read_text(), content)

    def test_only_this_machine_can_be_measured(self):
        _, errors = self.run_tfcdo("plan", "-t", "dgx1", "--measure", status=2)
        self.assertIn("--measure measures this machine: -t here", errors)


if __name__ == "__main__":
    tf.test.main()
