"""The codec: how the values of a pack are cast where they are copied, and cast back.

Between devices, float32 and float64 may be rounded to 16 bits where they are copied; sums are
formed in their own dtype. docs/wire.md derives the error.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import tensorflow as tf

from tfcdo import dtypes
from tfcdo.exchange import rounding
from tfcdo.execute import gradients
from tfcdo.execute.feedback import Residuals


@dataclasses.dataclass(frozen=True)
class PackCodec:
    """The codec of one pack, with the rounding errors that its devices keep."""

    wire: str  # The dtype that is sent.
    dtype: tf.DType  # Of the values.
    residuals: Residuals | None = None  # None without error feedback.
    pack: int = 0  # Its number.

    @property
    def scaled(self) -> bool:
        """Returns whether values are scaled before they are cast."""
        return dtypes.needs_scale(self.wire, self.dtype.name)

    def encode(self, tensors: Sequence[tf.Tensor], node: int) -> list[tf.Tensor]:
        """Encodes tensors on the current device, a node's; a scale, if any, comes last."""
        if not tensors:
            return []
        carried = self.carry(tensors, node)
        scale = None
        if self.scaled:
            scale = rounding.scale_for(rounding.largest_magnitude(carried), self.wire)
        sent = self.round(carried, node, scale)
        return sent if scale is None else [*sent, scale]

    def decode(self, sent: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Makes the tensors again, on the current device, of a copy of the result of `encode`."""
        if not self.scaled or not sent:
            return [decode(bits, self.dtype) for bits in sent]
        *encoded, scale = sent
        return [decode(bits, self.dtype, scale) for bits in encoded]

    def carry(self, tensors: Sequence[tf.Tensor], node: int) -> list[tf.Tensor]:
        """Adds the rounding errors of the step before, on the current device."""
        if self.residuals is None:
            return list(tensors)
        errors = self._errors(tensors, node)
        return [tensor + error.read_value() for tensor, error in zip(tensors, errors, strict=True)]

    def round(
        self, tensors: Sequence[tf.Tensor], node: int, scale: tf.Tensor | None
    ) -> list[tf.Tensor]:
        """Casts tensors to the wire's dtype, on the current device, and keeps the errors."""
        sent = [encode(tensor, self.wire, scale) for tensor in tensors]
        if self.residuals is not None:
            errors = self._errors(tensors, node)
            for error, tensor, bits in zip(errors, tensors, sent, strict=True):
                arrived = decode(bits, self.dtype, scale)
                error.assign(rounding.rounding_error(tensor, arrived, error.read_value()))
        return sent

    def _errors(self, tensors: Sequence[tf.Tensor], node: int) -> list[tf.Variable]:
        assert self.residuals is not None
        return [
            self.residuals.variable(
                node,
                f"pack{self.pack}_tensor{index}",
                functools.partial(tf.zeros, tensor.shape, tensor.dtype),
            )
            for index, tensor in enumerate(tensors)
        ]


def encode(tensor: tf.Tensor, wire_dtype: str, scale: tf.Tensor | None = None) -> tf.Tensor:
    """Casts a tensor to the wire's dtype; its gradient passes as it is, in the tensor's dtype."""
    return gradients.with_gradient_of(rounding.encode(tensor, wire_dtype, scale), tensor)


def decode(sent: tf.Tensor, dtype: tf.DType, scale: tf.Tensor | None = None) -> tf.Tensor:
    """Casts a copy of an encoded tensor back to its own dtype; nothing is rounded."""
    # The gradient of a cast would be cast to the wire's dtype, and several of them added in it.
    return gradients.with_gradient_of(rounding.decode(sent, dtype, scale), sent)
