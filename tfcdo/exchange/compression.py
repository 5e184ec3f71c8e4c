"""Gradient compression: products of thin matrices (PowerSGD), or the largest values (TopK)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from tfcdo import checks
from tfcdo.exchange import dtypes
from tfcdo.exchange.protocol import Collective, Exchange, PackSpec, Peers


@dataclasses.dataclass(frozen=True)
class PowerSGD(Exchange):
    """Sends each matrix M of n x m values as a product of n x r and m x r values.

    A step of a power iteration, begun with the last step's factor: the hosts add up P = M Q, make
    its columns orthonormal, and add up Q = M' P. The result is P Q'. Columns are the last axis of a
    kernel. Values that this would not make two times smaller, such as biases, are summed exactly,
    together with P. Each host computes the products: all need processors of one kind.

    Args:
      rank: the number of columns of the factors, r.
      error_feedback: whether a matrix's rest is added to the next one, in a state of its size.
      start_step: the number of steps at the beginning in which all is summed exactly.

    Raises:
      ValueError: if `rank` is less than 1 or `start_step` negative.
      TypeError: if a number is not an int, or `error_feedback` not a bool.

    References:
      Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
      Optimization", NeurIPS 2019, algorithms 1 and 2.

    Example:
      >>> PowerSGD(4).cost(PackSpec("float32", ((512, 256), (9,))), hosts=2)[0]  # 512 * 4 + 9.
      Collective(kind='all_reduce', num_bytes=8228, varies=False)
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
        return {i: (n, m) for i, (n, m) in sizes.items() if 0 < 2 * self.rank * (n + m) <= n * m}

    def state(self, pack: PackSpec, hosts: int) -> dict[str, np.ndarray]:
        """Returns a factor and an error for each matrix, and the number of steps."""
        state: dict[str, np.ndarray] = {"step": np.array(0, np.int64)} if self.start_step else {}
        for i, (n, m) in self._matrices(pack.shapes).items():
            drawn = np.random.RandomState(i).normal(size=(m, self.rank))
            state[f"factor{i}"] = drawn.astype(pack.dtype)
            if self.error_feedback:
                state[f"error{i}"] = np.zeros((n, m), pack.dtype)
        return state

    def cost(self, pack: PackSpec, hosts: int) -> tuple[Collective, ...]:
        """Returns an all-reduce of P and of all that is exact, and one of Q."""
        sizes, item = self._matrices(pack.shapes).values(), dtypes.itemsize(pack.dtype)
        first = pack.size + sum(n * self.rank - n * m for n, m in sizes)
        second = sum(m * self.rank for _, m in sizes)
        call = Collective("all_reduce", item * first, varies=bool(second and self.start_step))
        return (call, Collective("all_reduce", item * second)) if second else (call,)

    def run(
        self, tensors: Sequence[Any], state: Mapping[str, Any], peers: Peers
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Adds up the tensors of all hosts; see `Exchange.run`."""
        import tensorflow as tf

        from tfcdo.exchange.rounding import cut, finite_or, laid_out, orthonormal

        shapes = [tuple(tensor.shape) for tensor in tensors]
        found = self._matrices(shapes)
        if not found:
            return cut(peers.all_reduce(laid_out(tensors)), shapes), state
        count, others = len(found), sorted(set(range(len(tensors))) - found.keys())
        of_p = [(n, self.rank) for n, _ in found.values()] + [shapes[i] for i in others]
        of_q = [(m, self.rank) for _, m in found.values()]
        errors = [state.get(f"error{i}", 0) for i in found]
        own = [tf.reshape(tensors[i], found[i]) + error for i, error in zip(found, errors)]

        def either(exact: Any, compressed: Any) -> Any:
            late = self.start_step
            return tf.cond(state["step"] < late, exact, compressed) if late else compressed()

        def products() -> Any:
            thin = [tf.matmul(matrix, state[f"factor{i}"]) for i, matrix in zip(found, own)]
            return laid_out(thin + [tensors[i] for i in others])

        first = peers.all_reduce(either(lambda: laid_out(tensors), products))
        none = [tf.zeros(shape, first.dtype) for shape in of_p[:count]]
        bases = either(lambda: none, lambda: [*map(orthonormal, cut(first, of_p)[:count])])
        back = [tf.matmul(matrix, p, transpose_a=True) for matrix, p in zip(own, bases)]
        total = cut(peers.all_reduce(laid_out(back)), of_q)

        def results() -> tuple[list[Any], dict[str, Any]]:
            sums, changed = dict(zip(others, cut(first, of_p)[count:])), dict(state)
            for i, p, q, mine, matrix in zip(found, bases, total, back, own, strict=True):
                sums[i] = tf.reshape(tf.matmul(p, q, transpose_b=True), shapes[i])
                scale = tf.reduce_mean(tf.abs(q))
                changed[f"factor{i}"] = finite_or(q / scale, state[f"factor{i}"])
                if self.error_feedback:
                    error = matrix - tf.matmul(p, mine, transpose_b=True)
                    changed[f"error{i}"] = finite_or(error, state[f"error{i}"])
            return [sums[i] for i in range(len(tensors))], changed

        sums, changed = either(lambda: (cut(first, shapes), dict(state)), results)
        return sums, changed | ({"step": state["step"] + 1} if self.start_step else {})


@dataclasses.dataclass(frozen=True)
class TopK(Exchange):
    """Sends each host's values of the largest magnitudes of a pack, with their positions.

    A result is the sum of the values that were sent; an element that no host has sent is 0.

    Args:
      fraction: the part of a pack's values that is sent, such as 0.01; at least one value is.
      error_feedback: whether values that are not sent are added to the next step's. The
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
        checks.check_number("fraction", self.fraction)
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
