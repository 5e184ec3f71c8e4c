"""Every optimizer and every option of Keras on several replicas, with a whole and a sharded state.

The oracle is Keras's own optimizer on one device.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras import optimizers as ko
from keras_training import (
    Make,
    TrainingTestCase,
    fitted,
    trained_eagerly,
    with_tables,
    word_data,
    word_layers,
)

import tfcdo
from tfcdo.keras import CheckInSync, DistributedOptimizer

# What Keras does wrongly on several replicas, or not at all.
MENDED: dict[str, Make] = {
    "clipnorm": lambda: ko.SGD(0.3, clipnorm=0.05),
    "clipvalue": lambda: ko.SGD(0.3, clipvalue=0.02, loss_scale_factor=8.0),
    "global_clipnorm": lambda: ko.SGD(0.3, momentum=0.5, global_clipnorm=0.05),
    "accumulation": lambda: ko.Adam(0.05, gradient_accumulation_steps=2, global_clipnorm=0.05),
    "schedule": lambda: ko.SGD(
        ko.schedules.ExponentialDecay(0.5, 1, 0.7), gradient_accumulation_steps=3
    ),
    "ema_accumulation": lambda: ko.SGD(
        0.2,
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
OPTIMIZERS = [
    name
    for name, item in vars(ko).items()
    if isinstance(item, type)
    and issubclass(item, ko.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
]


def distributed(make: Make, sharded: bool = False) -> Make:
    return lambda: DistributedOptimizer(make(), shard_optimizer_state=sharded)


@functools.cache
def fitted_alone(row: str) -> keras.Model:
    return fitted(1, MENDED[row])


class OptionsTest(TrainingTestCase):
    def assert_sharded(self, whole: keras.Model, sharded: keras.Model) -> None:
        """Asserts the bits of the training with a whole state, and slots on one device each."""
        self.assert_same_training(whole, sharded, 0.0)
        for slot in sharded.optimizer.variables:
            if len(slot.shape) and slot.synchronization != "on_read":
                everywhere = slot.path.endswith("_average")
                self.assertEqual(everywhere, hasattr(slot.value, "values"), slot.path)

    @parameterized.parameters(
        *zip(MENDED, (3, 2, 5, 3, 2, 3, 3, 2)),
        # One replica takes another way through these.
        *((row, 1) for row in ("ema_accumulation", "several")),
    )
    def test_each_option(self, row, count):
        # Overwriting at every other step, rather than update, differs from the sixth step on.
        steps = 8 if row == "ema_accumulation" else 4
        expected = trained_eagerly(1, MENDED[row], steps)
        whole = trained_eagerly(count, distributed(MENDED[row]), steps)
        self.assert_same_training(expected, whole)
        self.assert_moved(expected)
        if count > 1:
            sharded = trained_eagerly(count, distributed(MENDED[row], sharded=True), steps)
            self.assert_sharded(whole, sharded)

    @parameterized.parameters(*OPTIMIZERS)
    def test_each_optimizer(self, name):
        def make():
            return getattr(ko, name)(0.1, global_clipnorm=0.1, gradient_accumulation_steps=2)

        expected = trained_eagerly(1, make)
        self.assert_moved(expected)
        model = trained_eagerly(3, distributed(make, sharded=True))
        self.assert_same_training(expected, model, 2e-5)

    def test_keras_alone_clips_before_the_sum(self):
        make = MENDED["global_clipnorm"]
        expected, alone = trained_eagerly(1, make), trained_eagerly(3, make)
        differences = [
            np.abs(a - b).max()
            for a, b in zip(expected.get_weights(), alone.get_weights(), strict=True)
        ]
        self.assertGreater(max(differences), 1e-3)

    @parameterized.parameters(
        ("loss_scale", 2, False),
        ("ema_accumulation", 3, True),
        ("several", 2, True),
    )
    def test_fit_in_a_graph(self, row, count, sharded):
        # `fit` ends by giving the variables their moving average.
        make, in_sync = distributed(MENDED[row], sharded), [CheckInSync(every=1)]
        model = fitted(count, make, run_eagerly=False, callbacks=in_sync)
        # TensorFlow rewrites the arithmetic of graphs.
        self.assert_same_training(fitted_alone(row), model, 1e-5 if sharded else 2e-6)

    @parameterized.parameters(
        (tf.distribute.MirroredStrategy, "loss_scale", False),
        (tfcdo.MirroredStrategy, "ema_accumulation", True),
    )
    def test_fit_on_one_replica(self, strategy, row, sharded):
        """Even a single replica of a strategy cannot meet the others within a `tf.cond`."""
        make, own = distributed(MENDED[row], sharded), strategy(["CPU:0"], tfcdo.AutoAllReduce())
        model = fitted(1, make, run_eagerly=False, strategy=own)
        self.assert_same_training(fitted_alone(row), model)

    @parameterized.parameters(
        (lambda: ko.SGD(0.2),),
        (lambda: ko.Adagrad(0.2),),
        (lambda: ko.SGD(0.2, weight_decay=0.1),),
        (MENDED["accumulation"],),
    )
    def test_rows_of_embeddings(self, make):
        """Keras alone squares rows, and takes their norm, before those of equal index are added."""
        train = functools.partial(trained_eagerly, layers=word_layers, data=word_data)
        expected = train(1, functools.partial(with_tables, make))
        whole = train(3, distributed(make))
        self.assert_same_training(expected, whole)
        self.assert_sharded(whole, train(3, distributed(make, sharded=True)))
        self.assert_moved(expected, word_layers)


if __name__ == "__main__":
    tf.test.main()
