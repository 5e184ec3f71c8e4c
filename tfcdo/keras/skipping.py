"""Starting a `fit` inside an epoch: the batches that were trained before are left out."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import keras
import tensorflow as tf


class SkipBatches:
    """Stands for a model's train function until `batch`; drops batches of the iterator first."""

    # Keras's own loop counts the batches, so that it ends the epoch where it always does.
    def __init__(self, model: keras.Model, batch: int, steps: int | None, drop: int) -> None:
        at_once = model.steps_per_execution
        if batch % at_once and batch < (steps or math.inf):
            raise ValueError(
                "steps_per_execution must divide the number of batches that are done, so that "
                f"training can go on inside the epoch; got {at_once} and a backup after batch "
                f"{batch}: compile with a divisor of it"
            )
        self._model = model
        self._train_function = model.train_function
        self._calls = math.ceil(min(batch, steps or batch) / at_once)
        self._drop = drop
        self._logs: Any = None
        model.train_function = self

    @staticmethod
    def remove_from(model: keras.Model) -> None:
        """Puts back the train function, if a `fit` has ended before this did."""
        if isinstance(model.train_function, SkipBatches):
            model.train_function = model.train_function._train_function

    def __call__(self, iterator: Any) -> Any:
        """Skips one call of the train function, or ends the skipping."""
        if self._logs is None:
            # The metrics of the epoch so far; Keras returns them if it trains no other batch.
            self._logs = self._model.get_metrics_result()
            # An iterator that ends now says so again in the next call, as it did before.
            with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                for _ in range(self._drop):
                    next(iterator)
        if self._calls:
            self._calls -= 1
            return self._logs
        self._model.train_function = self._train_function
        return self._train_function(iterator)


def batches_before(epoch_iterator: Any, epochs: int) -> int:
    """Returns how many batches of earlier epochs `fit`'s iterator of the next epoch has given."""
    size: int | None = epoch_iterator.data_adapter.num_batches
    if not epoch_iterator.steps_per_epoch:
        return 0  # Each epoch has an iterator of its own.
    # Keras trains so many at once, also beyond the end of an epoch.
    at_once: int = epoch_iterator.steps_per_execution
    steps: int = math.ceil(epoch_iterator.steps_per_epoch / at_once) * at_once
    # It makes a new iterator after an epoch that has reached the end of the data.
    return steps * (epochs % math.ceil(size / steps)) if size else steps * epochs
