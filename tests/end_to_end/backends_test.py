"""One script on Keras's backends TensorFlow and JAX: the same losses as on one device."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pathlib
import re
import runpy
import sys
import unittest
from unittest import mock

import keras
import tensorflow as tf
import warm_python

import tfcdo

_EXAMPLE = pathlib.Path(__file__).absolute().parents[2] / "examples" / "backends.py"


def setUpModule() -> None:
    tfcdo.configure_virtual_cpus(4)  # As the example does, which may come later.


@functools.cache
def losses_of_one() -> list[float]:
    with mock.patch.object(tfcdo.keras, "set_distribution"):
        return runpy.run_path(str(_EXAMPLE))["losses"]["loss"]


class BackendsTest(tf.test.TestCase):
    def test_tensorflow(self):
        self.addCleanup(tf.distribute.experimental_set_strategy, None)
        devices = "keras.src.distribution.distribution_lib.list_devices"
        with mock.patch(devices, return_value=["cpu:0", "cpu:1"]):
            losses = runpy.run_path(str(_EXAMPLE))["losses"]["loss"]
        self.assertEqual(2, tf.distribute.get_strategy().num_replicas_in_sync)
        tf.distribute.experimental_set_strategy(None)
        self.assertAllClose(losses_of_one(), losses, 1e-5, 1e-5)

    @unittest.skipUnless(importlib.util.find_spec("jax"), "needs JAX: pip install 'tfcdo[docs]'")
    def test_jax(self):
        variables = {"KERAS_BACKEND": "jax", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with mock.patch.dict(os.environ, variables):
            ran = warm_python.run_cold(str(_EXAMPLE))
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
