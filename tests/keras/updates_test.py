"""Optimizers on several replicas train as Keras's own on one device; `programs_test` has more."""

import copy
import functools
import pathlib
import threading
import time
import warnings
from typing import Any
from unittest import mock

import keras
import keras_training as kt
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras import optimizers as ko

import tfcdo
from tfcdo import keras_internals, tf_internals
from tfcdo.training import updates

OPTIONS: dict[str, kt.Make] = {
    "clipping": lambda: ko.SGD(0.3, momentum=0.5, global_clipnorm=0.05, loss_scale_factor=8.0),
    "accumulation": lambda: ko.Adam(0.05, gradient_accumulation_steps=2, global_clipnorm=0.05),
    "average": lambda: ko.SGD(
        ko.schedules.ExponentialDecay(0.5, 1, 0.7),
        use_ema=True,
        ema_momentum=0.7,
        ema_overwrite_frequency=2,
        gradient_accumulation_steps=2,
        loss_scale_factor=8.0,
        weight_decay=0.1,
    ),
    "names": lambda: (o := ko.AdamW(0.1, 0.5)).exclude_from_weight_decay(None, ["bias:0$"]) or o,
    "loss_scale": lambda: ko.LossScaleOptimizer(
        ko.SGD(0.2, clipnorm=0.05, gradient_accumulation_steps=2), 16.0, dynamic_growth_steps=2
    ),
    "several": lambda: ko.MultiOptimizer(
        ko.OptimizerMap(
            ko.SGD(0.2, clipnorm=0.05), {".*bias": ko.Adam(0.1, gradient_accumulation_steps=2)}
        )
    ),
}


class AllSmaller(ko.SGD):
    def apply(self, grads: Any, variables: Any = None) -> None:
        super().apply(grads, variables)
        tf.nest.map_structure(lambda variable: variable.assign(variable * 0.9), variables)


class UpdatesTest(kt.TrainingTestCase):
    def assert_sharded(self, whole: keras.Model, sharded: keras.Model) -> None:
        self.assert_same_training(whole, sharded, 0.0)
        for slot in sharded.optimizer.variables:
            if len(slot.shape) and not kt.is_own_of_each(slot):
                everywhere = slot.path.endswith("_average")
                self.assertEqual(everywhere, hasattr(slot.value, "values"), slot.path)

    @parameterized.parameters(*zip(OPTIONS, (3, 2, 2, 2, 2, 3)))
    def test_each_option(self, option, count):
        # Overwriting at every other step, rather than update, differs from the sixth step on.
        steps = 8 if option == "average" else 4
        whole = kt.trained_eagerly(count, OPTIONS[option], steps)
        self.assert_same_training(kt.trained_eagerly(1, OPTIONS[option], steps), whole)
        sharded = kt.trained_eagerly(count, OPTIONS[option], steps, shard_optimizer_state=True)
        self.assert_sharded(whole, sharded)

    @parameterized.parameters(
        (lambda: ko.Adagrad(0.2, weight_decay=0.1, clipnorm=0.05),), (OPTIONS["accumulation"],),
        (AllSmaller, lambda: kt.word_layers(None)),
    )  # fmt: skip
    def test_rows_of_embeddings(self, make, layers=kt.word_layers):
        """Words repeat: Keras squares their rows, and takes their norm, one by one."""
        train = functools.partial(kt.trained_eagerly, layers=layers, data=kt.word_data)
        whole = train(2, make)
        self.assert_same_training(train(1, make), whole)
        self.assert_sharded(whole, train(2, make, shard_optimizer_state=True))

    def test_callbacks_find_what_they_change(self):
        def with_callbacks(count: int) -> keras.Model:
            schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
            swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
            make = functools.partial(ko.SGD, 0.2, use_ema=True, ema_momentum=0.7, clipnorm=0.05)
            return kt.fitted(count, make, 2, [schedule, swap], shard_optimizer_state=True)

        model = with_callbacks(2)
        self.assert_same_training(with_callbacks(1), model)
        self.assertAllClose(0.2 / 4, model.optimizer.learning_rate)

    @parameterized.parameters("apply", "apply_gradients")
    def test_an_optimizer_of_the_user(self, name):
        class SignedMomentum(ko.Optimizer):
            seed: int | None = 1  # On all alike.

            def build(self, variables: Any) -> None:
                super().build(variables)
                self.momenta = [self.add_variable_from_reference(v, "m", "ones") for v in variables]

            def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
                momentum = self.momenta[self._get_variable_index(variable)]
                noise = 0.1 * keras.random.normal(variable.shape, seed=self.seed)
                self.assign(momentum, 0.5 * momentum + gradient + noise)
                self.assign_sub(variable, learning_rate * keras.ops.tanh(momentum))

        def own(self: Any, *args: Any) -> Any:  # Not linear: it must get the sums.
            grads, variables = args if name == "apply" else zip(*args[0], strict=True)
            return ko.Optimizer.apply(self, [grad * abs(grad) for grad in grads], variables)

        setattr(SignedMomentum, name, own)
        make = functools.partial(SignedMomentum, 0.3, clipnorm=0.2)
        # Each of two replicas has as many examples as a weight has rows.
        train: Any = functools.partial(kt.trained_eagerly, data=lambda: kt.dense_data(8))
        refused = "must be None with shard_optimizer_state=True"
        if name == "apply_gradients":
            train, refused = kt.fitted, "must be False .* `apply_gradients` of its own, Signed"
        expected = train(1, make)
        for sharded in (False, True) if name == "apply" else (False,):
            self.assert_same_training(expected, train(2, make, shard_optimizer_state=sharded))
        SignedMomentum.seed = None
        accumulating = functools.partial(make, gradient_accumulation_steps=2)
        self.assert_same_training(*(train(count, accumulating) for count in (1, 2)))
        with self.assertRaisesRegex(ValueError, refused):
            train(2, accumulating, shard_optimizer_state=True)
        if name == "apply":
            with self.assertRaisesRegex(ValueError, "_state must be False .* draws random number"):
                train(2, make, shard_optimizer_state=True)

    def test_arguments_of_an_optimizer_of_the_user(self):
        class Halved(ko.SGD):
            def apply(self, grads: Any, variables: Any = None, factor: float = 1.0) -> Any:
                super().apply([factor * grad for grad in grads], variables)
                variables[0].assign_sub([1.0])  # As each replica does, whatever the aggregation.

            def apply_gradients(self, grads_and_vars: Any) -> Any:
                grads, variables = ([pair[i] for pair in grads_and_vars] for i in range(2))
                return self.apply(grads, variables, factor=0.5 if grads[0][0] > 3.0 else 0.0)

        with (strategy := kt.strategy_of(2)).scope():
            variable, optimizer = keras.Variable([8.0], aggregation="sum"), Halved(1.0)
            optimizer.build([variable])
        pairs = [(tf.constant([2.0]), variable)]
        tf.function(lambda: strategy.run(lambda: optimizer.apply_gradients(pairs)))()  # AutoGraph
        self.assertAllClose([8 - 0.5 * (2 + 2) - 1], variable)
        failing = mock.patch.object(ko.SGD, "add_optimizer_variables", side_effect=ValueError)
        with failing, self.assertRaises(ValueError):
            kt.fitted(2, lambda: ko.SGD(0.1, 0.5))

    def test_slots_that_keras_does_not_know_as_a_variables(self):
        """The other devices, and files, get them from the owner of the variable."""

        class Scaled(ko.Optimizer):
            def build(self, variables: Any) -> None:
                super().build(variables)
                self.norms = [self.add_variable((), aggregation="sum") for _ in variables]
                self.sums = {v.path: [self.add_variable(v.shape)] for v in variables}

            def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
                at = self._get_variable_index(variable)
                [total] = list(self.sums.values())[at]
                self.norms[at].assign(0.5 * self.norms[at] + keras.ops.norm(gradient))
                self.assign_add(total, gradient)
                self.assign_sub(variable, learning_rate * total / (1 + self.norms[at]))

        make = functools.partial(Scaled, 0.1)
        model = kt.trained_eagerly(2, make, shard_optimizer_state=True)
        self.assert_same_training(kt.trained_eagerly(1, make), model)
        slots = [slot for slot in model.optimizer.variables if hasattr(slot.value, "values")]
        self.assertLen(slots, 6)  # With the counter and the learning rate.
        for slot in slots:
            self.assert_bitwise_equal([one.read_value() for one in slot.value.values])


class OwnLoopTest(kt.TrainingTestCase):
    def test_nothing_is_sent_while_gradients_accumulate(self):
        ops, counts = tfcdo.ReductionToOneDevice(), []
        strategy = kt.strategy_of(2, ops)
        make = functools.partial(ko.Adam, 0.1, clipnorm=1.0, gradient_accumulation_steps=3)
        model = kt.trained_eagerly(2, make, steps=0, strategy=strategy)
        with mock.patch.object(ops, "_plans_of", wraps=ops._plans_of) as spy:
            for at in range(6):
                kt.train_eagerly(model, strategy, range(at, at + 1))
                counts.append([len(call.args[1]) for call in spy.call_args_list])
                spy.reset_mock()
        self.assertEqual(counts, [[], [], [2], [], [], [2]])

    @parameterized.parameters((tf.Variable, False), (keras.Variable, True))
    def test_traced_before_anything_is_built(self, make, sharded):
        strategy = kt.strategy_of(2, shard_optimizer_state=sharded)
        with strategy.scope():
            variables = [make([1.0, 2.0]), make([[3.0]])]
            optimizer = ko.Adam(0.1, global_clipnorm=1.0)

        def on_replica(x: tf.Tensor) -> None:
            optimizer.apply([x * tf.convert_to_tensor(one) for one in variables], variables)

        step = tf.function(lambda x: strategy.run(on_replica, (x,)))
        alone = ko.Adam(0.1, global_clipnorm=1.0)
        expected = [keras.Variable(one.numpy()) for one in variables]
        for x in (1.0, -3.0):
            step(tf.constant(x))
            alone.apply([2 * x * one.value for one in expected], expected)
        for own, other in zip(variables, expected, strict=True):
            for component in keras_internals.value_of(own).values:
                self.assertAllClose(other, component, rtol=1e-6)

    def test_what_a_build_assigns_is_not_assigned_at_each_step(self):
        """Such as `ScheduleFreeAdamW`, whose momentum begins as a copy of the weights."""

        class FromFirst(ko.SGD):
            def build(self, variables: Any) -> None:
                super().build(variables)
                self.first = self.add_optimizer_variables(variables, "first")
                for first, variable in zip(self.first, variables, strict=True):
                    self.assign(first, keras.ops.copy(variable))

        with kt.strategy_of(2).scope() as strategy:
            variable, optimizer = keras.Variable([3.0]), FromFirst(1.0)

        def on_replica() -> None:
            optimizer.apply([tf.ones([1])], [variable])

        step = tf.function(lambda: strategy.run(on_replica))
        step()
        step()
        self.assertAllEqual([3.0 - 2 * 2], variable)
        self.assertAllEqual([3.0], optimizer.first[0])

    @parameterized.parameters((False, None), (False, 2), (True, None))
    def test_variables_that_the_optimizer_does_not_know(self, sharded, accumulated):
        strategy = kt.strategy_of(2, shard_optimizer_state=sharded)
        with strategy.scope():
            variables = [keras.Variable([1.0]), keras.Variable([1.0])]
            optimizer = ko.Adam(0.1, gradient_accumulation_steps=accumulated)
            optimizer.build(variables[:1])
        with self.assertRaisesRegex(ValueError, "Unknown variable"):
            strategy.run(lambda: optimizer.apply([tf.ones([1])] * 2, variables))

    @parameterized.parameters(
        (lambda: ko.Nadam(0.1, use_ema=True), True),  # It makes a variable of its own in `build`.
        # Its scale had been one variable, which each replica doubled.
        (OPTIONS["loss_scale"], False),
        *tu.nightly((lambda: ko.SGD(0.1, gradient_accumulation_steps=2), False)),
    )
    def test_built_outside_of_the_scope(self, make, sharded):
        trained = []
        for count in (1, 2):
            with kt.strategy_of(count, shard_optimizer_state=sharded).scope():
                model = kt.model_of(kt.dense_layers, make())
            model.optimizer.build(model.trainable_variables)
            model.fit(*kt.dense_data(), 8, shuffle=False, verbose=0)
            trained.append(model)
        self.assert_same_training(*trained)

    def test_replicas_meet_once_for_gradients(self):
        with (strategy := kt.strategy_of(2)).scope():
            model = kt.model_of(kt.dense_layers, "sgd")
            optimizer = ko.Adam(0.1, global_clipnorm=1.0, use_ema=True, weight_decay=0.1)
            optimizer.build(model.trainable_variables)
        context = tf.distribute.ReplicaContext

        def step() -> None:
            variables = model.trainable_variables
            optimizer.apply([tf.convert_to_tensor(one) for one in variables], variables)

        options: dict[str, Any] = {"autospec": True, "side_effect": context.merge_call}
        with mock.patch.object(context, "merge_call", **options) as meet:
            tu.traced_ops(lambda: strategy.run(step))
        self.assertEqual(2, meet.call_count)  # Each of two replicas.

    def test_sizes_are_known_of_gradients_of_layers_that_reshape(self):
        layers = [keras.layers.Input((3, 4)), keras.layers.Dense(2), keras.layers.Flatten()]
        with (strategy := kt.strategy_of(2)).scope():
            model = kt.model_of(lambda: [*layers, keras.layers.Dense(1)], "sgd", run_eagerly=False)
        ops = strategy.extended._cross_device_ops
        with mock.patch.object(ops, "_plans_of", wraps=ops._plans_of) as spy:
            model.fit(tf.ones([9, 3, 4]), tf.ones([9, 1]), batch_size=4, shuffle=False, verbose=0)
        reductions = [one for call in spy.call_args_list for one in call.args[1]]
        shapes = [part.shape for one in reductions for part in one.values]
        self.assertIn([4, 2], shapes)
        for shape in shapes:
            self.assertTrue(shape.is_fully_defined(), shapes)

    def test_a_gradient_with_a_known_size_stays_on_its_device(self):
        strategy = tfcdo.MirroredStrategy(["CPU:0"])
        with strategy.scope():
            variable = keras.Variable(tf.zeros([4, 2]))

        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        def placed(grad):
            [unified] = updates.unified(strategy, [grad], [variable])
            [part] = tf_internals.components(unified)
            self.assertEqual(part.shape, [4, 2])
            self.assertEndsWith(part.device, "CPU:0")
            return part

        placed.get_concrete_function()

    @parameterized.parameters(
        (True, "adam", "the variable 'sequential"),
        (False, "adam", "the optimizer 'adam"),
        (False, "scaled", "the optimizer 'adam"),
        (False, "sgd", "the metric of the variable 'mean_squared_error(?=.* model.compile, into)"),
        (False, "rmsprop", "the variable 'counter"),
    )
    def test_made_outside_of_the_scope(self, is_model, kind, named):
        strategy, outside = kt.strategy_of(2), tf.distribute.get_strategy()
        counter = keras.Variable(0.0, trainable=False, name="counter")
        made = [keras.metrics.MeanSquaredError(), lambda *_: counter.assign_add(1.0)]
        metrics = {"sgd": made[:1], "rmsprop": made[1:]}.get(kind)
        with (outside if is_model else strategy).scope():
            model = keras.Sequential(kt.dense_layers())
        with (strategy if is_model else outside).scope():
            optimizer = ko.Adam()
        with strategy.scope():
            chosen = {"adam": optimizer, "scaled": ko.LossScaleOptimizer(optimizer)}.get(kind, kind)
            model.compile(chosen, "mse", metrics=metrics)
        with strategy.scope(), self.assertRaisesRegex(ValueError, f"{named}.* must be made in the"):
            model.fit(*kt.dense_data(), verbose=0)

    def test_a_step_that_fails_on_one_replica(self):
        """Others had drawn random numbers, or updated, and then trained other weights."""

        class Fails(keras.metrics.Mean):
            def update_state(self, targets: Any, outputs: Any, sample_weight: Any = None) -> None:
                tf.debugging.assert_less(targets, 50.0)
                super().update_state(outputs)

        with kt.strategy_of(3).scope():
            layers = [*kt.dense_layers(), keras.layers.Dropout(0.5)]
            model = kt.model_of(lambda: layers, ko.Adam(), metrics=[Fails()])
        inputs, targets = kt.dense_data()
        targets[3] = 99
        with self.assertRaises(tf.errors.InvalidArgumentError):
            model.fit(inputs, targets, 6, shuffle=False, verbose=0)
        variables = [*model.trainable_variables, *model.optimizer.variables]
        for variable in (*variables, layers[-1].seed_generator.state):
            self.assert_bitwise_equal([one.read_value() for one in variable.value.values])


_TABLE = np.arange(8.0, dtype=np.float32).reshape([4, 2]) - 2
_ROWS = np.array([3, 0, 3])


def table(replica: int) -> tf.Tensor:
    return tf.constant(_TABLE * (replica + 1))


def rows(replica: int) -> tf.IndexedSlices:
    values = tf.constant(_TABLE[: len(_ROWS)] * (replica + 1))
    shape = tf.constant(_TABLE.shape) if replica else None  # It can be left out.
    return tf.IndexedSlices(values, tf.constant(_ROWS), shape)


def nothing(replica: int) -> None:
    return None


class GradientsTest(kt.TrainingTestCase):
    # A replica without a gradient adds no rows. A gradient of all replicas counts once for each.
    @parameterized.parameters(
        ((nothing, table, table), 2, {"shard_optimizer_state": True}),
        ((rows, table, rows), None),
        ((table, rows, nothing), 2),
        ((nothing, rows, rows), None),
        (rows, None),
        (table, None, {"ops": tfcdo.ReductionToOneDevice()}),
    )
    def test_unlike_kinds(self, kinds, accumulated, options=None):
        strategy = kt.strategy_of(3, **(options or {}))
        with strategy.scope():
            own = [keras.Variable(np.zeros_like(_TABLE)) for _ in range(2)]
            optimizer = ko.SGD(1.0, gradient_accumulation_steps=accumulated)
        shared = kinds(1) if callable(kinds) else None

        def gradient(replica: int) -> Any:
            return kinds[replica](replica) if shared is None else shared

        def on_replica() -> None:
            replica = int(tf.distribute.get_replica_context().replica_id_in_sync_group)
            # The first step finds the optimizer not built; then it knows the variables.
            gradients = [gradient(replica), tf.ones_like(_TABLE)]
            optimizer.apply(gradients, None if optimizer.built else own)

        for _ in range(accumulated or 1):
            strategy.run(on_replica)
        given = filter(lambda one: one is not None, map(gradient, range(3)))
        total = sum(tu.dense(g, 4) if isinstance(g, tf.IndexedSlices) else g for g in given)
        for variable, expected in zip(own, (-total, -3 * np.ones_like(_TABLE)), strict=True):
            for component in variable.value.values:
                self.assertAllClose(expected, component)

    def test_no_replica_has_one(self):
        strategy = kt.strategy_of(2)
        with strategy.scope():
            own = [keras.Variable([1.0]), keras.Variable([1.0])]
            optimizer = ko.SGD(0.5, weight_decay=0.1)
        with self.assertWarnsRegex(UserWarning, "Gradients do not exist"):
            strategy.run(lambda: optimizer.apply([None, tf.ones([1])], own))
        self.assertAllEqual([1.0], own[0])
        self.assertNotAllEqual([1.0], own[1])

    @parameterized.parameters(("float32", True, None), *tu.nightly(("int32", False, 0.01)))
    def test_sparse_inputs(self, dtype, sharded, clipnorm):
        """A lookup of sparse ids adds the gradients of equal ids, which Adam then squares."""
        words = np.random.default_rng(0).integers(0, 3, [19, 5]).astype(dtype)
        data = tf.data.Dataset.from_tensor_slices((words, np.sin(np.arange(19.0)))).batch(6)
        data = data.map(lambda x, y: (tf.sparse.from_dense(x), y))

        def make(_: bool) -> keras.Model:
            layer = keras.layers.Dense(2) if dtype == "float32" else keras.layers.Embedding(3, 2)
            inputs = keras.layers.Input([5], dtype=dtype, sparse=True)
            layers, adam = [inputs, layer, keras.layers.Flatten(), keras.layers.Dense(1)], ko.Adam
            return kt.model_of(lambda: layers, adam(0.1, global_clipnorm=clipnorm), False)

        self.check_as_on_one_device(make, data, tolerance=1e-5, sharded=(sharded,))

    @parameterized.parameters("positions constant large two unique variable", "token tokens")
    def test_rows_whose_indices_are_not_of_the_batch(self, kinds):
        """One device looks these up once per batch; tokens of a known number once per example."""

        class Lookup(keras.layers.Layer):
            def __init__(self, kind: str) -> None:
                super().__init__()
                # TensorFlow captures a large table of them.
                of_examples = np.arange(800).reshape(4, 200)[:, : 200 if kind == "large" else 2] % 3
                self.kind, self.table = kind, keras.layers.Embedding(4, 2, name=kind)
                self.constant = keras.ops.convert_to_tensor(of_examples)
                self.variable = keras.Variable(of_examples, trainable=False, dtype="int32")

            def call(self, x: Any) -> Any:
                positions = keras.ops.expand_dims(keras.ops.arange(tf.shape(x)[1]), 1)[::-1, :1]
                ones = keras.ops.ones((keras.ops.shape(x)[0], 1, 1), "int32")
                of_batch = {"positions": positions, "token": ones, "variable": self.variable.value}
                of_batch["tokens"] = ones * self.variable[0, 1]
                found = self.table(of_batch.get(self.kind, self.constant))
                words = keras.ops.cast(keras.ops.abs(9 * x), "int32") % 4
                own = self.table(words) if self.kind == "two" else x[..., None]
                if self.kind == "unique":
                    ids, at, _ = tf.unique_with_counts(tf.reshape(words, [-1]))
                    own = tf.reshape(tf.gather(self.table(ids), at), [-1, 4, 2])
                return keras.ops.tanh(own + keras.ops.sum(found, 1))

        def make(run_eagerly: bool) -> keras.Model:
            x = keras.Input([4])
            model = keras.Model(x, keras.layers.Add()([Lookup(kind)(x) for kind in kinds.split()]))
            model.compile(ko.Adam(0.1), "mse", run_eagerly=run_eagerly)
            return model

        inputs, _ = kt.dense_data(10)
        data = tf.data.Dataset.from_tensor_slices((inputs, np.repeat(inputs[..., None], 2, 2)))
        data = data.batch(6, drop_remainder="token" in kinds)
        self.check_as_on_one_device(make, data, tolerance=1e-5, sharded=(True, False))

    @parameterized.parameters((None, (False,)), (2, (True,)), *tu.nightly((None, (True,))))
    def test_overflow_on_the_last_replica_only(self, accumulation, sharded):
        """Keras alone looks at the first replica, and lets an overflow on another one in."""
        inputs, targets = (kt.word_data if any(sharded) else kt.dense_data)(5 * kt.BATCH)
        targets[kt.BATCH - 1] = 1e38  # In the first batch.

        def make(run_eagerly: bool) -> keras.Model:
            inner = ko.Adagrad(0.1, gradient_accumulation_steps=accumulation)
            optimizer = ko.LossScaleOptimizer(inner, 4096.0, dynamic_growth_steps=2)
            only_rows = [*kt.word_layers()[:2], keras.layers.GlobalAveragePooling1D()]
            layers = only_rows if any(sharded) else kt.dense_layers()
            return kt.model_of(lambda: layers, optimizer, run_eagerly)

        options: dict[str, Any] = {"replicas": 3, "sharded": sharded, "batch_size": kt.BATCH}
        _, model = self.check_as_on_one_device(make, inputs, targets, **options)
        iterations = model.optimizer.inner_optimizer.iterations
        self.assertEqual(iterations.numpy(), 2 if accumulation else 4)

    @parameterized.parameters(((True,), 2), *tu.nightly(((False,), 2), ((False,), None)))
    def test_float8(self, sharded, accumulation):
        def make(_: bool) -> keras.Model:
            # Without biases, whose gradients Keras rounds to bfloat16 on each replica.
            options = {"use_bias": False, "dtype": keras.dtype_policies.get("float8_from_float32")}
            dense = keras.layers.Dense(5, "tanh", **options), keras.layers.Dense(2, **options)
            inner = ko.SGD(0.1, clipnorm=0.5, gradient_accumulation_steps=accumulation)
            optimizer = ko.LossScaleOptimizer(inner, 4.0)
            return kt.model_of(lambda: [keras.Input((4,)), *dense], optimizer, run_eagerly=False)

        options: dict[str, Any] = {"sharded": sharded, "tolerance": 1e-5, "batch_size": kt.BATCH}
        _, *models = self.check_as_on_one_device(make, *kt.dense_data(4 * kt.BATCH), **options)
        for model in models:
            history = model.layers[0].inputs_amax_history.numpy()
            self.assertLen(np.flatnonzero(history), 4 // (accumulation or 1))

    def test_threads_trace_steps_of_one_optimizer(self):
        first_to_meet = threading.Semaphore(1)

        class Slow(ko.SGD):
            def update_step(self, *arguments: Any) -> None:
                if first_to_meet.acquire(blocking=False):
                    time.sleep(0.5)  # Meanwhile other threads get here, or have to wait.
                super().update_step(*arguments)

        with (strategy := kt.strategy_of(2)).scope():
            variable = keras.Variable([1.0, 2.0])
            optimizer = Slow(0.25, clipnorm=100.0)
            optimizer.build([variable])

        def on_replica(thread: int) -> None:
            optimizer.apply([tf.fill([2], thread + 1.0)], [variable])

        def train(thread: int) -> None:
            tf.function(lambda: strategy.run(on_replica, (thread,)), autograph=False)()

        tu.call_in_six_threads(train)
        change = 0.25 * 2 * sum(range(1, 7))
        self.assertAllClose([1.0 - change, 2.0 - change], variable)


class FrozenTest(kt.TrainingTestCase):
    def test_a_layer_is_frozen_amid_an_accumulation(self):
        """The next update drops its accumulated gradients, also on a device that owns no other."""

        def trained(count: int, sharded: bool = False) -> keras.Model:
            strategy = kt.strategy_of(count, shard_optimizer_state=sharded)
            with strategy.scope():
                sgd, dense = ko.SGD(0.1, 0.9, gradient_accumulation_steps=2), keras.layers.Dense
                model = kt.model_of(lambda: [keras.Input((4,)), dense(3), dense(2)], sgd)
                model.optimizer.build(model.trainable_variables)
            for trainable, batches in ((True, 1), (False, 1), (True, 2)):
                model.layers[0].trainable = trainable
                with strategy.scope():
                    model.compile(model.optimizer, "mse", run_eagerly=True)
                model.fit(*kt.dense_data(batches * kt.BATCH), kt.BATCH, shuffle=False, verbose=0)
            return model

        expected = trained(1)
        for sharded in (False, True):
            self.assert_same_training(expected, trained(3, sharded))


class SavedTest(kt.TrainingTestCase):
    @parameterized.parameters((2, False), (None, True))
    def test_no_parts_outside_of_a_step(self, steps, sharded):
        with kt.strategy_of(2, shard_optimizer_state=sharded).scope():
            model = kt.model_of(kt.dense_layers, ko.SGD(0.1, gradient_accumulation_steps=steps))
        apply, variables = model.optimizer.apply, model.trainable_variables
        model.optimizer.build(variables)
        with self.assertRaisesRegex(ValueError, "must be applied in strategy.run"):
            apply([tf.ones(variable.shape) for variable in variables], variables)
        with self.assertRaisesRegex(ValueError, "No gradients"):
            model.distribute_strategy.run(apply, ([None] * len(variables), variables))

    def test_saved_amid_an_accumulation(self):
        make = functools.partial(ko.Adam, 0.1, clipnorm=0.1, gradient_accumulation_steps=3)
        path = pathlib.Path(self.get_temp_dir()) / "model.keras"
        whole = kt.fitted(1, make, examples=5 * kt.BATCH)
        rest = [values[2 * kt.BATCH :] for values in kt.dense_data(5 * kt.BATCH)]
        for saving, loading in ((3, 1), (1, 2)):
            kt.fitted(saving, make, examples=2 * kt.BATCH, shard_optimizer_state=True).save(path)
            with kt.strategy_of(loading, shard_optimizer_state=True).scope():
                loaded = keras.models.load_model(path)
            loaded.fit(*rest, kt.BATCH, shuffle=False, verbose=0)
            self.assert_same_training(whole, loaded)

    def test_a_copy_has_the_state_and_trains_on(self):
        strategy = kt.strategy_of(2, shard_optimizer_state=True)
        model = kt.fitted(2, OPTIONS["accumulation"], strategy=strategy, examples=3 * kt.BATCH)
        with strategy.scope(), warnings.catch_warnings():
            warnings.filterwarnings("error", "Skipping variable loading")
            own = copy.deepcopy(model)
        for one in (model, own):
            one.fit(*kt.dense_data(3 * kt.BATCH), kt.BATCH, shuffle=False, verbose=0)
        self.assert_same_training(model, own)


if __name__ == "__main__":
    tf.test.main()
