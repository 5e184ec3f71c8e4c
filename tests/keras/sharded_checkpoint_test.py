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

from tfcdo.keras import BackupAndRestore

DATA = functools.partial(dense_data, 60)  # Divides by four.


def adam(**options: Any) -> keras.optimizers.Optimizer:
    return ko.Adam(0.05, global_clipnorm=0.5, **options)


@functools.cache
def undisturbed() -> keras.Model:
    return trained_eagerly(1, adam, 4, data=DATA)


@functools.cache
def half_trained() -> keras.Model:
    return trained_eagerly(4, adam, 2, data=DATA, shard_optimizer_state=True)


class CheckpointTest(TrainingTestCase):
    def _path(self, name: str) -> str:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        return str(pathlib.Path(folder, name))

    def _assert_goes_on(self, model: keras.Model, strategy: tf.distribute.Strategy) -> None:
        train_eagerly(model, strategy, range(2, 4), DATA)
        self.assert_same_training(undisturbed(), model, 2e-5)

    @parameterized.parameters((3, True), (1, False))
    def test_load_model_elsewhere(self, count, shards):
        path = self._path("m.keras")
        half_trained().save(path)
        strategy = strategy_of(count, shard_optimizer_state=shards)
        with strategy.scope():
            model = keras.models.load_model(path)
        self.assertIs(ko.Adam, type(model.optimizer))
        self._assert_goes_on(model, strategy)

    @parameterized.parameters((True, "weights.h5"), (False, "keras"))
    def test_load_weights_on_two_devices(self, shards, suffix):
        path = self._path(f"m.{suffix}")
        half_trained().save(path) if suffix == "keras" else half_trained().save_weights(path)
        strategy = strategy_of(2, shard_optimizer_state=shards)
        with strategy.scope():
            model = model_of(dense_layers, adam())
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        self._assert_goes_on(model, strategy)

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
        strategy = strategy_of(4, shard_optimizer_state=True)
        with strategy.scope():
            model = model_of(dense_layers, adam())
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        self._assert_goes_on(model, strategy)

    @parameterized.parameters((2, True), (1, False))
    def test_tensorflow_checkpoint(self, count, shards):
        source = half_trained()
        prefix = tf.train.Checkpoint(model=source, optimizer=source.optimizer).save(self._path("c"))
        strategy = strategy_of(count, shard_optimizer_state=shards)
        with strategy.scope():
            model = model_of(dense_layers, adam())
            restore = tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(prefix)
            model.optimizer.build(model.trainable_variables)
            restore.assert_existing_objects_matched()
        self._assert_goes_on(model, strategy)

    def test_backup(self):
        folder = self._path("backup")
        expected = fitted(1, adam, epochs=2)
        again = BackupAndRestore(folder, delete_checkpoint=False)
        fitted(3, adam, 1, [again], shard_optimizer_state=True)
        model = fitted(2, adam, 2, [BackupAndRestore(folder)], shard_optimizer_state=True)
        self.assert_same_training(expected, model, 2e-5)


if __name__ == "__main__":
    tf.test.main()
