"""Runs the trainings of docs/compat.md with one library, and makes a row of each."""

from __future__ import annotations

import functools
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from compat_rows import Row, first_words
from training_cases import BATCH, Training

import tfcdo

# Weights and reported numbers of a training; or how much two trainings differ in each.
Seen = tuple[list[np.ndarray], list[float]]
Differences = tuple[float, float]


def differences(training: Training, library: str, count: int) -> Differences | str:
    """Trains on several replicas and compares with one device."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, seen = train(training, _strategy(training, library, count))
            if training.saved_only:
                path = pathlib.Path(folder) / "model.keras"
                model.save(path)
                loaded = keras.models.load_model(path)
                inside, outside = (_evaluate(training, one) for one in (model, loaded))
                return _largest((seen[0], inside), (loaded.get_weights(), outside))
            return _largest(seen, _on_one_device(training))
    except Exception as error:
        return f"{type(error).__name__}: {first_words(str(error))}"


@functools.lru_cache(maxsize=1)
def _on_one_device(training: Training) -> Seen:
    return train(training, tf.distribute.get_strategy())[1]


def train(training: Training, strategy: tf.distribute.Strategy) -> tuple[keras.Model, Seen]:
    """Trains, and returns the model with its weights and the numbers that it reported."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = training.build()
        arguments = {"loss": "mse", "metrics": list(training.metrics), **training.compile}
        model.compile(training.optimizer(), **arguments)
    reported = _loop(training, model) if training.loop else _fit(training, model)
    if training.evaluate_batch:
        reported += _evaluate(training, model)
    return model, (model.get_weights(), reported)


def _fit(training: Training, model: keras.Model) -> list[float]:
    inputs, targets, *weights = training.data()
    history = model.fit(
        inputs,
        targets,
        BATCH,
        epochs=2,
        sample_weight=weights[0] if weights else None,
        shuffle=False,
        verbose=0,
        **training.fit,
    ).history
    return [number for name in sorted(history) for number in history[name]]


def _loop(training: Training, model: keras.Model) -> list[float]:
    strategy = model.distribute_strategy
    data = tf.data.Dataset.from_tensor_slices(training.data()).batch(BATCH)

    def step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(inputs, training=True) - targets) ** 2) / BATCH
        gradients = tape.gradient(loss, [one.value for one in model.trainable_variables])
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def train_step(batch: Any) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    return [
        float(train_step(batch))
        for _ in range(2)
        for batch in strategy.experimental_distribute_dataset(data)
    ]


def _strategy(training: Training, library: str, count: int) -> tf.distribute.Strategy:
    devices = [f"CPU:{index}" for index in range(count)]
    if library == "tfcdo":
        ops = tfcdo.HierarchicalCopyAllReduce(wire_dtype=training.wire_dtype)
        return tfcdo.MirroredStrategy(devices, ops, **training.options)
    return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())


def _evaluate(training: Training, model: keras.Model) -> list[float]:
    inputs, targets, *_ = training.data()
    return model.evaluate(inputs, targets, training.evaluate_batch, verbose=0)


def _largest(one: Seen, other: Seen) -> Differences:
    weights = max(float(np.abs(a - b).max()) for a, b in zip(one[0], other[0], strict=True))
    reported = max(abs(a - b) / max(1, abs(b)) for a, b in zip(one[1], other[1], strict=True))
    return weights, reported


def row(training: Training, library: str) -> Row:
    """Runs a training with one library on all numbers of replicas."""
    return judge(
        training, {count: differences(training, library, count) for count in training.counts}
    )


def judge(training: Training, differences: Mapping[int, Differences | str]) -> Row:
    """Makes a row of the differences, or errors, by the number of replicas."""
    errors = {count: text for count, text in differences.items() if isinstance(text, str)}
    if errors:
        counts = " and ".join(map(str, errors))
        where = "" if len(errors) == len(differences) else f" ({counts} replicas)"
        text, mark = f"{next(iter(errors.values()))}{where}", "✗"
    else:
        pairs = [pair for pair in differences.values() if not isinstance(pair, str)]
        weights, reported = map(max, zip(*pairs, strict=True))
        equal = weights <= training.tolerance and reported <= training.tolerance
        text, mark = f"{_short(weights)}, {_short(reported)}", "✓" if equal else "✗"
    if mark == "✗" and training.reason:
        text, mark = f"{text}: {training.reason}", "~"
    return Row(training.name, mark, text)


def _short(difference: float) -> str:
    return f"{difference:.0e}" if difference else "0"
