"""Keras trainings on two hosts of two devices each, compared with one device."""

import pathlib
import random
from typing import Any

import clusters
import h5py
import keras
import numpy as np
import tensorflow as tf
from clusters import copies, other_strategy, scope, weights
from keras import optimizers as ko
from keras_training import BATCH, dense_data, dense_layers, model_of, word_data, word_layers

import tfcdo.keras
from tfcdo.cluster import session

_REST = 7  # The last batch does not divide by two hosts, nor by four replicas.


def _other(strategy: Any, **options: Any) -> Any:
    """Makes another strategy, if any; without checks, whose functions take long to trace."""
    return other_strategy(strategy, check_in_sync=False, **options) if strategy else None


def _fit(model: keras.Model, outlier: int | None = None) -> list[float]:
    inputs, targets = dense_data(3 * BATCH + _REST)
    if outlier is not None:
        targets[outlier] = 1e9  # The gradient of this example's error is infinite in float16.
    return model.fit(inputs, targets, BATCH, shuffle=False, verbose=0).history["loss"]


def mended_keras(strategy: Any) -> dict[str, np.ndarray]:
    """Clips, accumulates, averages, scales losses, predicts; the last batches do not divide."""
    averaging = {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 2}
    with scope(strategy):
        sgd = ko.SGD(0.2, clipnorm=0.05, gradient_accumulation_steps=2, **averaging)
        model = model_of(dense_layers, ko.LossScaleOptimizer(sgd, 16.0, dynamic_growth_steps=2))
    loss = _fit(model)
    predicted = model.predict(dense_data(BATCH + _REST)[0], BATCH, verbose=0)
    return {"loss": np.array(loss), "predicted": predicted, **weights(strategy, model.weights)}


def mixed_float16(strategy: Any) -> dict[str, np.ndarray]:
    """Trains in mixed precision, with casts; in one step one replica's gradients are infinite."""
    casting = _other(strategy, exchange="float16")
    half: dict[str, Any] = {"dtype": "mixed_float16"}

    def layers() -> list[Any]:
        # The first kernel is large enough to be cast.
        dense = keras.layers.Dense(600, "tanh", **half), keras.layers.Dense(2, **half)
        return [keras.Input((4,)), *dense, keras.layers.Activation("linear", dtype="float32")]

    with scope(casting):
        optimizer = ko.LossScaleOptimizer(ko.SGD(0.1), 16.0, dynamic_growth_steps=2)
        model = model_of(layers, optimizer, run_eagerly=strategy is None)
    _fit(model, outlier=BATCH + 3)
    scale = optimizer.dynamic_scale.numpy()
    return {"scale": scale, **weights(casting, model.trainable_weights)}


def jit(strategy: Any) -> dict[str, np.ndarray]:
    """Trains with XLA, with the state on one device of each host; on one device without XLA."""
    sharding = _other(strategy, shard_optimizer_state=True)
    with scope(sharding):
        adam = ko.Adam(0.05, epsilon=1e-3, global_clipnorm=0.5, weight_decay=0.1)
        compiles: dict[str, Any] = {"jit_compile": strategy is not None, "metrics": ["mae"]}
        model = model_of(word_layers, adam, run_eagerly=strategy is None, **compiles)
    history = model.fit(*word_data(2 * BATCH + _REST), BATCH, shuffle=False, verbose=0)
    if sharding:
        held = sharding.state_bytes(adam)
        # Two moments once, and a few scalars; not two moments on each of two devices.
        assert sum(held.values()) < 3 * sum(weight.nbytes for weight in model.get_weights()), held
    logs = {name: np.array(values) for name, values in history.history.items()}
    slots = {f"slot_{i}": slot.numpy() for i, slot in enumerate(adam.variables)}
    return {**logs, **slots, **weights(sharding, model.weights)}


def callbacks(strategy: Any) -> dict[str, np.ndarray]:
    """Slows and stops by the loss on other data; drops out on a batch; on a device of each host."""
    one_device = _other(strategy, devices_per_worker=1)
    with scope(one_device):
        model = model_of(dense_layers, ko.SGD(0.2))
        dropping = model_of(lambda: [*dense_layers(), keras.layers.Dropout(0.5)], "sgd")
    inputs, targets = dense_data(BATCH + _REST)
    monitored: dict[str, Any] = {"monitor": "val_loss", "min_delta": 3.0}
    slowing = keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1, **monitored)
    early = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True, **monitored)
    history = model.fit(
        *(inputs, targets, len(inputs), 20, 0, [slowing, early]),
        validation_data=(np.flip(inputs), np.flip(targets)),
        shuffle=False,
    )
    logs = {name: np.array(values) for name, values in history.history.items()}
    hosts, host = (2, one_device.cluster_resolver.task_id) if one_device else (1, 0)
    batch = [np.split(part, hosts)[host] for part in dense_data(8)]
    logs["on_batch"] = np.array(dropping.train_on_batch(*batch))
    return {**logs, **weights(one_device, model.weights)}


def shuffled(strategy: Any) -> dict[str, np.ndarray]:
    """Sets a bit of each example for each step that sees it, but for six with unlike orders."""
    drawn = np.array([random.random(), np.random.rand(), *np.random.permutation(3)])
    ids = np.arange(60)[:, None]  # The batches divide by two hosts.
    with _other(strategy, devices_per_worker=1).scope():
        table = keras.layers.Embedding(len(ids), 1, embeddings_initializer="zeros")
        model = keras.Sequential([keras.Input((1,), dtype="int32"), table, keras.layers.Flatten()])
        rate = ko.schedules.ExponentialDecay(2.0**-6, 1, 2.0)
        model.compile(ko.SGD(rate), lambda targets, outputs: -20 * outputs)
    data, options = tf.data.Dataset.from_tensor_slices((ids, ids)), tf.data.Options()
    options.deterministic = False
    model.fit(data.shuffle(60, seed=strategy.cluster_resolver.task_id + 1).batch(20), verbose=0)
    kerass = keras.callbacks.BackupAndRestore(f"of_host{strategy.cluster_resolver.task_id}")
    model.fit(data.with_options(options).batch(20), verbose=0, callbacks=[kerass])
    model.set_weights([np.zeros([len(ids), 1])])

    probe = keras.Sequential([keras.layers.Dense(1)])  # Of this host alone.
    probe.compile("sgd", "mse")

    def stop(epoch: int, _: Any) -> None:
        if strategy.cluster_resolver.task_id:
            probe.fit(np.ones([2, 1]), np.ones(2), verbose=0)
        model.stop_training = epoch == 1 == strategy.cluster_resolver.task_id

    stops = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    model.fit(ids, ids, 20, 9, 0, [stops, tfcdo.keras.BackupAndRestore("of_both")])
    model.fit(data.shuffle(60).batch(20), verbose=0)
    model.fit(ids, ids, 20, verbose=0)
    keras.utils.set_random_seed(7)
    model.fit(ids, ids, 20, verbose=0)
    written = ["model.weights.h5", "other.h5"][strategy.cluster_resolver.task_id]
    with h5py.File(written, "w"):  # As if another host was writing it.
        model.save_weights("model.weights.h5")
    return {"seen": model.get_weights()[0], "drawn": drawn}


def uneven_loop(strategy: Any) -> dict[str, np.ndarray]:
    """Drops out in a loop of one's own, whose batches leave hosts unlike numbers of examples."""
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


def few_rows(strategy: Any) -> dict[str, np.ndarray]:
    """Has, in a loop of one's own, too few rows for the other host: an error on both hosts."""
    loss_of = keras.losses.MeanSquaredError()

    @tf.function
    def step(part: Any) -> Any:
        losses = strategy.run(lambda own: loss_of(own, 2 * own), (part,))
        return strategy.reduce("SUM", losses, axis=None)

    messages, losses = [], []
    for rows in 3, 2, 5:
        data = tf.data.Dataset.from_tensors(np.ones([rows, 3], np.float32))
        try:
            losses += [step(part) for part in strategy.experimental_distribute_dataset(data)]
        except tf.errors.InvalidArgumentError as error:
            messages.append(error.message)
    return {"messages": np.array(messages), "losses": np.array(losses)}


def empty_host(strategy: Any) -> dict[str, np.ndarray]:
    """Has batches that leave one host without examples; a layer divides by a moving statistic."""

    def layers() -> list[Any]:
        dense = keras.layers.SpectralNormalization(keras.layers.Dense(3))
        return [keras.layers.Input((4,)), dense, keras.layers.Dense(2)]

    with scope(strategy):
        model = model_of(layers, ko.SGD(0.05), run_eagerly=strategy is None)
    model.fit(*dense_data(6), 2, shuffle=False, verbose=0)
    return {
        "estimate": model.non_trainable_weights[0].numpy(),
        **weights(strategy, model.trainable_weights),
    }


class _Unused(keras.layers.Layer):
    """Gathers the rows of all replicas, and uses none, as a loss of the layer does in `predict`."""

    def call(self, inputs: Any) -> Any:
        tfcdo.keras.global_batch(inputs)
        return inputs


def unused_rows(strategy: Any) -> dict[str, np.ndarray]:
    """Predicts with a layer that gathers rows which nothing uses; and rows of files, in order."""
    with scope(strategy):
        model = keras.Sequential([keras.layers.Input((4,)), _Unused()])
    files = tf.data.TextLineDataset([__file__, clusters.__file__]).map(
        lambda line: tf.fill([4], tf.cast(tf.strings.length(line), tf.float32))
    )
    kept = files.cache("kept" if strategy else "")  # One path for both hosts.
    if strategy:
        assert len([*strategy.experimental_distribute_dataset(kept.batch(9))])
        assert pathlib.Path(f"kept{'' if tfcdo.is_chief() else '.host1'}.index").exists()
    return {
        "predicted": model.predict(dense_data(11)[0], 4, verbose=0),
        "of_files": model.predict(files.batch(9), verbose=0),
        "size": np.array(len([*kept])),
    }


def caught_error(strategy: Any) -> dict[str, np.ndarray]:
    """Predicts rows of another length, which a step cannot multiply, and then others."""
    with scope(strategy):
        layers = [keras.layers.Input((4,)), keras.layers.Dense(2)]
        model = model_of(lambda: layers, "sgd", run_eagerly=False)
    inputs, message = dense_data(11)[0], ""
    model.predict(inputs, 4, verbose=0)
    try:
        model.predict(inputs[:, :3], 4, verbose=0)
    except tf.errors.InvalidArgumentError as error:
        message = error.message
    predicted = model.predict(inputs, 4, verbose=0)
    joined = session.current()
    kinds = joined.watch._watched.values() if joined is not None else ()
    return {
        "has_failed": np.array("Matrix size-incompatible" in message),
        "waits": np.array(sum(kind.marks.count() % 2 for kind in kinds)),
        "predicted": predicted,
    }


def unlike_sizes(strategy: Any) -> dict[str, np.ndarray]:
    """Gathers and reduces values whose sizes change, more often than keys come back."""
    host = strategy.cluster_resolver.task_id

    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None])])
    def step(values: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        total = strategy.reduce("SUM", strategy.run(lambda: values + 0.0), axis=None)
        return total, strategy.gather(strategy.run(lambda: rows + 0.0), axis=0)

    sums, gathered = zip(
        *(step(np.ones(1 + at % 5), np.full(2 * host + at % 3, at)) for at in range(70))
    )
    return {"sums": np.concatenate(sums), "gathered": np.concatenate(gathered)}


def in_sync(strategy: Any) -> dict[str, np.ndarray]:
    """Synchronizes statistics; goes on with other weights on one host, which all hosts find."""
    with strategy.scope():
        normalization = keras.layers.BatchNormalization(momentum=0.5)
        model = model_of(lambda: [*dense_layers(), normalization], "sgd")
    data = tf.data.Dataset.from_tensors(dense_data(BATCH + _REST))
    model.fit(data, verbose=0)
    moving = model.layers[-1].non_trainable_variables[0]
    before, mean = copies(strategy, moving), moving.numpy()
    model.evaluate(data, verbose=0)
    after = copies(strategy, moving)
    start, messages = model.get_weights(), []
    for compiles in (False, True):  # The first steps of each are compared again.
        if compiles:
            with strategy.scope():
                model.compile("sgd", "mse", run_eagerly=True)
        model.set_weights([one + 0.5 * strategy.cluster_resolver.task_id for one in start])
        for call in (model.fit, model.evaluate, model.predict):
            try:
                call(data, verbose=0)
            except RuntimeError as error:
                messages.append(str(error))
    return {"before": before, "mean": mean, "after": after, "messages": np.array(messages)}


_TIMEOUT = 400.0
# A step that one replica alone takes or leaves out makes a difference of some hundredths.
_TRAININGS = {"mended_keras": 2e-6, "mixed_float16": 5e-3, "jit": 2e-5, "callbacks": 1e-5}
_TRAININGS |= {"uneven_loop": 0.0, "empty_host": 2e-6, "unused_rows": 0.0, "caught_error": 1e-6}


class HostsTest(tf.test.TestCase):
    def test_two_hosts(self):
        names = ["shuffled", "unlike_sizes", "few_rows", *_TRAININGS, "in_sync"]
        results, outcomes = clusters.run_scenarios(2, __file__, 2, names, _TIMEOUT)
        for name, tolerance in _TRAININGS.items():
            with self.subTest(name):
                self.check_training(name, results[name], tolerance)
        with self.subTest("an epoch has each example once, in an order of its own; hosts warn"):
            self.assertAllEqual(*(own["drawn"] for own in results["shuffled"]))
            for own, outcome in zip(results["shuffled"], outcomes, strict=True):
                epochs = np.int32(own["seen"]) >> np.arange(0, 15, 3) & 7  # Of three steps each.
                self.assertContainsSubset(np.unique(epochs), [1, 2, 4])
                self.assertNotAllEqual(*epochs.T[:2])
                for warned in ("is shuffled without a seed", "use tfcdo.keras.BackupAndRestore"):
                    self.assertEqual(outcome.output.count(warned), 1)
            self.assertRegex("".join(o.output for o in outcomes), "with other seeds than on")
        with self.subTest("sizes that change"):
            rows = [np.full(2 * (2 * (at % 3) + 2), at) for at in range(70)]
            for own in results["unlike_sizes"]:
                self.assertAllEqual(np.full(210, 4), own["sums"])
                self.assertAllEqual(np.concatenate(rows), own["gathered"])
        with self.subTest("a batch with fewer rows than replicas"):
            for own in results["few_rows"]:
                self.assertLen(own["messages"], 2)
                for message in own["messages"]:
                    self.assertIn("fewer examples than the 4 replicas", str(message))
                self.assertAllClose([1.0], own["losses"])
        with self.subTest("callbacks stop before the 20 epochs are over, in smaller steps"):
            rates = results["callbacks"][0]["learning_rate"]
            self.assertLess(len(rates), 20)
            self.assertLess(rates[-1], rates[0])
        with self.subTest("statistics"):
            self.check_statistics(*results["in_sync"])
        with self.subTest("other weights are found at once"):
            for host, at in np.ndindex(2, 2 * 3):
                told = rf"^after execution 1 of the {('train', 'test', 'predict')[at % 3]} step, "
                told += r"replica 2 \(host 1\) holds other numbers of \S*kernel than replica 0, by "
                told += r"0\.\S* at most; .*check_in_sync=False"
                self.assertRegex(str(results["in_sync"][host]["messages"][at]), told)

    def check_training(self, name, results, tolerance):
        for key, expected in globals()[name](None).items():
            for own in results:
                actual = own[key]
                if key.startswith("replica"):
                    self.assertLen(actual, 1 if name == "callbacks" else 2)
                    for replica in actual:
                        self.assertEqual(results[0][key][0].tobytes(), replica.tobytes())
                    expected, actual = expected[:1], actual[:1]
                np.testing.assert_allclose(
                    actual, expected, rtol=tolerance, atol=tolerance, err_msg=key
                )

    def check_statistics(self, *hosts):
        before, after = (np.concatenate([own[key] for own in hosts]) for key in ("before", "after"))
        self.assertLen(np.unique(before, axis=0), 4)
        self.assertLen(np.unique(after, axis=0), 1)
        for own in hosts:
            self.assertAllClose(before.mean(0, np.float64), own["mean"], rtol=1e-6)


if __name__ == "__main__":
    tf.test.main()
