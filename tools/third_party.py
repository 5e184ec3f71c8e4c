"""Runs other libraries' programs under tfcdo's and TensorFlow's strategies: `make third-party`.

    python tools/third_party.py [PROGRAM ...]    # in the environment of `make third-party`

Each program runs three times, in processes of its own: on one device, and on three virtual CPU
devices under each strategy. The table is in docs/third-party.md.

A program takes a strategy and returns the variables or numbers that it has learned, as a list. Data
and initial values are the same for all strategies. The weights are one replica's.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pages
import tensorflow as tf

import tfcdo

NUM_DEVICES = 3
_SECONDS = 600
BATCH, STEPS = 12, 5
_RANDOM = np.random.default_rng(0)
FEATURES = _RANDOM.normal(size=(BATCH * STEPS, 6)).astype("float32")
TARGETS = _RANDOM.normal(size=(BATCH * STEPS, 1)).astype("float32")
TOKENS = _RANDOM.integers(1, 50, (BATCH * STEPS, 8)).astype("int32")
LABELS = _RANDOM.integers(0, 2, BATCH * STEPS).astype("int32")


def _loop(strategy: tf.distribute.Strategy, step: Callable[..., Any], *arrays: np.ndarray) -> None:
    """Runs a step on each replica for each batch."""
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)
    run = tf.function(lambda batch: strategy.run(step, args=batch))
    for batch in strategy.experimental_distribute_dataset(data):
        run(batch)


def _summed_gradients(tape: tf.GradientTape, loss: tf.Tensor, variables: Any) -> Any:
    gradients = tape.gradient(loss, variables)
    return tf.distribute.get_replica_context().all_reduce("sum", gradients)


@contextlib.contextmanager
def _seeded_scope(strategy: tf.distribute.Strategy, library: Any) -> Iterator[None]:
    with strategy.scope():
        library.utils.set_random_seed(1)
        yield


def _sum_of_squares(predictions: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(predictions - targets)) / BATCH


def sonnet(strategy: tf.distribute.Strategy) -> Any:
    """Trains a Sonnet MLP; the strategy is Sonnet's Replicator with the same cross-device ops."""
    import sonnet as snt

    devices = strategy.extended.worker_devices
    ops = strategy.extended._cross_device_ops
    strategy = snt.distribute.Replicator(list(devices), cross_device_ops=ops)
    tf.random.set_seed(1)
    with strategy.scope():
        model, optimizer = snt.nets.MLP([8, 1]), snt.optimizers.Adam(0.01)

    def step(inputs: tf.Tensor, targets: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = _sum_of_squares(model(inputs), targets)
        variables = model.trainable_variables
        optimizer.apply(_summed_gradients(tape, loss, variables), variables)

    _loop(strategy, step, FEATURES, TARGETS)
    return model.trainable_variables


def sonnet_tests(strategy: tf.distribute.Strategy) -> Any:
    """Runs Sonnet's own tests of its Replicator, with the strategy's cross-device ops."""
    from sonnet.src.distribute import replicator, replicator_test

    ops, init = strategy.extended._cross_device_ops, replicator.Replicator.__init__

    def with_ops(self: Any, devices: Any = None, cross_device_ops: Any = None) -> None:
        init(self, devices=devices, cross_device_ops=cross_device_ops or ops)

    replicator.Replicator.__init__ = with_ops
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(replicator_test).run(result)
    failures = [*result.failures, *result.errors]
    if failures:
        raise AssertionError(failures[0][1].strip().splitlines()[-1])
    return [result.testsRun]


def orbit(strategy: tf.distribute.Strategy) -> Any:
    """Trains with orbit's Controller and StandardTrainer."""
    import orbit as orbit_library

    global_step = tf.Variable(0, dtype=tf.int64)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([6, 1]))
    data = tf.data.Dataset.from_tensor_slices((FEATURES, TARGETS)).batch(BATCH).repeat()

    class Trainer(orbit_library.StandardTrainer):
        def train_step(self, iterator: Any) -> None:
            def step(batch: Any) -> None:
                with tf.GradientTape() as tape:
                    loss = _sum_of_squares(batch[0] @ weights, batch[1])
                weights.assign_sub(0.1 * _summed_gradients(tape, loss, [weights])[0])

            strategy.run(step, args=(next(iterator),))
            global_step.assign_add(1)

    controller = orbit_library.Controller(
        strategy=strategy,
        trainer=Trainer(strategy.experimental_distribute_dataset(data)),
        global_step=global_step,
        steps_per_loop=5,
    )
    controller.train(10, checkpoint_at_completion=False)
    return [weights]


def models(strategy: tf.distribute.Strategy) -> Any:
    """Trains with TensorFlow Models' minimize_using_explicit_allreduce."""
    import tf_keras
    from official.modeling import grad_utils

    with _seeded_scope(strategy, tf_keras):
        model = tf_keras.Sequential([tf_keras.layers.Dense(8), tf_keras.layers.Dense(1)])
        model.build([None, 6])
        optimizer = tf_keras.optimizers.legacy.Adam(0.01)

    def step(inputs: tf.Tensor, targets: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = _sum_of_squares(model(inputs), targets)
        grad_utils.minimize_using_explicit_allreduce(
            tape, optimizer, loss, model.trainable_variables
        )

    _loop(strategy, step, FEATURES, TARGETS)
    return model.get_weights()


def _fit(model: Any, *data: Any) -> Any:
    """Trains a model with `fit`; returns its weights and its losses."""
    history = model.fit(*data, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), history.history["loss"]]


def tf_keras(strategy: tf.distribute.Strategy) -> Any:
    """Trains a tf_keras model with fit."""
    import tf_keras as keras

    with _seeded_scope(strategy, keras):
        model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(), "mse")
    return _fit(model, FEATURES, TARGETS)


_BACKBONE = (50, 1, 2, 16, 32)  # Words, layers, heads, and the widths of layers and within them.
_TEXT = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}


def keras_hub_bert(strategy: tf.distribute.Strategy) -> Any:
    """Fine-tunes a small BERT classifier; gradients are clipped by their global norm."""
    import keras
    from keras_hub import models

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with _seeded_scope(strategy, keras):
        backbone = models.BertBackbone(*_BACKBONE, dropout=0.0, max_sequence_length=8)
        model = models.BertTextClassifier(backbone, 2, preprocessor=None, dropout=0.0)
        model.compile(keras.optimizers.Adam(0.001, global_clipnorm=0.1), loss)
    return _fit(model, {**_TEXT, "segment_ids": np.zeros_like(TOKENS)}, LABELS)


def keras_hub_gpt2(strategy: tf.distribute.Strategy) -> Any:
    """Trains a small GPT-2 to predict the next token."""
    import keras
    from keras_hub import models

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with _seeded_scope(strategy, keras):
        backbone = models.GPT2Backbone(*_BACKBONE, dropout=0.0, max_sequence_length=8)
        model = models.GPT2CausalLM(backbone, preprocessor=None)
        model.compile(keras.optimizers.SGD(0.1), loss)
    return _fit(model, _TEXT, np.roll(TOKENS, -1, axis=1))


def keras_rs(strategy: tf.distribute.Strategy) -> Any:
    """Trains KerasRS's FeatureCross on embeddings."""
    import keras
    import keras_rs as library

    with _seeded_scope(strategy, keras):
        tokens = keras.Input([8], dtype="int32")
        embedded = keras.layers.Flatten()(keras.layers.Embedding(50, 2)(tokens))
        crossed = library.layers.FeatureCross()(embedded, embedded)
        model = keras.Model(tokens, keras.layers.Dense(1)(crossed))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return _fit(model, TOKENS, TARGETS)


def recommenders(strategy: tf.distribute.Strategy) -> Any:
    """Trains a TensorFlow Recommenders model with a ranking task."""
    import tensorflow_recommenders as tfrs
    import tf_keras as keras

    class Ranking(tfrs.Model):
        def __init__(self) -> None:
            super().__init__()
            mean = keras.layers.GlobalAveragePooling1D()
            self.net = keras.Sequential(
                [keras.layers.Embedding(50, 4), mean, keras.layers.Dense(1)]
            )
            self.task = tfrs.tasks.Ranking(
                keras.losses.MeanSquaredError(reduction=keras.losses.Reduction.SUM)
            )

        def compute_loss(self, batch: Any, training: bool = False) -> tf.Tensor:
            return self.task(batch["target"], self.net(batch["tokens"])) / BATCH

    data = tf.data.Dataset.from_tensor_slices({"tokens": TOKENS, "target": TARGETS}).batch(BATCH)
    with _seeded_scope(strategy, keras):
        model = Ranking()
        model.compile(keras.optimizers.Adagrad(0.1))
    model.fit(data, epochs=2, verbose=0)
    return model.get_weights()


def probability(strategy: tf.distribute.Strategy) -> Any:
    """Fits a mean-field posterior of a linear model by variational inference."""
    import tensorflow_probability as tfp

    noise = np.random.default_rng(1).normal(size=(BATCH * STEPS, 6)).astype("float32")
    with strategy.scope():
        location, scale = tf.Variable(tf.zeros([6])), tf.Variable(tf.fill([6], -2.0))

    def step(inputs: tf.Tensor, targets: tf.Tensor, draws: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            posterior = tfp.distributions.Normal(location, tf.nn.softplus(scale))
            weights = posterior.loc + posterior.scale * draws
            predicted = tfp.distributions.Normal(tf.reduce_sum(inputs * weights, 1), 1.0)
            divergence = tfp.distributions.kl_divergence(
                posterior, tfp.distributions.Normal(tf.zeros(6), 1.0)
            )
            part = tf.cast(tf.shape(inputs)[0], tf.float32) / BATCH
            loss = part * tf.reduce_sum(divergence)
            loss -= tf.reduce_sum(predicted.log_prob(targets[:, 0])) / BATCH
        variables = [location, scale]
        for variable, gradient in zip(variables, _summed_gradients(tape, loss, variables)):
            variable.assign_sub(0.05 * gradient)

    _loop(strategy, step, FEATURES, TARGETS, noise)
    return [location, scale]


def agents(strategy: tf.distribute.Strategy) -> Any:
    """Trains a TF-Agents DQN on random transitions."""
    import tf_keras
    from tf_agents.agents.dqn import dqn_agent
    from tf_agents.networks import sequential
    from tf_agents.specs import tensor_spec
    from tf_agents.trajectories import time_step, trajectory

    spec = tf.TensorSpec([6], tf.float32)
    with _seeded_scope(strategy, tf_keras):
        agent = dqn_agent.DqnAgent(
            time_step.time_step_spec(spec),
            tensor_spec.BoundedTensorSpec([], tf.int32, 0, 1),
            q_network=sequential.Sequential([tf_keras.layers.Dense(2)], input_spec=spec),
            optimizer=tf_keras.optimizers.legacy.SGD(0.1),
        )
        agent.initialize()

    def step(inputs: tf.Tensor, actions: tf.Tensor) -> None:
        observations = tf.stack([inputs, 0.5 * inputs], 1)
        ones = tf.ones([tf.shape(inputs)[0], 2])  # Rewards and discounts of two moments.
        agent.train(trajectory.mid(observations, tf.stack([actions, actions], 1), (), ones, ones))

    _loop(strategy, step, FEATURES, LABELS)
    return agent._q_network.variables


def keras_tuner(strategy: tf.distribute.Strategy) -> Any:
    """Searches for a learning rate with KerasTuner's distribution_strategy."""
    import keras
    import keras_tuner as library

    def make(parameters: Any) -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input([6]), keras.layers.Dense(1)])
        rate = parameters.Choice("learning_rate", [0.01, 0.1])
        model.compile(keras.optimizers.SGD(rate), "mse")
        return model

    with tempfile.TemporaryDirectory() as folder:
        tuner = library.GridSearch(
            make, objective="val_loss", directory=folder, distribution_strategy=strategy
        )
        data = (FEATURES, TARGETS)
        tuner.search(*data, validation_data=data, batch_size=BATCH, shuffle=False, verbose=0)
        return [trial.score for trial in tuner.oracle.get_best_trials(2)]


# The package of each program.
PACKAGES: dict[Any, str] = {
    sonnet: "dm-sonnet",
    sonnet_tests: "dm-sonnet",
    orbit: "tf-models-official",
    models: "tf-models-official",
    tf_keras: "tf_keras",
    keras_hub_bert: "keras-hub",
    keras_hub_gpt2: "keras-hub",
    keras_rs: "keras-rs",
    recommenders: "tensorflow-recommenders",
    probability: "tensorflow-probability",
    agents: "tf-agents",
    keras_tuner: "keras-tuner",
}
PROGRAMS = {program.__name__: program for program in PACKAGES}
_WITH_KERAS_2 = ("orbit", "models", "tf_keras", "recommenders", "probability", "agents")


def run(name: str, kind: str) -> list[np.ndarray] | str:
    """Returns a program's numbers under a kind of strategy, or its error."""
    devices = tfcdo.configure_virtual_cpus(NUM_DEVICES)
    library = tfcdo if kind == "tfcdo" else tf.distribute
    strategy = library.MirroredStrategy(devices[:1] if kind == "one" else devices)
    try:
        return [*map(np.asarray, PROGRAMS[name](strategy))]
    except Exception as error:
        return pages.error_text(error)


def outcome(name: str, kind: str) -> Any:
    """Runs one program in a process of its own; returns its numbers, or its error."""
    legacy = {"TF_USE_LEGACY_KERAS": f"{name in _WITH_KERAS_2:d}"}
    call = {"name": name, "kind": kind}
    (result,) = pages.call_apart("third_party", [call], _SECONDS, **legacy)
    return result or f"no result in {_SECONDS} s"


def row(found: Any, expected: Any) -> pages.Row:
    """Says how one strategy's numbers compare with one device's."""
    if isinstance(expected, str):
        return pages.Row("✗", f"{expected} (on one device)")
    if isinstance(found, str):
        return pages.Row("✗", found)
    difference = pages.largest_difference(found, expected)
    return pages.Row("✓" if difference < 3e-5 else "✗", f"{difference:.0e}")


def rows(names: Sequence[str]) -> Iterator[list[str]]:
    """Runs programs under all strategies; yields the cells of their rows."""
    for name in pages.with_progress(names):
        expected, *others = (outcome(name, kind) for kind in ("one", "tensorflow", "tfcdo"))
        package = PACKAGES[PROGRAMS[name]]
        description = PROGRAMS[name].__doc__.splitlines()[0]
        cells = (row(found, expected).cell for found in others)
        yield [f"{package} {importlib.metadata.version(package)}", description, *cells]


if __name__ == "__main__":
    versions = f"TensorFlow {tf.__version__} | tfcdo {tfcdo.__version__}"
    table = pages.table(f"library | program | {versions}", rows(sys.argv[1:] or [*PROGRAMS]))
    pages.replace("docs/third-party.md", "third_party.py", table)
