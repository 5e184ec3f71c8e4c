"""Travelling: what happens to the tensors of a pack where they are copied to another device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf

from tfcdo.execute import wire
from tfcdo.execute.feedback import ErrorFeedback
from tfcdo.execute.feedback import Residuals

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Wire:
    """Says how the values of a class travel between devices.

    Attributes:
      dtype: what float32 and float64 are cast to; None for nothing.
      feedback: keeps what the casts lose for the next step; None to lose it.
    """

    dtype: tf.DType | None = None
    feedback: ErrorFeedback | None = None

    def casts(self, dtype: tf.DType) -> bool:
        """Returns whether values of a dtype are cast."""
        return self.dtype is not None and wire.is_cast(dtype)

    def travel(
        self, dtype: tf.DType, residuals: Residuals | None = None, pack: int = 0
    ) -> Travel[Any]:
        """Returns how the tensors of a pack travel.

        Args:
          dtype: their dtype.
          residuals: what earlier casts have lost; None without error feedback.
          pack: the number of the pack.
        """
        if self.dtype is None or not wire.is_cast(dtype):
            return AS_THEY_ARE
        return Cast(self.dtype, dtype, residuals, pack)


AS_IT_IS = Wire()


class Travel(Generic[T]):
    """Sends values as they are."""

    def send(self, value: T, device: int) -> T:
        """Makes what is copied of a value.

        Args:
          value: such as the tensors of a pack, on the current device.
          device: the number of that device.

        Returns:
          What to copy.
        """
        del device  # What is not changed is the same from everywhere.
        return value

    def receive(self, sent: T) -> T:
        """Makes the value again, on the current device, of a copy of what `send` returned."""
        return sent


AS_THEY_ARE: Travel[Any] = Travel()


@dataclasses.dataclass(frozen=True)
class Cast(Travel[Sequence[tf.Tensor]]):
    """Sends the tensors of a pack in 16 bits.

    Attributes:
      wire_dtype: bfloat16 or float16.
      dtype: the tensors' dtype, float32 or float64.
      residuals: what earlier casts have lost; None without error feedback.
      pack: the number of the pack.
    """

    wire_dtype: tf.DType
    dtype: tf.DType
    residuals: Residuals | None = None
    pack: int = 0

    def send(self, value: Sequence[tf.Tensor], device: int) -> list[tf.Tensor]:
        """Casts tensors, after adding what earlier casts have lost; see `Travel.send`."""
        if not value:
            return []
        carried = self.carried(value, device)
        scale = wire.scale_for(carried, self.wire_dtype)
        sent = self.cast(carried, device, scale)
        return sent if scale is None else [*sent, scale]

    def receive(self, sent: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Casts tensors back; see `Travel.receive`."""
        if not sent or not wire.needs_scale(self.wire_dtype, self.dtype):
            return [wire.decode(one, self.dtype) for one in sent]
        *bits, scale = sent
        return [wire.decode(one, self.dtype, scale) for one in bits]

    def carried(self, tensors: Sequence[tf.Tensor], device: int) -> list[tf.Tensor]:
        """Adds to tensors what casts of earlier steps have lost of them on the current device."""
        if self.residuals is None:
            return list(tensors)
        lost = self.residuals.on(device, self.pack, tensors)
        return [tensor + one.read_value() for tensor, one in zip(tensors, lost, strict=True)]

    def cast(
        self, tensors: Sequence[tf.Tensor], device: int, scale: tf.Tensor | None
    ) -> list[tf.Tensor]:
        """Casts tensors to the wire's dtype, on the current device, and keeps what that loses.

        Args:
          tensors: what `carried` returned.
          device: the number of that device.
          scale: what they are multiplied by; None for nothing.

        Returns:
          The tensors in the wire's dtype.
        """
        sent = [wire.encode(tensor, self.wire_dtype, scale) for tensor in tensors]
        if self.residuals is not None:
            kept = self.residuals.on(device, self.pack, tensors)
            for variable, tensor, bits in zip(kept, tensors, sent, strict=True):
                arrived = wire.decode(bits, self.dtype, scale)
                # What arrives as infinity or NaN is not used, nor is then what was carried lost.
                lost = tf.where(tf.math.is_finite(arrived), tensor - arrived, variable)
                variable.assign(lost)
        return sent
