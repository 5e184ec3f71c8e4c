"""The examples, against training on one device; some have test files of their own."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import runpy
import tempfile
import types
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
import testing_utils as tu
import warm_python
from absl.testing import parameterized

import tfcdo

_EXAMPLES = pathlib.Path(__file__).absolute().parents[2] / "examples"


def _load(name: str) -> Any:
    return types.SimpleNamespace(**runpy.run_path(str(_EXAMPLES / f"{name}.py")))


def _on_two_and_one(train: Any) -> tuple[Any, Any]:
    two = tfcdo.MirroredStrategy(["/cpu:0", "/cpu:1"])
    fit = tf.keras.Model.fit
    one_epoch: Any = lambda *args, **options: fit(*args, **{**options, "epochs": 1})  # noqa: E731
    with mock.patch.object(tf.keras.Model, "fit", one_epoch):
        return train(two), train(tf.distribute.OneDeviceStrategy("/cpu:0"))


class ExamplesTest(tf.test.TestCase, parameterized.TestCase):
    def test_there_are_no_others(self):
        tested = {"keras_fit", "embeddings", "accumulate_and_clip", "contrastive", "own_loop"}
        tested |= {"mixed_precision", "migrate_gpu", "own_algorithm", "multi_worker"}
        elsewhere = {"ray_train", "backends", "demo"}
        self.assertEqual(tested | elsewhere, {path.stem for path in _EXAMPLES.glob("*.py")})

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
            *("-m", "tfcdo.cli.main", "launch", "--workers", "2", "--devices-per-worker", "1"),
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
        model = tf.keras.models.load_model(folder / "model.keras")
        self.assertEqual(model.count_params(), 16 * 64 + 64 + 64 * 10 + 10)


if __name__ == "__main__":
    tf.test.main()
