"""Exchanges: how the roots of hosts add up the sums of a pack, for `exchange=` of a strategy."""

from tfcdo.exchange.casts import Blocks, Cast
from tfcdo.exchange.compression import PowerSGD, TopK
from tfcdo.exchange.diloco import DiLoCo
from tfcdo.exchange.protocol import Collective, Exchange, PackSpec, Peers, Rehearsal, Sum

__all__ = [
    "Blocks",
    "Cast",
    "Collective",
    "DiLoCo",
    "Exchange",
    "PackSpec",
    "Peers",
    "PowerSGD",
    "Rehearsal",
    "Sum",
    "TopK",
]
