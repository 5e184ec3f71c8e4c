"""Moving statistics: the mean over replicas is what is saved, and what all replicas use."""

import functools
import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras_training import TrainingTestCase, model_of, strategy_of

import tfcdo
from tfcdo.training import statistics


def layers_with_statistics() -> list[keras.Layer]:
    normalization = keras.layers.BatchNormalization(momentum=0.5)
    return [keras.layers.Input((2,)), normalization, keras.layers.Dense(1)]


def data(examples: int = 24) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(0).normal(1, 3, [examples, 2]).astype(np.float32)
    return inputs, inputs.sum(1, keepdims=True)


class StatisticsTest(TrainingTestCase):
    def test_read_used_saved_and_loaded_agree(self):
        path = pathlib.Path(self.get_temp_dir()) / "model.keras"
        with strategy_of(2).scope():
            model = model_of(layers_with_statistics, "sgd")
        model.fit(*data(12), 6, verbose=0, shuffle=False)
        moving = model.non_trainable_variables
        own = [[copy.numpy() for copy in one.value.values] for one in moving]
        self.assertNotAllClose(own[0][0], own[0][1])
        self.assertAllClose(np.mean(own, 1, np.float64), [one.numpy() for one in moving], rtol=1e-6)
        inside = model.evaluate(*data(), 6, verbose=0)
        model.save(path)
        loaded = keras.models.load_model(path)
        self.assertAllClose(inside, loaded.evaluate(*data(), 6, verbose=0), rtol=1e-6)
        options = {"verbose": 0, "shuffle": False, "validation_data": data(12)}
        history = model.fit(*data(), 6, validation_batch_size=6, **options).history
        expected = model.evaluate(*data(12), 6, verbose=0)
        self.assertAllClose(history["val_loss"][-1], expected, rtol=1e-6)

    def test_equal_numbers_stay_as_they_are(self):
        # Seven: with two or three replicas, a mean in 32 bits is exact as well.
        strategy = strategy_of(7)
        with strategy.scope():
            model = model_of(lambda: [keras.Input((50,)), keras.layers.BatchNormalization()], "sgd")
        frozen = model.non_trainable_variables[0]
        expected = np.random.default_rng(0).normal(size=50).astype(np.float32)
        frozen.assign(expected)
        self.assertAllEqual(expected, frozen)
        mean = strategy.reduce("MEAN", {"frozen": frozen.value}, axis=None)
        self.assertAllEqual(expected, mean["frozen"])
        model.predict(np.zeros([7, 50]), verbose=0)
        for copy in frozen.value.values:
            self.assertAllEqual(expected, copy)

    @parameterized.parameters("evaluate", "predict")
    def test_each_method(self, method):
        with strategy_of(2).scope():
            model = model_of(layers_with_statistics, "sgd")
        given = data(6) if method == "evaluate" else data(6)[:1]
        mean = model.non_trainable_variables[0].value
        for turn in (1.0, 2.0):  # The function is not made again.
            for replica, copy in enumerate(mean.values):
                copy.assign([turn + replica, 4.0 * replica])
            getattr(model, method)(*given, verbose=0)
            for copy in mean.values:
                self.assertAllEqual([turn + 0.5, 2.0], copy)

    def test_counters_of_a_layer(self):
        """Keras adds to a variable by assigning the sum, which TensorFlow then sums, too."""

        class Counter(keras.layers.Layer):
            def build(self, _: tuple[int | None, ...]) -> None:
                options = {"initializer": "zeros", "trainable": False, "aggregation": "sum"}
                self.total = self.add_weight(shape=(), **options)
                self.rows = self.add_weight(shape=(), dtype="int32", **options)

            def call(self, x: tf.Tensor) -> tf.Tensor:
                self.total.assign_sub(keras.ops.sum(keras.ops.sign(x) + 2))
                self.rows.assign_add(keras.ops.shape(x)[0])
                return x

        # The last batch has two examples.
        options: dict[str, Any] = {"replicas": 3, "tolerance": 1e-5, "batch_size": 6}
        counter = functools.partial(Counter, dtype="mixed_bfloat16")
        make = functools.partial(model_of, lambda: [counter(), keras.layers.Dense(1)], "sgd")
        self.check_as_on_one_device(lambda _: make(), *data(8), **options)

    def test_no_wire_dtype_rounds_synchronized_batch_normalization(self):
        inputs = np.random.default_rng(0).normal(10, 0.1, [12, 4]).astype(np.float32)

        def fitted(count: int) -> list[np.ndarray]:
            ops = tfcdo.AutoAllReduce(wire_dtype="bfloat16")
            with strategy_of(count, ops, synchronize_batch_norm=True).scope():
                normalization = keras.layers.BatchNormalization(momentum=0.5)
                model = model_of(lambda: [keras.Input((4,)), normalization], "sgd")
            model.fit(inputs, inputs, 6, verbose=0, shuffle=False)
            return model.get_weights()

        expected, actual = fitted(1), fitted(2)
        # Keras computes E(x^2) - E(x)^2 in float32, which rounds the variance to about 1e-5.
        for at, options in enumerate([{"rtol": 0.01}] * 2 + [{"rtol": 1e-5}, {"atol": 1e-4}]):
            self.assertAllClose(expected[at], actual[at], **options)


class LargestValue(keras.layers.Layer):
    """Keeps in one row the largest input, in another a count of steps, which it copies."""

    def build(self, _):
        self.rows = self.add_weight(shape=(3, 2), initializer="zeros", trainable=False)
        self.steps = self.add_weight(dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs):
        largest = tf.reduce_max(inputs, 0, keepdims=True)
        self.rows.value.scatter_max(tf.IndexedSlices(largest, tf.constant([2])))
        self.rows.value.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])))
        self.steps.assign(tf.cast(self.rows.value[0, 0], tf.int32))
        return inputs


class ScatterTest(TrainingTestCase):
    @parameterized.parameters("add", "div", "max", "min", "mul", "sub", "update")
    def test_changes_rows_on_all_replicas_or_on_one(self, method):
        def changed(variable, delta):
            getattr(variable, f"scatter_{method}")(tf.IndexedSlices([delta], tf.constant([1])))

        expected = tf.Variable([1.0, 2.0, 3.0])
        changed(expected, 4.0)
        strategy = strategy_of(3)
        with strategy.scope():
            variable = tf.Variable([1.0, 2.0, 3.0], trainable=False, dtype=tf.float32)
        tf.function(lambda: changed(variable, 4.0))()
        self.assertAllEqual([expected] * 3, variable.values)

        def step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            changed(variable, tf.cast(replica + 1, tf.float32))

        tf.function(lambda: strategy.run(step))()
        for replica, component in enumerate(variable.values):
            one = tf.Variable(expected)
            changed(one, replica + 1.0)
            self.assertAllEqual(one, component)

    def test_a_replica_without_examples_changes_nothing(self):
        with strategy_of(3).scope():
            layer = LargestValue()
            model = model_of(lambda: [keras.Input((2,)), layer, keras.layers.Dense(1)], "sgd")
        inputs, targets = -np.ones([5, 2], np.float32), np.ones([5, 1])
        inputs[[0, 3]] = [[1, 2], [5, 1]]
        model.fit(inputs, targets, 3, verbose=0, shuffle=False)  # The last batch has two examples.
        path = pathlib.Path(self.get_temp_dir()) / "exported"
        rows = [np.array([[2, 2], [0, 0], largest]) for largest in ([5, 2], [0, 0])]
        # The third replica takes the mean of the others.
        self.assertAllEqual([*rows, np.mean(rows, 0)], layer.rows.value.values)
        self.assertAllEqual([2] * 3, layer.steps.value.values)
        model.export(path, verbose=False)
        loaded = tf.saved_model.load(path)
        self.assertAllClose(model.predict(inputs[:2], verbose=0), loaded.serve(inputs[:2]))

    def test_other_variables_stay_as_they_are(self):
        for changes in (
            {"trainable": True},
            {"dtype": "int64"},
            {"dtype": None, "initial_value": lambda: 0.0},
            {"dtype": None, "initial_value": [0]},
            {"aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA},
            {"synchronization": tf.VariableSynchronization.ON_WRITE},
            {"colocate_with": object()},
        ):
            options = {"trainable": False, "dtype": "float32", **changes}
            self.assertEqual(statistics.as_kept(options), options)
        kept = statistics.as_kept({"trainable": False, "initial_value": 0.0})
        self.assertEqual(tf.VariableAggregation.MEAN, kept["aggregation"])


if __name__ == "__main__":
    tf.test.main()
