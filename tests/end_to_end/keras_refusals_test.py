"""Tests of what Keras itself refuses under a MirroredStrategy, as the documentation lists it."""

from __future__ import annotations

import pathlib

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from absl.testing import parameterized

import tfcdo
from tfcdo import virtual_devices

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "troubleshooting.md"
_DEVICES = virtual_devices.configure_virtual_cpus(2)


class RefusalTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        ("gradient_accumulation_steps", {"gradient_accumulation_steps": 2}),
        ("ema_overwrite_frequency", {"use_ema": True, "ema_overwrite_frequency": 2}),
    )
    def test_an_optimizer_that_the_page_names(self, name: str, arguments: dict[str, object]):
        self.assertIn(f"`{name}`", _PAGE.read_text(encoding="utf-8"))
        strategy = tf.distribute.MirroredStrategy(
            _DEVICES, cross_device_ops=tfcdo.HierarchicalCopyAllReduce()
        )
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1, **arguments), "mse")
        with self.assertRaises((RuntimeError, ValueError)):
            model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)

    def test_an_empty_dataset_is_named(self):
        with tfcdo.MirroredStrategy(_DEVICES).scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        dataset = tf.data.Dataset.from_tensor_slices((np.ones((8, 2)), np.ones((8, 1)))).batch(4)
        with (
            self.assertLogs(logging.get_absl_logger(), "WARNING") as logs,
            self.assertRaises(StopIteration),
        ):
            model.fit(dataset.take(0), verbose=0)
        self.assertRegex(" ".join(logs.output), "a dataset without elements .* StopIteration")


if __name__ == "__main__":
    tf.test.main()
