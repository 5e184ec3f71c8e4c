"""The base class of tfcdo's callbacks."""

from __future__ import annotations

from typing import Any

import keras


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
