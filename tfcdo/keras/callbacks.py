"""What tfcdo's callbacks share, and `TraceSummary`: how much of a step all-reduces take."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfcdo import checks, keras_internals, log
from tfcdo.tracing.recording import Profiler


class Callback(keras.callbacks.Callback):
    """A callback of Keras 3, which says so to another Keras."""

    def set_model(self, model: Any) -> None:
        """Takes the model; Keras calls it, also tf_keras, and before all else."""
        if not isinstance(model, keras.Model):
            raise TypeError(
                f"tfcdo.keras.{type(self).__name__} needs Keras 3, and tfcdo's strategies do not; "
                f"model must be a keras.Model; got {model!r}"
            )
        super().set_model(model)


class TraceSummary(Callback):
    """Prints after an epoch how much of a step all-reduces took, and how much of it was exposed.

    TensorFlow's profiler records a few steps of the epoch, which takes a little time; the first
    steps of an epoch are left out, as they also trace graphs and fill caches.

    Args:
      every: after how many epochs to print, beginning with the first.
      skip: how many steps of the epoch to leave out; an epoch without others prints nothing.
      steps: how many steps to record.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: if `every` or `steps` is less than 1, or `skip` less than 0.

    Example:
      >>> import keras
      >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> history = model.fit(tf.ones([8, 2]), tf.ones([8, 1]), 2, verbose=0,
      ...                     callbacks=[TraceSummary(skip=1)])
      no all-reduce of tfcdo ran in a graph while this was recorded (eager ops have no names to know them by)
    """  # noqa: E501 - the line is what is printed.

    def __init__(self, every: int = 1, skip: int = 2, steps: int = 5) -> None:
        super().__init__()
        checks.check_int("every", every, at_least=1)
        checks.check_int("skip", skip, at_least=0)
        checks.check_int("steps", steps, at_least=1)
        self._every, self._skip, self._steps = every, skip, steps
        self._profiler: Profiler | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Decides whether this epoch is recorded; Keras calls it."""
        self._stop()  # After a `fit` that has failed.
        self._is_wanted = epoch % self._every == 0
        self._seen, self._text = 0, ""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the profiler before the first step to record; Keras calls it."""
        if not self._is_wanted or batch < self._skip or self._text or self._profiler:
            return
        profiler = Profiler()
        try:
            profiler.start()
            self._profiler = profiler
            keras_internals.at_end_of_fit(self.model, self._stop)  # Also of one that fails.
        except tf.errors.AlreadyExistsError:
            self._is_wanted = False
            log.warn_once(
                "TraceSummary records nothing, as something else profiles this process already; "
                "set profile_batch=0 in keras.callbacks.TensorBoard"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops the profiler after the last step to record; Keras calls it."""
        self._seen += self._profiler is not None
        if self._seen == self._steps:
            self._stop()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Prints the summary; Keras calls it."""
        self._stop()
        if self._text:
            print(self._text, flush=True)  # noqa: T201 - this is what a user asks it for

    def _stop(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            self._text = str(profiler.stop().summary)
