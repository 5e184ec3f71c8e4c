from __future__ import annotations

import subprocess
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import warm_python
from absl.testing import absltest
from cli_testing import run_tfcdo
from sklearn import datasets

import tfcdo
from tfcdo.cli import demo, demo_training
from tfcdo.virtual_devices import configure_virtual_cpus

_DEVICES = configure_virtual_cpus(3)


def _demo(*arguments: str) -> tuple[int, dict[str, tuple[str, ...]], str]:
    """Runs the demo; returns its exit status, its table by the first column, and its output."""
    result = subprocess.run(
        [warm_python.executable(), "-m", "tfcdo.cli.main", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    rows = [
        tuple(cell.strip() for cell in line.strip("│").split("│"))
        for line in result.stdout.splitlines()
        if line.startswith("│")
    ]
    return result.returncode, {row[0]: row[1:] for row in rows}, result.stdout


class DemoTest(absltest.TestCase):
    def test_training_passes_every_check(self):
        status, table, output = _demo(
            *("--devices", "3", "--cross-device-ops", "hierarchicalcopyallreduce"),
            *("--epochs", str(demo.MIN_EPOCHS)),
        )
        self.assertEqual(status, 0, output)
        self.assertNotIn("Traceback", output)
        name = "HierarchicalCopyAllReduce"
        self.assertIn(f"Training on 3 virtual CPU devices with tfcdo.{name}", output)
        self.assertIn(f"{name}(num_packs=1, topology=None) on 3 devices: hierarchical_copy", output)
        self.assertEqual(
            table["Weights on 3 virtual CPU devices"], ("bitwise equal", "bitwise equal", "ok")
        )
        accuracy, *judged = table["Accuracy on 360 test images"]
        self.assertGreater(float(accuracy.rstrip("%")), 95)
        self.assertEqual(judged, ["over 95%", "ok"])
        difference = table["Largest weight difference from one-device training"][0]
        self.assertLess(float(difference), 1e-5)
        clipped = table["Difference if tfcdo.keras clips and accumulates"]
        self.assertLess(float(clipped[0]), 1e-5)
        self.assertEqual(clipped[1:], ("< 1e-05", "ok"))
        self.assertGreater(float(table["Difference if Keras alone clips"][0]), 1e-3)
        self.assertEqual(table[f"1 + 2 + 3 by tfcdo.{name}"], ("6 6 6", "6 6 6", "ok"))
        # What fails without tfcdo comes after the verdict, and is not one.
        self.assertNotIn("not ok", output)
        ours, _, others = output.partition("All checks passed.")
        for shown in (f"1 + 2 + 3 by tf.distribute.{name}", "Difference if Keras alone clips"):
            self.assertNotIn(shown, ours)
            self.assertIn(shown, others)

    def test_two_workers_train_like_one_device(self):
        status, table, output = _demo("--workers", "2", "--devices", "2", "--epochs", "1")
        self.assertEqual(status, 0, output)
        self.assertIn("Training on 2 workers, 2 x 2 virtual CPU devices, with tfcdo.", output)
        self.assertEqual(
            table["Weights on 2 x 2 virtual CPU devices"],
            ("bitwise equal", "bitwise equal", "ok"),
        )
        difference, *judged = table["Largest weight difference from one-device training"]
        self.assertLess(float(difference), 1e-5)
        self.assertEqual(judged[-1], "ok")
        self.assertIn("Accuracy on 360 test images", table)

    def test_an_unknown_class_gets_one_line_with_the_known_ones(self):
        status, _, errors = run_tfcdo("demo", "--devices", "3", "--cross-device-ops", "Ring")
        self.assertEqual(status, 2)
        (line,) = errors.splitlines()
        self.assertStartsWith(line, "tfcdo: --cross-device-ops: no class 'Ring' in tfcdo")
        for name in ("HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice"):
            self.assertIn(name, line)


class LeavesOneOut(tfcdo.ReductionToOneDevice):
    """Wrong on purpose."""

    def __init__(self):
        super().__init__(accumulation_fn=lambda values: tf.add_n(values[1:]))


class CheckTest(absltest.TestCase):
    """Each check of the demo fails where it should, and the demo with it."""

    def test_accuracy(self):
        model = mock.Mock(return_value=tf.one_hot([0, 1, 2, 3], 4))
        images = np.zeros((4, 8, 8, 1), np.float32)
        for labels, passed in (([0, 1, 2, 3], True), ([0, 1, 2, 2], False)):
            digits = demo_training.Digits(images, np.array(labels), images, np.array(labels))
            self.assertEqual(demo._check_accuracy(model, digits, 8).passed, passed)
        check = demo._check_accuracy(model, digits, demo.MIN_EPOCHS - 1)
        self.assertEqual((check.wanted, check.passed), ("not judged before 8 epochs", None))

    def test_a_failed_check_fails_the_demo(self):
        images, labels = datasets.load_digits(return_X_y=True)
        with (
            mock.patch.object(demo, "MAX_WEIGHT_DIFFERENCE", -1.0),
            # So few that the training is one step.
            mock.patch.object(datasets, "load_digits", return_value=(images[:490], labels[:490])),
        ):
            status, output, _ = run_tfcdo("demo", "--devices", "2", "--epochs", "1")
        self.assertEqual(status, 1)
        subject = "Largest weight difference from one-device training"
        self.assertIn(f"Not as wanted: {subject}; Difference if tfcdo.keras", output)

    def test_replicas_that_differ(self):
        strategy = tf.distribute.MirroredStrategy(_DEVICES)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
        self.assertTrue(demo._check_replicas(strategy, model).passed)
        copies = strategy.experimental_local_results(model.weights[0].value)
        copies[2].assign_add(tf.fill((2, 2), 1e-6))
        check = demo._check_replicas(strategy, model)
        self.assertEqual((check.result, check.passed), ("2 different copies", False))

    def test_weights_that_differ(self):
        model, alone = (
            keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)]) for _ in range(2)
        )
        alone.set_weights(model.get_weights())
        self.assertTrue(demo._check_weights(model, alone).passed)
        alone.weights[1].assign([0.0, 0.5])
        check = demo._check_weights(model, alone)
        self.assertEqual((check.result, check.passed), ("5.0e-01", False))

    def test_sums_that_are_wrong(self):
        check = demo._check_sums(_DEVICES, LeavesOneOut)[-1]
        self.assertEqual((check.result, check.wanted), ("5 5 5", "6 6 6"))
        self.assertFalse(check.passed)


if __name__ == "__main__":
    absltest.main()
