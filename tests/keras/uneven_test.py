"""Batches that do not divide by the number of replicas, weighted by examples."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras_training import TrainingTestCase, dense_data, dense_layers, model_of

import tfcdo
from tfcdo.keras import DistributedOptimizer, weight_by_examples


def trained(count: int, examples: int, weighted: bool) -> tuple[keras.Model, list[float]]:
    strategy = tf.distribute.get_strategy()
    if count > 1:
        strategy = tfcdo.MirroredStrategy(tu.device_names(count), tfcdo.ReductionToOneDevice())
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.3, global_clipnorm=0.5)
        # Run eagerly, Keras itself fails where a replica has no examples.
        model = model_of(dense_layers, DistributedOptimizer(optimizer), run_eagerly=False)
    if weighted:
        assert weight_by_examples(model) is model
    inputs, targets = dense_data(examples)
    weights = np.linspace(0.5, 2, examples, dtype=np.float32)
    options = {"batch_size": 10, "shuffle": False, "verbose": 0}
    history = model.fit(inputs, targets, sample_weight=weights, **options).history
    return model, history["loss"]


def trained_on_sentences(
    count: int, kind: str, weighted: bool = True, jit: bool = False
) -> tuple[keras.Model, list[float]]:
    """Tags the words of sentences of unlike lengths, which end with zeros."""
    rng = np.random.default_rng(0)
    words, tags = rng.integers(1, 9, [16, 6]), rng.integers(0, 3, [16, 6])
    words[np.arange(6) >= np.arange(16)[:, None]] = 0
    tags[8:, :3] = -1 if kind in ("ignore_class", "both") else tags[8:, :3]
    targets: dict[str, np.ndarray] = {"tags": tags}
    keras.utils.set_random_seed(1)
    strategy = tf.distribute.get_strategy()
    if count > 1:
        strategy = tfcdo.MirroredStrategy(tu.device_names(count), tfcdo.ReductionToOneDevice())
    with strategy.scope():
        inputs = keras.Input([6], dtype="int32")
        embedded = keras.layers.Embedding(9, 4, mask_zero=kind != "ignore_class")(inputs)
        outputs = {"tags": keras.layers.Dense(3)(embedded)}
        ignored = -1 if kind in ("ignore_class", "both") else None
        entropy = keras.losses.SparseCategoricalCrossentropy(True, ignore_class=ignored)
        losses = {"tags": entropy}
        if kind == "one_of_two":
            first = keras.layers.Embedding(9, 4)(inputs)[:, 0]
            outputs["first"], losses["first"] = keras.layers.Dense(1)(first), "mse"
            targets["first"] = rng.normal(size=[16, 1])
        model = keras.Model(inputs, outputs)
        model.compile(DistributedOptimizer(keras.optimizers.SGD(0.3)), losses, jit_compile=jit)
    if weighted:
        weight_by_examples(model)
    options = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(words, targets, validation_data=(words, targets), **options).history
    return model, [*history["loss"], *history["val_loss"]]


class WeightByExamplesTest(TrainingTestCase):
    # A last batch of 7 examples, and a batch that leaves a replica without any.
    @parameterized.parameters((3, 17), (5, 4))
    def test_as_on_one_device(self, count, examples):
        expected, losses = trained(1, examples, weighted=False)
        model, weighted_losses = trained(count, examples, weighted=True)
        self.assert_same_training(expected, model)
        self.assertAllClose(losses, weighted_losses)

    def test_without_it_examples_count_unequally(self):
        expected, losses = trained(1, 17, weighted=False)
        model, unweighted_losses = trained(3, 17, weighted=False)
        self.assertGreater(np.abs(expected.get_weights()[0] - model.get_weights()[0]).max(), 1e-3)
        self.assertAllClose(losses, unweighted_losses, rtol=1e-2)

    # Keras takes the mean of the elements that a mask or `ignore_class` keeps: of 1 to 6 words.
    @parameterized.parameters("mask", "ignore_class", "both", "one_of_two")
    def test_elements_that_a_mask_keeps(self, kind):
        expected, losses = trained_on_sentences(1, kind)
        model, weighted_losses = trained_on_sentences(3, kind)
        self.assert_same_training(expected, model)
        if kind != "one_of_two":
            self.assertAllClose(losses, weighted_losses)

    def test_a_mask_with_xla(self):
        expected, _ = trained_on_sentences(1, "mask")
        model, _ = trained_on_sentences(3, "mask", jit=True)
        self.assert_same_training(expected, model)

    def test_without_it_a_short_sentence_counts_as_a_long_one(self):
        (expected, _), (model, _) = (trained_on_sentences(count, "mask", False) for count in (1, 3))
        differences = zip(expected.get_weights(), model.get_weights(), strict=True)
        self.assertGreater(max(np.abs(one - own).max() for one, own in differences), 1e-3)

    def test_what_is_not_a_model(self):
        with self.assertRaisesRegex(TypeError, "model must be a keras.Model, of Keras 3; got 3"):
            weight_by_examples(3)


def _statistics_after(examples: int, jit: bool = False, nan: bool = False) -> keras.Model:
    strategy = tfcdo.MirroredStrategy(tu.device_names(3), tfcdo.ReductionToOneDevice())
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([*dense_layers(), keras.layers.BatchNormalization(momentum=0.5)])
        optimizer = DistributedOptimizer(keras.optimizers.SGD(0.3, momentum=0.5))
        model.compile(optimizer, "mse", jit_compile=jit)
    inputs, targets = dense_data(examples)
    targets[-1] = np.nan if nan else targets[-1]
    model.fit(inputs, targets, batch_size=12, shuffle=False, verbose=0)
    return model


class EmptyBatchTest(TrainingTestCase):
    # The last batch has one example, for the first replica.
    @parameterized.parameters(False, True)
    def test_statistics_stay_as_they_are(self, jit):
        before, model = _statistics_after(12), _statistics_after(13, jit)
        for weight in [*model.weights, *model.optimizer.variables]:
            self.assertTrue(np.isfinite(weight.numpy()).all(), weight.path)
        pairs = zip(before.non_trainable_variables, model.non_trainable_variables, strict=True)
        for old, new in pairs:
            old, new = old.value.values, new.value.values
            self.assertAllClose(old[1:], new[1:], rtol=1e-6)
            self.assertNotAllClose(old[0], new[0])

    def test_nan_of_an_example_counts(self):
        model = _statistics_after(13, nan=True)
        self.assertTrue(np.isnan(model.trainable_variables[0].numpy()).all())


if __name__ == "__main__":
    tf.test.main()
