"""Times the training steps of a real Keras model under each implementation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcdo.bench import implementations, results, workloads
from tfcdo.bench.devices import ChosenDevices

_SEED = 7
_CLASSES = 10
# The smallest images that the models take: on a processor, larger images hide the all-reduce.
_IMAGE = (32, 32, 3)
_IMAGES_PER_DEVICE = 4

MODELS: Mapping[str, Callable[..., Any]] = {
    name: getattr(keras.applications, keras_name)
    for name, keras_name in workloads.KERAS_MODELS.items()
}


def run(
    model: str,
    devices: ChosenDevices,
    compared: Sequence[implementations.Implementation],
    rounds: int,
    track: results.Track = results.silently,
) -> list[results.Measurement]:
    """Trains one copy of a model under each implementation, a step of each in turn."""
    steps, first_steps = {}, {}
    for one in track(compared, description=f"building {model}"):
        copy = _compiled(model, one.strategy(devices.names))
        first_steps[one.name] = _train(copy, devices, 1)[0]
        # Keras starts again at each call: the second step is one in the middle of training. It
        # traces once more when it is called the second time, which is the warm-up.
        steps[one.name] = functools.partial(_train, copy, devices, 2)
    taken = results.take_turns(steps, rounds, 1, track)
    return [
        results.Measurement(
            one.name,
            one.package,
            len(devices.names),
            *results.median_and_spread([seconds[-1] for seconds in taken[one.name]]),
            workload=model,
            first_call=first_steps[one.name],
        )
        for one in compared
    ]


def _compiled(model: str, strategy: tf.distribute.Strategy) -> Any:
    keras.utils.set_random_seed(_SEED)
    with strategy.scope():
        built = MODELS[model](weights=None, input_shape=_IMAGE, classes=_CLASSES)
        built.compile(optimizer=keras.optimizers.SGD(0.01), loss="sparse_categorical_crossentropy")
    return built


def _train(model: Any, devices: ChosenDevices, steps: int) -> list[float]:
    count = _IMAGES_PER_DEVICE * len(devices.names)
    generator = np.random.default_rng(_SEED)
    images = generator.random((steps * count, *_IMAGE), np.float32)
    labels = generator.integers(0, _CLASSES, steps * count)
    starts: list[float] = []
    ends: list[float] = []  # Keras has waited for the step then, because it passes the loss.
    timer = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: starts.append(time.perf_counter()),
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()),
    )
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(count, drop_remainder=True)
    model.fit(batches, callbacks=[timer], shuffle=False, verbose=0)
    return [end - start for start, end in zip(starts, ends, strict=True)]
