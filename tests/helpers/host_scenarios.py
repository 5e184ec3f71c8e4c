"""Scenarios that the hosts of a cluster run in tests, and one device to be compared with.

Each scenario takes a strategy, or None for one device without any, and returns arrays by name. The
names that begin with "replica" hold what each replica of this host has, in its first axis.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import host_values
import keras
import numpy as np
import tensorflow as tf
from host_keras import in_sync  # noqa: F401
from host_keras import mended_keras  # noqa: F401
from host_keras import mixed_float16  # noqa: F401
from host_wire import explained  # noqa: F401
from host_wire import requires_nccl  # noqa: F401
from host_wire import wire_between  # noqa: F401

GLOBAL_BATCH = 24  # Divides by 2 x 2, 3 x 1 and 2 x 3 replicas.
NUM_EXAMPLES = 4 * GLOBAL_BATCH
WORDS, CLASSES, LENGTH = 50, 5, 6


def _scope(strategy: Any) -> Any:
    return strategy.scope() if strategy else contextlib.nullcontext()


def _examples() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    words = generator.integers(0, WORDS, (NUM_EXAMPLES, LENGTH))
    return words, (words.sum(axis=1) % CLASSES).astype(np.int64)


def _weights(model: Any, strategy: Any) -> dict[str, np.ndarray]:
    arrays = {}
    for index, weight in enumerate(model.weights):
        variable = weight.value
        parts = strategy.experimental_local_results(variable) if strategy else (variable,)
        arrays[f"replica_weight_{index}"] = np.stack([part.numpy() for part in parts])
    return arrays


def fit(strategy: Any) -> dict[str, np.ndarray]:
    """Keras fit, evaluate and predict, of a model with an embedding: its gradient has rows."""
    keras.utils.set_random_seed(7)
    words, labels = _examples()
    with _scope(strategy):
        model = keras.Sequential(
            [
                keras.layers.Input((LENGTH,), dtype="int32"),
                keras.layers.Embedding(WORDS, 8),
                keras.layers.Flatten(),
                keras.layers.Dense(16, activation="tanh"),
                keras.layers.Dense(CLASSES),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.2, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    data = tf.data.Dataset.from_tensor_slices((words, labels)).batch(GLOBAL_BATCH)
    history = model.fit(data, epochs=2, verbose=0, shuffle=False)
    inputs = tf.data.Dataset.from_tensor_slices(words).batch(GLOBAL_BATCH)
    return {
        **_weights(model, strategy),
        "history": np.array([history.history["loss"], history.history["accuracy"]]),
        "evaluate": np.array(model.evaluate(data, verbose=0)),
        "predict": model.predict(inputs, verbose=0),
    }


def own_loop(strategy: Any) -> dict[str, np.ndarray]:
    """A training loop of one's own in mixed precision, which reduces a structure each step."""
    keras.utils.set_random_seed(8)
    words, labels = _examples()
    with _scope(strategy):
        layers = [
            keras.layers.Input((LENGTH,)),
            keras.layers.Dense(16, activation="tanh", dtype="mixed_bfloat16"),
            keras.layers.Dense(CLASSES, dtype="mixed_bfloat16"),
        ]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(inputs: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = tf.cast(model(inputs, training=True), tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
            loss = tf.reduce_sum(losses) / GLOBAL_BATCH
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return tf.reduce_sum(losses), tf.size(losses)

    @tf.function
    def train(inputs: Any, targets: Any) -> Any:
        if strategy is None:
            return step(inputs, targets)
        return strategy.reduce("SUM", strategy.run(step, (inputs, targets)), axis=None)

    scaled = (words / WORDS).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((scaled, labels)).batch(GLOBAL_BATCH)
    if strategy:
        data = strategy.experimental_distribute_dataset(data)
    sums = [[float(part) for part in train(*batch)] for _ in range(2) for batch in data]
    return {**_weights(model, strategy), "sums": np.array(sums)}


def values(strategy: Any) -> None:
    """Reduces and gathers values of every kind; numpy says what comes out."""
    host_values.check(strategy)


def flat(strategy: Any) -> dict[str, np.ndarray]:
    """All-reduces with one collective over all devices, as NCCL would, by rings here.

    Every collective must have all replicas as its members.
    """
    extended = strategy.extended
    ops = extended._cross_device_ops
    between = dataclasses.replace(ops._options.between, flat=True)
    extended._cross_device_ops = ops._between(ops._network, between)
    members, reduce = [], tf.raw_ops.CollectiveReduceV2

    def counted(**arguments: Any) -> tf.Tensor:
        members.append(arguments["group_size"])
        return reduce(**arguments)

    with mock.patch.object(tf.raw_ops, "CollectiveReduceV2", counted):
        host_values.check_all_reduces(strategy)
        numbers = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(flat_numbers(context.replica_id_in_sync_group))
        )
        [total] = extended.batch_reduce_to("SUM", [(numbers, numbers)])
    extended._cross_device_ops = ops
    assert set(members) == {strategy.num_replicas_in_sync}, set(members)
    return {"sums": np.stack(strategy.experimental_local_results(total))}


def flat_numbers(replica: int) -> np.ndarray:
    """Returns what a replica gives to `flat`: float32, whose sums are rounded."""
    return np.random.default_rng(replica).normal(size=1001).astype(np.float32)
