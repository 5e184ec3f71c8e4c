"""Hosts that train alone and exchange their parameters in turn, compared with a simulation.

The simulation is two trainings on one device each, whose parameters are averaged by numpy. Each
host of the cluster runs `main`, which saves the results of each scenario.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import clusters
import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
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
    inputs = drawn.normal(0, 0.4, size=[count, 36]).astype(np.float32)
    return inputs, np.sin(inputs.sum(1, keepdims=True)).astype(np.float32)


def model_with(optimizer: Any, **options: Any) -> keras.Model:
    """Builds a model whose parameters are large enough for exchanges to be cast."""
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(40, activation="tanh")
    model = keras.Sequential([keras.Input([36]), hidden, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
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


def scaling() -> Any:
    """Makes an optimizer that scales losses."""
    return ko.LossScaleOptimizer(adam(), 16.0)


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
    return _train(_strategy(1, plain), sgd, UNEVEN, run_eagerly=True)


def one_device() -> dict[str, np.ndarray]:
    """Does the same on one device of each host."""
    return _train(_strategy(1, plain, devices=1), sgd, UNEVEN, run_eagerly=True)


def three_hosts() -> dict[str, np.ndarray]:
    """Exchanges a third of the parameters in each second step, on one device of each host."""
    return _train(_strategy(6, fragments=3, devices=1))


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
    return _train(_strategy(2), accumulating, run_eagerly=True)


def int8() -> dict[str, np.ndarray]:
    """Exchanges in 8 bits."""
    return _train(_strategy(3, exchange="int8"), run_eagerly=True)


def sharded() -> dict[str, np.ndarray]:
    """Has the inner optimizer's state on one device of each host."""
    return _train(_strategy(3, shard_optimizer_state=True), run_eagerly=True)


def scaled() -> dict[str, np.ndarray]:
    """Scales losses, and has the inner optimizer's state on one device of each host."""
    return _train(_strategy(3, shard_optimizer_state=True), scaling, run_eagerly=True)


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
            model = model_with(adam(), run_eagerly=True)
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
        model = model_with(adam(), run_eagerly=True)
    model.set_weights([one + strategy.cluster_resolver.task_id for one in model.get_weights()])
    try:
        _fit(model)
    except RuntimeError as error:
        return {"message": np.array(str(error))}
    return {"message": np.array("")}


SCENARIOS = (
    synchronous,
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
ON_THREE_HOSTS = (one_device, three_hosts)


def main(folder: str, *names: str) -> None:
    """Runs scenarios by their names."""
    host = tfcdo.MultiWorkerMirroredStrategy(devices_per_worker=2).cluster_resolver.task_id
    for name in names:
        start = time.monotonic()
        results: dict[str, Any] = globals()[name]()
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        np.savez(pathlib.Path(folder, f"{name}-{host}.npz"), **results)


def _run(folder: str, hosts: int, scenarios: Sequence[Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns each host's results of each scenario."""
    names = [scenario.__name__ for scenario in scenarios]
    for outcome in clusters.run(hosts, __file__, [folder, *names], _TIMEOUT):
        assert outcome.returncode == 0, outcome.output
    return {
        name: [dict(np.load(pathlib.Path(folder, f"{name}-{host}.npz"))) for host in range(hosts)]
        for name in names
    }


_TIMEOUT = 900.0
_PARTS = (6, 4)  # Four replicas have 3, 3, 2 and 2 of 10 examples.
# The matrix of 36 x 40 values is a fragment; the other values are in two of equal size.
_FRAGMENTS = (0, 1, 2, 1)


class _Outer:
    """SGD(0.7, momentum=0.9, nesterov=True), in 64 bits."""

    def __init__(self, parameters, parts):
        self.parts = parts
        self.common = [one.astype(np.float64) for one in parameters]
        self._velocity = [np.zeros_like(one) for one in self.common]

    def update(self, at, of_hosts):
        mean = np.average([one.astype(np.float64) for one in of_hosts], axis=0, weights=self.parts)
        gradient = self.common[at] - mean
        self._velocity[at] = 0.9 * self._velocity[at] - 0.7 * gradient
        self.common[at] += 0.9 * self._velocity[at] - 0.7 * gradient


def _simulate(every, make=adam, fragments=(0,) * 4, updates_every=1, parts=_PARTS):
    """Trains hosts with parts of a batch; returns their mean after each epoch, and at the end."""
    # A few steps are quicker eagerly than traced.
    hosts = [model_with(make(), run_eagerly=True) for _ in parts]
    inputs, targets = data()
    outer, ends = _Outer(hosts[0].get_weights(), parts), np.cumsum(parts)
    count = max(fragments) + 1
    period, done, after_epochs = every * updates_every, 0, []
    last = [0] * count  # The step of each fragment's last exchange.

    def exchange(fragment, begun):
        """Exchanges the parameters with which the last step began; what it changed is kept."""
        values = [model.get_weights() for model in hosts]
        for at, own in enumerate(fragments):
            if own == fragment:
                outer.update(at, [value[at] for value in begun])
                for value, before in zip(values, begun, strict=True):
                    value[at] = np.float32(outer.common[at] + (value[at] - before[at]))
        for model, value in zip(hosts, values, strict=True):
            model.set_weights(value)

    for _ in range(EPOCHS):
        for batch in range(STEPS):
            begun = [model.get_weights() for model in hosts]
            for model, part, end in zip(hosts, parts, batch * BATCH + ends, strict=True):
                rows = slice(end - part, end)
                model.train_on_batch(inputs[rows], targets[rows])
            done += 1
            for fragment in range(count):
                # Fragments are exchanged while the next step is computed.
                at = done - (fragment + 1) * period // count - (count > 1)
                if at % period == 0 and (count == 1 or done > 1):
                    now = [model.get_weights() for model in hosts]
                    exchange(fragment, begun if count > 1 else now)
                    last[fragment] = done - (count > 1)
        after_epochs.append([one.copy() for one in outer.common])
    for fragment in range(count):
        if last[fragment] < done:
            exchange(fragment, [model.get_weights() for model in hosts])
    return after_epochs, outer.common


class DiLoCoTest(tf.test.TestCase, parameterized.TestCase):
    def test_two_hosts(self):
        """One test, as each of pytest's processes would start hosts of its own."""
        with tempfile.TemporaryDirectory() as folder:
            results = _run(folder, 2, SCENARIOS)
            saved = []
            for epoch in range(EPOCHS):
                model = model_with("sgd")
                model.load_weights(pathlib.Path(folder, f"saved-{epoch}.weights.h5"))
                saved.append(model.get_weights())
        for name, hosts in results.items():
            with self.subTest(f"all replicas hold the same: {name}"):
                self.check_same(hosts)
        with self.subTest("averages of each step are synchronous training"):
            self.check_synchronous(results["synchronous"][0])
        after_epochs, expected = _simulate(3)
        with self.subTest("what is read and saved in between is what all hosts have"):
            for epoch, common in enumerate(after_epochs):
                read = [results["alone"][1][f"read_{epoch}_{at}"] for at in range(len(common))]
                self.assertAllClose(common, read, atol=1e-6)
                self.assertAllClose(common, saved[epoch], atol=1e-6)
        with self.subTest("other data is tried with what all hosts have"):
            model = model_with("sgd")
            model.set_weights(after_epochs[0])
            loss = model.evaluate(*data(), verbose=0)
            self.assertNear(loss, results["alone"][1]["val_loss"][0], 1e-5)
        for name in ("alone", "executions", "sharded", "scaled", "own_loop"):
            with self.subTest(name):
                self.check_weights(expected, results[name][0], 1e-6)
        with self.subTest("fragments"):
            _, in_turn = _simulate(6, fragments=_FRAGMENTS)
            self.check_weights(in_turn, results["fragments"][0], 1e-6)
        with self.subTest("accumulated gradients"):
            _, accumulated = _simulate(2, accumulating, updates_every=2)
            self.check_weights(accumulated, results["accumulated"][0], 1e-6)
        with self.subTest("int8"):
            self.check_weights(expected, results["int8"][0], 2e-2)
            far = [
                np.abs(one - results["int8"][0][f"weight_{at}"][0]).max()
                for at, one in enumerate(expected)
            ]
            self.assertGreater(max(far), 1e-4)
        with self.subTest("resumed"):
            for host in (0, 1):
                for name, value in results["resumed"][host].items():
                    self.assertEqual(value.tobytes(), results["int8"][host][name].tobytes(), name)
        with self.subTest("other weights are found"):
            for found in results["other_weights"]:
                self.assertRegex(
                    str(found["message"]),
                    r"^after execution 1 of the train step, replica 2 \(host 1\) holds other "
                    r"numbers of \S*outer\S* than replica 0, by 1 at most",
                )

    def test_three_hosts(self):
        with tempfile.TemporaryDirectory() as folder:
            results = _run(folder, 3, ON_THREE_HOSTS)
        for hosts in results.values():
            self.check_same(hosts)
        self.check_synchronous(results["one_device"][0])
        _, in_turn = _simulate(6, fragments=_FRAGMENTS, parts=(4, 3, 3))
        self.check_weights(in_turn, results["three_hosts"][0], 1e-6)

    def check_same(self, hosts):
        """Asserts that hosts report the same, and all their replicas have the same weights."""
        for other in hosts[1:]:
            self.assertEqual(hosts[0].keys(), other.keys())
            for name, value in hosts[0].items():
                self.assertEqual(value.tobytes(), other[name].tobytes(), name)
        for name, value in hosts[0].items():
            if name.startswith("weight"):
                for replica in value:
                    self.assertEqual(value[0].tobytes(), replica.tobytes(), name)

    def check_weights(self, expected, result, tolerance):
        for at, one in enumerate(expected):
            self.assertAllClose(one, result[f"weight_{at}"][0], atol=tolerance, rtol=0)

    def check_synchronous(self, result):
        model = model_with(sgd())
        history = _fit(model, count=UNEVEN)
        self.check_weights(model.get_weights(), result, 1e-6)
        self.assertAllClose(history["loss"], result["loss"], atol=1e-6)


class ArgumentsTest(tf.test.TestCase):
    def test_are_checked(self):
        with self.assertRaisesRegex(ValueError, "every must be at least 1; got 0"):
            DiLoCo(0)
        with self.assertRaisesRegex(ValueError, "fragments must divide every, 50; got fragments=4"):
            DiLoCo(50, fragments=4)
        with self.assertRaisesRegex(TypeError, "optimizer must be a function that makes a Keras"):
            DiLoCo(50, 0.7)  # type: ignore[arg-type]


if __name__ == "__main__":
    tf.test.main()
