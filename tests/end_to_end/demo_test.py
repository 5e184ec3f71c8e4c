from __future__ import annotations

import contextlib
import importlib
import io
import pathlib
import sys
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
import warm_python
from absl.testing import absltest

import tfcdo
from tfcdo.virtual_devices import configure_virtual_cpus

_DEVICES = configure_virtual_cpus(3)
_DEMO = pathlib.Path(__file__).absolute().parents[2] / "examples" / "demo.py"


with mock.patch.object(sys, "path", [str(_DEMO.parent), *sys.path]):
    demo = importlib.import_module("demo")


class DemoTest(absltest.TestCase):
    def test_training_passes_every_check(self):
        result = warm_python.run(str(_DEMO), "--devices", "2")
        output = result.stdout + result.stderr
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines()]
        table = {row[0]: row[1:] for row in rows if row}
        self.assertEqual(result.returncode, 0, output)
        self.assertIn("Training on 2 virtual CPU devices with tfcdo.MirroredStrategy", output)
        equal = "bitwise equal"
        self.assertEqual(table["Weights on 2 virtual CPU devices"], [equal, equal, "ok"])
        self.assertEqual(table["Accuracy on 360 test images"][1:], ["over 95%", "ok"])
        difference, *_, verdict = table["Largest weight difference from one-device training"]
        self.assertLess(float(difference), 1e-5)
        self.assertEqual(verdict, "ok")
        self.assertEqual(table["1 + 2 + 3 by tfcdo's copies"], ["6 6 6", "6 6 6", "ok"])
        self.assertNotIn("not ok", output)
        # What fails without tfcdo comes after the verdict, and is not one.
        ours, _, others = output.partition("All checks passed.")
        self.assertGreater(float(table["Clipping under TensorFlow's strategy"][0]), 1e-3)
        self.assertNotIn("TensorFlow's copies", ours)
        self.assertIn("1 + 2 + 3 by TensorFlow's copies", others)
        self.assertIn("Clipping under TensorFlow's strategy", others)


class CheckTest(absltest.TestCase):
    def test_a_failed_check_fails_the_demo(self):
        def untrained(digits: Any, devices: int, epochs: int, strategy: Any, *_: Any) -> Any:
            with strategy.scope():
                layers = [keras.layers.Flatten(), keras.layers.Dense(10)]
                return keras.Sequential([keras.layers.Input((8, 8, 1)), *layers])

        printed = self.enter_context(contextlib.redirect_stdout(io.StringIO()))
        with mock.patch.object(demo, "train", untrained):
            self.assertEqual(demo.main(devices=2, epochs=1), 1)
        subject = "Largest weight difference from one-device training"
        self.assertIn(f"Not as wanted: {subject}\n", printed.getvalue())

    def test_weights_that_differ(self):
        strategy = tf.distribute.MirroredStrategy(_DEVICES)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
        alone = keras.models.clone_model(model)
        alone.set_weights(model.get_weights())
        self.assertTrue(demo.check_replicas(strategy, model).passed)
        self.assertTrue(demo.check_weights("w", model, alone).passed)
        alone.weights[1].assign([0.0, 0.5])
        copies = strategy.experimental_local_results(model.weights[0].value)
        copies[2].assign_add(tf.fill((2, 2), 1e-6))
        one_left_out = tfcdo.ReductionToOneDevice(None, lambda values: tf.add_n(values[1:]))
        for check, result in (
            (demo.check_weights("w", model, alone), "5.0e-01"),
            (demo.check_replicas(strategy, model), "2 different copies"),
            (demo.check_sum("sum", _DEVICES, one_left_out), "5 5 5"),
        ):
            self.assertEqual((check.result, check.passed), (result, False))


if __name__ == "__main__":
    absltest.main()
