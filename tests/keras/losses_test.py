"""Every example counts the same, however a batch is dealt: losses and weights are one device's."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras_training import Layers, TrainingTestCase, dense_data, dense_layers, model_of, strategy_of


def trained(
    count: int,
    loss: Any,
    layers: Layers = dense_layers,
    examples: int = 17,
    run_eagerly: bool = False,
    **options: Any,
) -> tuple[keras.Model, list[float]]:
    with strategy_of(count, shard_optimizer_state=run_eagerly).scope():
        model = model_of(layers, "sgd")
        optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
        model.compile(optimizer, loss, run_eagerly=run_eagerly)
    options |= {"batch_size": 10, "verbose": 0}
    history = model.fit(*dense_data(examples), shuffle=False, **options).history
    return model, [*history["loss"], model.evaluate(*dense_data(examples), **options)]


def trained_on_sentences(
    count: int, kind: str, reduction: str, run_eagerly: bool = False
) -> tuple[keras.Model, dict[str, list[float]]]:
    """Tags the words of sentences of unlike lengths, which end with zeros."""
    rng = np.random.default_rng(0)
    words, tags = rng.integers(1, 9, [17, 6]), rng.integers(0, 3, [17, 6])
    words[np.arange(6) >= 1 + np.arange(17)[:, None] % 6] = 0
    tags[8:, :3] = -1 if kind == "ignore_class" else tags[8:, :3]
    targets: dict[str, np.ndarray] = {"tags": tags}
    keras.utils.set_random_seed(1)
    with strategy_of(count).scope():
        inputs = keras.Input([6], dtype="int32")
        embedded = keras.layers.Embedding(9, 4, mask_zero=kind != "ignore_class")(inputs)
        outputs = {"tags": keras.layers.Dense(3, name="tags")(embedded)}
        options = {"ignore_class": -1} if kind == "ignore_class" else {}
        entropy = keras.losses.SparseCategoricalCrossentropy
        losses = {"tags": entropy(True, reduction=reduction, **options)}
        if kind == "one_of_two":
            first = keras.layers.Embedding(9, 4)(inputs)[:, 0]
            outputs["first"] = keras.layers.Dense(1, name="first")(first)
            losses["first"] = keras.losses.MeanSquaredError(reduction=reduction)
            targets["first"] = rng.normal(size=[17, 1])
        model = keras.Model(inputs, outputs)
        weights = dict.fromkeys(losses, 0.5)
        # The metric is reported once for each batch.
        model.compile(
            *(keras.optimizers.SGD(0.1), losses, weights, {"tags": "accuracy"}),
            run_eagerly=run_eagerly,
        )
    # The last batch has one sentence.
    model.fit(words, targets, 8, validation_data=(words, targets), shuffle=False, verbose=0)
    return model, model.history.history


class LossesTest(TrainingTestCase):
    def assert_same(self, expected: Any, actual: Any) -> None:
        self.assert_same_training(expected[0], actual[0], 5e-6)
        self.assertAllClose(expected[1], actual[1], 5e-6, 5e-6)

    def test_batches_that_leave_replicas_without_examples(self):
        loss = keras.losses.MeanSquaredError(reduction="sum")
        options = {"examples": 4, "run_eagerly": True, "sample_weight": np.linspace(0.5, 2, 4)}
        self.assert_same(trained(1, loss, **options), trained(5, loss, **options))

    # Keras takes the mean of the elements that a mask or `ignore_class` keeps: of 1 to 6 words.
    # It weights the losses of outputs by their examples eagerly, and by batches in graphs.
    @parameterized.parameters(
        ("ignore_class", "sum_over_batch_size"),
        ("one_of_two", "mean_with_sample_weight"),
        ("one_of_two", "mean_with_sample_weight", True),
    )
    def test_elements_that_a_mask_keeps(self, *case):
        self.assert_same(trained_on_sentences(1, *case), trained_on_sentences(2, *case))

    def test_losses_of_a_whole_batch(self):
        """One number that a loss function returns, and one that a layer adds."""

        class Activity(keras.layers.Layer):
            def call(self, inputs: Any) -> Any:
                self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
                return inputs

        def layers() -> list[Any]:
            return [*dense_layers(), Activity()]

        def loss(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
            return keras.ops.mean(keras.ops.square(targets - outputs))

        self.assert_same(trained(1, loss, layers), trained(2, loss, layers))

    def test_own_train_step(self):
        class Own(keras.Sequential):
            def train_step(self, data: Any) -> dict[str, Any]:
                x, y = data
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x, y, self(x, training=True), training=True)
                variables = self.trainable_variables
                self.optimizer.apply(tape.gradient(loss, variables), variables)
                self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
                return {"loss": self._loss_tracker.result()}

        def fitted(count: int) -> keras.Model:
            keras.utils.set_random_seed(1)
            with strategy_of(count).scope():
                model = Own(dense_layers())
                model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(*dense_data(17), 10, shuffle=False, verbose=0)
            return model

        self.assert_same_training(fitted(1), fitted(2))

    def test_nan_of_an_example_counts(self):
        with strategy_of(3).scope():
            model = model_of(dense_layers, "sgd", run_eagerly=False)
        inputs, targets = dense_data(13)
        targets[-1] = np.nan
        model.fit(inputs, targets, 12, shuffle=False, verbose=0)
        self.assertTrue(np.isnan(model.trainable_variables[0].numpy()).all())

    @parameterized.parameters(True, False)
    def test_no_layer_sees_an_empty_part(self, run_eagerly):
        """Kernels of some devices fail on nothing, or give it another shape."""

        class NeedsRows(keras.layers.Layer):
            def call(self, inputs: tf.Tensor) -> tf.Tensor:
                rows = tf.debugging.assert_positive(tf.shape(inputs)[:1], "no rows")
                with tf.control_dependencies([rows] if rows is not None else []):
                    return tf.identity(inputs)

        with strategy_of(3).scope():
            layers = [keras.Input([4]), NeedsRows(), keras.layers.Dense(2)]
            model = model_of(lambda: layers, "sgd", run_eagerly=run_eagerly)
        inputs, targets = dense_data(13)
        model.fit(inputs, targets, 12, shuffle=False, verbose=0)
        model.evaluate(inputs, targets, 12, verbose=0)
        self.assertLen(model.predict(inputs, 12, verbose=0), 13)

    def test_an_own_loop_refuses_an_empty_part(self):
        strategy = strategy_of(3)
        with strategy.scope():
            model = model_of(dense_layers, "sgd")
            data = tf.data.Dataset.from_tensor_slices(dense_data(5)).batch(3)
            data = strategy.experimental_distribute_dataset(data)

        @tf.function
        def step(batch: Any) -> Any:
            return strategy.run(lambda batch: model(batch[0]), (batch,))

        first, last = data
        step(first)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "drop_remainder=True"):
            step(last)


if __name__ == "__main__":
    tf.test.main()
