"""The four classes in a training loop of one's own, in one thread and in six."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from strategy_testing import (
    BASES,
    CASES,
    CLASSES,
    EAGER,
    FUNCTION,
    StrategyTestCase,
    context,
    distributed,
    in_mode,
    on_replica,
    strategy_of,
    strategy_results,
)
from testing_utils import SUM

import tfcdo

# A real training: an embedding, whose gradient is rows, and a linear layer on it.

_LEARNING_RATE = 0.1
_ROWS, _WIDTH, _OUTPUTS = 6, 3, 2


@dataclasses.dataclass
class Weights:
    table: np.ndarray
    kernel: np.ndarray
    bias: np.ndarray


def initial_weights(seed: int = 0) -> Weights:
    generator = np.random.default_rng(seed)
    shapes = ((_ROWS, _WIDTH), (_WIDTH, _OUTPUTS), (_OUTPUTS,))
    return Weights(*(generator.normal(size=shape).astype(np.float32) for shape in shapes))


def examples(number: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, _ROWS, [number])
    return ids, generator.normal(size=[number, _OUTPUTS]).astype(np.float32)


def numpy_training(
    weights: Weights, batches: Sequence[tuple[np.ndarray, np.ndarray]], epochs: int = 1
) -> Weights:
    """The oracle: the same training in float64, on one device, by hand."""
    table, kernel, bias = (x.astype(np.float64) for x in vars(weights).values())
    for ids, targets in [*batches] * epochs:
        rows = table[ids]
        error = 2 * (rows @ kernel + bias - targets) / len(ids)
        table_gradient = np.zeros_like(table)
        np.add.at(table_gradient, ids, error @ kernel.T)
        kernel_gradient, bias_gradient = rows.T @ error, error.sum(0)
        table = table - _LEARNING_RATE * table_gradient
        kernel = kernel - _LEARNING_RATE * kernel_gradient
        bias = bias - _LEARNING_RATE * bias_gradient
    return Weights(table, kernel, bias)


class Model(tf.Module):
    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.table = tf.Variable(weights.table)
        self.kernel = tf.Variable(weights.kernel)
        self.bias = tf.Variable(weights.bias)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def predict(self, ids: tf.Tensor) -> tf.Tensor:
        return self(ids)

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.table, ids) @ self.kernel + self.bias


def batches_of(data: tuple[np.ndarray, np.ndarray], size: int) -> list[Any]:
    number = len(data[0])
    return [tuple(part[i : i + size] for part in data) for i in range(0, number, size)]


def train_step(model: Model, ids: tf.Tensor, targets: tf.Tensor) -> None:
    """Does a replica's step with its part of a global batch, whatever its size."""
    number = context().all_reduce(SUM, tf.cast(tf.shape(ids)[0], tf.float32))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(ids) - targets) ** 2) / number
    variables = [model.table, model.kernel, model.bias]
    gradients = context().all_reduce(SUM, tape.gradient(loss, variables))

    def update(strategy, gradients):
        for variable, gradient in zip(variables, gradients, strict=True):
            strategy.extended.update(variable, descend, args=(gradient,))

    context().merge_call(update, args=(gradients,))


def descend(variable: tf.Variable, gradient: Any) -> None:
    if isinstance(gradient, tf.IndexedSlices):
        variable.scatter_sub(tf.IndexedSlices(_LEARNING_RATE * gradient.values, gradient.indices))
    else:
        variable.assign_sub(_LEARNING_RATE * gradient)


def train(
    strategy: tf.distribute.Strategy,
    model: Model,
    data: tuple[np.ndarray, np.ndarray],
    batch_size: int,
    epochs: int = 1,
    mode: str = FUNCTION,
) -> None:
    dataset = distributed(strategy, data, batch_size)

    def step(batch):
        strategy.run(lambda ids, targets: train_step(model, ids, targets), args=batch)

    if mode != EAGER:
        step = tf.function(step, input_signature=[dataset.element_spec], autograph=False)
    for _ in range(epochs):
        for batch in dataset:
            step(batch)


class TrainingTest(StrategyTestCase):
    def trained(
        self, ops: Any, count: int, mode: str = FUNCTION, first: int = 0, seed: int = 0
    ) -> Model:
        """A model after two epochs of three batches, the last of which is partial."""
        strategy = strategy_of(ops, count, first)
        with strategy.scope():
            model = Model(initial_weights(seed))
        data = examples(5 * count + 1)
        train(strategy, model, data, 2 * count, 2, mode)
        self.assert_weights(
            numpy_training(initial_weights(seed), batches_of(data, 2 * count), 2), model, count
        )
        return model

    def assert_weights(self, expected: Weights, model: Model, count: int) -> None:
        for name, value in vars(expected).items():
            components = strategy_results(getattr(model, name))
            self.assertLen(components, count)
            self.assert_bitwise_equal([component.read_value() for component in components])
            self.assertAllClose(value, components[0], rtol=1e-5, atol=1e-5)

    def assert_same_weights(self, first: Model, second: Model) -> None:
        for name in vars(initial_weights()):
            self.assert_bitwise_equal(
                [strategy_results(getattr(m, name))[0].read_value() for m in (first, second)]
            )

    def test_the_oracle_notices_a_replica_left_out(self):
        with self.assertRaises(AssertionError):
            self.trained(tfcdo.ReductionToOneDevice(accumulation_fn=lambda v: tf.add_n(v[1:])), 4)

    @parameterized.parameters(*[case for case in CASES if case[1] == FUNCTION])
    def test_partial_batches(self, name, mode, count):
        ops = CLASSES[name]()
        with self.used(ops):
            self.trained(ops, count, mode)

    @parameterized.parameters(*BASES)
    def test_partial_batches_outside_a_function(self, name, count):
        ops = CLASSES[name]()
        with self.used(ops):
            self.trained(ops, 3, EAGER)

    def test_tensorflows_hierarchical_copy_is_wrong_at_odd_counts(self):
        # What tfcdo is for; and the proof that the training of the tests above shows it.
        with self.assertRaises(AssertionError):
            self.trained(tf.distribute.HierarchicalCopyAllReduce(), 3)

    @parameterized.parameters(*dict(BASES))
    def test_copies_and_repetitions_agree_in_every_bit(self, name):
        ops = CLASSES[name]()
        before = copy.deepcopy(ops)
        used = self.trained(ops, 3)
        for other in before, CLASSES[name]():
            self.assertIsNot(ops, other)
            self.assert_same_weights(used, self.trained(other, 3))

    @parameterized.parameters(*dict(BASES))
    def test_one_instance_for_two_strategies(self, name):
        ops = CLASSES[name]()
        strategies = [strategy_of(ops, 3), strategy_of(ops, 5, first=3)]
        for strategy in *strategies, strategy_of(ops, 3, first=2):  # Each on its own devices.
            devices = strategy.extended.worker_devices
            value = tu.per_replica([1.0] * len(devices), devices)
            (result,) = strategy.extended.batch_reduce_to(SUM, [(value, value)])
            self.assert_replicas(float(len(devices)), result, len(devices))
            self.assertEqual(devices, tuple(component.device for component in result.values))
        models, data = [], examples(16)
        for seed, strategy in enumerate(strategies):
            with strategy.scope():
                models.append(Model(initial_weights(seed)))
        for _ in range(2):  # In turn.
            for strategy, model in zip(strategies, models, strict=True):
                train(strategy, model, data, 7)
        for seed, (strategy, model) in enumerate(zip(strategies, models, strict=True)):
            expected = numpy_training(initial_weights(seed), batches_of(data, 7), 2)
            self.assert_weights(expected, model, strategy.num_replicas_in_sync)

    @parameterized.parameters(*dict(BASES))
    def test_saving_and_restoring(self, name):
        model = self.trained(CLASSES[name](), 3)
        directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)

        path = tf.train.Checkpoint(model=model).save(str(directory / "checkpoint"))
        data = examples(7, seed=3)
        for strategy in strategy_of(CLASSES[name](), 4), tf.distribute.get_strategy():
            with strategy.scope():
                restored = Model(initial_weights(seed=5))
            tf.train.Checkpoint(model=restored).restore(path).assert_consumed()
            self.assert_same_weights(model, restored)
            before = Weights(*(getattr(model, key).numpy() for key in vars(initial_weights())))
            # It goes on where it stopped.
            train(strategy, restored, data, 4)
            self.assert_weights(
                numpy_training(before, batches_of(data, 4)), restored, strategy.num_replicas_in_sync
            )

        tf.saved_model.save(model, str(directory / "model"))
        ids = np.array([5, 0, 3, 3])
        expected = model.table.numpy()[ids] @ model.kernel.numpy() + model.bias.numpy()
        for strategy in strategy_of(CLASSES[name](), 2), tf.distribute.get_strategy():
            with strategy.scope():
                loaded = tf.saved_model.load(str(directory / "model"))
            self.assertAllClose(expected, loaded.predict(tf.constant(ids)))


class ThreadsTest(StrategyTestCase):
    """Six threads at once.

    They call functions and feed them themselves: neither a distributed dataset nor the eager tape
    of a replica function works in several threads, whatever class the strategy is given.
    """

    @parameterized.parameters(*dict(BASES))
    def test_each_trains_with_a_strategy_of_its_own(self, name):
        ops = CLASSES[name]()

        def work(thread):
            count = 2 + thread // 2  # Two threads each on the same devices.
            strategy = strategy_of(ops, count, first=thread // 2)
            devices = strategy.extended.worker_devices
            with strategy.scope():
                model = Model(initial_weights(thread))
            step = in_mode(FUNCTION, lambda *batch: strategy.run(
                lambda ids, targets: train_step(model, ids, targets), args=batch
            ))  # fmt: skip
            batches = batches_of(examples(6 * count, seed=thread), 2 * count)
            for batch in batches:
                step(*(tu.per_replica(np.split(part, count), devices) for part in batch))
            expected = numpy_training(initial_weights(thread), batches)
            for key, value in vars(expected).items():
                np.testing.assert_allclose(getattr(model, key), value, rtol=1e-5, atol=1e-5)

        tu.call_in_six_threads(work)

    @parameterized.parameters(*CLASSES)
    def test_all_use_one_strategy(self, name):
        strategy = strategy_of(CLASSES[name](), 3)

        def work(thread):
            own = [tu.numbers((4,), tf.float32, 10 * thread + rank) for rank in range(3)]
            run = in_mode(FUNCTION, lambda value: strategy.run(
                lambda x: context().all_reduce(SUM, on_replica(x)), args=(value,)
            ))  # fmt: skip
            for _ in range(3):
                self.assert_replicas(tu.oracle(SUM, own), run(tu.per_replica(own)), 3)

        tu.call_in_six_threads(work)


if __name__ == "__main__":
    tf.test.main()
