"""Trainings of one host of a cluster whose hosts train alone between exchanges.

`clusters.run(2, "host_diloco", [FOLDER, ...])` starts it. Each host saves the results of each
scenario to FOLDER. The functions that make models and data are also the oracle's.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import optimizers as ko

import tfcdo
import tfcdo.keras
from tfcdo.exchange import DiLoCo

BATCH, STEPS, EPOCHS = 10, 7, 2
# The last batch has one example, so that a host has none.
UNEVEN = 4 * BATCH + 1


def data(count: int = BATCH * STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Draws examples."""
    drawn = np.random.default_rng(7)
    inputs = drawn.normal(size=[count, 6]).astype(np.float32)
    return inputs, np.sin(inputs.sum(1, keepdims=True)).astype(np.float32)


def model_with(optimizer: Any, **options: Any) -> keras.Model:
    """Builds a model whose parameters are large enough for exchanges to be cast."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(n, activation="tanh") for n in (40, 40)]
    model = keras.Sequential([keras.Input([6]), *layers, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model


def sgd() -> Any:
    """Makes an optimizer whose parameters' mean is the training's with mean gradients."""
    return ko.SGD(0.1)


def adam() -> Any:
    """Makes an optimizer with which hosts differ."""
    return ko.Adam(0.02, epsilon=1e-3)  # Less sensitive to rounding than the default.


def accumulating() -> Any:
    """Makes an optimizer that updates every second step."""
    return ko.Adam(0.02, epsilon=1e-3, gradient_accumulation_steps=2)


def plain() -> Any:
    """Makes the outer optimizer that averages."""
    return ko.SGD(1.0)


def _strategy(
    every: int, optimizer: Any = None, fragments: int = 1, devices: int = 2, **options: Any
) -> Any:
    return tfcdo.MultiWorkerMirroredStrategy(
        devices_per_worker=devices, outer=DiLoCo(every, optimizer, fragments), **options
    )


def _train(
    strategy: Any, optimizer: Callable[[], Any] = adam, count: int = BATCH * STEPS, **options: Any
) -> dict[str, np.ndarray]:
    with strategy.scope():
        model = model_with(optimizer(), **options)
    history = _fit(model, count=count)
    return {**history, **_weights(model)}


def _fit(
    model: keras.Model, *callbacks: Any, count: int = BATCH * STEPS, tries: bool = False
) -> dict[str, np.ndarray]:
    inputs, targets = data(count)
    logs = model.fit(
        *(inputs, targets, BATCH, EPOCHS),
        validation_data=(inputs, targets) if tries else None,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    ).history
    return {name: np.array(values) for name, values in logs.items()}


def _weights(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns each trained variable of each replica of this host."""
    return {
        f"weight_{index}": np.stack([one.numpy() for one in variable.value.values])
        for index, variable in enumerate(model.trainable_variables)
    }


def synchronous() -> dict[str, np.ndarray]:
    """Averages after each step; the last batch leaves a host without examples."""
    return _train(_strategy(1, plain), sgd, UNEVEN)


def one_device() -> dict[str, np.ndarray]:
    """Does the same on one device of each host."""
    return _train(_strategy(1, plain, devices=1), sgd, UNEVEN)


def alone() -> dict[str, np.ndarray]:
    """Trains a number of steps that three does not divide."""
    strategy = _strategy(3)
    saved = _Saved(strategy)
    with strategy.scope():
        model = model_with(adam())
    history = _fit(model, saved, tries=True)
    return {**history, **_weights(model), **saved.weights}


class _Saved(keras.callbacks.Callback):
    """Saves the model on the chief alone, and reads it as others would, after each epoch."""

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self._is_chief = strategy.cluster_resolver.task_id == 0
        self.weights: dict[str, np.ndarray] = {}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        path = pathlib.Path(sys.argv[2], f"saved-{epoch}.weights.h5")
        if self._is_chief:
            self.model.save_weights(path)
        read = self.model.get_weights()
        own = [variable.value.values[0].numpy() for variable in self.model.trainable_variables]
        assert any(np.any(one != other) for one, other in zip(read, own, strict=True))
        self.weights |= {f"read_{epoch}_{index}": one for index, one in enumerate(read)}


def executions() -> dict[str, np.ndarray]:
    """Takes two steps in each execution; XLA compiles them."""
    return _train(_strategy(3), steps_per_execution=2, jit_compile=True)


def fragments() -> dict[str, np.ndarray]:
    """Exchanges a third of the parameters in each second step."""
    return _train(_strategy(6, fragments=3))


def accumulated() -> dict[str, np.ndarray]:
    """Exchanges after each second update, which is each fourth step."""
    return _train(_strategy(2), accumulating)


def int8() -> dict[str, np.ndarray]:
    """Exchanges in 8 bits."""
    return _train(_strategy(3, exchange="int8"))


def sharded() -> dict[str, np.ndarray]:
    """Has the inner optimizer's state on one device of each host."""
    return _train(_strategy(3, shard_optimizer_state=True))


def scaled() -> dict[str, np.ndarray]:
    """Scales losses, and has the inner optimizer's state on one device of each host."""
    return _train(
        _strategy(3, shard_optimizer_state=True), lambda: ko.LossScaleOptimizer(adam(), 16.0)
    )


def own_loop() -> dict[str, np.ndarray]:
    """Trains in a loop of one's own, and goes on from a checkpoint of each host."""
    strategy = _strategy(3)
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH).repeat(EPOCHS)
    batches = strategy.experimental_distribute_dataset(batches)
    path = pathlib.Path(sys.argv[2], f"checkpoint-{strategy.cluster_resolver.task_id}")
    for number, batch in enumerate(batches):
        if number in (0, 4):  # One step after an exchange.
            model = _with_step(strategy)
            checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        if number == 4:
            checkpoint.read(str(path)).assert_consumed()
        model.step(batch)
        if number == 3:
            checkpoint.write(str(path))
    strategy.exchange_parameters(model.optimizer)
    return _weights(model)


def _with_step(strategy: Any) -> keras.Model:
    """Makes a model whose attribute `step` trains it on a batch."""
    with strategy.scope():
        model, loss = model_with(adam()), keras.losses.MeanSquaredError()
        model.optimizer.build(model.trainable_variables)

    def on_replica(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(targets, model(inputs, training=True))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(value, variables), variables)

    model.step = tf.function(lambda batch: strategy.run(on_replica, batch), autograph=False)
    return model


class _Interrupt(keras.callbacks.Callback):
    """Ends a training in a batch of the second epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.iterations == STEPS + 4:
            raise InterruptedError


def resumed() -> dict[str, np.ndarray]:
    """Is interrupted two steps after an exchange, and goes on with other objects."""
    folder = pathlib.Path(sys.argv[2], "backup")
    for others in ([_Interrupt()], []):
        strategy = _strategy(3, exchange="int8")
        with strategy.scope():
            model = model_with(adam())
        backup = tfcdo.keras.BackupAndRestore(folder, save_freq=1)
        try:
            _fit(model, backup, *others)
        except InterruptedError:
            continue
    return _weights(model)


def other_weights() -> dict[str, np.ndarray]:
    """Begins with other weights on each host."""
    strategy = _strategy(3)
    with strategy.scope():
        model = model_with(adam())
    model.set_weights([one + strategy.cluster_resolver.task_id for one in model.get_weights()])
    try:
        _fit(model)
    except RuntimeError as error:
        return {"message": np.array(str(error))}
    return {"message": np.array("")}


SCENARIOS = (
    synchronous,
    one_device,
    alone,
    executions,
    fragments,
    accumulated,
    int8,
    sharded,
    scaled,
    own_loop,
    resumed,
    other_weights,
)


def main(folder: str, *names: str) -> None:
    """Runs scenarios, all by default."""
    host = tfcdo.MultiWorkerMirroredStrategy(devices_per_worker=2).cluster_resolver.task_id
    for scenario in SCENARIOS:
        if not names or scenario.__name__ in names:
            path = pathlib.Path(folder, f"{scenario.__name__}-{host}.npz")
            results: dict[str, Any] = scenario()
            np.savez(path, **results)
