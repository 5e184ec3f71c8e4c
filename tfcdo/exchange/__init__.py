"""Exchanges: what the roots of hosts do with the sum of a pack, for `exchange=` of a strategy."""

from tfcdo.exchange.casts import Blocks, Cast
from tfcdo.exchange.diloco import DiLoCo
from tfcdo.exchange.power_sgd import PowerSGD
from tfcdo.exchange.protocol import Collective, Exchange, PackSpec, Peers, Sum
from tfcdo.exchange.rehearsal import Rehearsal
from tfcdo.exchange.top_k import TopK

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
