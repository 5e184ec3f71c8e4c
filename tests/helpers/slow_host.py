"""One host of a cluster that is slow, is killed, or is asked for its black box, while it trains."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo import strategies

_DELAY = 0.2
_STEPS = 24


def main(fault: str, steps_per_execution: str = "1") -> None:
    """Trains; the fault happens on host 1. Prints what the strategy knows of delays."""
    here = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1
    if fault != "killed":
        # The machine may be so busy that a host that is well says nothing for ten seconds.
        mock.patch.object(strategies, "_HEARTBEAT_SECONDS", 100.0).start()
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=64)
    strategy = tfcdo.MultiWorkerMirroredStrategy(None, options, devices_per_worker=1)
    x, y = np.random.default_rng(0).normal(size=(2, 2 * _STEPS, 8)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(2, drop_remainder=True)
    if fault == "data" and here:
        data = data.map(lambda *pair: [_slept(one) for one in pair[:1]] + list(pair[1:]))
    if fault in ("killed", "signal"):
        data = data.enumerate().map(lambda index, pair: _faulty(index, pair, fault, here))
    sharding = tf.data.Options()
    sharding.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    with strategy.scope():
        layers = [keras.layers.Dense(8, activation="tanh") for _ in range(4)]
        if fault == "backward" and here:
            layers.insert(2, _SlowBackward())
        model = keras.Sequential([keras.layers.Input((8,)), *layers])
        model.compile("sgd", "mse", steps_per_execution=int(steps_per_execution))
    model.fit(data.with_options(sharding), verbose=0)
    print("delays", json.dumps([dataclasses.asdict(one) for one in strategy.host_delays()]))
    # The first host, which keeps the numbers, must not end before the others have read them.
    strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)


def _slept(value: tf.Tensor, seconds: float = _DELAY) -> tf.Tensor:
    def sleep(array: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return array

    return tf.ensure_shape(tf.numpy_function(sleep, [value], value.dtype), value.shape)


@keras.saving.register_keras_serializable()
class _SlowBackward(keras.layers.Layer):
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def slow(value: tf.Tensor) -> tuple[tf.Tensor, object]:
            return tf.identity(value), _slept

        return slow(inputs)


def _faulty(index: tf.Tensor, pair: tuple[tf.Tensor, tf.Tensor], fault: str, here: bool) -> object:
    def happen(number: np.ndarray) -> np.ndarray:
        if number == 10 and fault == "signal":
            threading.Timer(4.0, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        if number == 10 and here:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10.0)
        return number

    number = tf.numpy_function(happen, [index], tf.int64)
    with tf.control_dependencies([number]):
        return [tf.ensure_shape(tf.identity(one), one.shape) for one in pair]
