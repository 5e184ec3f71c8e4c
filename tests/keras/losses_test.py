"""Every example counts the same, however a batch is dealt: losses and weights are one device's."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras_training import TrainingTestCase, dense_data, dense_layers, model_of, strategy_of

_REDUCTIONS = ["sum_over_batch_size", "mean_with_sample_weight", "sum"]


def trained(
    count: int,
    examples: int,
    reduction: str = "sum_over_batch_size",
    weighted: bool = True,
    run_eagerly: bool = False,
    loss: Any = keras.losses.MeanSquaredError,
    sharded: bool = False,
) -> tuple[keras.Model, list[float]]:
    with strategy_of(count, shard_optimizer_state=sharded).scope():
        model = model_of(dense_layers, "sgd")
        optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
        model.compile(optimizer, loss(reduction=reduction), run_eagerly=run_eagerly)
    data = dense_data(examples)
    weights = np.linspace(0.5, 2, examples, dtype=np.float32) if weighted else None
    options: dict[str, Any] = {"batch_size": 10, "sample_weight": weights, "verbose": 0}
    history = model.fit(*data, shuffle=False, **options).history
    return model, [*history["loss"], model.evaluate(*data, **options)]


@functools.cache
def trained_on_sentences(
    count: int,
    kind: str,
    reduction: str = "sum_over_batch_size",
    jit: bool = False,
    run_eagerly: bool = False,
) -> tuple[keras.Model, dict[str, list[float]]]:
    """Tags the words of sentences of unlike lengths, which end with zeros."""
    rng = np.random.default_rng(0)
    words, tags = rng.integers(1, 9, [17, 6]), rng.integers(0, 3, [17, 6])
    words[np.arange(6) >= 1 + np.arange(17)[:, None] % 6] = 0
    tags[8:, :3] = -1 if kind in ("ignore_class", "both") else tags[8:, :3]
    targets: dict[str, np.ndarray] = {"tags": tags}
    keras.utils.set_random_seed(1)
    with strategy_of(count).scope():
        inputs = keras.Input([6], dtype="int32")
        embedded = keras.layers.Embedding(9, 4, mask_zero=kind != "ignore_class")(inputs)
        outputs = {"tags": keras.layers.Dense(3, name="tags")(embedded)}
        ignored = -1 if kind in ("ignore_class", "both") else None
        losses = {
            "tags": keras.losses.SparseCategoricalCrossentropy(
                True, ignore_class=ignored, reduction=reduction
            )
        }
        if kind == "one_of_two":
            first = keras.layers.Embedding(9, 4)(inputs)[:, 0]
            outputs["first"] = keras.layers.Dense(1, name="first")(first)
            losses["first"] = keras.losses.MeanSquaredError(reduction=reduction)
            targets["first"] = rng.normal(size=[17, 1])
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.1),
            losses,
            # Reported once for each batch.
            metrics={"tags": "accuracy"},
            loss_weights=dict.fromkeys(losses, 0.5),
            jit_compile=jit,
            run_eagerly=run_eagerly,
        )
    # The last batch has one sentence.
    options: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(words, targets, validation_data=(words, targets), **options).history
    return model, history


class LossesTest(TrainingTestCase):
    def assert_same(self, expected: Any, actual: Any, tolerance: float = 5e-6) -> None:
        self.assert_same_training(expected[0], actual[0], tolerance)
        self.assertAllClose(expected[1], actual[1], tolerance, tolerance)

    # A last batch of 7 examples, one that leaves replicas without any, and only such batches.
    @parameterized.parameters(
        (3, 17, False, False, _REDUCTIONS[0], True),
        (3, 17, False, False, _REDUCTIONS[1], False),
        (5, 13, False, True, _REDUCTIONS[1], True),
        (5, 13, False, True, _REDUCTIONS[2], False),
        (5, 4, True, False, _REDUCTIONS[2], True),
        (5, 4, True, False, _REDUCTIONS[0], False),
    )
    def test_uneven_batches(self, count, examples, run_eagerly, sharded, reduction, weighted):
        self.assert_same(
            trained(1, examples, reduction, weighted),
            trained(count, examples, reduction, weighted, run_eagerly, sharded=sharded),
        )

    # Keras takes the mean of the elements that a mask or `ignore_class` keeps: of 1 to 6 words.
    @parameterized.parameters(
        ("mask", "sum_over_batch_size"),
        ("ignore_class", "sum_over_batch_size"),
        ("both", "sum"),
        ("one_of_two", "mean_with_sample_weight"),
    )
    def test_elements_that_a_mask_keeps(self, kind, reduction):
        expected = trained_on_sentences(1, kind, reduction)
        self.assert_same(expected, trained_on_sentences(3, kind, reduction))

    def test_masks_eagerly(self):
        # Keras weights the losses of outputs by their examples eagerly, and by batches in graphs.
        expected = trained_on_sentences(1, "one_of_two", run_eagerly=True)
        self.assert_same(expected, trained_on_sentences(5, "one_of_two", run_eagerly=True))

    def test_masks_with_xla(self):
        expected = trained_on_sentences(1, "mask")
        self.assert_same(expected, trained_on_sentences(3, "mask", jit=True), 3e-5)

    @parameterized.parameters(
        (lambda reduction: lambda y, p: keras.ops.mean(keras.ops.abs(y - p), -1),),
        (lambda reduction: lambda y, p: keras.ops.mean(keras.ops.square(y - p)),),
        (lambda reduction: "mae",),
    )
    def test_losses_that_are_functions(self, loss):
        """One value for each example, or one for the batch."""
        expected = trained(1, 17, loss=loss, weighted=False)
        self.assert_same(expected, trained(3, 17, loss=loss, weighted=False))

    def test_add_loss(self):
        class Activity(keras.layers.Layer):
            def call(self, inputs: Any) -> Any:
                self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
                return inputs

        def fitted(count: int) -> tuple[keras.Model, Any]:
            with strategy_of(count).scope():
                model = model_of(
                    lambda: [*dense_layers(), Activity()], keras.optimizers.SGD(0.1), False
                )
            return model, model.fit(*dense_data(17), 10, shuffle=False, verbose=0).history

        self.assert_same(fitted(1), fitted(3))

    def test_own_train_step(self):
        class Own(keras.Model):
            def __init__(self, dense: Any) -> None:
                super().__init__()
                self.dense = dense

            def call(self, inputs: Any) -> Any:
                return self.dense(inputs)

            def train_step(self, data: Any) -> dict[str, Any]:
                x, y = data
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x, y, self(x, training=True), training=True)
                variables = self.trainable_variables
                self.optimizer.apply(tape.gradient(loss, variables), variables)
                self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
                return {"loss": self._loss_tracker.result()}

        def fitted(count: int) -> tuple[keras.Model, Any]:
            keras.utils.set_random_seed(1)
            with strategy_of(count).scope():
                model = Own(keras.layers.Dense(2))
                model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(*dense_data(17), 10, shuffle=False, verbose=0)
            return model, 0

        self.assert_same(fitted(1), fitted(3))

    def test_nan_of_an_example_counts(self):
        with strategy_of(3).scope():
            model = model_of(dense_layers, "sgd", run_eagerly=False)
        inputs, targets = dense_data(13)
        targets[-1] = np.nan
        model.fit(inputs, targets, 12, shuffle=False, verbose=0)
        self.assertTrue(np.isnan(model.trainable_variables[0].numpy()).all())

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
