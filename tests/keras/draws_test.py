"""Random numbers of the whole batch: K replicas draw for their rows what one device draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as kl
from keras_training import TrainingTestCase, model_of, strategy_of

_STEPS, _WIDTH = 5, 3


class _OfSteps(kl.Layer):
    """Drops out where each step of each example is a row: a multiple of the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = kl.Dropout(0.2)

    def call(self, inputs: Any, training: bool = False) -> Any:
        dropped = self.dropout(keras.ops.reshape(inputs, [-1, _WIDTH]), training=training)
        return keras.ops.reshape(dropped, [-1, _STEPS, _WIDTH])


class RandomScale(kl.Layer):
    """A user's layer, with nothing of tfcdo's: multiplies each example by a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(5)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs
        shape = (keras.ops.shape(inputs)[0], *[1] * (len(inputs.shape) - 1))
        return inputs * keras.random.uniform(shape, 0.8, 1.2, seed=self.seed)


class NoisyScale(kl.Layer):
    """Draws numbers that do not belong to rows, which are equal on all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, inputs: Any) -> Any:
        return inputs * keras.random.normal([_WIDTH], 1.0, seed=self.seed)


# Each layer's draws reach the weights of the last one.
def of_rows() -> list[Any]:
    return [
        kl.Dropout(0.2),
        kl.Dropout(0.2, noise_shape=(None, 1, _WIDTH)),
        kl.SpatialDropout1D(0.2),
        kl.AlphaDropout(0.2),
        kl.GaussianDropout(0.4),
        kl.GaussianNoise(0.5),
        kl.TimeDistributed(kl.Dropout(0.2)),
        _OfSteps(),
        kl.Reshape([_STEPS * _WIDTH]),
        kl.Dropout(0.2),
        kl.Reshape([_STEPS, _WIDTH]),
    ]


def recurrent() -> list[Any]:
    return [
        kl.LSTM(4, dropout=0.3, recurrent_dropout=0.3, return_sequences=True),
        kl.Bidirectional(kl.SimpleRNN(3, dropout=0.3, return_sequences=True)),
        kl.GRU(4, dropout=0.3, recurrent_dropout=0.3, return_sequences=True),
    ]


def of_ones_own() -> list[Any]:
    return [RandomScale(), NoisyScale()]


def layers_with(random: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    return lambda: [kl.Input([_STEPS, _WIDTH]), *random(), kl.Flatten(), kl.Dense(2)]


def data(examples: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(0).normal(size=[examples, _STEPS, _WIDTH]).astype(np.float32)
    return inputs, inputs[:, :2, 0] + 1


def fitted(
    count: int,
    layers: Callable[[], list[Any]],
    examples: int,
    run_eagerly: bool = False,
    jit: bool = False,
    values: Callable[[int], Any] = data,
) -> keras.Model:
    with strategy_of(count).scope():
        model = model_of(layers, "sgd")
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly, jit_compile=jit)
    model.fit(*values(examples), 6, shuffle=False, verbose=0)
    return model


class DrawsTest(TrainingTestCase):
    # A last batch of 5 or of 1 example, of 6; the latter leaves replicas without any.
    @parameterized.parameters(
        (of_rows, 3, 11), (recurrent, 2, 7), (of_ones_own, 3, 7), (of_rows, 3, 7, True)
    )
    def test_as_on_one_device(self, random, count, examples, run_eagerly=False):
        layers = layers_with(random)
        expected = fitted(1, layers, examples, run_eagerly)
        self.assert_same_training(expected, fitted(count, layers, examples, run_eagerly))

    def test_preprocessing(self):
        def layers() -> list[Any]:
            return [
                kl.Input([6, 6, 2]),
                kl.RandomFlip(),
                kl.RandomTranslation(0.3, 0.3),
                kl.RandomRotation(0.2),
                kl.RandomZoom(0.3),
                kl.RandomContrast(0.5),
                kl.RandomBrightness(0.5, value_range=(0.0, 1.0)),
                kl.Flatten(),
                kl.Dense(2),
            ]

        def images(examples: int) -> tuple[np.ndarray, np.ndarray]:
            drawn = np.random.default_rng(0).uniform(size=[examples, 6, 6, 2]).astype(np.float32)
            return drawn, drawn[:, 0, 0]

        expected, model = (fitted(count, layers, 11, values=images) for count in (1, 2))
        self.assert_same_training(expected, model, 1e-5)

    def test_functions(self):
        """What is drawn is used as it is, so that each number is compared."""

        class Draws(kl.Layer):
            def __init__(self) -> None:
                super().__init__()
                self.seed = keras.random.SeedGenerator(3)

            def call(self, inputs: Any, training: bool = False) -> Any:
                shape, seed = keras.ops.shape(inputs), self.seed
                steps = keras.ops.reshape(inputs, [-1, _WIDTH])
                drawn = (
                    keras.random.uniform(shape, -1.0, 2.0, seed=seed),
                    keras.random.normal(shape, 1.0, 2.0, seed=seed),
                    keras.random.truncated_normal(shape, seed=seed),
                    keras.random.randint(shape, 0, 9, seed=seed),
                    keras.random.gamma(shape, 0.5, seed=seed),
                    keras.random.uniform(shape, dtype="float64", seed=seed),
                    keras.random.normal(shape, dtype="float16", seed=seed),
                    keras.ops.reshape(keras.random.categorical(steps, _WIDTH, seed=seed), shape),
                )
                return keras.ops.stack([keras.ops.cast(one, "float32") for one in drawn], 1)

        def predicted(count: int) -> Any:
            with strategy_of(count).scope():
                model = keras.Sequential([kl.Input([_STEPS, _WIDTH]), Draws()])
                model.compile("sgd", "mse")
            return model.predict(data(7)[0], 6, verbose=0)

        expected = predicted(1)
        for number in range(8):
            self.assertGreater(np.std(expected[:, number]), 0.1)
        self.assertAllClose(expected, predicted(3), 1e-6, 1e-6)

    def test_xla_trains_as_one_device_with_xla(self):
        layers = layers_with(lambda: [kl.Dropout(0.4), _OfSteps()])
        expected, model = (fitted(count, layers, 12, jit=True) for count in (1, 2))
        self.assert_same_training(expected, model, 3e-5)

    def test_own_loop(self):
        def trained(count: int) -> keras.Model:
            strategy = strategy_of(count)
            with strategy.scope():
                model = model_of(layers_with(lambda: [kl.Dropout(0.4)]), keras.optimizers.SGD(0.1))
            batches = tf.data.Dataset.from_tensor_slices(data(11)).batch(6)

            @tf.function
            def step(batch: Any) -> None:
                def on_replica(batch: Any) -> None:
                    with tf.GradientTape() as tape:
                        errors = (model(batch[0], training=True) - batch[1]) ** 2
                        loss = tf.reduce_sum(errors) / 6
                    variables = model.trainable_variables
                    model.optimizer.apply(tape.gradient(loss, variables), variables)

                strategy.run(on_replica, (batch,))

            for batch in strategy.experimental_distribute_dataset(batches):
                step(batch)
            return model

        self.assert_same_training(trained(1), trained(2))


if __name__ == "__main__":
    tf.test.main()
