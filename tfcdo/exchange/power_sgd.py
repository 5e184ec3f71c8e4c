"""PowerSGD: matrices are sent as products of two thin ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from tfcdo import checks, dtypes
from tfcdo.exchange.protocol import Collective, Exchange, PackSpec, Peers


@dataclasses.dataclass(frozen=True)
class PowerSGD(Exchange):
    """Sends each matrix M of n x m values as a product of n x r and m x r values.

    A step of a power iteration, begun with the last step's factor: the hosts add up P = M Q, make
    its columns orthonormal, and add up Q = M' P. The result is P Q'. A kernel of more axes is a
    matrix whose columns are its last axis. Values that this would not make at least two times
    smaller, such as biases, are summed exactly, in the same collective as P. All hosts need
    processors of one kind: each computes the products itself.

    Args:
      rank: the number of columns of the factors, r.
      error_feedback: whether the difference of a host's matrix and its product is added to its
        matrix in the next step; the state is then as large as the values.
      start_step: the number of steps at the beginning in which all is summed exactly.

    Raises:
      ValueError: if `rank` is less than 1 or `start_step` negative.
      TypeError: if a number is not an int, or `error_feedback` not a bool.

    References:
      Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
      Optimization", NeurIPS 2019, algorithms 1 and 2.

    Example:
      >>> [both, q] = PowerSGD(4).cost(PackSpec("float32", ((512, 256), (256,))), hosts=2)
      >>> both.num_bytes == 4 * (512 * 4 + 256), q.num_bytes == 4 * (256 * 4)
      (True, True)
    """

    rank: int
    error_feedback: bool = True
    start_step: int = 0
    whole_values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.check_int("rank", self.rank, at_least=1)
        checks.check_int("start_step", self.start_step, at_least=0)
        checks.check_bool("error_feedback", self.error_feedback)

    def _matrices(self, shapes: Sequence[Any]) -> dict[int, tuple[int, int]]:
        """Returns the numbers of rows and columns of the values that become products."""
        sizes = {i: (math.prod(shape[:-1]), shape[-1]) for i, shape in enumerate(shapes) if shape}
        return {i: (n, m) for i, (n, m) in sizes.items() if 2 * self.rank * (n + m) <= n * m}

    def state(self, pack: PackSpec, hosts: int) -> dict[str, np.ndarray]:
        """Returns a factor and an error for each matrix, and the number of steps."""
        state = {}
        for i, (n, m) in self._matrices(pack.shapes).items():
            drawn = np.random.RandomState(i).normal(size=(m, self.rank))
            state[f"factor{i}"] = drawn.astype(pack.dtype)
            if self.error_feedback:
                state[f"error{i}"] = np.zeros((n, m), pack.dtype)
        return state | ({"step": np.array(0, np.int64)} if self.start_step else {})

    def cost(self, pack: PackSpec, hosts: int) -> tuple[Collective, ...]:
        """Returns an all-reduce of P and of all that is exact, and one of Q."""
        found, item = self._matrices(pack.shapes), dtypes.itemsize(pack.dtype)
        exact = pack.size - sum(n * m for n, m in found.values())
        first = exact + sum(n * self.rank for n, _ in found.values())
        second = sum(m * self.rank for _, m in found.values())
        varies = self.start_step > 0
        return tuple(
            Collective("all_reduce", item * size, varies) for size in (first, second) if size
        )

    def run(
        self, tensors: Sequence[Any], state: Mapping[str, Any], peers: Peers
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Adds up the tensors of all hosts; see `Exchange.run`."""
        import tensorflow as tf

        def joined(parts: Sequence[Any]) -> Any:
            return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

        def cut(flat: Any, shapes: Sequence[Any]) -> list[Any]:
            parts = tf.split(flat, [math.prod(shape) for shape in shapes])
            return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

        def in_phase(exact: Any, compressed: Any) -> Any:
            if not self.start_step:
                return compressed()
            return tf.cond(state["step"] < self.start_step, exact, compressed)

        shapes = [tuple(tensor.shape) for tensor in tensors]
        found = self._matrices(shapes)
        others = [i for i in range(len(tensors)) if i not in found]
        own = {i: tf.reshape(tensors[i], size) for i, size in found.items()}
        if self.error_feedback:
            own = {i: matrix + state[f"error{i}"] for i, matrix in own.items()}
        of_p = [(n, self.rank) for n, _ in found.values()]
        of_q = [(m, self.rank) for _, m in found.values()]

        def sent_first() -> Any:
            products = [tf.matmul(own[i], state[f"factor{i}"]) for i in found]
            return joined(products + [tensors[i] for i in others])

        first = peers.all_reduce(in_phase(lambda: joined(tensors), sent_first))
        if not found:
            return cut(first, shapes), dict(state)

        def factors() -> tuple[list[Any], Any]:
            products = cut(first, of_p + [shapes[i] for i in others])[: len(found)]
            bases = [tf.linalg.qr(product)[0] for product in products]
            back = [tf.matmul(own[i], p, transpose_a=True) for i, p in zip(found, bases)]
            return bases, joined(back)

        none = [tf.zeros(shape, first.dtype) for shape in of_p + of_q]
        bases, back = in_phase(lambda: (none[: len(found)], joined(none[len(found) :])), factors)
        total = peers.all_reduce(back)

        def results() -> tuple[list[Any], dict[str, Any]]:
            exact = cut(first, of_p + [shapes[i] for i in others])[len(found) :]
            sums, changed = dict(zip(others, exact, strict=True)), dict(state)
            for i, p, q, mine in zip(found, bases, cut(total, of_q), cut(back, of_q), strict=True):
                sums[i] = tf.reshape(tf.matmul(p, q, transpose_b=True), shapes[i])
                # Of a scale that no step of tiny or large values can spoil.
                scale = tf.reduce_mean(tf.abs(q))
                is_usable = tf.math.is_finite(scale) & (scale > 0)
                changed[f"factor{i}"] = tf.where(is_usable, q / scale, state[f"factor{i}"])
                if self.error_feedback:
                    error = own[i] - tf.matmul(p, mine, transpose_b=True)
                    kept = tf.math.is_finite(tf.reduce_sum(error))
                    changed[f"error{i}"] = tf.where(kept, error, state[f"error{i}"])
            return [sums[i] for i in range(len(tensors))], changed

        sums, changed = in_phase(lambda: (cut(first, shapes), dict(state)), results)
        return sums, changed | ({"step": state["step"] + 1} if self.start_step else {})
