"""The four classes in a training loop of one's own: an embedding and a linear layer on it."""

from __future__ import annotations

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

_LEARNING_RATE = 0.1
_ROWS, _WIDTH, _OUTPUTS = 6, 3, 2


class Model(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        draw = np.random.default_rng(0).normal
        shapes = ((_ROWS, _WIDTH), (_WIDTH, _OUTPUTS), (_OUTPUTS,))
        self.table, self.kernel, self.bias = (
            tf.Variable(draw(size=shape).astype(np.float32)) for shape in shapes
        )

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.table, ids) @ self.kernel + self.bias


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


def trained(strategy: tf.distribute.Strategy, mode: str, batch_size: int, examples: int) -> Model:
    """Trains two epochs, whose last batches are partial."""
    with strategy.scope():
        model = Model()
    generator = np.random.default_rng(1)
    ids = generator.integers(0, _ROWS, [examples])
    targets = generator.normal(size=[examples, _OUTPUTS]).astype(np.float32)
    dataset = distributed(strategy, (ids, targets), batch_size)

    def step(batch):
        strategy.run(lambda ids, targets: train_step(model, ids, targets), args=batch)

    if mode != EAGER:
        step = tf.function(step, input_signature=[dataset.element_spec], autograph=False)
    for _ in range(2):
        for batch in dataset:
            step(batch)
    return model


class TrainingTest(StrategyTestCase):
    @parameterized.parameters(*BASE_CASES, ("unpacked", FUNCTION, 4))
    def test_partial_batches(self, name, mode, count):
        ops, sizes = CLASSES[name](), (2 * count, 5 * count + 1)
        with self.used(ops):
            model = trained(strategy_of(ops, count), mode, *sizes)
        expected = trained(tf.distribute.OneDeviceStrategy("/cpu:0"), EAGER, *sizes)
        self.assertNotAllClose(Model().table, expected.table, atol=0.01)
        for name in ("table", "kernel", "bias"):
            components = strategy_results(getattr(model, name))
            self.assertLen(components, count)
            self.assert_bitwise_equal([component.read_value() for component in components])
            self.assertAllClose(getattr(expected, name), components[0], rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    tf.test.main()
