"""`CheckInSync`: that all replicas hold the same weights is checked, not assumed."""

from __future__ import annotations

from typing import Any

from absl import logging

from tfcdo import checks, digests
from tfcdo.keras.callback import Callback


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
      >>> import tensorflow as tf
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
        self._comparison: digests.WeightComparison | None = None

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
        if self._comparison is None:
            self._comparison = digests.WeightComparison(self.model)
        difference = self._comparison.difference()
        if difference is None:
            return
        message = f"after step {self._step}, {difference}"
        if self._raise_on_difference:
            raise RuntimeError(message)
        logging.error("tfcdo: %s", message)
