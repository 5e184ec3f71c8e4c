"""Milliseconds a step of a real Keras model under each implementation."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcdo.bench import implementations
from tfcdo.bench import workloads
from tfcdo.bench.devices import Devices

_SEED = 7
_CLASSES = 10
# The smallest images that the models take: on a processor, larger ones hide the all-reduce.
_IMAGE = (32, 32, 3)
_IMAGES_PER_DEVICE = 4

MODELS: Mapping[str, Callable[..., Any]] = {
    name: getattr(keras.applications, known) for name, known in workloads.KERAS_MODELS.items()
}


@dataclasses.dataclass(frozen=True)
class FitMeasurement:
    """What training took.

    Attributes:
      model: which.
      num_devices: on how many devices.
      name: the implementation.
      kind: `"tfcdo"` or `"tf"`.
      seconds: the median time of one step, in seconds.
      spread: the distance between the quartiles of these times, in seconds.
      first_step: seconds of the first step, with all tracing and building.
    """

    model: str
    num_devices: int
    name: str
    kind: str
    seconds: float
    spread: float
    first_step: float


class _StepTimes(keras.callbacks.Callback):
    """Notes how long each training step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops it; Keras has waited for the step, because it hands over the loss."""
        self.seconds.append(time.perf_counter() - self._start)


def num_pieces(num_implementations: int, rounds: int) -> int:
    """How often `run` tells its progress."""
    return num_implementations * (1 + rounds)


def run(
    model: str,
    devices: Devices,
    compared: Sequence[implementations.Implementation],
    rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[FitMeasurement]:
    """Trains one copy of a model under each implementation, a step of each in turn.

    Args:
      model: one of `MODELS`.
      devices: on which devices.
      compared: the implementations.
      rounds: how many steps of each count.
      progress: told what is done next.

    Returns:
      One measurement each.

    Raises:
      implementations.UnusableArgumentsError: if one cannot run with its arguments.
    """
    trained = {}
    firsts = {}
    for one in compared:
        progress(f"building {model} under {one.name}")
        trained[one.name], firsts[one.name] = one.make(functools.partial(_start, model, devices))
        # Keras traces once more when it is called the second time.
        _train(trained[one.name], devices, 1)
    times: dict[str, list[float]] = {one.name: [] for one in compared}
    for number in range(rounds):
        for name, copy in trained.items():
            progress(f"step {number + 1} of {rounds}")
            # Keras sets out anew at each call: the second step is one in the middle of training.
            times[name].append(_train(copy, devices, 2)[-1])
    return [
        _measurement(model, devices, one, times[one.name], firsts[one.name]) for one in compared
    ]


def _start(model: str, devices: Devices, one: implementations.Implementation) -> tuple[Any, float]:
    """A model, and the seconds of its first step."""
    made = _compiled(model, one.strategy(devices.names))
    return made, _train(made, devices, 1)[0]


def _compiled(model: str, strategy: tf.distribute.Strategy) -> Any:
    keras.utils.set_random_seed(_SEED)
    with strategy.scope():
        made = MODELS[model](weights=None, input_shape=_IMAGE, classes=_CLASSES)
        made.compile(optimizer=keras.optimizers.SGD(0.01), loss="sparse_categorical_crossentropy")
    return made


def _train(model: Any, devices: Devices, steps: int) -> list[float]:
    count = _IMAGES_PER_DEVICE * len(devices.names)
    generator = np.random.default_rng(_SEED)
    images = generator.random((steps * count, *_IMAGE), np.float32)
    labels = generator.integers(0, _CLASSES, steps * count)
    clock = _StepTimes()
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(count, drop_remainder=True)
    model.fit(batches, callbacks=[clock], shuffle=False, verbose=0)
    return clock.seconds


def _measurement(
    model: str,
    devices: Devices,
    one: implementations.Implementation,
    times: Sequence[float],
    first: float,
) -> FitMeasurement:
    lower, median, upper = np.quantile(times, (0.25, 0.5, 0.75))
    return FitMeasurement(
        model,
        len(devices.names),
        one.name,
        one.package,
        float(median),
        float(upper - lower),
        first,
    )
