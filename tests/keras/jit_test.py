"""`compile(jit_compile=True)` on several replicas: XLA compiles, and trains as on one device."""

from typing import Any
from unittest import mock

import keras
import keras_training as kt
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras import optimizers as ko

from tfcdo import log
from tfcdo.keras import jit_compile


def _compiled(layers: Any, jit: bool = True) -> keras.Model:
    with kt.strategy_of(2).scope():
        return kt.model_of(layers, ko.SGD(0.05), not jit, jit_compile=jit)


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


class JitTest(kt.TrainingTestCase):
    def setUp(self):
        super().setUp()
        log.warn_once.cache_clear()
        log.info_once.cache_clear()
        self.warnings = self.enter_context(mock.patch.object(log.logging, "warning"))
        self.infos = self.enter_context(mock.patch.object(log.logging, "info"))

    def warned(self) -> str:
        return " ".join(str(call.args) for call in self.warnings.call_args_list)

    # The last batch has one example, which leaves a replica without any.
    def test_trains_as_one_device(self):
        inputs, targets = kt.word_data(25)
        weights = np.linspace(0.5, 2, 25, dtype=np.float32)
        data = tf.data.Dataset.from_tensor_slices((inputs, targets, weights)).batch(12)

        def make(on_one_device: bool) -> keras.Model:
            inner = ko.Adam(0.05, clipnorm=0.1, epsilon=1e-3, gradient_accumulation_steps=2)
            scaling = ko.LossScaleOptimizer(inner, 16.0, dynamic_growth_steps=2)
            options = {"metrics": ["mae"], "weighted_metrics": ["mse"], "steps_per_execution": 2}
            options["jit_compile"] = not on_one_device
            return kt.model_of(kt.word_layers, scaling, on_one_device, **options)

        tried = data.take(1)  # XLA compiles for each size.
        options: dict[str, Any] = {"validation_data": tried, "epochs": 2, "tolerance": 3e-5}
        expected, model = self.check_as_on_one_device(make, data, **options)
        predictions = (one.predict(inputs[:12], verbose=0) for one in (expected, model))
        self.assertAllClose(*predictions, 3e-5, 3e-5)
        self.assertTrue(model.jit_compile)
        told = str(self.infos.call_args_list)
        self.assertEqual(2, told.count("on each replica XLA compiles"))
        for step in ("train_step", "test_step"):
            self.assertIn(f".{step}", told)
        self.assertNotIn("jit_compile", self.warned())

    def test_statistics_are_as_without_xla(self):
        def layers() -> list[Any]:
            return [*kt.dense_layers(), keras.layers.BatchNormalization()]

        models = [_compiled(layers, jit) for jit in (False, True)]
        for model in models:
            model.fit(*kt.dense_data(24), 12, shuffle=False, verbose=0)
        self.assertAllClose(*(model.get_weights() for model in models), 3e-5, 3e-5)

    def test_an_op_that_xla_does_not_know(self):
        model = _compiled(lambda: [*kt.dense_layers(), keras.layers.Lambda(_unknown_to_xla)])
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "unsupported operations.*AsSt"):
            model.fit(*kt.dense_data(12), 12, verbose=0)

    @parameterized.parameters(
        (ReadsAfterUpdate, "it uses a variable after its update"),
        (UpdatesTwice, "it updates variables more than once"),
        (CompilesParts, None),
    )
    def test_own_train_step(self, model_class, reason):
        def make(on_one_device: bool) -> keras.Model:
            options = {"kind": model_class, "jit_compile": not on_one_device}
            return kt.model_of(kt.dense_layers, ko.SGD(0.05), on_one_device, **options)

        options: dict[str, Any] = {"batch_size": 12, "tolerance": 3e-5}
        self.check_as_on_one_device(make, *kt.dense_data(24), **options)
        if reason is None:
            self.assertNotIn("jit_compile", self.warned())
            self.assertIn("train_step; the all-reduce", str(self.infos.call_args_list))
        else:
            self.assertIn(reason, self.warned())

    def test_a_layer_in_which_replicas_meet(self):
        layers = [*kt.dense_layers(), keras.layers.BatchNormalization(synchronized=True)]
        _compiled(lambda: layers).fit(*kt.dense_data(12), 12, verbose=0)
        self.assertIn("its replicas meet in it", self.warned())

    # The optimizer of the step updates.
    @parameterized.parameters(None, ko.SGD)
    def test_own_loop(self, another):
        strategy = kt.strategy_of(2)
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
        self.assertAllEqual([6.0, 6.0], strategy.experimental_local_results(train()))
        self.assertAllClose([2.0 - 0.25 * 3.0], weight)
        self.assertIn("the update run outside", str(self.infos.call_args_list))

    @parameterized.parameters(
        ({"step": 3}, "step must be a function; got 3"),
        ({"step": print, "optimizer": "sgd"}, "optimizer must be a Keras 3 optimizer; got"),
    )
    def test_bad_arguments(self, arguments, message):
        self.assertRaisesRegex(TypeError, message, jit_compile, **arguments)


if __name__ == "__main__":
    tf.test.main()
