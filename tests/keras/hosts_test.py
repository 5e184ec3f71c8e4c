"""Keras trainings on two hosts of two devices each, compared with one device."""

from __future__ import annotations

from typing import Any

import clusters
import keras
import numpy as np
import tensorflow as tf
from clusters import copies, other_strategy, scope, weights
from keras import optimizers as ko
from keras_training import BATCH, dense_data, dense_layers, model_of, word_data, word_layers

_EXAMPLES = 3 * BATCH + 7  # The last batch does not divide by four replicas.


def _fit(
    strategy: Any, model: keras.Model, *callbacks: Any, outlier: int | None = None
) -> list[float]:
    inputs, targets = dense_data(_EXAMPLES)
    if outlier is not None:
        targets[outlier] = 1e9  # The gradient of this example's error is infinite in float16.
    return model.fit(
        inputs, targets, BATCH, callbacks=list(callbacks), shuffle=False, verbose=0
    ).history["loss"]


def mended_keras(strategy: Any) -> dict[str, np.ndarray]:
    """Clips, accumulates, averages and scales losses; the last batch does not divide."""
    averaging = {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 2}
    with scope(strategy):
        sgd = ko.SGD(0.2, clipnorm=0.05, gradient_accumulation_steps=2, **averaging)
        optimizer = ko.LossScaleOptimizer(sgd, 16.0, dynamic_growth_steps=2)
        model = model_of(dense_layers, optimizer)
    loss = _fit(strategy, model)
    return {"loss": np.array(loss), **weights(strategy, model.weights)}


def sharded_state(strategy: Any) -> dict[str, np.ndarray]:
    """Trains with the state on one device of each host."""
    sharding = other_strategy(strategy, shard_optimizer_state=True) if strategy else None
    with scope(sharding):
        optimizer = ko.Adam(0.05, global_clipnorm=0.5, weight_decay=0.1)
        model = model_of(dense_layers, optimizer, run_eagerly=False)
    loss = _fit(sharding, model)
    if sharding:
        held = sharding.state_bytes(model.optimizer)
        # Two moments once, and a few scalars; not two moments on each of two devices.
        assert sum(held.values()) < 3 * sum(weight.nbytes for weight in model.get_weights()), held
    slots = {f"slot_{i}": slot.numpy() for i, slot in enumerate(model.optimizer.variables)}
    return {"loss": np.array(loss), **slots, **weights(sharding, model.weights)}


def mixed_float16(strategy: Any) -> dict[str, np.ndarray]:
    """Trains in mixed precision, with casts between hosts.

    In one step of each epoch one replica's gradients are infinite: all hosts have to leave it out.
    """
    casting = other_strategy(strategy, exchange="float16") if strategy else None
    with scope(casting):
        optimizer = ko.LossScaleOptimizer(ko.SGD(0.1), 16.0, dynamic_growth_steps=2)
        model = model_of(_half_layers, optimizer, run_eagerly=False)
    for _ in range(2):
        _fit(casting, model, outlier=BATCH + 3)
    scale = optimizer.dynamic_scale.numpy()
    return {"scale": scale, **weights(casting, model.trainable_weights)}


def jit(strategy: Any) -> dict[str, np.ndarray]:
    """Trains with XLA on several replicas, and without on one device."""
    with scope(strategy):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(word_layers())
        model.compile(
            ko.SGD(0.05, momentum=0.9),
            "mse",
            metrics=["mae"],
            jit_compile=strategy is not None,
        )
    history = model.fit(*word_data(2 * BATCH + 7), BATCH, shuffle=False, verbose=0)
    logs = {name: np.array(values) for name, values in history.history.items()}
    return {**logs, **weights(strategy, model.weights)}


def callbacks(strategy: Any) -> dict[str, np.ndarray]:
    """Takes smaller steps and stops early by the loss on other data; the batches do not divide."""
    with scope(strategy):
        sgd = ko.SGD(0.2)
        model = model_of(dense_layers, sgd, run_eagerly=False)
    inputs, targets = dense_data(_EXAMPLES)
    others = np.flip(inputs), np.flip(targets)
    history = model.fit(
        *(inputs, targets, BATCH),
        epochs=20,
        validation_data=others,
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.ReduceLROnPlateau("val_loss", 0.5, patience=1, min_delta=0.5),
            keras.callbacks.EarlyStopping(
                "val_loss", patience=2, min_delta=0.5, restore_best_weights=True
            ),
        ],
    )
    logs = {name: np.array(values) for name, values in history.history.items()}
    predicted = model.predict(others[0], BATCH, verbose=0)
    return {**logs, "predicted": predicted, **weights(strategy, model.weights)}


def shuffled(strategy: Any) -> dict[str, np.ndarray]:
    """Counts how often each example is seen: last with a seed, before in orders that differ."""
    ids = np.arange(60)[:, None]  # The batches divide by four replicas.
    with strategy.scope():
        table = keras.layers.Embedding(len(ids), 1, embeddings_initializer="zeros")
        model = keras.Sequential([keras.Input((1,), dtype="int32"), table, keras.layers.Flatten()])
        model.compile(ko.SGD(1.0), lambda targets, outputs: -outputs)
    data = tf.data.Dataset.from_tensor_slices((ids, ids))
    model.fit(data.shuffle(60, seed=strategy.cluster_resolver.task_id + 1).batch(20), verbose=0)
    model.fit(ids, ids, 20, verbose=0)
    model.set_weights([np.zeros([len(ids), 1])])
    keras.utils.set_random_seed(7)
    model.fit(ids, ids, 20, verbose=0)
    return {"seen": 20 * model.get_weights()[0]}


def uneven_loop(strategy: Any) -> dict[str, np.ndarray]:
    """Drops out in a loop of one's own, whose batches leave one host fewer examples than the other.

    In most of them, a host's own replicas have equally many.
    """
    with scope(strategy):
        dropout = keras.layers.Dropout(0.5, seed=5)

    @tf.function
    def dropped(inputs: Any) -> Any:
        if strategy is None:
            return dropout(inputs, training=True)
        outputs = strategy.run(lambda part: dropout(part, training=True), (inputs,))
        return strategy.gather(outputs, axis=0)

    data = tf.data.Dataset.from_tensor_slices(np.ones([17, 7], np.float32)).batch(6)
    if strategy:
        data = strategy.experimental_distribute_dataset(data)
    return {"dropped": np.concatenate([dropped(inputs) for inputs in data])}


def unlike_sizes(strategy: Any) -> dict[str, np.ndarray]:
    """Predicts and reduces values whose sizes change, more often than keys come back."""
    inputs = np.arange(349 * 4, dtype=np.float32).reshape([349, 4])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Activation("linear")])
    predicted = model.predict(inputs, 5, verbose=0)

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def total(values: tf.Tensor) -> tf.Tensor:
        own = strategy.run(lambda: values + 0.0)
        return strategy.reduce("SUM", own, axis=None)

    sums = np.concatenate([total(np.ones(1 + step % 5)).numpy() for step in range(70)])
    return {"predicted": predicted - inputs, "sums": sums}


def other_weights(strategy: Any) -> dict[str, np.ndarray]:
    """Starts the second host with other weights, which is found without a callback."""
    with strategy.scope():
        model = model_of(dense_layers, "sgd")
    if strategy.cluster_resolver.task_id == 1:
        model.set_weights([weight + 0.5 for weight in model.get_weights()])
    return {"message": np.array(_error_of(strategy, model))}


def _half_layers() -> list[Any]:
    """Layers that compute in float16, with a kernel that is large enough to be cast."""
    return [
        keras.layers.Input((4,)),
        keras.layers.Dense(600, activation="tanh", dtype="mixed_float16"),
        keras.layers.Dense(2, dtype="mixed_float16"),
        keras.layers.Activation("linear", dtype="float32"),
    ]


class _Break(keras.callbacks.Callback):
    """Changes a weight on the last host's last replica, after two steps."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        if batch == 1 and strategy.cluster_resolver.task_id == 1:
            kernel = self.model.trainable_variables[0].value
            last = strategy.experimental_local_results(kernel)[-1]
            last.assign_add(np.full(last.shape, 0.5))


def in_sync(strategy: Any) -> dict[str, np.ndarray]:
    """Synchronizes statistics; breaks the sync on one host and has it found on all."""
    with strategy.scope():
        model = model_of(
            lambda: [*dense_layers(), keras.layers.BatchNormalization(momentum=0.5)], "sgd"
        )
    _fit(strategy, model)
    moving = model.layers[-1].non_trainable_variables[0]
    before = copies(strategy, moving)
    mean = moving.numpy()
    model.evaluate(*dense_data(BATCH), BATCH, verbose=0)
    synchronized = copies(strategy, moving)
    with strategy.scope():
        model.compile("sgd", "mse", run_eagerly=True)  # Its first steps are compared again.
    return {
        "before": before,
        "mean": mean,
        "synchronized": synchronized,
        "message": np.array(_error_of(strategy, model, _Break())),
    }


def _error_of(strategy: Any, model: keras.Model, *callbacks: Any) -> str:
    try:
        _fit(strategy, model, *callbacks)
    except RuntimeError as error:
        return str(error)
    return "nothing was found"


_TIMEOUT = 400.0
# Sums of gradients over the examples of a replica are rounded in float16; a step that one replica
# alone takes or leaves out makes a difference of some hundredths.
_TRAININGS = {
    "mended_keras": 2e-6,
    "sharded_state": 2e-5,
    "mixed_float16": 5e-3,
    "jit": 3e-5,
    "callbacks": 1e-5,
    "uneven_loop": 0.0,
}


class HostsTest(tf.test.TestCase):
    def test_two_hosts(self):
        """One test, as each of pytest's processes would start hosts of its own."""
        names = ["shuffled", "unlike_sizes", *_TRAININGS, "in_sync", "other_weights"]
        results, outcomes = clusters.run_scenarios(2, __file__, 2, names, _TIMEOUT)
        for name, tolerance in _TRAININGS.items():
            with self.subTest(name):
                self.check_training(name, results[name], tolerance)
        with self.subTest("with a seed, an epoch has each example once; without, hosts warn"):
            for own, outcome in zip(results["shuffled"], outcomes, strict=True):
                self.assertAllClose(np.ones_like(own["seen"]), own["seen"])
                self.assertEqual(outcome.output.count("is shuffled without a seed"), 1)
            # By the host that came last, at least.
            self.assertRegex("".join(o.output for o in outcomes), "with other seeds than on")
        with self.subTest("sizes that change"):
            for own in results["unlike_sizes"]:
                self.assertAllEqual(np.zeros([349, 4]), own["predicted"])
                self.assertAllEqual(np.full(210, 4), own["sums"])
        with self.subTest("callbacks stop before the 20 epochs are over, in smaller steps"):
            rates = results["callbacks"][0]["learning_rate"]
            self.assertLess(len(rates), 20)
            self.assertLess(rates[-1], rates[0])
        with self.subTest("statistics"):
            self.check_statistics(*results["in_sync"])
        with self.subTest("a break is found on all hosts"):
            for own in results["in_sync"]:
                self.assertRegex(
                    str(own["message"]),
                    r"^after execution 3 of the train step, replica 3 \(host 1\) holds other "
                    r"numbers of \S*kernel than replica 0, by 0\.5\S* at most; of \d+ variables 1 ",
                )
        with self.subTest("other weights are found at once"):
            for own in results["other_weights"]:
                self.assertRegex(
                    str(own["message"]),
                    r"^after execution 1 of the train step, replica 2 \(host 1\) holds other "
                    r"numbers of \S*kernel than replica 0, by 0\.\S* at most; "
                    r".*check_in_sync=False",
                )

    def check_training(self, name, results, tolerance):
        for key, expected in globals()[name](None).items():
            for own in results:
                actual = own[key]
                if key.startswith("replica"):
                    self.assertLen(actual, 2)
                    for replica in actual:
                        self.assertEqual(results[0][key][0].tobytes(), replica.tobytes())
                    expected, actual = expected[:1], actual[:1]
                np.testing.assert_allclose(
                    actual, expected, rtol=tolerance, atol=tolerance, err_msg=key
                )

    def check_statistics(self, first, second):
        before = np.concatenate([first["before"], second["before"]])
        self.assertLen(np.unique(before, axis=0), 4)
        for own in first, second:
            self.assertAllClose(before.mean(0, np.float64), own["mean"], rtol=1e-6)
        after = np.concatenate([own["synchronized"] for own in (first, second)])
        self.assertLen(np.unique(after, axis=0), 1)


if __name__ == "__main__":
    tf.test.main()
