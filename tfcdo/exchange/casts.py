"""Exchanges that send values in 16 or 8 bits: each host adds up a share of them.

A ring that adds in 16 bits would round each partial sum. Here only the copies are rounded: every
host sends each other one its share of the values, encoded; each adds its share, in the values' own
dtype; and the sums go back to all, encoded again. The bytes are half of a ring's, or a quarter.
A host's own share is not sent, so it is not rounded. All hosts, also the one that forms a sum, take
it as it is sent, so they get bitwise the same. docs/wire-numerics.md has the bounds of the error.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfcdo import checks
from tfcdo.exchange import dtypes
from tfcdo.exchange.protocol import Collective, Exchange, PackSpec, Peers, check_comparable

# Shares are a multiple of this many values, 64 bytes: TensorFlow takes a tensor apart without
# copying it where the parts are aligned.
SHARE_ALIGNMENT = 32
CAST_DTYPES = ("bfloat16", "float16")


class _Shares(Exchange):
    """The sum of encoded shares: the common part of `Cast` and `Blocks`."""

    dtype: str
    error_feedback: bool

    @abc.abstractmethod
    def layout(self, size: int, hosts: int) -> tuple[int, int]:
        """Returns the number and size of the blocks of a share of `size` values."""

    def state(self, pack: PackSpec, hosts: int) -> dict[str, np.ndarray]:
        """Returns the errors of the shares that a host sends, and of the sums that it forms."""
        if not self.error_feedback:
            return {}
        share = self.layout(pack.size, hosts)
        return {
            "shares": np.zeros([hosts - 1, *share], pack.dtype),
            "sums": np.zeros([1, *share], pack.dtype),
        }

    def cost(self, pack: PackSpec, hosts: int) -> tuple[Collective, ...]:
        """Returns an exchange of shares and a gather of their sums, each with its scales."""
        blocks, block = self.layout(pack.size, hosts)
        scales = blocks * dtypes.itemsize(pack.dtype)
        share = blocks * block * dtypes.itemsize(self.dtype)
        share += scales * dtypes.needs_scale(self.dtype, pack.dtype)
        return Collective("all_to_all", hosts * share), Collective("all_gather", share)

    def run(
        self, tensors: Sequence[Any], state: Mapping[str, Any], peers: Peers
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Adds up the tensors of all hosts; see `Exchange.run`."""
        from tfcdo.exchange import rounding

        [flat] = tensors
        layout = self.layout(flat.shape[0], peers.size)
        total, state = rounding.sum_of_shares(flat, self.dtype, layout, state, peers)
        return [total], state


@dataclasses.dataclass(frozen=True)
class Cast(_Shares):
    """Sends values in 16 bits, and adds them in their own dtype.

    Each value is rounded once where it is sent, and each sum once. Where the dtype's range is
    smaller than the values', each share is scaled by a power of two, which rounds nothing.

    Args:
      dtype: "bfloat16" or "float16".
      error_feedback: whether the errors of both casts are added to the values of the next step. The
        state is 1 + 1/H times as large as the values, on H hosts.

    Raises:
      ValueError: if `dtype` is another one.
      TypeError: if `error_feedback` is not a bool.

    Example:
      >>> Cast("bfloat16").cost(PackSpec("float32", ((4096,),)), hosts=2)[0]
      Collective(kind='all_to_all', num_bytes=8192, varies=False)
    """

    dtype: str
    error_feedback: bool = False

    def __post_init__(self) -> None:
        _check(self, CAST_DTYPES)

    def layout(self, size: int, hosts: int) -> tuple[int, int]:
        """Returns the number and size of the blocks of a share of `size` values: one block."""
        return 1, -(-size // (hosts * SHARE_ALIGNMENT)) * SHARE_ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Blocks(_Shares):
    """Sends values in 8 bits, in blocks that have a scale each, and adds them in their own dtype.

    The largest magnitude of a block becomes 127. A block with NaN or infinity arrives as NaN.

    Args:
      dtype: "int8".
      block: the most values that share a scale.
      error_feedback: as for `Cast`; recommended.

    Raises:
      ValueError: if `dtype` is another one, or `block` less than 2.
      TypeError: if `block` is not an int or `error_feedback` is not a bool.

    References:
      Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022 (blocks).

    Example:
      >>> Blocks("int8").cost(PackSpec("float32", ((4096,),)), hosts=2)[1]  # 8 blocks, 8 scales.
      Collective(kind='all_gather', num_bytes=2080, varies=False)
    """

    dtype: str = "int8"
    block: int = 256
    error_feedback: bool = False

    def __post_init__(self) -> None:
        _check(self, ("int8",))
        checks.check_int("block", self.block, at_least=2)

    def layout(self, size: int, hosts: int) -> tuple[int, int]:
        """Returns the number and size of the blocks of a share of `size` values."""
        # The blocks are equal, so that a share has few values more than it must have. Values of 8
        # bits are sent in pairs.
        blocks = -(-size // (hosts * self.block))
        return blocks, -(-size // (hosts * blocks * 2)) * 2


def _check(exchange: Cast | Blocks, accepted: Sequence[str]) -> None:
    name = getattr(exchange.dtype, "name", exchange.dtype)  # A tf.DType has one.
    if name not in accepted:
        raise ValueError(
            f"dtype must be {' or '.join(map(repr, accepted))}; got {exchange.dtype!r}"
        )
    object.__setattr__(exchange, "dtype", name)
    checks.check_bool("error_feedback", exchange.error_feedback)


# The names that `exchange=` accepts.
BY_NAME: dict[str, Cast | Blocks] = {
    "bfloat16": Cast("bfloat16"),
    "float16": Cast("float16"),
    "int8": Blocks("int8"),
}


def check_exchange(name: str, value: Any) -> Exchange:
    """Returns the argument `name` as an exchange: an object, or one of three names of dtypes."""
    named = getattr(value, "name", value)  # A tf.DType has one.
    if isinstance(named, str) and named in BY_NAME:
        return BY_NAME[named]
    accepted = (
        f"{name} must be 'bfloat16', 'float16', 'int8', an exchange such as "
        "tfcdo.exchange.Cast('bfloat16'), or a function from a variable's path and spec to one"
    )
    if isinstance(value, str):
        raise ValueError(f"{accepted}; got {value!r}")
    if isinstance(value, type) or not isinstance(value, Exchange):
        raise TypeError(f"{accepted}; got {value!r}")
    check_comparable(name, value)
    return value
