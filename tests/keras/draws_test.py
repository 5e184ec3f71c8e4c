"""Random numbers of the whole batch: K replicas draw for their rows what one device draws."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras import layers as kl
from keras_training import OwnStep, TrainingTestCase, graphs_as_traced, model_of, strategy_of

_STEPS, _WIDTH = 5, 3


class _OfSteps(kl.Dropout):
    """Drops out where each step of each example is a row: a multiple of the batch's."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        dropped = super().call(keras.ops.reshape(inputs, [-1, _WIDTH]), training)
        return keras.ops.reshape(dropped, [-1, _STEPS, _WIDTH])


# Each layer's draws reach the weights of the last one.
def of_rows() -> list[Any]:
    return [
        kl.Dropout(0.2), kl.Dropout(0.2, noise_shape=(None, 1, _WIDTH)), kl.SpatialDropout1D(0.2),
        kl.AlphaDropout(0.2), kl.GaussianDropout(0.4), kl.GaussianNoise(0.5),
        kl.TimeDistributed(kl.Dropout(0.2)), _OfSteps(0.2), kl.Reshape([_STEPS * _WIDTH]),
        kl.Dropout(0.2),
    ]  # fmt: skip


def of_images() -> list[Any]:
    return [
        kl.RandomFlip(), kl.RandomTranslation(0.3, 0.3), kl.RandomRotation(0.2), kl.RandomZoom(0.3),
        kl.RandomContrast(0.5), kl.RandomBrightness(0.5, value_range=(0.0, 1.0)),
    ]  # fmt: skip


def data(examples: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=[examples, _STEPS, _WIDTH]).astype(np.float32)


class DrawsTest(TrainingTestCase):
    def check(
        self,
        random: Callable[[], list[Any]],
        inputs: np.ndarray,
        jit: bool = False,
        kind: Any = keras.Sequential,
        **options: Any,
    ) -> None:
        def layers() -> list[Any]:
            return [kl.Input(inputs.shape[1:]), *random(), kl.Flatten(), kl.Dense(2)]

        def make(run_eagerly: bool) -> keras.Model:
            sgd = keras.optimizers.SGD(0.1)
            return model_of(layers, sgd, run_eagerly and not jit, kind=kind, jit_compile=jit)

        targets = inputs.reshape([len(inputs), -1])[:, :2] + 1
        options = {"tolerance": 2e-6, "batch_size": 6, **options}
        self.check_as_on_one_device(make, inputs, targets, **options)

    # A last batch of 1 or of 5 examples, of 6; the former leaves a replica without any.
    @parameterized.parameters(
        (of_rows, 2, 7),
        (of_rows, 3, 11, True),
        *tu.nightly((lambda: [kl.SimpleRNN(3, dropout=0.3, recurrent_dropout=0.3)], 2, 7)),
    )
    def test_as_on_one_device(self, random, replicas, examples, eager=False):
        self.check(random, data(examples), replicas=replicas, ways=(eager,))

    def test_preprocessing(self):
        images = np.random.default_rng(0).uniform(size=[11, 6, 6, 2]).astype(np.float32)
        self.check(of_images, images, tolerance=1e-5)

    def test_functions(self):
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
                    # Parameters of each example.
                    keras.random.gamma(shape, keras.ops.exp(inputs), seed=seed),
                    keras.random.beta(shape, keras.ops.exp(inputs[..., :1]), 2.0, seed=seed),
                    keras.random.binomial(shape, 5.0, keras.ops.sigmoid(inputs), seed=seed),
                    keras.random.truncated_normal(shape, inputs, 0.5, seed=seed),
                    keras.random.uniform(shape, dtype="float64", seed=seed),
                    keras.random.normal(shape, dtype="float16", seed=seed),
                    # A number of each example, and some that belong to none.
                    keras.random.uniform((shape[0], 1, 1), seed=seed),
                    keras.random.normal([_WIDTH], seed=seed),
                    keras.ops.reshape(keras.random.categorical(steps, _WIDTH, seed=seed), shape),
                )
                zeros = keras.ops.zeros_like(inputs)
                return keras.ops.stack([zeros + keras.ops.cast(d, zeros.dtype) for d in drawn], 1)

        @graphs_as_traced()
        def predicted(count: int, batches: Any, run_eagerly: bool = True) -> Any:
            with strategy_of(count).scope():
                inputs = [kl.Input([_STEPS, _WIDTH]) for _ in tf.nest.flatten(batches.element_spec)]
                model = keras.Model(inputs, [*map(Draws(), inputs)])
                model.compile("sgd", "mse", run_eagerly=run_eagerly)
            return tf.nest.flatten(model.predict(batches, verbose=0))

        of_examples = tf.data.Dataset.from_tensor_slices(data(6)).batch(5)
        # As of 8 labelled and 12 unlabelled images.
        for batches in (of_examples, tf.data.Dataset.from_tensors(((data(8), data(12)),))):
            expected = predicted(1, batches)
            self.assertGreater(np.std(expected[0], (0, 2, 3)).min(), 0.1)
            for run_eagerly in (False, True):  # Eagerly, the number of rows is known, also one.
                self.assertAllClose(expected, predicted(2, batches, run_eagerly), 2e-6, 2e-6)

    @parameterized.parameters((12, (False,)), (11, (False,)), *tu.nightly((12, (True,))))
    def test_sizes_that_tensorflow_knows(self, examples, ways):
        """`tf.shape(x)[0]` of batches of one size, as in Keras's example of a WGAN-GP, and more."""

        class Noise(kl.Layer):
            def build(self, _: Any) -> None:
                self.seed, self.w = keras.random.SeedGenerator(3), self.add_weight([24, _WIDTH])

            def call(self, inputs: Any) -> Any:
                shape, chances, seed = tf.shape(inputs), tf.sigmoid(inputs), self.seed
                counts = keras.random.binomial((shape[0], _STEPS, _WIDTH), 5, chances, seed=seed)
                masks = keras.random.uniform(shape[:2], seed=seed)[..., tf.newaxis]
                noise = keras.random.normal((shape[0], 1, 1), seed=seed)
                noise += keras.ops.mean(keras.random.dropout(self.w, 0.4, seed=seed), 0)
                rows, steps = (tf.size(tf.where(n < 9)) for n in (inputs[:, 0, 0], inputs[0, :, 0]))
                noise += keras.random.normal((rows, 1, 1), seed=seed)
                noise += keras.random.normal((steps, 1), seed=seed)
                return inputs + noise + counts + masks

        self.check(lambda: [Noise()], data(examples), ways=ways)

    @parameterized.parameters(("none", False), ("outside", False), *tu.nightly(("before", True)))
    def test_seeds_made_outside_of_the_scope(self, kind, run_eagerly):
        """Or none; by a `train_step` that does not call the model, as in Keras's DDIM."""

        class Noisy(keras.Model):
            def call(self, inputs: Any) -> Any:
                return self.other([inputs])

            def train_step(self, data: Any) -> dict[str, Any]:
                x, y = data
                x += keras.random.normal(keras.ops.shape(x), seed=self.seed)
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x, y, self.dense(x))
                variables = self.dense.trainable_variables
                self.optimizer.apply(tape.gradient(loss, variables), variables)
                return {"loss": loss}

        def trained(count: int) -> Any:
            keras.backend.clear_session()
            keras.utils.set_random_seed(1)
            seed = keras.random.SeedGenerator(3) if kind == "outside" else None
            if kind == "before":
                keras.random.normal([2])
            with strategy_of(count).scope():
                model = Noisy()
                model.seed, model.dense = seed, kl.Dense(2)
                model.other = keras.Sequential([kl.Input([_WIDTH]), kl.Dense(2)])
                is_eager = run_eagerly or count == 1
                model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=is_eager)
            inputs = data(7)[:, 0]
            with warnings.catch_warnings(record=True) as told:
                losses = model.fit(inputs, inputs[:, :2], batch_size=6, shuffle=False, verbose=0)
            self.assertEqual([], [one.message for one in told if one.category is UserWarning])
            return [model.dense.get_weights(), losses.history["loss"], keras.random.normal([2])]

        self.assertAllClose(trained(1), trained(2), 2e-6, 2e-6)

    def test_in_a_stateless_call(self):
        class Stateless(OwnStep):
            def outputs_of(self, x: Any) -> Any:
                variables, others = self.trainable_variables, self.non_trainable_variables
                return self.stateless_call(variables, others, x, training=True)[0]

        self.check(lambda: [kl.Dropout(0.5, seed=3)], data(7), kind=Stateless)

    def test_xla_trains_as_one_device_with_xla(self):
        self.check(lambda: [kl.Dropout(0.4), _OfSteps(0.2)], data(12), tolerance=3e-5, jit=True)


if __name__ == "__main__":
    tf.test.main()
