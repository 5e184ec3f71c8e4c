"""Finds Keras's current call, from the functions that are being called."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any


def is_in(part: str) -> bool:
    """Returns whether a function of Keras whose name has this part is being called."""
    return any(part in frame.f_code.co_name for frame in _frames())


def epoch_iterator() -> Any:
    """Returns the object by which the `fit` of Keras that is running takes its batches."""
    for frame in _frames():
        if frame.f_code.co_name == "fit" and "epoch_iterator" in frame.f_locals:
            return frame.f_locals["epoch_iterator"]
    return None


def _frames() -> Iterator[types.FrameType]:
    """Yields the frames of Keras's functions that are being called, the innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("keras."):
            yield frame
        frame = frame.f_back


def adds_metrics_twice(version: str | None = None) -> bool:
    """Returns whether a Keras, by default the imported one, has TensorFlow add up metrics twice."""
    # Keras 3.7 to 3.9 has its metrics' variables added up (keras-team/keras#21467), but does not
    # say when. TensorFlow then adds the replicas' parts when they are written, and metrics write
    # what they have read: K times the total, and the new values.
    if version is None:
        version = getattr(sys.modules.get("keras"), "__version__", "")
    numbers = [int(number) for number in version.split(".")[:2] if number.isdecimal()]
    return [3, 7] <= numbers < [3, 10]
