"""Every example counts the same, however a batch is dealt: losses and weights are one device's."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import keras_training as kt
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo import log
from tfcdo.training import models
from tfcdo.training.step import RETURNED_AS, ReplicaStep, during, stand_ins


class LossesTest(kt.TrainingTestCase):
    @parameterized.parameters(
        ("ignore_class", "sum_over_batch_size"),
        ("one_of_two", "mean_with_sample_weight", True),
        *tu.nightly(("one_of_two", "mean_with_sample_weight")),
    )
    def test_elements_that_a_mask_keeps(self, kind, reduction, run_eagerly=False):
        """Keras takes their mean: of 1 to 6 words of sentences, which end with zeros."""
        rng = np.random.default_rng(0)
        words, tags = rng.integers(1, 9, [17, 6]), rng.integers(0, 3, [17, 6])
        words[np.arange(6) >= 1 + np.arange(17)[:, None] % 6] = 0
        tags[8:, :3] = -1 if kind == "ignore_class" else tags[8:, :3]
        targets: dict[str, np.ndarray] = {"tags": tags}
        if kind == "one_of_two":
            targets["first"] = rng.normal(size=[17, 1])

        def make(on_one_device: bool) -> keras.Model:
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
            model = keras.Model(inputs, outputs)
            weights = dict.fromkeys(losses, 0.5)
            model.compile(
                *(keras.optimizers.SGD(0.1), losses, weights, {"tags": "accuracy"}),
                # With several outputs, Keras weights them otherwise eagerly.
                run_eagerly=run_eagerly or (on_one_device and kind == "ignore_class"),
            )
            return model

        # What `evaluate` traces takes long.
        tried = (words, targets) if run_eagerly or kind == "ignore_class" else None
        self.check_as_on_one_device(make, words, targets, batch_size=8, validation_data=tried)

    @parameterized.parameters(None, "sum", *tu.nightly("sum_over_batch_size", "mean"))
    def test_losses_of_a_whole_batch(self, reduction):
        class Activity(keras.layers.Layer):
            def call(self, inputs: Any) -> Any:
                self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
                # Keras sums a loss of each example, as in its example of a reader of captchas.
                self.add_loss(0.1 * keras.ops.mean(keras.ops.cos(inputs), -1, keepdims=True))
                self.add_loss(0.1 * keras.ops.mean(keras.ops.sin(inputs), 0))  # Of each unit.
                return inputs

        def loss(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
            squares = keras.ops.square(targets - outputs)
            self.metric.update_state(keras.ops.mean(squares))
            self.metric.update_state(squares, 0.5)  # Keras takes their mean.
            return keras.ops.sum(squares) if reduction == "sum" else keras.ops.mean(squares)

        class Own(keras.losses.Loss):
            def __call__(self, y: Any, x: Any, weights: Any = None) -> tf.Tensor:
                average = tf.nn.compute_average_loss(keras.losses.mean_absolute_error(y, x))
                return loss(y, x) + keras.losses.MeanAbsoluteError()(y, x) + average

        def make(run_eagerly: bool) -> keras.Model:
            layers = [*kt.dense_layers(), Activity()]
            used = Own(reduction=reduction) if reduction else loss
            sgd = keras.optimizers.SGD(0.01 if reduction == "sum" else 0.1)
            self.metric = layers[-1].metric = keras.metrics.Mean("metric")
            return kt.model_of(lambda: layers, sgd, run_eagerly, used)

        data = kt.dense_data(17)
        self.check_as_on_one_device(make, *data, batch_size=10, validation_data=data)

    @parameterized.parameters((2, 2), (2, 1), *tu.nightly((1, 1)))
    def test_losses_of_each_example(self, outputs, known):
        """A loss that Keras neither sums nor averages; also two rows for one of two outputs."""

        def make(on_one_device: bool) -> keras.Model:
            x = keras.Input([4])
            model = keras.Model(x, [keras.layers.Dense(2, name=f"y{i}")(x) for i in range(outputs)])
            losses = [*[keras.losses.MeanSquaredError(reduction=None)] * known, None][:outputs]
            # With several outputs, Keras weights them otherwise eagerly.
            model.compile("sgd", losses, run_eagerly=on_one_device if outputs == 1 else known == 1)
            return model

        x, y = kt.dense_data(16)
        with mock.patch.object(log, "warn_once", side_effect=AssertionError):
            self.check_as_on_one_device(make, x, [y] * 2 if known == 2 else y, batch_size=5)

    def test_losses_of_each_example_and_numbers(self):
        """Keras adds a number to each example's loss: it counts by their number, here a part's."""
        with kt.strategy_of(3).scope():
            x = keras.Input([4])
            model = keras.Model(x, [keras.layers.Dense(2)(x), keras.layers.Dense(2)(x)])
            model.compile("sgd", [keras.losses.MeanSquaredError(reduction=None), "mse"])
        inputs, targets = kt.dense_data(6)
        with mock.patch.object(log, "warn_once") as warned:
            model.fit(inputs, [targets] * 2, verbose=0)
        self.assertIn("3 replicas. Give all losses", warned.call_args.args[0])

    def test_metrics_of_one_number(self):
        """Functions that return a mean: one of the user's, a loss, and one with a loss in it."""

        def error(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
            return keras.ops.mean(keras.ops.abs(targets - outputs))

        def both(y: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
            return keras.losses.MeanSquaredError()(y, x) + keras.losses.mean_absolute_error(y, x)

        def of_targets(y: tf.Tensor, x: tf.Tensor) -> tf.Tensor:  # A few numbers, not examples'.
            return keras.ops.mean(keras.ops.abs(y - x), 0)

        def keepdims(y: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
            return keras.ops.mean(keras.ops.abs(y - x), keepdims=True)

        def distiller(layers: list[Any]) -> keras.Model:
            teacher, own = keras.Sequential(kt.dense_layers()), keras.distillation
            return own.Distiller(teacher, keras.Sequential(layers), own.LogitsDistillation())

        metrics = [error, keras.losses.MeanSquaredError(name="x"), both, of_targets, keepdims]
        make = functools.partial(kt.model_of, kt.dense_layers, "sgd", loss=both, metrics=metrics)
        data, weights = kt.dense_data(15), {"sample_weight": np.arange(15.0)}
        options: dict[str, Any] = {"batch_size": 7, "validation_data": data, **weights}
        for kind in (keras.Sequential, distiller)[: 1 + hasattr(keras, "distillation")]:  # 3.12
            self.check_as_on_one_device(functools.partial(make, kind=kind), *data, **options)

    @parameterized.parameters(("mean_with_sample_weight", np.arange(7.0) % 6 + 1), (None, None))
    def test_a_number_and_the_weight_of_one_example(self, reduction, weights):
        """Run eagerly: Keras makes a vector of number and weights, but of one weight a number."""

        class Own(keras.losses.Loss):
            def call(self, targets: Any, outputs: Any) -> tf.Tensor:
                number = keras.losses.MeanAbsoluteError()(targets, outputs)
                return number + keras.ops.mean(tfcdo.keras.global_batch((targets - outputs) ** 2))

        make = functools.partial(kt.model_of, kt.dense_layers, "sgd", loss=Own(reduction=reduction))
        r2 = functools.partial(keras.metrics.R2Score, None)  # One for each output, not example.
        how: dict[str, Any] = {"sample_weight": weights, "batch_size": 3}
        self.check_as_on_one_device(lambda _: make(metrics=[r2()]), *kt.dense_data(7), **how)

    @parameterized.parameters((True,), *tu.nightly(False))
    def test_own_train_step_without_targets(self, own_mean):
        class Own(kt.OwnStep):
            def loss_of(self, x: Any, y: Any, outputs: Any) -> Any:
                if not own_mean:
                    return super().loss_of(x, y, outputs)
                errors = tfcdo.keras.global_batch((outputs - y) ** 2)
                return tf.reduce_mean(errors) / tf.distribute.get_strategy().num_replicas_in_sync

            def logs_of(self, x: Any, y: Any, outputs: Any, loss: Any) -> dict[str, Any]:
                return {"loss": self.compute_loss(x, y, outputs)}

        make = functools.partial(kt.model_of, kt.dense_layers, "sgd", kind=Own)
        self.check_as_on_one_device(make, kt.dense_data(17)[0], batch_size=10, tolerance=2e-6)

    @parameterized.parameters(
        (lambda own, y, x: keras.losses.MeanSquaredError()(y, x), []),
        (lambda own, y, x: own.compute_loss(None, y, x), []),
        (lambda own, y, x: tf.reduce_mean((y - x) ** 2), ["counts"]),  # As in Keras's VAE.
        (lambda own, y, x: keras.losses.MeanSquaredError()(y, x) + sum(own.losses), ["count"]),
        (lambda own, y, x: own.compute_loss(None, y, x) + sum(own.layers[1].losses), ["count"]),
    )
    def test_own_train_step_is_told_of_losses_that_are_whole_on_each_replica(self, loss, told):
        """A mean that is not Keras's, and losses of regularizers, as in Keras's guide."""

        class Own(kt.OwnStep):
            def loss_of(self, x: Any, y: Any, outputs: Any) -> Any:
                return loss(self, y, outputs)

        layers = [*kt.dense_layers(), keras.layers.ActivityRegularization(0.1)]
        with kt.strategy_of(2).scope():
            model = kt.model_of(lambda: layers, "sgd", False, "mse", Own)
        with mock.patch.object(log, "warn_once") as warn:
            model.fit(*kt.dense_data(8), verbose=0)
        texts = {verb: f"{verb} 2 times on 2 replicas" for verb in ("counts", "count")}
        self.assertEqual(told, [verb for verb in texts if texts[verb] in str(warn.call_args_list)])

    def test_an_error_of_a_step_that_builds_a_layer(self):
        class Own(keras.Model):
            def train_step(self, data: Any) -> Any:
                raise KeyError(self.dense(data[0]).dtype.name)

        with kt.strategy_of(2).scope():
            model = Own()
            model.dense = keras.layers.Dense(1)
            model.compile("sgd", "mse")
        self.assertRaisesRegex(KeyError, "float32", model.fit, *kt.dense_data(4), verbose=0)

    @parameterized.parameters((False,), *tu.nightly(True))
    def test_losses_of_layers_whose_replicas_meet(self, run_eagerly):
        """Also a loss that Keras has scaled already, as in its guide's `LogisticEndpoint`."""

        class Endpoint(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                self.add_loss(keras.ops.mean(keras.ops.square(x - 1)))
                self.add_loss(keras.losses.MeanAbsoluteError()(keras.ops.zeros_like(x), x))
                self.kept = self.all["x"] = x  # No other replica's takes its place as they meet.
                return -keras.ops.moments(x, [0], synchronized=True)[0] + self.kept * self.all["x"]

        # Before 3.14, Keras did not divide its sum by the examples.
        divides = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14)

        def layers() -> list[Any]:
            l2 = keras.regularizers.L2(0.1) if divides else None
            endpoint, meeting = Endpoint(), keras.layers.BatchNormalization(synchronized=True)
            endpoint.all = {}
            dense = keras.layers.Dense(4, kernel_regularizer=keras.ops.abs, activity_regularizer=l2)
            return [dense, endpoint, meeting, keras.layers.Dense(1)]

        def make(on_one_device: bool) -> keras.Model:
            return kt.model_of(layers, keras.optimizers.SGD(0.1), run_eagerly or on_one_device)

        tried = kt.dense_data(9) if run_eagerly else None
        options: dict[str, Any] = {"batch_size": 7, "replicas": 3, "validation_data": tried}
        self.check_as_on_one_device(make, *kt.dense_data(9), tolerance=2e-6, **options)

    @parameterized.parameters("", "gathers", *tu.nightly("sums"))
    def test_gradients_of_gradients_where_replicas_meet(self, how):
        """As for a penalty of a WGAN's: the last batch has no examples for the second replica."""

        class Centered(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                of_all = tfcdo.keras.global_batch(x) if how == "gathers" else x
                return x - keras.ops.moments(of_all, [0], True, synchronized=how == "sums")[0]

        class Own(kt.OwnStep):
            def loss_of(self, x: Any, y: Any, outputs: Any) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    squares = self(x, training=True) ** 2
                slopes = tape.gradient(squares, x)
                mean_square = keras.losses.MeanSquaredError()
                return mean_square(y, outputs) + mean_square(tf.zeros_like(slopes), slopes)

        def layers() -> list[Any]:
            meeting = Centered() if how else keras.layers.BatchNormalization(synchronized=True)
            return [keras.layers.Dense(3, "tanh"), meeting, keras.layers.Dense(2)]

        make, data = functools.partial(kt.model_of, layers, "sgd", kind=Own), kt.dense_data(5)
        self.check_as_on_one_device(make, *data, batch_size=4, ways=(True, False))

    @parameterized.parameters(
        (True, {"run_eagerly": True}), (False, {}), *tu.nightly((True, {"jit_compile": True}))
    )
    def test_own_train_step_reports_metrics(self, tracked, how):
        """As Keras's guide has it: in trackers of Keras's and its own, weighted; by any name."""

        class Own(kt.OwnStep):
            def logs_of(self, x: Any, y: Any, outputs: Any, loss: Any) -> dict[str, Any]:
                first, compiled = self.metrics[:2]
                for metric in (first, self.tracker) if tracked else ():
                    metric.update_state(loss)
                self.weighted.update_state(loss, sample_weight=tf.shape(x)[0])
                compiled.update_state(y, outputs)
                self.mean.update_state(keras.ops.mean(outputs))
                self.mean.update_state([loss, keras.ops.mean(outputs)])  # Two numbers.
                self.rows.update_state(keras.ops.ones_like(y))
                reported = [compiled, self.mean, self.rows]
                reported += [self.tracker, self.weighted] if tracked else []
                results = {one.name.replace("mean", "renamed"): one.result() for one in reported}
                return {"a": x[0, 0] < 9, "loss": first.result() if tracked else loss, "b": results}

        def make(on_one_device: bool) -> keras.Model:
            options = {"run_eagerly": False, **({"run_eagerly": True} if on_one_device else how)}
            model = kt.model_of(kt.dense_layers, "sgd", kind=Own, metrics=["mae"], **options)
            for name in ("tracker", "weighted", "mean", "unused"):
                setattr(model, name, keras.metrics.Mean(name))
            model.rows = keras.metrics.Sum("rows")
            return model

        model, _ = self.check_as_on_one_device(make, *kt.dense_data(8), batch_size=7)
        self.assertLen(model.history.history, 7 if tracked else 5)
        for metric in model.metrics:  # As if `train_step` and `test_step` returned any as "one".
            vars(metric)[RETURNED_AS] = {"one"}
        self.assertEqual({"one": 5.0}, models._of_all_replicas(model, {"one": 5.0}))

    def test_no_layer_sees_an_empty_part(self):
        """Some kernels fail on nothing, or on zeros; a NaN of an example still counts."""

        class NeedsRows(keras.layers.Layer):
            def call(self, inputs: tf.Tensor) -> tf.Tensor:
                needed = tf.shape(inputs)[:1], tf.abs(inputs)
                with tf.control_dependencies(map(tf.debugging.assert_positive, needed)):
                    return tf.identity(inputs)

        with kt.strategy_of(2).scope():
            layers = [keras.Input([4]), NeedsRows(), keras.layers.Dense(2)]
            model = kt.model_of(lambda: layers, "sgd", run_eagerly=False)
        inputs, targets = kt.dense_data(7)
        model.evaluate(inputs, targets, 6, verbose=0)
        self.assertLen(model.predict(inputs, 6, verbose=0), 7)
        self.assertLen(model.predict_on_batch(inputs[:1]), 1)
        targets[-1] = np.nan
        model.fit(inputs, targets, 6, shuffle=False, verbose=0)
        self.assertTrue(np.isnan(model.trainable_variables[0].numpy()).all())

    @parameterized.parameters((1, [[[5], [6]], [[0, 5]], [[5, 6]]]), (0, [[[0]], [[0, 0]], [[0]]]))
    def test_stand_ins_are_the_rows_of_an_example(self, rows, expected):
        """Rows of zeros on a host without any; two rows per example, sparse and ragged ones."""
        sparse = tf.sparse.from_dense(tf.constant([[0, 5]])[:rows])
        ragged = tf.ragged.constant([[5, 6]])[:rows]
        values = tf.constant([[5], [6]])[: 2 * rows], None, sparse, ragged
        steps = [ReplicaStep(0, 2, rows), ReplicaStep(1, 2, 0)]
        dense, none, sparse, ragged = stand_ins(steps, values)
        self.assertIsNone(none)
        found = dense.numpy(), tf.sparse.to_dense(sparse).numpy(), ragged.to_tensor().numpy()
        self.assertEqual(expected, [one.tolist() for one in found])

    def test_an_own_loop_refuses_an_empty_part(self):
        with (strategy := kt.strategy_of(3)).scope():
            model = kt.model_of(kt.dense_layers, "sgd")
        data = tf.data.Dataset.from_tensor_slices(kt.dense_data(5)).batch(3)
        step = tf.function(lambda batch: strategy.run(lambda part: model(part[0]), (batch,)))
        first, last = strategy.experimental_distribute_dataset(data)
        step(first)
        self.assertRaisesRegex(tf.errors.InvalidArgumentError, "drop_remainder=True", step, last)

    def test_float64(self):
        """A third, and the mean of random numbers, would have the digits of float32."""
        strategy, loss = kt.strategy_of(3), keras.losses.MeanAbsoluteError(dtype="float64")
        rows = tu.distributed(strategy, lambda replica: tf.zeros([2, 1], tf.float64))
        draw = functools.partial(keras.random.normal, [2, 1], 0.1, 0.0, "float64")
        losses = strategy.run(lambda rows: loss(rows, draw()), (rows,))
        self.assertAllClose(0.1, strategy.reduce("SUM", losses, axis=None), 1e-12, 1e-12)

    def test_a_loss_in_the_scope(self):
        """Outside of a step it is one of all examples, as of data to validate with."""
        inputs, targets = kt.dense_data(7)
        with kt.strategy_of(3).scope():
            model = kt.model_of(kt.dense_layers, "sgd")
            loss = keras.losses.MeanSquaredError()(targets, model(inputs))
            total = model.compute_loss(inputs, targets, model(inputs))
        expected = np.mean((targets - model(inputs)) ** 2)
        self.assertAllClose([expected, expected + sum(model.losses)], [loss, total], 1e-6, 1e-6)

    @parameterized.parameters("train_step", "own_step")
    def test_an_own_loop_over_a_method_of_a_model(self, method):
        """A step of Keras's reports a loss of the whole batch; in an own loop it is a share."""

        class Own(kt.OwnStep):
            def own_step(self, *data: Any) -> Any:
                return self.train_step(data)

            def loss_of(self, x: Any, y: Any, outputs: Any) -> Any:
                return keras.losses.MeanSquaredError()(y, outputs)

            def logs_of(self, x: Any, y: Any, outputs: Any, loss: Any) -> Any:
                return loss

        def trained(count: int) -> list[Any]:
            with (strategy := kt.strategy_of(count)).scope():
                model = kt.model_of(kt.dense_layers, "sgd", kind=Own)
            step = getattr(model, method)

            @tf.function
            def total(batch: Any) -> Any:
                losses = strategy.run(step, batch if method == "own_step" else (batch,))
                return strategy.reduce("SUM", losses, axis=None)

            data = tf.data.Dataset.from_tensor_slices(kt.dense_data(10)).batch(7)
            data = strategy.experimental_distribute_dataset(data)
            return [*map(total, data), *model.get_weights()]

        for one, other in zip(*map(trained, (1, 2)), strict=True):
            self.assertAllClose(one, other, 5e-6, 5e-6)

    @parameterized.parameters((True, False), (False, True))
    def test_another_value_before_the_batch(self, eager, with_targets):
        """A seed per replica, say, is not taken for the batch."""
        strategy = kt.strategy_of(3)
        seeds = tu.distributed(strategy, lambda replica: tf.constant([1, replica]))
        inputs, targets = kt.dense_data(7)
        batch = (inputs, targets) if with_targets else (inputs,)
        [parts] = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(batch))

        def loss(seed: Any, inputs: Any, targets: Any = 0.0) -> Any:
            return keras.losses.MeanSquaredError()(tf.zeros_like(inputs[:, 0]), inputs[:, 0])

        def total(parts: Any) -> Any:
            return strategy.reduce("SUM", strategy.run(loss, (seeds, *parts)), axis=None)

        actual = (total if eager else tf.function(total))(parts)
        self.assertAllClose(np.mean(inputs[:, 0] ** 2), actual)
        with during(method="fit"):  # There, the first value has the examples.
            self.assertEqual(2, strategy.extended._steps((seeds, *parts), {}, False)[0].rows)


# Each replica's rows; it keeps those that are not 0.
PARTS = np.array([[[1], [2], [0]], [[0], [3], [0]], [[4], [5], [6]]], np.float32)
WEIGHTS = np.arange(1.0, 10.0, dtype=np.float32)[:, None]


def rows_and_gradient(select: Callable[[tf.Tensor], tf.Tensor], own: Any = None) -> Any:
    """Returns, on a replica, the rows of all, and the gradient of their weighted sum."""
    if own is None:
        own = tf.gather(PARTS, tf.distribute.get_replica_context().replica_id_in_sync_group)
    with tf.GradientTape() as tape:
        tape.watch(own)
        rows = tfcdo.keras.global_batch(select(own))
        loss = tf.reduce_sum(rows * tf.cast(WEIGHTS, rows.dtype)[: tf.shape(rows)[0]])
    return rows, tape.gradient(loss, own)


class GlobalBatchTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        select=[tf.identity, lambda own: tf.boolean_mask(own, own[:, 0] > 0)],
        eager=[True, False],
        has_batch=[True, False],
    )
    def test_rows_of_all(self, select, eager, has_batch):
        strategy = tfcdo.MirroredStrategy(tu.device_names(3))
        of_all = np.concatenate(PARTS)
        [batch] = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(of_all))
        args = select, batch if has_batch else None
        step = functools.partial(strategy.run, rows_and_gradient, args)
        rows, gradients = (step if eager else tf.function(step))()
        kept = np.arange(9) if select is tf.identity else np.flatnonzero(of_all[:, 0])
        expected = np.zeros_like(of_all)
        expected[kept] = 3 * WEIGHTS[: len(kept)]  # Each of the replicas has this loss.
        for replica, own in enumerate(strategy.experimental_local_results(rows)):
            self.assertAllEqual(own, of_all[kept], f"replica {replica}")
        self.assertAllEqual(tf.concat(strategy.experimental_local_results(gradients), 0), expected)

    def test_known_parts_that_no_dataset_has_cut(self):
        strategy = tfcdo.MirroredStrategy(tu.device_names(3))
        parts = tu.distributed(strategy, lambda at: tf.ones([(2, 1, 3)[at], 1]))  # First the mean.
        step = tf.function(lambda own: strategy.run(tfcdo.keras.global_batch, (own,)))
        for rows in strategy.experimental_local_results(step(parts)):
            self.assertAllEqual(rows, tf.ones([6, 1]))

    @parameterized.product(eager=[True, False], dtype=[tf.float32, tf.complex64])
    def test_a_tensor_that_all_replicas_share(self, eager, dtype):
        strategy = tfcdo.MirroredStrategy(tu.device_names(2))
        shared = tf.ones([2, 1], dtype)
        step = functools.partial(strategy.run, rows_and_gradient, (tf.identity, shared))
        rows, gradients = (step if eager else tf.function(step))()
        of_each = tf.reshape(2 * WEIGHTS[:4], [2, 2, 1])  # Each of the replicas has this loss.
        results = map(strategy.experimental_local_results, (rows, gradients))
        for own, gradient, expected in zip(*results, of_each, strict=True):
            self.assertAllEqual(own, tf.ones([4, 1]))
            self.assertAllEqual(gradient, expected)

    def test_none_and_a_number_have_no_rows(self):
        strategy = tfcdo.MirroredStrategy(tu.device_names(2))
        self.assertIsNone(strategy.run(lambda: tfcdo.keras.global_batch((None, tf.ones([1])))[0]))
        with self.assertRaisesRegex(ValueError, r"values must have rows.*; got a scalar, .*3"):
            strategy.run(lambda: tfcdo.keras.global_batch(tf.constant(3.0)))

    def test_graph_ends_with_its_function(self):
        with (strategy := tfcdo.MirroredStrategy(tu.device_names(2))).scope():
            layer = keras.layers.BatchNormalization(synchronized=True)
            layer.build((None, 3))

        def gradient() -> Any:
            inputs = tf.ones([4, 3])
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = layer(tfcdo.keras.global_batch(inputs), training=True)
            return tape.gradient(outputs**2, inputs)

        step = tf.function(lambda: strategy.run(gradient), autograph=False)
        graph = weakref.ref(step.get_concrete_function().graph)
        del step
        gc.collect()
        self.assertIsNone(graph())


if __name__ == "__main__":
    tf.test.main()
