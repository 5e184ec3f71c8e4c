"""`compile(jit_compile=True)` on several replicas: XLA compiles, and trains as on one device."""

from __future__ import annotations

import functools
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

_TOLERANCE = 3e-5


def _compiled(strategy: Any, layers: Any, optimizer: Any, jit: bool, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = options.pop("model_class", keras.Sequential)(layers())
        metrics = {"metrics": ["mae"], "weighted_metrics": ["mse"]}
        model.compile(optimizer(), "mse", jit_compile=jit, **metrics, **options)
    return model


def _fit(model: Any, data: Any) -> list[np.ndarray]:
    """Trains and validates with all of the data; returns history, predictions and weights."""
    inputs, targets = data
    weights = np.linspace(0.5, 2, len(inputs), dtype=np.float32)
    history = model.fit(
        inputs,
        targets,
        12,
        epochs=2,
        sample_weight=weights,
        validation_data=data,
        shuffle=False,
        verbose=0,
    ).history
    predicted = model.predict(inputs, 12, verbose=0)
    return [np.array(list(history.values())), predicted, *model.get_weights()]


def _results_of_training(model: Any) -> list[np.ndarray]:
    """Trains an epoch; returns the history and the weights."""
    data = tf.data.Dataset.from_tensor_slices(dense_data(24)).batch(12)
    history = model.fit(data, verbose=0).history
    return [np.array(list(history.values())), *model.get_weights()]


def _accumulating() -> Any:
    return ko.Adam(0.05, clipnorm=0.1, epsilon=1e-3, gradient_accumulation_steps=2)


def _scaling() -> Any:
    return ko.LossScaleOptimizer(ko.SGD(0.05), 16.0, dynamic_growth_steps=2)


def _unknown_to_xla(inputs: tf.Tensor) -> tf.Tensor:
    numbers = tf.strings.to_number(tf.strings.as_string(inputs))
    return inputs + 0 * tf.ensure_shape(numbers, inputs.shape)


def _with_string_op() -> list[Any]:
    return [*dense_layers(), keras.layers.Lambda(_unknown_to_xla)]


class ReadsAfterUpdate(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data[:2])
        return {**logs, "size": tf.reduce_sum(tf.abs(self.trainable_variables[0]))}


class UpdatesTwice(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        super().train_step(data[:2])
        return super().train_step(data[:2])


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
            np.testing.assert_allclose(other, one, rtol=_TOLERANCE, atol=_TOLERANCE)

    def warned(self) -> str:
        return " ".join(str(call.args) for call in self.warnings.call_args_list)

    def assert_compiled(self, *steps: str) -> None:
        told = [str(call.args) for call in self.infos.call_args_list]
        told = [line for line in told if "on each replica XLA compiles" in line]
        for step in steps:
            self.assertLen([line for line in told if f".{step}" in line], 1)
        self.assertLen(told, len(steps))
        self.assertNotIn("jit_compile", self.warned())

    # The last batch has one example, which leaves a replica without any.
    @parameterized.parameters(False, True)
    def test_trains_as_one_device(self, words):
        layers, data = (word_layers, word_data) if words else (dense_layers, dense_data)
        optimizer = _scaling if words else _accumulating
        steps = 2 if words else 1
        model = _compiled(strategy_of(2), layers, optimizer, jit=True, steps_per_execution=steps)
        results = _fit(model, data(25))
        self.assertTrue(model.jit_compile)
        self.assert_compiled("train_step", "test_step")
        alone = _fit(_compiled(strategy_of(1), layers, optimizer, jit=False), data(25))
        self.assert_close(alone, results)

    def test_statistics_are_as_without_xla(self):
        def layers() -> list[Any]:
            return [*dense_layers(), keras.layers.BatchNormalization(), keras.layers.Dense(2)]

        strategy, sgd = strategy_of(2), functools.partial(ko.SGD, 0.05)
        self.assert_close(
            *[_results_of_training(_compiled(strategy, layers, sgd, jit)) for jit in (False, True)]
        )

    def test_an_op_that_xla_does_not_know(self):
        strategy, sgd = strategy_of(2), functools.partial(ko.SGD, 0.05)
        model = _compiled(strategy, _with_string_op, sgd, jit=True)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "unsupported operations.*AsSt"):
            model.fit(*dense_data(12), 12, verbose=0)
        with strategy.scope():
            model.compile(ko.SGD(0.05), "mse", jit_compile=False)
        model.fit(*dense_data(12), 12, verbose=0)

    @parameterized.parameters(
        (ReadsAfterUpdate, "it uses a variable after its update"),
        (UpdatesTwice, "it updates variables more than once"),
        (CompilesParts, None),
    )
    def test_own_train_step(self, model_class, reason):
        sgd = functools.partial(ko.SGD, 0.05)
        models = (
            _compiled(strategy_of(count), dense_layers, sgd, count > 1, model_class=model_class)
            for count in (1, 2)
        )
        self.assert_close(*map(_results_of_training, models))
        if reason is None:
            self.assertNotIn("jit_compile", self.warned())
            self.assertIn("train_step; the all-reduce", str(self.infos.call_args_list))
        else:
            self.assertIn(reason, self.warned())

    def test_a_layer_in_which_replicas_meet(self):
        layers = [*dense_layers(), keras.layers.BatchNormalization(synchronized=True)]
        model = _compiled(strategy_of(2), lambda: layers, functools.partial(ko.SGD, 0.05), jit=True)
        model.fit(*dense_data(12), 12, verbose=0)
        self.assertIn("its replicas meet in it", self.warned())

    def test_auto_is_without_xla_under_a_strategy(self):
        devices = [mock.Mock(device_type="GPU")]
        with (
            strategy_of(2).scope(),
            mock.patch.object(tf.config, "list_physical_devices", return_value=devices),
        ):
            model = keras.Sequential(dense_layers())
            model.compile("sgd", "mse", jit_compile="auto")
            self.assertFalse(model.jit_compile)

    def test_own_loop(self):
        strategy = strategy_of(2)
        with strategy.scope():
            weight = tf.Variable([2.0])
            optimizer = ko.SGD(0.25)
            optimizer.build([weight])

        def step(inputs: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(inputs * weight)
            optimizer.apply(tape.gradient(loss, [weight]), [weight])
            return loss

        compiled = jit_compile(step, optimizer)
        train = tf.function(lambda: strategy.run(compiled, (tf.constant([1.0, 2.0]),)))
        losses = strategy.experimental_local_results(train())
        self.assertAllEqual([6.0, 6.0], losses)
        self.assertAllClose([2.0 - 0.25 * 2 * 3.0], weight)

    @parameterized.parameters(
        ({"step": 3}, "step must be a function; got 3"),
        ({"step": print, "optimizer": "sgd"}, "optimizer must be a Keras 3 optimizer or None"),
    )
    def test_bad_arguments(self, arguments, message):
        with self.assertRaisesRegex(TypeError, message):
            jit_compile(**arguments)


if __name__ == "__main__":
    tf.test.main()
