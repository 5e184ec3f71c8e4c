"""`CheckInSync`: that all replicas hold the same weights is checked, not assumed."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfcdo import checks
from tfcdo.keras.callback import Callback

# Odd numbers without pattern, as in hash functions of 64 bits.
_OF_INDEX, _FIRST, _SECOND = (
    int(np.uint64(odd).astype(np.int64))
    for odd in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_HALF = np.int64(32)
_INTEGER_OF_SIZE = {2: tf.int16, 4: tf.int32, 8: tf.int64}


class CheckInSync(Callback):
    """Compares the replicas' weights, on all hosts, while a model trains.

    Each replica makes one number of 64 bits from the bits of each trainable variable and of each
    variable of the optimizer, and these digests are compared: weights are sent only if some differ.
    Variables of which each replica is meant to keep its own are left out: moving statistics and
    gradients that are being accumulated.

    Args:
      every: after how many steps to compare; also at the end of training.
      raise_on_difference: whether to raise an error rather than log one.

    Raises:
      TypeError: if `every` is not an int or `raise_on_difference` not a bool.
      ValueError: if `every` is less than 1.
      RuntimeError: while training, if replicas differ; it names the first variable, replica and
        step, and the largest difference.

    Example:
      >>> import keras
      >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> history = model.fit(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0,
      ...                     callbacks=[CheckInSync(every=2)])
    """

    def __init__(self, every: int = 100, raise_on_difference: bool = True) -> None:
        super().__init__()
        checks.check_int("every", every, at_least=1)
        self._every = every
        if not isinstance(raise_on_difference, bool):
            raise TypeError(
                f"raise_on_difference must be True or False; got {raise_on_difference!r}"
            )
        self._raise_on_difference = raise_on_difference

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts counting steps; Keras calls it."""
        self._steps_of_past_epochs = self._step = self._checked = 0
        self._digests: Any = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compares the replicas if it is time to; Keras calls it."""
        # With `steps_per_execution` Keras calls once for several steps, and counts the last ones of
        # an epoch in full.
        steps = (self.params or {}).get("steps") or batch + 1
        self._step = self._steps_of_past_epochs + min(batch + 1, steps)
        if self._step // self._every > self._checked // self._every:
            self._check()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Goes on counting in the next epoch; Keras calls it."""
        self._steps_of_past_epochs = self._step

    def on_train_end(self, logs: Any = None) -> None:
        """Compares the replicas; Keras calls it."""
        if self._checked < self._step:
            self._check()

    def _check(self) -> None:
        self._checked = self._step
        strategy = self.model.distribute_strategy
        if strategy.num_replicas_in_sync == 1:
            return
        with strategy.scope():
            if self._digests is None:
                self._variables = _mirrored_variables(self.model)
                self._digests = _digests_of(strategy, self._variables)
            digests = self._digests().numpy()
            differing = np.flatnonzero((digests != digests[0]).any(0))
            if not len(differing):
                return
            message = _difference(strategy, self._variables, digests, differing)
        message = f"after step {self._step}, {message}"
        if self._raise_on_difference:
            raise RuntimeError(message)
        logging.error("tfcdo: %s", message)


def digest(tensor: tf.Tensor) -> tf.Tensor:
    """Makes one number of all bits of a tensor, on its device.

    Args:
      tensor: numbers or bools, of any shape.

    Returns:
      An int64 scalar: equal for tensors of equal bits, and different, but for one chance in 2^64,
      for others.
    """
    if tensor.dtype.is_floating:
        tensor = tf.bitcast(tensor, _INTEGER_OF_SIZE[tensor.dtype.size])
    bits = tf.reshape(tf.cast(tensor, tf.int64), [-1])
    # The order counts, and so does how much each element differs: each is stirred with its index.
    stirred = (bits + tf.range(tf.size(bits, tf.int64)) * _OF_INDEX) * _FIRST
    stirred = tf.bitwise.bitwise_xor(stirred, tf.bitwise.right_shift(stirred, _HALF))
    return tf.reduce_sum(stirred * _SECOND)


def _mirrored_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of which all replicas hold the same numbers."""
    variables = [*model.trainable_variables, *getattr(model.optimizer, "variables", ())]
    return [
        variable
        for variable in variables
        if variable.value.synchronization != tf.VariableSynchronization.ON_READ
        and (variable.value.dtype.is_floating or variable.value.dtype.is_integer)
    ]


def _digests_of(strategy: tf.distribute.Strategy, variables: list[keras.Variable]) -> Any:
    """Makes a function that returns the digests of all variables on all replicas of all hosts."""

    def on_replica() -> tf.Tensor:
        digests = []
        for variable in variables:
            tensor = tf.convert_to_tensor(variable)
            # A slot that only its owner has is read there, and only the digest is sent.
            with tf.device(tensor.device):
                digests.append(digest(tensor))
        return tf.stack(digests)[None]

    @tf.function(autograph=False)
    def digests() -> tf.Tensor:
        return strategy.gather(strategy.run(on_replica), axis=0)

    return digests


def _difference(
    strategy: tf.distribute.Strategy,
    variables: list[keras.Variable],
    digests: np.ndarray,
    differing: np.ndarray,
) -> str:
    """Tells which variable and replica differ first, and by how much; this moves one variable."""
    first = variables[differing[0]]
    replica = int(np.flatnonzero(digests[:, differing[0]] != digests[0, differing[0]])[0])
    values = strategy.gather(
        strategy.run(lambda: tf.cast(tf.convert_to_tensor(first), tf.float64)[None]), axis=0
    ).numpy()
    hosts = strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)
    host = f" (host {replica * hosts // strategy.num_replicas_in_sync})" if hosts > 1 else ""
    return (
        f"replica {replica}{host} holds other numbers of {first.path} than replica 0, by "
        f"{np.abs(values[replica] - values[0]).max():.3g} at most; of {len(variables)} variables "
        f"{len(differing)} differ somewhere"
    )
