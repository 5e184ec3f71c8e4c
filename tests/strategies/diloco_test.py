"""Hosts that train alone and exchange their parameters in turn, compared with numpy."""

import functools
from typing import Any

import clusters
import keras
import numpy as np
import tensorflow as tf
from clusters import other_strategy
from keras import optimizers as ko
from keras_training import TwoOptimizers, model_of

import tfcdo.keras
from tfcdo.exchange import DiLoCo

BATCH, STEPS, EPOCHS = 10, 4, 2
# Two hosts have 6 and 4 examples of a batch, and 4 and 3 of the last one.
EXAMPLES = 37
_sgd = functools.partial(ko.SGD, 0.1)  # A mean of its parameters is a step with a mean gradient.
# With it, hosts differ; it is less sensitive to rounding than by default.
_adam = functools.partial(ko.Adam, 0.02, epsilon=1e-3)
_half = ko.schedules.PiecewiseConstantDecay([0], [0.7, 0.35])  # After the first exchange.
_halving = functools.partial(ko.SGD, _half, momentum=0.9, nesterov=True)
_plain = functools.partial(ko.SGD, 1.0)  # As the outer optimizer, it averages.


def data(count: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(7)
    inputs = drawn.normal(0, 0.4, size=[count, 36]).astype(np.float32)
    return inputs, np.sin(inputs @ drawn.normal(size=[36, 40])).astype(np.float32)


def model_with(optimizer: Any, kind: Any = keras.Sequential, **options: Any) -> keras.Model:
    """Builds a model whose parameters are large enough for exchanges to be cast."""
    options = {"run_eagerly": not options, "kind": kind, **options}
    return model_of(lambda: [keras.Input([36]), keras.layers.Dense(40)], optimizer, **options)


def _outer(strategy: Any, every: int, *given: Any, **options: Any) -> Any:
    options = {"check_in_sync": False, **options}  # The checks' functions take long to trace.
    return other_strategy(strategy, outer=DiLoCo(every, *given), **options)


def _train(
    strategy: Any, optimizer: Any, *callbacks: Any, count: int = EXAMPLES, **options: Any
) -> dict[str, np.ndarray]:
    fitting = {"validation_data": options.pop("tried", None), "shuffle": False, "verbose": 0}
    with clusters.scope(strategy):
        model = model_with(optimizer(), **options)
    logs = model.fit(*data(count), BATCH, EPOCHS, callbacks=list(callbacks), **fitting).history
    history = {name: np.array(values) for name, values in logs.items()}
    return history | clusters.weights(strategy, model.trainable_variables)


def synchronous(strategy: Any) -> dict[str, np.ndarray]:
    """Averages after each step; the last batch has one example, so that hosts have none."""
    return _train(_outer(strategy, 1, _plain) if strategy else None, _sgd, count=BATCH + 1)


def alone(strategy: Any) -> dict[str, np.ndarray]:
    """Trains a number of steps that three does not divide, and tries other data."""
    saving, saved = _Saved(), model_with("sgd")
    results = _train(_outer(strategy, 3), _adam, saving, tried=data())
    saved.load_weights(_Saved.path)
    results |= {f"saved_{at}": one for at, one in enumerate(saved.get_weights())}
    return results | saving.weights


class _Saved(keras.callbacks.Callback):
    """Saves the model on the chief alone, and reads it as others would, after an epoch."""

    path = "saved.weights.h5"
    weights: dict[str, np.ndarray]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch > 0:
            return
        assert len({"inner_optimizer", "tfcdo_outer"} & vars(self.model.optimizer).keys()) == 1
        if tfcdo.is_chief():
            self.model.save_weights(self.path)
        read = self.model.get_weights()
        predicted = self.model.predict_on_batch(data()[0])[:EXAMPLES]  # Of all hosts.
        np.testing.assert_allclose(predicted, data()[0] @ read[0] + read[1], atol=1e-5)
        own = [variable.value.values[0].numpy() for variable in self.model.trainable_variables]
        assert any(np.any(one != other) for one, other in zip(read, own, strict=True))
        self.weights = {f"read_{at}": one for at, one in enumerate(read)}


def fragments(strategy: Any) -> dict[str, np.ndarray]:
    """Exchanges a half of the parameters in each second step; XLA compiles two steps at a time.

    The chief alone saves its loss scale.
    """
    at_once = {"steps_per_execution": 2, "jit_compile": True}
    scaling = lambda: ko.LossScaleOptimizer(_adam(), 16.0)  # noqa: E731
    return _train(_outer(strategy, 4, _halving, 2), scaling, _Saved(), **at_once)


def scaled(strategy: Any) -> dict[str, np.ndarray]:
    """Exchanges after each sixth step, the third update; scales losses, and shards the state."""
    other = _outer(strategy, 3, shard_optimizer_state=True)
    return _train(other, lambda: ko.LossScaleOptimizer(_adam(gradient_accumulation_steps=2), 16.0))


def averaged(strategy: Any) -> dict[str, np.ndarray]:
    """Ends with an exchange, and with the weights' moving averages."""
    return _train(_outer(strategy, 4), functools.partial(_adam, use_ema=True, ema_momentum=0.5))


def _resumed(folder: str, train: Any) -> dict[str, np.ndarray]:
    """Trains, and again with other objects from two steps after an exchange."""
    backup = functools.partial(tfcdo.keras.BackupAndRestore, folder, delete_checkpoint=False)
    whole, resumed = (train(backup(save_freq=STEPS + 1)) for _ in range(2))
    assert len(resumed["loss"]) == 1 < len(whole["loss"])
    return whole | {f"resumed_{name}": value for name, value in resumed.items()}


def int8(strategy: Any) -> dict[str, np.ndarray]:
    """Exchanges in 8 bits, and is resumed with another strategy."""
    options = {"exchange": "int8", "shard_optimizer_state": True}
    return _resumed("int8", lambda backup: _train(_outer(strategy, 3, **options), _adam, backup))


def _with_two_optimizers(layers: Any) -> keras.Model:
    model = TwoOptimizers(layers)
    model.first, model.second = _adam(), _adam()
    return model


def two_optimizers(strategy: Any) -> dict[str, np.ndarray]:
    strategy, kind = _outer(strategy, 3, check_in_sync=True), _with_two_optimizers
    with strategy.scope():
        twice = model_with("sgd", kind)
        twice.second.build(twice.trainable_variables)
    with np.testing.assert_raises_regex(ValueError, "for a weight.* got two for '.*kernel': b"):
        twice.fit(*data(), verbose=0)
    return _resumed("two", lambda backup: _train(strategy, lambda: "sgd", backup, kind=kind))


def own_loop(strategy: Any) -> dict[str, np.ndarray]:
    """Trains in a loop of one's own, and goes on from a checkpoint of each host."""
    strategy, host = _outer(strategy, 3), strategy.cluster_resolver.task_id
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH).repeat(EPOCHS)
    for number, batch in enumerate(strategy.experimental_distribute_dataset(batches)):
        if number in (0, 4):  # One step after an exchange.
            model = _with_step(strategy)
            checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        if number == 4:
            checkpoint.read(f"checkpoint-{host}").assert_consumed()
        model.step(batch)
        if number == 3:
            checkpoint.write(f"checkpoint-{host}")
    strategy.exchange_parameters(model.optimizer)
    return clusters.weights(strategy, model.trainable_variables)


def _with_step(strategy: Any) -> keras.Model:
    """Makes a model whose attribute `step` trains it on a batch."""
    with strategy.scope():
        model, loss = model_with(_adam()), keras.losses.MeanSquaredError()
        model.optimizer.build(model.trainable_variables)

    def on_replica(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(targets, model(inputs, training=True))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(value, variables), variables)

    model.step = tf.function(lambda batch: strategy.run(on_replica, batch), autograph=False)
    return model


def other_weights(strategy: Any) -> None:
    host = strategy.cluster_resolver.task_id
    with _outer(strategy, 3, check_in_sync=True).scope():
        model = model_with(_adam())
    model.set_weights([one + host for one in model.get_weights()])
    told = (
        r"^after execution 1 of the train step, replica 2 \(host 1\) holds other numbers of "
        r"\S*outer\S* than replica 0, by 1 at most"
    )
    with np.testing.assert_raises_regex(RuntimeError, told):
        model.fit(*data(), BATCH, verbose=0, shuffle=False)


_TIMEOUT = 600.0


class _Host:
    """Adam and a dense layer, on a part of each batch, in 64 bits."""

    def __init__(self, parameters, accumulated):
        self.values = [one.astype(np.float64) for one in parameters]
        self.averages = self.values[:]
        self._accumulated, self._gradients, self._updates = accumulated, [], 0
        self._moments = [np.zeros([2, *one.shape]) for one in parameters]

    def step(self, inputs, targets):
        kernel, bias = self.values
        error = (inputs @ kernel + bias - targets) * 2 / targets.size
        self._gradients.append((inputs.T @ error, error.sum(0)))
        if len(self._gradients) < self._accumulated:
            return
        self._updates += 1
        rate = 0.02 * np.sqrt(1 - 0.999**self._updates) / (1 - 0.9**self._updates)
        for at, (mean, square) in enumerate(self._moments):
            gradient = np.mean([one[at] for one in self._gradients], 0)
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            self.values[at] = self.values[at] - rate * mean / (np.sqrt(square) + 1e-3)
            own = 0.5 if self._updates > 1 else 1.0
            self.averages[at] = (1 - own) * self.averages[at] + own * self.values[at]
        self._gradients.clear()


def _simulate(every, fragments=(0, 0), accumulated=1, later=0.7):
    """Returns the common parameters after the first epoch, and at the end; and averages."""
    common = [one.astype(np.float64) for one in model_with("sgd").get_weights()]
    velocity = [np.zeros_like(one) for one in common]
    hosts = [_Host(common, accumulated) for _ in range(2)]
    inputs, targets = data()
    count, period = max(fragments) + 1, every * accumulated
    last = [0] * count  # The step of each fragment's last exchange.
    examples = np.zeros([count, 2])  # On each host, since a fragment's last exchange.

    def state():
        return [host.values[:] for host in hosts], examples.copy()

    def exchange(fragment, begun, counted):
        """Exchanges the parameters with which the last step began; what it changed is kept."""
        rate = later if last[fragment] else 0.7
        for at in np.flatnonzero(np.equal(fragments, fragment)):
            mean = np.average([value[at] for value in begun], axis=0, weights=counted[fragment])
            velocity[at] = 0.9 * velocity[at] - rate * (common[at] - mean)
            common[at] = common[at] + 0.9 * velocity[at] - rate * (common[at] - mean)
            for host, before in zip(hosts, begun, strict=True):
                host.values[at] = common[at] + (host.values[at] - before[at])
        examples[fragment] -= counted[fragment]

    for done in range(1, EPOCHS * STEPS + 1):
        before = state()
        first = (done - 1) % STEPS * BATCH
        parts = np.array_split(np.arange(first, min(first + BATCH, EXAMPLES)), 4)  # By replica.
        for index, host in enumerate(hosts):
            rows = np.concatenate(parts[2 * index : 2 * index + 2])
            host.step(inputs[rows], targets[rows])
            examples[:, index] += len(rows)
        for fragment in range(count):
            # Fragments are exchanged while the next step is computed.
            at = done - (fragment + 1) * period // count - (count > 1)
            if at % period == 0 and (count == 1 or done > 1):
                exchange(fragment, *(state() if count == 1 else before))
                last[fragment] = done - (count > 1)
        if done == STEPS:
            after_epoch = common[:]
    for fragment in range(count):
        if last[fragment] < done:
            exchange(fragment, *state())
    averages = [np.mean(of_hosts, 0) for of_hosts in zip(*(host.averages for host in hosts))]
    return after_epoch, common, averages


class DiLoCoTest(tf.test.TestCase):
    def test_two_hosts(self):
        names = ["alone", "fragments", "scaled", "int8", "two_optimizers", "own_loop"]
        names += ["averaged", "other_weights"]
        results, _ = clusters.run_scenarios(2, __file__, 2, names, _TIMEOUT)
        for name, hosts in results.items():
            with self.subTest(f"all replicas hold the same: {name}"):
                self.check_same(hosts)
        after_epoch, expected, _ = _simulate(3)
        with self.subTest("what is read in between is what all hosts have"):
            for at, common in enumerate(after_epoch):
                for name in ("read", "saved"):
                    value = results["alone"][1][f"{name}_{at}"]
                    self.assertAllClose(common, value, rtol=0, atol=1e-6)
        with self.subTest("other data is tried with what all hosts have"):
            (inputs, targets), (kernel, bias) = data(), after_epoch
            loss = np.mean((inputs @ kernel + bias - targets) ** 2)
            self.assertNear(loss, results["alone"][1]["val_loss"][0], 1e-5)
        for name, simulated in (
            ("alone", expected),
            ("two_optimizers", expected),
            ("own_loop", expected),
            ("fragments", _simulate(4, fragments=(0, 1), later=0.35)[1]),
            ("scaled", _simulate(3, accumulated=2)[1]),
            ("averaged", _simulate(4)[2]),
        ):
            with self.subTest(name):
                self.check_weights(simulated, results[name][0], 1e-6)
        with self.subTest("int8"):
            self.check_weights(expected, results["int8"][0], 2e-2)
            kernel = results["int8"][0]["replica_0"][0]
            self.assertGreater(np.abs(expected[0] - kernel).max(), 1e-4)
        with self.subTest("resumed"):
            for own in (*results["int8"], *results["two_optimizers"]):
                for name in ("replica_0", "replica_1"):
                    self.assertEqual(own[name].tobytes(), own[f"resumed_{name}"].tobytes(), name)

    def test_three_hosts(self):
        """Averages of each step are synchronous training; on one device of each host."""
        results, _ = clusters.run_scenarios(3, __file__, 1, ["synchronous"], _TIMEOUT)
        self.check_same(results["synchronous"])
        for name, expected in synchronous(None).items():
            self.assertAllClose(expected, results["synchronous"][0][name], rtol=0, atol=1e-6)

    def check_same(self, hosts):
        for own in hosts:
            self.assertEqual(hosts[0].keys(), own.keys())
            for name, value in own.items():
                same, parts = hosts[0][name], [value]
                if name.startswith("replica"):
                    same, parts = same[0], value
                self.assertEqual({same.tobytes()}, {part.tobytes() for part in parts}, name)

    def check_weights(self, expected, result, tolerance):
        for at, one in enumerate(expected):
            self.assertAllClose(one, result[f"replica_{at}"][0], atol=tolerance, rtol=0)


if __name__ == "__main__":
    tf.test.main()
