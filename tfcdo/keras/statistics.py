"""`SynchronizeStatistics`: one set of moving statistics for all replicas."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfcdo.keras.callback import Callback

MEAN = tf.distribute.ReduceOp.MEAN


class SynchronizeStatistics(Callback):
    """Gives all replicas, on all hosts, the mean of their moving statistics.

    `BatchNormalization` and other layers keep statistics that are not trained. Each replica
    computes them from its own part of the batches. TensorFlow's strategies save the first
    replica's and use each replica's own in `evaluate`; tfcdo's save the mean. After this callback,
    a saved model, `evaluate`, `predict` and a loaded model all use the same statistics. Means
    commute with moving averages: synchronizing at each step gives the same statistics.

    It runs before each evaluation, also within `fit`, and at the end of each epoch and of
    training. Give it to `fit`, before a callback that saves the model.

    Example:
      >>> import keras
      >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.BatchNormalization()])
      >>> model.compile("sgd", "mse")
      >>> history = model.fit(tf.ones([4, 2]), tf.ones([4, 2]), verbose=0,
      ...                     callbacks=[SynchronizeStatistics()])
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Synchronizes the statistics; Keras calls it."""
        self._synchronize()

    def on_train_end(self, logs: Any = None) -> None:
        """Synchronizes the statistics; Keras calls it, also before `evaluate` and `predict`."""
        self._synchronize()

    on_test_begin = on_predict_begin = on_train_end

    def set_model(self, model: keras.Model) -> None:
        """Takes the model whose statistics to synchronize; Keras calls it."""
        super().set_model(model)
        self._average: Any = None

    def _synchronize(self) -> None:
        strategy = self.model.distribute_strategy
        variables = statistics_of(self.model)
        if strategy.num_replicas_in_sync == 1 or not variables:
            return
        with strategy.scope():
            if self._average is None:
                self._average = tf.function(
                    lambda: strategy.run(_average, args=(variables,)), autograph=False
                )
            self._average()


def statistics_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the floating-point variables of a model that are not meant to be trained."""
    return [
        variable
        for variable in model.non_trainable_variables
        if variable.value.dtype.is_floating and not variable.value.trainable
    ]


def _average(variables: list[keras.Variable]) -> None:
    """Gives each variable its mean over the replicas, on each replica."""
    # In 64 bits the mean of equal numbers of 32 bits is that number. They are reduced as one value,
    # because cross-device ops with a wire dtype take several for gradients.
    own = [tf.reshape(tf.cast(tf.convert_to_tensor(v), tf.float64), [-1]) for v in variables]
    means = tf.distribute.get_replica_context().all_reduce(MEAN, tf.concat(own, 0))
    sizes = [variable.value.shape.num_elements() for variable in variables]
    for variable, mean in zip(variables, tf.split(means, sizes), strict=True):
        tensor = tf.cast(tf.reshape(mean, variable.value.shape), variable.value.dtype)
        variable.assign(tensor)
