"""Small Keras models and ways to train them, on any number of replicas."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras.constraints import MaxNorm

import tfcdo

Make = Callable[[], Any]
Layers = Callable[[], list[Any]]
Data = tuple[np.ndarray, np.ndarray]
BATCH = 30  # Divides by 1, 2, 3 and 5 replicas.


def strategy_of(count: int, ops: Any = None, **options: Any) -> tf.distribute.Strategy:
    """Makes a strategy of tfcdo's; one replica is one device, without a strategy."""
    if count == 1:
        return tf.distribute.get_strategy()
    ops = ops or tfcdo.HierarchicalCopyAllReduce()
    return tfcdo.MirroredStrategy(tu.device_names(count), ops, **options)


def dense_data(examples: int = BATCH) -> Data:
    inputs = np.random.default_rng(0).normal(size=[examples, 4]).astype(np.float32)
    return inputs, np.sin(inputs[:, :2]) * 2 + inputs[:, 2:]


def dense_layers() -> list[Any]:
    regularizer = keras.regularizers.L2(0.01)
    return [
        keras.layers.Input((4,)),
        keras.layers.Dense(2, kernel_regularizer=regularizer, kernel_constraint=MaxNorm(0.9)),
    ]


def word_data(examples: int = BATCH) -> Data:
    words = np.random.default_rng(0).integers(0, 7, [examples, 3])
    return words, words[:, :2].astype(np.float32)


def word_layers(limit: float | None = 0.05) -> list[Any]:
    return [
        keras.layers.Input((3,), dtype="int32"),
        # A constraint changes rows that no word has touched.
        keras.layers.Embedding(9, 2, embeddings_constraint=limit and MaxNorm(limit)),
        keras.layers.Flatten(),
        keras.layers.Dense(2),
    ]


class OwnStep(keras.Sequential):
    """Has a `train_step` as in Keras's guide."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data if isinstance(data, tuple) else (data, data[:, :2])
        with tf.GradientTape() as tape:
            outputs = self.outputs_of(x)
            loss = self.loss_of(x, y, outputs)
        variables = self.trainable_variables
        self.update(variables, tape.gradient(loss, [one.value for one in variables]))
        return self.logs_of(x, y, outputs, loss)

    def outputs_of(self, x: Any) -> Any:
        return self(x, training=True)

    def loss_of(self, x: Any, y: Any, outputs: Any) -> Any:
        return self.compute_loss(x, y, outputs)

    def update(self, variables: list[Any], gradients: list[Any]) -> None:
        self.optimizer.apply(gradients, variables)

    def logs_of(self, x: Any, y: Any, outputs: Any, loss: Any) -> dict[str, Any]:
        return {"loss": loss}


class TwoOptimizers(OwnStep):
    """Updates its last variable with an optimizer of its own, as a GAN its other half."""

    def update(self, variables: list[Any], gradients: list[Any]) -> None:
        self.first.apply(gradients[:-1], variables[:-1])
        tf.nest.flatten(self.second)[0].apply(gradients[-1:], variables[-1:])


def model_of(
    layers: Layers,
    optimizer: Any,
    run_eagerly: bool = True,
    loss: Any = "mse",
    kind: Any = keras.Sequential,
    **options: Any,
) -> keras.Model:
    """Makes a model; a few steps are quicker eagerly than traced."""
    keras.utils.set_random_seed(1)
    model = kind(layers())
    model.compile(optimizer, loss, run_eagerly=run_eagerly, **options)
    return model


def trained_eagerly(
    count: int,
    make: Make,
    steps: int = 4,
    layers: Layers = dense_layers,
    data: Callable[[], Data] = dense_data,
    strategy: Any = None,
    **options: Any,
) -> keras.Model:
    """Trains in a loop of one's own, without `fit` and without a `tf.function`."""
    strategy = strategy or strategy_of(count, **options)
    with strategy.scope():
        model = model_of(layers, make())
        model.optimizer.build(model.trainable_variables)
    train_eagerly(model, strategy, range(steps), data)
    return model


def train_eagerly(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    steps: range,
    data: Callable[[], Data] = dense_data,
) -> None:
    """Makes some steps of a training; each step has its own order of the examples."""
    count = strategy.num_replicas_in_sync
    inputs, targets = data()

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / targets.size
            loss = model.optimizer.scale_loss(loss + sum(model.losses) / count)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        model.optimizer.apply(gradients, model.trainable_variables)

    def part(values: np.ndarray) -> Any:
        parts = np.split(values, count)
        return tu.distributed(strategy, lambda replica: tf.constant(parts[replica]))

    with strategy.scope():
        for index in steps:
            order = np.random.default_rng(index).permutation(len(inputs))
            parts = (part(inputs[order]), part(targets[order])) if count > 1 else (inputs, targets)
            strategy.run(step, parts)


def fitted(
    count: int,
    make: Make,
    epochs: int = 1,
    callbacks: Any = (),
    run_eagerly: bool = True,
    strategy: Any = None,
    examples: int = 4 * BATCH,
    **options: Any,
) -> keras.Model:
    with (strategy or strategy_of(count, **options)).scope():
        model = model_of(dense_layers, make(), run_eagerly)
    fitting = {"epochs": epochs, "callbacks": list(callbacks), "shuffle": False, "verbose": 0}
    model.fit(*dense_data(examples), BATCH, **fitting)
    return model


@contextlib.contextmanager
def graphs_as_traced() -> Iterator[None]:
    """Spares the time of Grappler, a fifth; it optimizes the graphs of `programs_test`."""
    optimizer = tf.config.optimizer
    optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        optimizer.set_experimental_options({"disable_meta_optimizer": False})


def is_own_of_each(variable: keras.Variable) -> bool:
    """Tells whether each replica keeps its own numbers in a variable."""
    synchronization = getattr(variable.value, "synchronization", None)
    return synchronization == tf.VariableSynchronization.ON_READ


class TrainingTestCase(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    def check_as_on_one_device(
        self,
        make: Callable[[bool], keras.Model],
        *data: Any,
        replicas: int = 2,
        tolerance: float = 5e-6,
        strategy: Callable[..., Any] = strategy_of,
        sharded: tuple[bool, ...] = (False,),
        ways: tuple[bool, ...] = (False,),
        **options: Any,
    ) -> list[keras.Model]:
        """Compares weights and logs of `fit`: `make` is told True, and on replicas each way."""
        models = []
        for count, is_sharded, way in [(1, False, True), *product([replicas], sharded, ways)]:
            keras.utils.set_random_seed(1)
            with strategy(count, shard_optimizer_state=is_sharded).scope():
                models.append(make(way))
            with graphs_as_traced():
                models[-1].fit(*data, shuffle=False, verbose=0, **options)
        for model in models[1:]:
            self.assert_same_training(models[0], model, tolerance)
            expected, logs = (one.history.history for one in (models[0], model))
            self.assertEqual(list(expected), list(logs))
            self.assertAllClose(expected, logs, max(tolerance, 5e-6), max(tolerance, 5e-6))
        return models

    def assert_same_training(
        self, expected: keras.Model, model: keras.Model, tolerance: float = 2e-6
    ) -> None:
        """Asserts equal weights and slots but for rounding, and equal bits on all replicas."""
        pairs = [
            *zip(expected.weights, model.weights, strict=True),
            *zip(expected.optimizer.variables, model.optimizer.variables, strict=True),
        ]
        for one, own in pairs:
            np.testing.assert_allclose(
                own.numpy(), one.numpy(), rtol=tolerance, atol=tolerance, err_msg=own.path
            )
            if not is_own_of_each(own):
                components = getattr(own.value, "values", (own.value,))
                self.assert_bitwise_equal([component.read_value() for component in components])
