"""The four classes in a training loop of one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from strategy_testing import (
    BASE_CASES,
    CLASSES,
    EAGER,
    FUNCTION,
    StrategyTestCase,
    context,
    distributed,
    strategy_of,
    strategy_results,
)
from testing_utils import SUM

# A real training: an embedding, whose gradient is rows, and a linear layer on it.

_LEARNING_RATE = 0.1
_ROWS, _WIDTH, _OUTPUTS = 6, 3, 2


@dataclasses.dataclass
class Weights:
    table: np.ndarray
    kernel: np.ndarray
    bias: np.ndarray


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


def initial_weights() -> Weights:
    generator = np.random.default_rng(0)
    shapes = ((_ROWS, _WIDTH), (_WIDTH, _OUTPUTS), (_OUTPUTS,))
    return Weights(*(generator.normal(size=shape).astype(np.float32) for shape in shapes))


class Model(tf.Module):
    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.table = tf.Variable(weights.table)
        self.kernel = tf.Variable(weights.kernel)
        self.bias = tf.Variable(weights.bias)

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


class TrainingTest(StrategyTestCase):
    @parameterized.parameters(*BASE_CASES, ("unpacked", FUNCTION, 4))
    def test_partial_batches(self, name, mode, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        with strategy.scope():
            model = Model(initial_weights())
        data = examples(5 * count + 1)
        dataset = distributed(strategy, data, 2 * count)

        def step(batch):
            strategy.run(lambda ids, targets: train_step(model, ids, targets), args=batch)

        if mode != EAGER:
            step = tf.function(step, input_signature=[dataset.element_spec], autograph=False)
        with self.used(ops):
            for _ in range(2):
                for batch in dataset:
                    step(batch)
        expected = numpy_training(initial_weights(), batches_of(data, 2 * count), 2)
        for key, value in vars(expected).items():
            components = strategy_results(getattr(model, key))
            self.assertLen(components, count)
            self.assert_bitwise_equal([component.read_value() for component in components])
            self.assertAllClose(value, components[0], rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    tf.test.main()
