"""Options of Keras's optimizers on several replicas: each trains as on one device.

The oracle is Keras's own optimizer on one device. A whole and a sharded state have the same bits.
`programs_test.py` has every optimizer, and the options one by one.
"""

from __future__ import annotations

import copy
import functools
import pathlib
import pickle
import warnings
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras import optimizers as ko
from keras_training import (
    BATCH,
    Make,
    TrainingTestCase,
    dense_data,
    dense_layers,
    fitted,
    is_own_of_each,
    model_of,
    strategy_of,
    trained_eagerly,
    word_data,
    word_layers,
)

import tfcdo
from tfcdo import keras_internals, tf_internals
from tfcdo.training import step, updates

OPTIONS: dict[str, Make] = {
    "clipping": lambda: ko.SGD(0.3, momentum=0.5, global_clipnorm=0.05, loss_scale_factor=8.0),
    "accumulation": lambda: ko.Adam(0.05, gradient_accumulation_steps=2, global_clipnorm=0.05),
    "average": lambda: ko.SGD(
        ko.schedules.ExponentialDecay(0.5, 1, 0.7),
        use_ema=True,
        ema_momentum=0.7,
        ema_overwrite_frequency=2,
        gradient_accumulation_steps=2,
        weight_decay=0.1,
    ),
    "loss_scale": lambda: ko.LossScaleOptimizer(
        ko.SGD(0.2, clipnorm=0.05, gradient_accumulation_steps=2), 16.0, dynamic_growth_steps=2
    ),
    "several": lambda: ko.MultiOptimizer(
        ko.OptimizerMap(
            ko.SGD(0.2, clipnorm=0.05), {".*bias": ko.Adam(0.1, gradient_accumulation_steps=2)}
        )
    ),
}


@functools.cache
def fitted_alone(option: str) -> keras.Model:
    return fitted(1, OPTIONS[option])


class UpdatesTest(TrainingTestCase):
    def assert_sharded(self, whole: keras.Model, sharded: keras.Model) -> None:
        """Asserts the bits of the training with a whole state, and slots on one device each."""
        self.assert_same_training(whole, sharded, 0.0)
        for slot in sharded.optimizer.variables:
            if len(slot.shape) and not is_own_of_each(slot):
                everywhere = slot.path.endswith("_average")
                self.assertEqual(everywhere, hasattr(slot.value, "values"), slot.path)

    @parameterized.parameters(*zip(OPTIONS, (3, 2, 2, 2, 3)))
    def test_each_option(self, option, count):
        # Overwriting at every other step, rather than update, differs from the sixth step on.
        steps = 8 if option == "average" else 4
        expected = trained_eagerly(1, OPTIONS[option], steps)
        whole = trained_eagerly(count, OPTIONS[option], steps)
        self.assert_same_training(expected, whole)
        self.assert_moved(expected)
        sharded = trained_eagerly(count, OPTIONS[option], steps, shard_optimizer_state=True)
        self.assert_sharded(whole, sharded)

    def test_fit_in_a_graph(self):
        model = fitted(2, OPTIONS["several"], run_eagerly=False, shard_optimizer_state=True)
        # TensorFlow rewrites the arithmetic of graphs.
        self.assert_same_training(fitted_alone("several"), model, 1e-5)

    @parameterized.parameters(("loss_scale", False, False), ("average", True, True))
    def test_one_replica_of_a_strategy(self, option, sharded, run_eagerly):
        strategy = tfcdo.MirroredStrategy(
            ["CPU:0"], tfcdo.AutoAllReduce(), shard_optimizer_state=sharded
        )
        model = fitted(1, OPTIONS[option], run_eagerly=run_eagerly, strategy=strategy)
        self.assert_same_training(fitted_alone(option), model)

    @parameterized.parameters(
        (lambda: ko.Adagrad(0.2, weight_decay=0.1, clipnorm=0.05),), (OPTIONS["accumulation"],)
    )
    def test_rows_of_embeddings(self, make):
        """Words repeat: Keras squares their rows, and takes their norm, one by one."""
        train = functools.partial(trained_eagerly, layers=word_layers, data=word_data)
        expected = train(1, make)
        whole = train(2, make)
        self.assert_same_training(expected, whole)
        self.assert_sharded(whole, train(2, make, shard_optimizer_state=True))
        self.assert_moved(expected, word_layers)

    def test_loss_scaling_that_compile_adds(self):
        keras.config.set_dtype_policy("mixed_float16")
        self.addCleanup(keras.config.set_dtype_policy, "float32")

        def layers() -> list[Any]:
            # A smaller loss: no gradient overflows, which one of 30 examples does before one of 10.
            return [*dense_layers(), keras.layers.Rescaling(0.01, dtype="float32")]

        def make() -> Any:
            return ko.SGD(0.3, clipnorm=0.001)

        expected, model = (fitted(count, make, layers=layers) for count in (1, 2))
        self.assertIsInstance(model.optimizer, ko.LossScaleOptimizer)
        self.assert_same_training(expected, model, 1e-3)

    def test_callbacks_find_what_they_change(self):
        def with_callbacks(count: int) -> keras.Model:
            schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
            swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
            make = functools.partial(ko.SGD, 0.2, use_ema=True, ema_momentum=0.7, clipnorm=0.05)
            return fitted(count, make, 2, [schedule, swap], shard_optimizer_state=True)

        expected, model = with_callbacks(1), with_callbacks(2)
        self.assert_same_training(expected, model)
        self.assertAllClose(0.2 / 4, model.optimizer.learning_rate)


class UsersOptimizersTest(TrainingTestCase):
    def test_as_on_one_device(self):
        class SignedMomentum(ko.Optimizer):
            def build(self, variables: Any) -> None:
                super().build(variables)
                self.momenta = [self.add_variable_from_reference(v, "m") for v in variables]

            def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
                momentum = self.momenta[self._get_variable_index(variable)]
                self.assign(momentum, 0.5 * momentum + gradient)
                self.assign_sub(variable, learning_rate * keras.ops.tanh(momentum))

            def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
                # Not linear: it must get the sums.
                return super().apply([grad * abs(grad) for grad in grads], trainable_variables)

        make = functools.partial(SignedMomentum, 0.3, clipnorm=0.2)
        expected = fitted(1, make)
        self.assert_moved(expected)
        for sharded in (False, True):
            model = fitted(2, make, shard_optimizer_state=sharded)
            self.assert_same_training(expected, model)
        accumulating = functools.partial(make, gradient_accumulation_steps=2)
        self.assert_same_training(fitted(1, accumulating), fitted(2, accumulating))
        with self.assertRaisesRegex(ValueError, "must be None with shard_optimizer_state=True"):
            fitted(2, accumulating, shard_optimizer_state=True)

    def test_an_own_apply_in_an_own_loop(self):
        class Squared(ko.SGD):
            def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
                return super().apply([grad * grad for grad in grads], trainable_variables)

        strategy = strategy_of(2)
        with strategy.scope():
            weight, optimizer = keras.Variable([1.0, 2.0]), Squared(0.1)

        def on_replica() -> None:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            optimizer.apply([tf.constant([[1.0, -1.0], [2.0, 4.0]])[replica]], [weight])

        strategy.run(on_replica)
        tf.function(strategy.run)(on_replica)
        self.assertAllClose([1.0 - 2 * 0.1 * 9, 2.0 - 2 * 0.1 * 9], weight)

    def test_the_optimizer_of_a_model_is_the_users_own(self):
        with strategy_of(2).scope():
            own = ko.SGD(0.1)
            model = model_of(dense_layers, own)
        self.assertIs(own, model.optimizer)
        self.assertIs(ko.SGD, type(own))
        self.assertEqual("keras.optimizers", ko.serialize(model.optimizer)["module"])


class OwnLoopTest(TrainingTestCase):
    def test_nothing_is_sent_while_gradients_accumulate(self):
        ops = tfcdo.ReductionToOneDevice()
        sums: list[list[int]] = []
        original = ops.batch_reduce

        def batch_reduce(reduce_op: Any, pairs: Any, options: Any = None) -> Any:
            pairs = list(pairs)
            sums[-1].append(len(pairs))
            return original(reduce_op, pairs, options)

        def count_from_here(step: int) -> float:
            sums.append([])
            return 1.0

        with (
            mock.patch.object(ops, "batch_reduce", batch_reduce),
            mock.patch.object(ops, "reduce", side_effect=AssertionError),
        ):
            make = functools.partial(ko.Adam, 0.1, clipnorm=1.0, gradient_accumulation_steps=3)
            trained_eagerly(2, make, steps=6, ops=ops, scale_of=count_from_here)
        # Both gradients in one batch, at each update.
        self.assertEqual(sums, [[], [], [2], [], [], [2]])

    @parameterized.parameters((False, False, True), (True, True, False))
    def test_traced_before_anything_is_built(self, sharded, keras_variables, pairs):
        strategy = strategy_of(2, shard_optimizer_state=sharded)
        make = keras.Variable if keras_variables else tf.Variable
        with strategy.scope():
            variables = [make([1.0, 2.0]), make([[3.0]])]
            optimizer = ko.Adam(0.1, global_clipnorm=1.0)

        @tf.function
        def step(x: tf.Tensor) -> None:
            def on_replica() -> None:
                gradients = [x * tf.convert_to_tensor(one) for one in variables]
                if pairs:
                    optimizer.apply_gradients(zip(gradients, variables, strict=True))
                else:
                    optimizer.apply(gradients, variables)

            strategy.run(on_replica)

        alone = ko.Adam(0.1, global_clipnorm=1.0)
        expected = [keras.Variable(one.numpy()) for one in variables]
        for x in (1.0, -3.0):
            step(tf.constant(x))
            alone.apply([2 * x * one.value for one in expected], expected)
        for own, other in zip(variables, expected, strict=True):
            for component in keras_internals.value_of(own).values:
                self.assertAllClose(other, component, rtol=1e-6)

    @parameterized.parameters(1, 2)
    def test_what_a_build_assigns_is_not_assigned_at_each_step(self, count):
        """Such as `ScheduleFreeAdamW`, whose momentum begins as a copy of the weights."""

        class FromFirst(ko.SGD):
            def build(self, variables: Any) -> None:
                super().build(variables)
                self.first = self.add_optimizer_variables(variables, "first")
                for first, variable in zip(self.first, variables, strict=True):
                    self.assign(first, keras.ops.copy(variable))

        with tfcdo.MirroredStrategy(tu.device_names(count)).scope() as strategy:
            variable, optimizer = keras.Variable([3.0]), FromFirst(1.0)

        @tf.function
        def step() -> None:
            strategy.run(lambda: optimizer.apply([tf.ones([1])], [variable]))

        step()
        step()
        self.assertAllEqual([3.0 - 2 * count], variable)
        self.assertAllEqual([3.0], optimizer.first[0])

    def test_replicas_meet_once_for_gradients(self):
        strategy = strategy_of(2)
        with strategy.scope():
            model = model_of(dense_layers, "sgd")
            optimizer = ko.Adam(0.1, global_clipnorm=1.0, use_ema=True, weight_decay=0.1)
            optimizer.build(model.trainable_variables)
        meetings = []
        merge_call = tf.distribute.ReplicaContext.merge_call

        def counted(context: Any, *args: Any, **kwargs: Any) -> Any:
            meetings.append(context.replica_id_in_sync_group)
            return merge_call(context, *args, **kwargs)

        def step() -> None:
            variables = model.trainable_variables
            optimizer.apply([tf.convert_to_tensor(one) for one in variables], variables)

        with mock.patch.object(tf.distribute.ReplicaContext, "merge_call", counted):
            tu.traced_ops(lambda: strategy.run(step))
        self.assertLen(meetings, 2)

    @parameterized.parameters(False, True)
    def test_sizes_are_known_of_gradients_of_layers_that_reshape(self, compiled):
        strategy = strategy_of(2)
        layers = [keras.layers.Input((3, 4)), keras.layers.Dense(2), keras.layers.Flatten()]
        with strategy.scope():
            model = keras.Sequential([*layers, keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=compiled)
        shapes = []
        batch_reduce = tfcdo.HierarchicalCopyAllReduce.batch_reduce_implementation

        def noted(ops: Any, op: Any, pairs: Any, *args: Any) -> Any:
            shapes.extend([part.shape for value, _ in pairs for part in value.values])
            return batch_reduce(ops, op, pairs, *args)

        with mock.patch.object(
            tfcdo.HierarchicalCopyAllReduce, "batch_reduce_implementation", noted
        ):
            model.fit(tf.ones([9, 3, 4]), tf.ones([9, 1]), batch_size=4, shuffle=False, verbose=0)
        self.assertIn([4, 2], shapes)
        for shape in shapes:
            self.assertTrue(shape.is_fully_defined(), shapes)

    @parameterized.parameters(1, 2)
    def test_gradients_with_known_sizes_stay_on_their_devices(self, count):
        # With one device a host, such a gradient was taken for one of another device, and sent
        # exactly, not as the exchange has it.
        strategy = tfcdo.MirroredStrategy([f"CPU:{i}" for i in range(count)])
        with strategy.scope():
            variable = keras.Variable(tf.zeros([4, 2]))

        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        def placed(grad):
            devices = strategy.extended.worker_devices
            grads = [step.on_each(devices, tf.identity, [grad] * count) if count > 1 else grad]
            with strategy.scope():
                [unified] = updates.unified(strategy, grads, [variable])
            for part, device in zip(tf_internals.components(unified), devices, strict=True):
                self.assertEqual(part.shape, [4, 2])
                self.assertEndsWith(part.device, device)
            return tf_internals.components(unified)

        placed.get_concrete_function()

    @parameterized.parameters((True, "the variable 'sequential"), (False, "the optimizer 'sgd"))
    def test_made_outside_of_the_scope(self, is_model, named):
        strategy, outside = strategy_of(2), tf.distribute.get_strategy()
        with (outside if is_model else strategy).scope():
            variables = keras.Sequential(dense_layers()).trainable_variables
        with (strategy if is_model else outside).scope():
            optimizer = ko.SGD()
        gradients = [tf.ones(one.shape) for one in variables]
        with self.assertRaisesRegex(ValueError, f"{named}.* must be made in the scope of"):
            tf.function(lambda: strategy.run(lambda: optimizer.apply(gradients, variables)))()

    def test_optimizer_of_fit_made_outside_of_the_scope(self):
        optimizer = ko.SGD()
        with strategy_of(2).scope():
            model = model_of(dense_layers, optimizer)
        with self.assertRaisesRegex(ValueError, "'sgd.*' must be made in the scope of"):
            model.fit(*dense_data(), BATCH, verbose=0)


def _pickled(model: keras.Model) -> keras.Model:
    return pickle.loads(pickle.dumps(model))


class SavedTest(TrainingTestCase):
    def test_saved_amid_an_accumulation(self):
        def make() -> Any:
            return ko.Adam(0.1, clipnorm=0.1, gradient_accumulation_steps=3)

        path = pathlib.Path(self.get_temp_dir()) / "model.keras"
        inputs, targets = dense_data(5 * BATCH)
        options: dict[str, Any] = {"shuffle": False, "verbose": 0}
        whole = model_of(dense_layers, make())
        whole.fit(inputs, targets, BATCH, **options)

        with strategy_of(3, shard_optimizer_state=True).scope():
            model = model_of(dense_layers, make())
        model.fit(inputs[: 2 * BATCH], targets[: 2 * BATCH], BATCH, **options)
        model.save(path)
        for count in (1, 2):
            with strategy_of(count).scope():
                loaded = keras.models.load_model(path)
            loaded.fit(inputs[2 * BATCH :], targets[2 * BATCH :], BATCH, **options)
            self.assert_same_training(whole, loaded)

    @parameterized.parameters((copy.deepcopy, True), (_pickled, False))
    def test_a_copy_has_the_state_and_trains_on(self, copied, sharded):
        strategy = strategy_of(2, shard_optimizer_state=sharded)
        model = fitted(2, OPTIONS["accumulation"], strategy=strategy, examples=3 * BATCH)
        with strategy.scope(), warnings.catch_warnings():
            warnings.filterwarnings("error", "Skipping variable loading")
            own = copied(model)
        for one in (model, own):
            one.fit(*dense_data(3 * BATCH), BATCH, shuffle=False, verbose=0)
        self.assert_same_training(model, own)


if __name__ == "__main__":
    tf.test.main()
