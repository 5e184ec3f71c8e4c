"""The inputs of a decision: a class's choices, and the facts about a machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from tfcdo.exchange.casts import Cast, check_exchange
from tfcdo.exchange.protocol import SUM, Exchange
from tfcdo.plan import algorithms
from tfcdo.plan.evaluation import Evaluation
from tfcdo.plan.packing import PackingOptions
from tfcdo.plan.plan import ValueSpec
from tfcdo.topology.measured import Measured
from tfcdo.topology.topology import Topology


@dataclasses.dataclass(frozen=True)
class BetweenHosts:
    """How packs cross the network between hosts."""

    # The most bytes of a pack where the caller does not say: enough to fill a network, and so few
    # that the first packs are sent while the backward pass still computes others.
    bytes_per_pack: int = 4 << 20
    flat: bool = False  # Whether one NCCL collective reduces over all devices of all hosts.
    # What the roots of hosts do; or a function to one from the path of a value's variable, None if
    # it has none, and the value's spec.
    exchange: Exchange | Callable[[str | None, ValueSpec], Exchange] = SUM

    def exchange_of(self, path: str | None, value: ValueSpec) -> Exchange:
        """Returns the exchange of the gradient of a variable."""
        if isinstance(self.exchange, Exchange):
            return self.exchange
        result = self.exchange(path, value)
        return check_exchange(f"the result of exchange({path!r}, {value})", result)


@dataclasses.dataclass(frozen=True)
class Options:
    """A class's choices: how it reduces whatever it is given."""

    algorithm: algorithms.Algorithm = "auto"  # Gives the copy trees.
    packing: PackingOptions = dataclasses.field(default_factory=PackingOptions)
    measured: Measured | None = None  # The machine; None for the detected one.
    nccl: Literal["never", "always", "auto"] = "never"  # "auto" takes it where it is faster.
    require_nccl: bool = False  # Whether to raise where NCCL was requested and cannot run.
    one_device: bool = False  # Whether batches have a root, on which everything is reduced.
    sparse_as_dense: bool = False  # Whether `tf.IndexedSlices` become tables first.
    sum_equal_rows: bool = False  # Whether those that stay rows have rows of one index added.
    wire: Cast | None = None  # How float32 and float64 gradients are sent; None for as they are.
    saved: Evaluation | None = None  # The file whose plan `algorithm` is.
    between: BetweenHosts | None = None  # None for one host.

    @property
    def topology(self) -> Topology | None:
        """Returns the machine; None for the detected one."""
        return self.measured.topology if self.measured else None


@dataclasses.dataclass(frozen=True)
class Machine:
    """The facts about a machine that a decision depends on."""

    topology: Topology
    origin: str = "was detected"  # Where the topology comes from, for people.
    # For each dtype that NCCL might add, the reason why it cannot; "" if it can. Empty where nobody
    # asks for NCCL.
    nccl: tuple[tuple[str, str], ...] = ()
    nccl_hosts: str = ""  # The reason why NCCL does not run between hosts; "" if it does.
