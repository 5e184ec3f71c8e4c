"""`compile(jit_compile=True)` on several replicas: XLA compiles, and trains as on one device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras import optimizers as ko
from keras_training import (
    TrainingTestCase,
    dense_data,
    dense_layers,
    strategy_of,
    word_data,
    word_layers,
)

from tfcdo import log
from tfcdo.keras import jit_compile


def _compiled(
    count: int,
    layers: Any,
    make: Any = lambda: ko.SGD(0.05),
    jit: bool = True,
    model_class: Any = keras.Sequential,
    **options: Any,
) -> Any:
    keras.utils.set_random_seed(1)
    with strategy_of(count).scope():
        model = model_class(layers())
        model.compile(make(), "mse", jit_compile=jit, run_eagerly=not jit, **options)
    return model


def _results_of_training(model: Any, data: Any = None, **options: Any) -> list[np.ndarray]:
    """Trains an epoch with batches of 12; returns the history and the weights."""
    data = tf.data.Dataset.from_tensor_slices(data or dense_data(24)).batch(12)
    history = model.fit(data, verbose=0, **options).history
    return [np.array(list(history.values())), *model.get_weights()]


def _unknown_to_xla(inputs: tf.Tensor) -> tf.Tensor:
    numbers = tf.strings.to_number(tf.strings.as_string(inputs))
    return inputs + 0 * tf.ensure_shape(numbers, inputs.shape)


class ReadsAfterUpdate(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data[:2])
        return {**logs, "size": tf.reduce_sum(tf.abs(self.trainable_variables[0]))}


class UpdatesTwice(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        super().train_step(data[:2])
        return super().train_step(data[:2])


class OfSigns(ko.SGD):
    """Updates with the signs of gradients, which is not the sum of the replicas' signs."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply([3 * tf.sign(grad) for grad in grads], trainable_variables)


class CompilesParts(UpdatesTwice):
    def train_step(self, data: Any) -> Any:
        part = jit_compile(super(UpdatesTwice, self).train_step, self.optimizer)
        part(data[:2])
        return part(data[:2])


class JitTest(TrainingTestCase):
    def setUp(self):
        super().setUp()
        log.warn_once.cache_clear()
        log.info_once.cache_clear()
        self.warnings = self.enter_context(mock.patch.object(log.logging, "warning"))
        self.infos = self.enter_context(mock.patch.object(log.logging, "info"))

    def assert_close(self, expected: list[np.ndarray], actual: list[np.ndarray]) -> None:
        for one, other in zip(expected, actual, strict=True):
            np.testing.assert_allclose(other, one, rtol=3e-5, atol=3e-5)

    def warned(self) -> str:
        return " ".join(str(call.args) for call in self.warnings.call_args_list)

    # The last batch has one example, which leaves a replica without any.
    def test_trains_as_one_device(self):
        inputs, targets = word_data(25)
        data = inputs, targets, np.linspace(0.5, 2, 25, dtype=np.float32)

        def scaling() -> Any:
            inner = ko.Adam(0.05, clipnorm=0.1, epsilon=1e-3, gradient_accumulation_steps=2)
            return ko.LossScaleOptimizer(inner, 16.0, dynamic_growth_steps=2)

        def trained(count: int) -> list[np.ndarray]:
            options = {"metrics": ["mae"], "weighted_metrics": ["mse"], "steps_per_execution": 2}
            model = _compiled(count, word_layers, scaling, count > 1, **options)
            self.assertEqual(model.jit_compile, count > 1)
            valid = tf.data.Dataset.from_tensor_slices(data).batch(12)
            results = _results_of_training(model, data, validation_data=valid, epochs=2)
            return [*results, model.predict(inputs, 12, verbose=0)]

        results = trained(2)
        told = str(self.infos.call_args_list)
        self.assertEqual(2, told.count("on each replica XLA compiles"))
        for step in ("train_step", "test_step"):
            self.assertIn(f".{step}", told)
        self.assertNotIn("jit_compile", self.warned())
        self.assert_close(trained(1), results)

    def test_statistics_are_as_without_xla(self):
        def layers() -> list[Any]:
            return [*dense_layers(), keras.layers.BatchNormalization()]

        models = (_compiled(2, layers, jit=jit) for jit in (False, True))
        self.assert_close(*map(_results_of_training, models))

    def test_an_op_that_xla_does_not_know(self):
        model = _compiled(2, lambda: [*dense_layers(), keras.layers.Lambda(_unknown_to_xla)])
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "unsupported operations.*AsSt"):
            model.fit(*dense_data(12), 12, verbose=0)

    @parameterized.parameters(
        (ReadsAfterUpdate, "it uses a variable after its update"),
        (UpdatesTwice, "it updates variables more than once"),
        (CompilesParts, None),
    )
    def test_own_train_step(self, model_class, reason):
        models = (_compiled(k, dense_layers, jit=k > 1, model_class=model_class) for k in (1, 2))
        self.assert_close(*map(_results_of_training, models))
        if reason is None:
            self.assertNotIn("jit_compile", self.warned())
            self.assertIn("train_step; the all-reduce", str(self.infos.call_args_list))
        else:
            self.assertIn(reason, self.warned())

    def test_a_layer_in_which_replicas_meet(self):
        layers = [*dense_layers(), keras.layers.BatchNormalization(synchronized=True)]
        model = _compiled(2, lambda: layers)
        model.fit(*dense_data(12), 12, verbose=0)
        self.assertIn("its replicas meet in it", self.warned())

    # The optimizer of the step updates.
    @parameterized.parameters(None, ko.SGD)
    def test_own_loop(self, another):
        strategy = strategy_of(2)
        with strategy.scope():
            weight = tf.Variable([2.0])
            optimizer = OfSigns(0.25)
            optimizer.build([weight])
            given = another and another(0.5)

        def step(inputs: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(inputs * weight)
            optimizer.apply(tape.gradient(loss, [weight]), [weight])
            return loss

        compiled = jit_compile(step, given)
        train = tf.function(lambda: strategy.run(compiled, (tf.constant([1.0, 2.0]),)))
        losses = strategy.experimental_local_results(train())
        self.assertAllEqual([6.0, 6.0], losses)
        self.assertAllClose([2.0 - 0.25 * 3.0], weight)
        self.assertIn("the update run outside", str(self.infos.call_args_list))

    @parameterized.parameters(
        ({"step": 3}, "step must be a function; got 3"),
        ({"step": print, "optimizer": "sgd"}, "optimizer must be a Keras 3 optimizer or None"),
    )
    def test_bad_arguments(self, arguments, message):
        with self.assertRaisesRegex(TypeError, message):
            jit_compile(**arguments)


if __name__ == "__main__":
    tf.test.main()
