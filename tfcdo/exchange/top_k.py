"""TopK: only the largest values are sent, and the others are kept for the next steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfcdo import checks, dtypes
from tfcdo.exchange.protocol import Collective, Exchange, PackSpec, Peers


@dataclasses.dataclass(frozen=True)
class TopK(Exchange):
    """Sends each host's values of the largest magnitudes of a pack, with their positions.

    A result is the sum of the values that were sent; an element that no host has sent is 0.

    Args:
      fraction: the part of a pack's values that is sent, such as 0.01; at least one value is.
      error_feedback: whether values that are not sent are added to those of the next step. The
        state is as large as the values.

    Raises:
      ValueError: if `fraction` is not above 0 and at most 1.
      TypeError: if `fraction` is not a number, or `error_feedback` not a bool.

    References:
      Lin et al., "Deep Gradient Compression", ICLR 2018; Stich et al., "Sparsified SGD with
      Memory", NeurIPS 2018.

    Example:
      >>> TopK(0.01).cost(PackSpec("float32", ((100_000,),)), hosts=2)  # 1,000 of 8 bytes.
      (Collective(kind='all_gather', num_bytes=8000, varies=False),)
    """

    fraction: float
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, (int, float)):
            raise TypeError(f"fraction must be a number; got {self.fraction!r}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1; got {self.fraction!r}")
        checks.check_bool("error_feedback", self.error_feedback)

    def _count(self, size: int) -> int:
        return max(1, round(self.fraction * size))

    def state(self, pack: PackSpec, hosts: int) -> dict[str, np.ndarray]:
        """Returns the values that were not sent."""
        return {"error": np.zeros([pack.size], pack.dtype)} if self.error_feedback else {}

    def cost(self, pack: PackSpec, hosts: int) -> tuple[Collective, ...]:
        """Returns a gather of values and positions of 4 bytes."""
        one = dtypes.itemsize(pack.dtype) + 4
        return (Collective("all_gather", self._count(pack.size) * one),)

    def run(
        self, tensors: Sequence[Any], state: Mapping[str, Any], peers: Peers
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Adds up the tensors of all hosts; see `Exchange.run`."""
        import tensorflow as tf

        [values] = tensors
        dtype, error = values.dtype, state.get("error")
        values = values if error is None else values + error
        count = self._count(values.shape[0])
        # NaN and infinity are sent first.
        is_finite = tf.math.is_finite(values)
        sizes = tf.where(is_finite, tf.abs(values), tf.constant(np.inf, dtype))
        places = tf.math.top_k(sizes, count, sorted=False).indices
        words = tf.reshape(tf.bitcast(tf.gather(values, places), tf.float32), [-1])
        sent = tf.concat([words, tf.bitcast(places, tf.float32)], 0)
        total = tf.zeros_like(values)
        for row in tf.split(peers.all_gather(sent), peers.size):
            words, theirs = row[:-count], tf.bitcast(row[-count:], tf.int32)
            if dtype.size == 8:
                words = tf.reshape(words, [count, 2])
            # The positions of a host are distinct, so that no order of additions is left open.
            total = tf.tensor_scatter_nd_add(total, theirs[:, tf.newaxis], tf.bitcast(words, dtype))
        if error is None:
            return [total], {}
        rest = tf.tensor_scatter_nd_update(values, places[:, tf.newaxis], tf.zeros([count], dtype))
        return [total], {"error": tf.where(is_finite, rest, error)}
