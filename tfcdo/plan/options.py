"""The inputs of a decision: a class's choices, and the facts about a machine."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tfcdo.plan import algorithms
from tfcdo.plan.evaluation import Evaluation
from tfcdo.plan.packing import PackingOptions
from tfcdo.topology.measured import Measured
from tfcdo.topology.topology import Topology


@dataclasses.dataclass(frozen=True)
class BetweenHosts:
    """How packs cross the network between hosts.

    Attributes:
      bytes_per_pack: the most bytes of a pack where the caller does not say.
      flat: whether one NCCL collective reduces over all devices of all hosts.
      wire: the dtype that float32 and float64 gradients are cast to; None for none.
      error_feedback: whether rounding errors are added to the values of the next step.
    """

    bytes_per_pack: int
    flat: bool = False
    wire: str | None = None
    error_feedback: bool = False


@dataclasses.dataclass(frozen=True)
class Options:
    """A class's choices: how it reduces whatever it is given.

    Attributes:
      algorithm: the name of the algorithm that gives the copy trees, or the trees themselves.
      packing: how values are packed.
      measured: the machine, perhaps with its measurement; None for the detected one.
      nccl: where to use NCCL if it can run: "never", "always", or "auto" for where it is faster.
      require_nccl: whether to raise where NCCL was requested and cannot run.
      one_device: whether everything is reduced on one device.
      sparse_as_dense: whether `tf.IndexedSlices` become tables first: True, False, or "auto" to add
        them as tables where these have fewer bytes.
      wire: the dtype that float32 and float64 gradients are cast to; None for none.
      error_feedback: whether rounding errors are added to the values of the next step.
      saved: the plan in a file whose schedule `algorithm` is; None for none.
      between: how packs cross the network between hosts; None for one host.
    """

    algorithm: algorithms.Algorithm = "auto"
    packing: PackingOptions = dataclasses.field(default_factory=PackingOptions)
    measured: Measured | None = None
    nccl: Literal["never", "always", "auto"] = "never"
    require_nccl: bool = False
    one_device: bool = False
    sparse_as_dense: bool | Literal["auto"] = "auto"
    wire: str | None = None
    error_feedback: bool = False
    saved: Evaluation | None = None
    between: BetweenHosts | None = None

    @property
    def topology(self) -> Topology | None:
        """Returns the machine; None for the detected one."""
        return self.measured.topology if self.measured else None


@dataclasses.dataclass(frozen=True)
class Machine:
    """The facts about a machine that a decision depends on.

    Attributes:
      topology: the devices and their links.
      origin: where the topology comes from, for people.
      nccl: for each dtype that NCCL might add, the reason why it cannot; "" if it can. Empty where
        NCCL is not asked for.
      nccl_hosts: the reason why NCCL does not run between hosts; "" if it does.
    """

    topology: Topology
    origin: str = "was detected"
    nccl: tuple[tuple[str, str], ...] = ()
    nccl_hosts: str = ""
