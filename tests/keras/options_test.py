"""Options of strategies: `shard_optimizer_state`; what hosts compare, weights among it."""

import contextlib
import functools
import json
import tempfile
from typing import Any

import keras
import keras_training as kt
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras import optimizers as ko

import tfcdo
from tfcdo.cluster import protocol
from tfcdo.training import alike

sharded = functools.partial(kt.trained_eagerly, shard_optimizer_state=True)
_data = functools.partial(kt.dense_data, 60)  # Divides by four.
_adam = functools.partial(ko.Adam, 0.05, global_clipnorm=0.5)


class ShardedStateTest(kt.TrainingTestCase):
    def test_wire_dtype_casts_gradients_but_not_weights(self):
        make = functools.partial(ko.SGD, 0.2)
        ops = tfcdo.HierarchicalCopyAllReduce(wire_dtype="bfloat16")
        model, exact = sharded(2, make, ops=ops), sharded(2, make)
        self.assert_same_training(exact, model, 2e-2)
        weights = model.get_weights()[0]
        self.assertNotAllEqual(weights, exact.get_weights()[0])
        self.assertNotAllEqual(weights, tf.cast(tf.cast(weights, tf.bfloat16), tf.float32))

    def test_no_more_is_copied_than_is_explained(self):
        """Sums reach their owners only, and weights all devices."""
        strategy = kt.strategy_of(2, shard_optimizer_state=True)
        shapes = [(30,), (10,), (10,)]
        apply = ko.SGD.apply  # AutoGraph converts a user's own, with a condition of a tensor.
        own = {"apply": lambda it, g, *v: apply(it, [-g[0] if g[0][0] > 9 else g[0], *g[1:]], *v)}
        of_user = type("OfUser", (ko.SGD,), own)
        with strategy.scope():
            variables = [keras.Variable(np.ones(shape, np.float32)) for shape in shapes]
            optimizer = of_user(0.2)
            optimizer.build(variables)

        def step() -> None:
            optimizer.apply([tf.sin(one.value) for one in variables], variables)

        with self.assertNoLogs("tensorflow", "WARNING"):  # AutoGraph leaves tfcdo's functions out.
            graph = tf.function(lambda: strategy.run(step)).get_concrete_function().graph
        copied = tu.copied_bytes(graph.get_operations(), tu.device_names(2))
        told = strategy.explain(shapes, shard_optimizer_state=True)
        for link, num_bytes in told.bytes_by_link.items():
            self.assertBetween(copied[link], 1, num_bytes)

    @parameterized.parameters(
        (lambda: ko.SGD(0.2), True),
        (lambda: ko.Adam(0.2), False),
        (lambda: ko.SGD(0.2, weight_decay=0.1), False),
    )
    def test_only_rows_are_sent_back_if_only_rows_change(self, make, only_rows):
        strategy = kt.strategy_of(2, shard_optimizer_state=True)
        with strategy.scope():
            table = keras.Variable(np.ones([1000, 2], np.float32))
            optimizer = make()
            optimizer.build([table])

        def step() -> None:
            indices, shape = tf.constant([7, 7]), tf.constant([1000, 2])
            optimizer.apply([tf.IndexedSlices(tf.ones([2, 2]), indices, shape)], [table])

        ops = tu.traced_ops(lambda: strategy.run(step))
        scattered = [op for op in ops if op.type == "ResourceScatterUpdate"]
        self.assertLen(scattered, 1 if only_rows else 0)
        strategy.run(step)
        self.assert_bitwise_equal([one.read_value() for one in table.value.values])

    def test_a_step_that_fails_changes_no_weights(self):
        """The gradient of the last variable fails; no owner has begun by then."""
        strategy = kt.strategy_of(3, shard_optimizer_state=True)
        with strategy.scope():
            variables = [keras.Variable(np.ones([4], np.float32)) for _ in range(6)]
            optimizer = ko.SGD(0.2, weight_decay=0.1)
            optimizer.build(variables)

        def on_replica(last: tf.Tensor) -> None:
            last = tf.debugging.check_numerics(last, "bad")
            optimizer.apply([tf.ones([4])] * 5 + [last], variables)

        step = tf.function(lambda last: strategy.run(on_replica, (last,)))
        step(tf.ones([4]))
        components = [component for one in variables for component in one.value.values]
        before = [component.numpy() for component in components]
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "bad"):
            step(tf.constant([1.0, np.nan, 1.0, 1.0]))
        self.assertAllEqual(before, [component.numpy() for component in components])

    def test_saved_on_four_devices_and_restored_on_one(self):
        source = sharded(4, _adam, 2, data=_data)
        folder = self.enter_context(tempfile.TemporaryDirectory())
        path = tf.train.Checkpoint(model=source, optimizer=source.optimizer).save(f"{folder}/c")
        model = kt.model_of(kt.dense_layers, _adam())
        restore = tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
        model.optimizer.build(model.trainable_variables)
        restore.assert_existing_objects_matched()
        kt.train_eagerly(model, tf.distribute.get_strategy(), range(2, 4), _data)
        self.assert_same_training(kt.trained_eagerly(1, _adam, data=_data), model, 2e-5)


def _break(model: keras.Model, variable: str, replica: int, by: float = 0.25) -> None:
    variables = [*model.weights, *model.optimizer.variables]
    (found,) = [v for v in variables if v.path.endswith(variable)]
    change = np.zeros(found.shape)
    change.flat[-1] = by
    found.value.values[replica].assign_add(change)


class ComparisonTest(kt.TrainingTestCase):
    def test_names_variable_replica_and_difference(self):
        make = functools.partial(ko.SGD, 0.1, momentum=0.5, gradient_accumulation_steps=2)
        model = kt.trained_eagerly(3, make, steps=1)
        model.trainable_variables[0].trainable = False  # Frozen ones are compared, too.
        comparison = alike.WeightComparison(model, trains=True)
        # Variables of a replica's own are left out.
        self.assertNotAllClose(*model.optimizer._accumulated_gradients[0].value.values[:2])
        self.assertIsNone(comparison.difference())
        for variable, replica in (("kernel", 2), ("bias", 2), ("bias_momentum", 1)):
            _break(model, variable, replica)
            self.assertRegex(
                str(comparison.difference()),
                rf"^replica {replica} holds other numbers of \S*{variable} than replica 0, by "
                r"0\.25\d* at most; of 6 variables 1 differ somewhere$",
            )
            _break(model, variable, replica, -0.25)
        graph = comparison._digests().graph  # Only digests are sent.
        (gathered,) = [op.outputs[0] for op in graph.get_operations() if op.type == "ConcatV2"]
        self.assertEqual((gathered.shape, gathered.dtype), ((3, 6), tf.int64))

    @parameterized.parameters(
        ("float32", 1e-8, 0.01), ("bfloat16", 3e-3, 1), ("float32", 1e-8, 0.01, True)
    )
    def test_rows_may_differ_by_rounding(self, dtype, rounding, more, shards=False):
        def layers() -> list[Any]:
            inputs, _, *others = kt.word_layers()
            return [inputs, keras.layers.Embedding(9, 2, dtype=dtype), *others]

        make = sharded if shards else kt.trained_eagerly
        model = make(3, lambda: ko.SGD(0.1, 0.5), 1, layers, kt.word_data)
        comparison = alike.WeightComparison(model, trains=True)
        for variable in ("embeddings", *([] if shards else ["embeddings_momentum"])):
            _break(model, variable, 1, rounding)
            self.assertIsNone(comparison.difference())
            _break(model, variable, 2, more)
            found = rf"^replica 2 holds other numbers of \S*{variable} .* 1 differ somewhere$"
            self.assertRegex(str(comparison.difference()), found)
            _break(model, variable, 2, -more)
        # Other variables by less: unlike processors add up a norm in other orders.
        _break(model, "bias", 2, 1e-7)
        self.assertIsNone(comparison.difference())
        _break(model, "bias", 1, 1e-5)
        self.assertRegex(str(comparison.difference()), r"^replica 1 .*bias.* 1 differ somewhere$")
        comparison.allow_drift()  # In a later `fit`.
        self.assertIsNone(comparison.difference())
        _break(model, "bias", 1)
        self.assertRegex(str(comparison.difference()), r"^replica 1 .*bias.* 1 differ somewhere$")


_WORDS = tuple(f"word{number}" for number in range(100))


def _told_to_hosts(
    units: int = 2,
    l2: str | None = None,
    words: tuple[str, ...] = _WORDS,
    function: Any = keras.ops.sin,
    loss: Any = "mse",
    rate: Any = 0.1,
    growth: int = 2000,
) -> Any:
    """Makes a model, and returns what hosts tell each other of it."""
    inner = keras.Sequential([keras.layers.Dense(units, kernel_regularizer=l2)])
    lookup = keras.layers.StringLookup(vocabulary=list(words))
    model = keras.Sequential([keras.layers.Lambda(function), inner, lookup])
    model.compile(ko.LossScaleOptimizer(ko.Adam(rate), dynamic_growth_steps=growth), loss)
    return json.loads(json.dumps(alike.of_model(model)))


class AlikeTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"units": 3}, "^layers, element 2 of 4: units: 2 on x, 3 on y$"),
        ({"l2": "l2"}, "^layers, element 2 of 4: kernel_regularizer: nothing on x, .*'L2'.* on y$"),
        ({"words": ("a",)}, r"vocabulary: 100 values on x, \['a'\] on y; vocabulary_size: 101 on"),
        (
            {"function": lambda x: x},
            "element 0 of 4: function: class: function on x, __lambda__ on y$",
        ),
        ({"loss": keras.losses.Huber(2.0)}, "^loss, element 0 of 1: mse on x, .*'delta': 2.0.* y$"),
        ({"rate": ko.schedules.CosineDecay(1.0, 9)}, "learning_rate: nothing on x, .*'decay_steps"),
        ({"rate": 0.2}, "^$"),  # The chief's.
        ({"growth": 9}, "^dynamic_growth_steps: 2000 on x, 9 on y$"),
    )
    def test_what_differs_is_named(self, change, told):
        left, right = _told_to_hosts(), _told_to_hosts(**change)
        self.assertRegex(protocol.differences(left, "x", right, "y"), told)


class FitTest(kt.TrainingTestCase):
    @parameterized.parameters((1, 3, True), (1, 4, False), (2, 6, True), (1, 4, True, 2))
    def test_the_first_executions(self, steps_per_execution, step, is_found, epochs=1):
        strategy = kt.strategy_of(2)
        strategy.extended.checks_in_sync = True
        with strategy.scope():
            model = kt.model_of(kt.dense_layers, "sgd")
        model.steps_per_execution = steps_per_execution

        def at(batch: int, logs: Any) -> None:
            if batch + 1 == step - steps_per_execution:
                _break(model, "kernel", 1)

        number = step // steps_per_execution + epochs - 1
        found = rf"^after execution {number} of the train step, replica 1 .*check_in_sync=False"
        with self.assertRaisesRegex(RuntimeError, found) if is_found else contextlib.nullcontext():
            breaking = keras.callbacks.LambdaCallback(on_train_batch_end=at)
            model.fit(*kt.dense_data(step * kt.BATCH), kt.BATCH, epochs, 0, callbacks=[breaking])


class DigestTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("float16", "bfloat16", "float32", "float64", "int32", "bool")
    def test_any_change_shows(self, dtype):
        values = tf.cast(np.random.default_rng(0).integers(0, 2, [3, 40]), dtype)
        seen = {int(alike.digest(tf.identity(values))) for _ in range(2)}
        flipped = values.numpy()
        for at in ((0, 0), (1, 7), (2, 39)):  # One by one, and together.
            flipped[at] = 1 - flipped[at]
            seen.add(int(alike.digest(tf.constant(flipped))))
        seen.add(int(alike.digest(tf.reverse(values, [1]))))
        self.assertLen(seen, 5)

    def test_small_changes_do_not_cancel(self):
        bits = np.arange(1 << 20, dtype=np.int32)
        changes = np.array([(0, 0), (3, -1), (5, -1), (1, -1), (7, -5)], np.int32)
        changed = (tf.concat([bits[:2] + change, bits[2:]], 0) for change in changes)
        self.assertLen({int(alike.digest(one)) for one in changed}, 5)


if __name__ == "__main__":
    tf.test.main()
