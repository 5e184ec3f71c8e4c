"""Checkpoints of sharded states are ordinary: saved on four devices, they load anywhere."""

from __future__ import annotations

import functools
import pathlib
import tempfile
from typing import Any

import h5py  # type: ignore[import-untyped]
import keras
import tensorflow as tf
from absl.testing import parameterized
from keras import optimizers as ko
from keras_training import (
    TrainingTestCase,
    dense_data,
    dense_layers,
    fitted,
    model_of,
    strategy_of,
    train_eagerly,
    trained_eagerly,
)

from tfcdo.keras import BackupAndRestore, DistributedOptimizer

DATA = functools.partial(dense_data, 60)  # Divides by four.


def adam(**options: Any) -> keras.optimizers.Optimizer:
    return ko.Adam(0.05, global_clipnorm=0.5, **options)


def sharded() -> DistributedOptimizer:
    return DistributedOptimizer(adam(), shard_optimizer_state=True)


@functools.cache
def undisturbed() -> keras.Model:
    return trained_eagerly(1, adam, 4, data=DATA)


@functools.cache
def half_trained() -> keras.Model:
    return trained_eagerly(4, sharded, 2, data=DATA)


class CheckpointTest(TrainingTestCase):
    def _path(self, name: str) -> str:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        return str(pathlib.Path(folder, name))

    def _assert_goes_on(self, model: keras.Model, strategy: tf.distribute.Strategy) -> None:
        train_eagerly(model, strategy, range(2, 4), DATA)
        self.assert_same_training(undisturbed(), model, 2e-5)

    @parameterized.parameters(2, 0)
    def test_load_model_elsewhere(self, count):
        path = self._path("m.keras")
        half_trained().save(path)
        # Without a scope: on TensorFlow's default strategy.
        strategy = strategy_of(count) if count else tf.distribute.get_strategy()
        with strategy.scope():
            model = keras.models.load_model(path)
        self.assertTrue(model.optimizer.shard_optimizer_state)
        self._assert_goes_on(model, strategy)

    @parameterized.parameters(
        (sharded, "weights.h5"), (lambda: DistributedOptimizer(adam()), "keras")
    )
    def test_load_weights_on_two_devices(self, make, suffix):
        path = self._path(f"m.{suffix}")
        half_trained().save(path) if suffix == "keras" else half_trained().save_weights(path)
        strategy = strategy_of(2)
        with strategy.scope():
            model = model_of(dense_layers, make())
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        self._assert_goes_on(model, strategy)

    def test_load_weights_with_keras_alone(self):
        path = self._path("m.keras")
        half_trained().save(path)
        model = keras.models.load_model(path, compile=False)
        model.compile(adam(), "mse")
        model.optimizer.build(model.trainable_variables)
        model.load_weights(path)
        self._assert_goes_on(model, strategy_of(1))

    def test_the_same_file_as_keras_alone(self):
        def datasets(model: keras.Model) -> list[Any]:
            path, found = self._path("m.weights.h5"), []
            model.save_weights(path)
            with h5py.File(path) as file:
                file.visititems(lambda name, item: found.append((name, getattr(item, "shape", 0))))
            return found

        self.assertEqual(datasets(undisturbed()), datasets(half_trained()))

    def test_a_state_saved_by_keras_alone_is_loaded(self):
        path = self._path("m.weights.h5")
        trained_eagerly(1, adam, 2, data=DATA).save_weights(path)
        strategy = strategy_of(4)
        with strategy.scope():
            model = model_of(dense_layers, sharded())
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        self._assert_goes_on(model, strategy)

    @parameterized.parameters(sharded, lambda: DistributedOptimizer(adam()))
    def test_tensorflow_checkpoint(self, make):
        source = half_trained()
        prefix = tf.train.Checkpoint(model=source, optimizer=source.optimizer).save(self._path("c"))
        strategy = strategy_of(2)
        with strategy.scope():
            model = model_of(dense_layers, make())
            restore = tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(prefix)
            model.optimizer.build(model.trainable_variables)
            restore.assert_existing_objects_matched()
        self._assert_goes_on(model, strategy)

    def test_tensorflow_checkpoint_with_keras_alone(self):
        source = half_trained()
        optimizer = source.optimizer.inner_optimizer
        prefix = tf.train.Checkpoint(model=source, optimizer=optimizer).save(self._path("c"))
        model = model_of(dense_layers, adam())
        model.optimizer.build(model.trainable_variables)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.restore(prefix).assert_existing_objects_matched()
        self._assert_goes_on(model, strategy_of(1))

    def test_backup(self):
        folder = self._path("backup")
        expected = fitted(1, adam, epochs=2)
        fitted(3, sharded, 1, [BackupAndRestore(folder, delete_checkpoint=False)])
        model = fitted(2, sharded, 2, [BackupAndRestore(folder)])
        self.assert_same_training(expected, model, 2e-5)

    def test_the_state_of_another_optimizer(self):
        path = self._path("m.weights.h5")
        half_trained().save_weights(path)
        with strategy_of(2).scope():
            optimizer = DistributedOptimizer(ko.SGD(0.1), shard_optimizer_state=True)
            model = model_of(dense_layers, optimizer)
            model.optimizer.build(model.trainable_variables)
            with self.assertRaisesRegex(ValueError, "one of SGD, with 2 variables; got 6 variab"):
                model.load_weights(path)


if __name__ == "__main__":
    tf.test.main()
