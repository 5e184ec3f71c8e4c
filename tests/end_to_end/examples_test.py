"""The examples, against training on one device; `ray_test` has the one for Ray."""

import contextlib
import functools
import importlib.util
import io
import json
import os
import pathlib
import re
import runpy
import sys
import tempfile
import types
import unittest
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
import warm_python
from absl.testing import parameterized

import tfcdo

_EXAMPLES = pathlib.Path(__file__).absolute().parents[2] / "examples"
_BACKENDS = _EXAMPLES / "backends.py"

with mock.patch.object(sys, "path", [str(_EXAMPLES), *sys.path]):
    demo = importlib.import_module("demo")


def _load(name: str) -> Any:
    return types.SimpleNamespace(**runpy.run_path(str(_EXAMPLES / f"{name}.py")))


def _brief_fit(model: Any, *arguments: Any, fit: Any = keras.Model.fit, **options: Any) -> Any:
    """Fits for one epoch, without a graph on one device."""
    model.run_eagerly = model.distribute_strategy.num_replicas_in_sync == 1
    return fit(model, *arguments, **{**options, "epochs": 1})


def _on_two_and_one(train: Any) -> tuple[Any, Any]:
    two = tfcdo.MirroredStrategy(["/cpu:0", "/cpu:1"])
    return train(two), train(tf.distribute.OneDeviceStrategy("/cpu:0"))


@mock.patch.object(keras.Model, "fit", _brief_fit)
class ExamplesTest(tf.test.TestCase, parameterized.TestCase):
    def test_there_are_no_others(self):
        tested = {"keras_fit", "embeddings", "accumulate_and_clip", "contrastive", "own_loop"}
        tested |= {"mixed_precision", "migrate_gpu", "own_algorithm", "multi_worker", "demo"}
        tested |= {"backends", "ray_train"}  # The latter by `ray_test`.
        self.assertEqual(tested, {path.stem for path in _EXAMPLES.glob("*.py")})

    @parameterized.parameters("keras_fit", "embeddings", "accumulate_and_clip", "contrastive")
    def test_keras_trains_as_on_one_device(self, name):
        model, expected_model = _on_two_and_one(_load(name).train)
        for own, expected in zip(model.weights, expected_model.weights, strict=True):
            self.assertAllClose(expected, own, rtol=1e-4, atol=1e-5, msg=own.path)

    def test_mixed_precision(self):
        (model, loss), (_, expected) = _on_two_and_one(_load("mixed_precision").train)
        self.assertEqual(model.layers[0].compute_dtype, "float16")
        # float16 has three digits.
        self.assertAllClose(expected, loss, rtol=0.03)

    def test_own_loop(self):
        slopes, height = _load("own_loop").train(tfcdo.MirroredStrategy(["/cpu:0", "/cpu:1"]))
        self.assertAllClose([[1], [-2], [0.5]], slopes, atol=0.05)
        self.assertAllClose(3, height, atol=0.05)

    def test_migration(self):
        example = _load("migrate_gpu")
        devices = ["/cpu:0", "/cpu:1"]
        one, before = example.train_before(devices[:1]), example.train_before(devices)
        after = example.train_after(devices)
        for expected, own in zip(one.get_weights(), after.get_weights(), strict=True):
            self.assertAllClose(expected, own, rtol=1e-4, atol=1e-5)
        # Why one should: each replica clips before the sum.
        self.assertNotAllClose(one.get_weights()[0], before.get_weights()[0], atol=1e-3)

    def test_own_algorithm(self):
        example = _load("own_algorithm")
        trees = example.ring_in_order(example.ALONG_NVLINKS)
        self.assertLess(2 * example.milliseconds(trees, 10**8), example.milliseconds("ring", 10**8))
        for total in example.all_reduce(trees, tu.ALL_DEVICES):
            self.assertAllEqual(np.arange(100) * sum(range(8)), total)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            example.main()
        self.assertIn("on each device: {2772.0}", printed.getvalue())

    def test_two_workers_save_one_model(self):
        """As docs/several-hosts.md says."""
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        done = warm_python.run(
            *("-m", "tfcdo", "launch", "--workers", "2", "--devices-per-worker", "1"),
            *(str(_EXAMPLES / "multi_worker.py"), "--epochs", "2", "--folder", str(folder)),
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        # One worker speaks for all, and nobody else has written to the folder.
        self.assertEqual(set(re.findall(r"^worker \d", done.stdout, re.MULTILINE)), {"worker 0"})
        self.assertIn("Training on 2 replicas", done.stdout)
        self.assertIn("Epoch 2/2", done.stdout)
        self.assertEqual([path.name for path in folder.iterdir()], ["model.keras"])
        accuracy = float(re.findall(r"accuracy ([\d.]+)$", done.stdout, re.MULTILINE)[-1])
        self.assertGreater(accuracy, 0.95)
        model = keras.models.load_model(folder / "model.keras")
        self.assertEqual(model.count_params(), 16 * 64 + 64 + 64 * 10 + 10)


class DemoTest(tf.test.TestCase):
    def test_training_passes_every_check(self):
        result = warm_python.run(str(_EXAMPLES / "demo.py"), "--devices", "2")
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

    def test_replicas_that_differ_and_a_wrong_sum(self):
        devices = tu.device_names(3)
        strategy = tf.distribute.MirroredStrategy(devices)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
        copies = strategy.experimental_local_results(model.weights[0].value)
        copies[2].assign_add(tf.fill((2, 2), 1e-6))
        one_left_out = tfcdo.ReductionToOneDevice(None, lambda values: tf.add_n(values[1:]))
        for check, result in (
            (demo.check_replicas(strategy, model), "2 different copies"),
            (demo.check_sum("sum", devices, one_left_out), "5 5 5"),
        ):
            self.assertEqual((check.result, check.passed), (result, False))


@functools.cache
def losses_of_one() -> list[float]:
    with mock.patch.object(tfcdo.keras, "set_distribution"):
        return runpy.run_path(str(_BACKENDS))["losses"]["loss"]


class BackendsTest(tf.test.TestCase):
    def test_tensorflow(self):
        self.addCleanup(tf.distribute.experimental_set_strategy, None)
        devices = "keras.src.distribution.distribution_lib.list_devices"
        with mock.patch(devices, return_value=["cpu:0", "cpu:1"]):
            losses = runpy.run_path(str(_BACKENDS))["losses"]["loss"]
        self.assertEqual(2, tf.distribute.get_strategy().num_replicas_in_sync)
        tf.distribute.experimental_set_strategy(None)
        self.assertAllClose(losses_of_one(), losses, 1e-5, 1e-5)

    @unittest.skipUnless(importlib.util.find_spec("jax"), "needs JAX: pip install 'tfcdo[docs]'")
    def test_jax(self):
        variables = {"KERAS_BACKEND": "jax", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with mock.patch.dict(os.environ, variables):
            ran = warm_python.run_cold(str(_BACKENDS))
        found = re.search(r"^jax on 4 devices: (.*)$", ran.stdout, re.MULTILINE)
        assert found, ran.stdout + ran.stderr
        self.assertAllClose(losses_of_one(), json.loads(found[1]), 1e-5, 1e-5)

    def test_devices_of_the_distribution(self):
        self.addCleanup(tf.distribute.experimental_set_strategy, None)
        tfcdo.keras.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
        strategy = tf.distribute.get_strategy()
        self.assertIsInstance(strategy, tfcdo.MirroredStrategy)
        self.assertEqual(["CPU:0"], [one[-5:] for one in strategy.extended.worker_devices])
        tfcdo.keras.set_distribution(keras.distribution.DataParallel)
        count = len(keras.distribution.list_devices())
        self.assertEqual(count, tf.distribute.get_strategy().num_replicas_in_sync)
        tfcdo.keras.set_distribution(None)
        self.assertFalse(tf.distribute.has_strategy())

    def test_what_tensorflow_lacks(self):
        mesh = keras.distribution.DeviceMesh((1, 1), ["batch", "model"], ["cpu:0"])
        layout = keras.distribution.LayoutMap(mesh)
        parallel = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
        with self.assertRaisesRegex(TypeError, "distribution must be .*shard_optimizer_state"):
            tfcdo.keras.set_distribution(parallel)
        cluster = {"worker": ["localhost:1", "localhost:2"]}
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
        message = "must be the class keras.distribution.DataParallel"
        environment = mock.patch.dict(os.environ, TF_CONFIG=config)
        with environment, self.assertRaisesRegex(ValueError, message):
            tfcdo.keras.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))


if __name__ == "__main__":
    tf.test.main()
