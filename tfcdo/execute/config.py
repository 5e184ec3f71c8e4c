"""The configuration of an all-reduce: a class's choices, as `tfcdo.execute.batch` gets them."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any, Literal

from tfcdo.execute.hosts import Hosts
from tfcdo.execute.one_device import Accumulate
from tfcdo.plan import algorithms
from tfcdo.plan import copy_tree
from tfcdo.plan.algorithms import Algorithm
from tfcdo.plan.algorithms import scheduler
from tfcdo.plan.batch_plan import BatchPlan
from tfcdo.plan.batch_plan import ValueSpec
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.packing import PackingOptions
from tfcdo.plan.packing import plan_batch
from tfcdo.plan.saved_plan import SavedPlan
from tfcdo.plan.widening import widened
from tfcdo.topology.detection import detect
from tfcdo.topology.topology import Topology

SparseAsDense = bool | Literal["auto"]


@dataclasses.dataclass(frozen=True)
class AllReduceConfig:
    """Says how a value is to be reduced.

    Attributes:
      algorithm: the name of the algorithm that gives the copy trees, or the trees themselves.
      packing: how values are packed.
      topology: the machine; None to find out.
      nccl: whether to use NCCL where it can run: "never", "always", or "auto" for unless a
        measurement of this machine says that copy trees are faster.
      require_nccl: whether to raise where NCCL is asked for and cannot run.
      root: the device that even all-reduces are reduced on, without copy trees; None to reduce
        along copy trees, and what is not an all-reduce on its first destination.
      accumulate: sums a list of dense tensors on the root; None for `numerics.add`.
      across_hosts: the hosts that reduce together; None for one host.
      saved: the plan that `algorithm` is the schedule of; None for none.
      sparse_as_dense: whether `tf.IndexedSlices` become dense tensors before they are reduced:
        True or False; or "auto": their tables travel where they have fewer bytes than the rows.
    """

    algorithm: Algorithm
    packing: PackingOptions
    topology: Topology | None = None
    nccl: Literal["never", "always", "auto"] = "never"
    require_nccl: bool = False
    root: str | None = None
    accumulate: Accumulate | None = None
    across_hosts: Hosts | None = None
    saved: SavedPlan | None = None
    sparse_as_dense: SparseAsDense = "auto"

    @property
    def last_values_first(self) -> bool:
        """Returns whether copy trees take the last values first, as a backward pass makes them."""
        return self.across_hosts is not None

    def topology_of(self, devices: Sequence[str]) -> Topology:
        """Returns the topology that was given, or the one that is found for some devices."""
        return self.topology or detect(tuple(devices))

    def check_plan(self, devices: Sequence[str]) -> None:
        """Raises `ValueError` unless the plan, if one was given, is for some devices."""
        if self.saved is None:
            return
        reason = self.saved.why_not_on(self.topology_of(devices))
        if reason is not None:
            remedy = f"make one here with `tfcdo plan -t here:{len(devices)} --save FILE`"
            if self.saved.topology.num_devices == len(devices):
                remedy += ", or pass the plan's own machine as topology= to use it all the same"
            raise ValueError(f"plan must be for this machine: {reason}; {remedy}")

    def plan(
        self, specs: Sequence[ValueSpec], devices: Sequence[str], widening: float = 1.0
    ) -> BatchPlan:
        """Plans the all-reduce of values on some devices; equal questions get the same object.

        Args:
          specs: what is known of the values, with the bytes that travel.
          devices: the device names.
          widening: how many bytes are added for each byte that travels.
        """
        topology = widened(self.topology_of(devices), widening)
        algorithm, options = self._across_hosts(topology, specs)
        return plan_batch(tuple(specs), options, algorithm, topology)

    def plan_for_nccl(self, specs: Sequence[ValueSpec], devices: Sequence[str]) -> BatchPlan:
        """Plans an all-reduce by NCCL: one tensor per pack, unless asked otherwise in one pack."""
        num_packs = 1 if self.packing.num_packs is None else self.packing.num_packs
        options = dataclasses.replace(self.packing, num_packs=num_packs, one_tensor_per_pack=True)
        # Each pack is one op; NCCL knows the machine itself and does not use the copy trees.
        config = dataclasses.replace(self, packing=options)
        return config.plan(specs, devices)

    def trees(self, count: int, devices: Sequence[str]) -> list[CopyTree]:
        """Returns the copy trees of values whose sizes are known only when the step runs.

        Args:
          count: the number of values, at least one; each travels along a tree of its own.
          devices: the device names.

        Returns:
          One tree per value, the algorithm's in turn.
        """
        topology = self.topology_of(devices)
        algorithm, _ = self._across_hosts(topology, ())
        # Nothing is known of the sizes: the trees are those of tiny values.
        schedule = scheduler(algorithm, topology)(count, count)
        return [pack.tree for pack in schedule.packs]

    def _across_hosts(
        self, topology: Topology, specs: Sequence[ValueSpec]
    ) -> tuple[Algorithm, PackingOptions]:
        if self.across_hosts is None:
            return self.algorithm, self.packing
        return self.across_hosts.packing_for(self.algorithm, self.packing, topology, specs)


@functools.lru_cache(maxsize=256)
def on_root(root: str, accumulate: Accumulate | None, **common: Any) -> AllReduceConfig:
    """Returns the config that reduces on one device; `common` are other attributes of it."""
    one_pack = PackingOptions(1)
    return AllReduceConfig("one_device", one_pack, root=root, accumulate=accumulate, **common)


@functools.lru_cache(maxsize=256)
def along_star(num_devices: int, root: int, **common: Any) -> AllReduceConfig:
    """Returns the config that reduces along a star; `common` are other attributes of it."""
    return AllReduceConfig((copy_tree.star(num_devices, root),), PackingOptions(1), **common)


def check_algorithm(algorithm: Any) -> str | tuple[CopyTree, ...]:
    """Returns the argument `all_reduce_alg`: a known name, or copy trees.

    Raises:
      ValueError: if it is neither.
    """
    trees = tuple(algorithm) if isinstance(algorithm, Sequence) else ()
    if trees and all(isinstance(tree, CopyTree) for tree in trees):
        return trees
    known = ("nccl", *algorithms.ALGORITHMS)
    if not isinstance(algorithm, str) or algorithm not in known:
        raise ValueError(
            f"all_reduce_alg must be one of {', '.join(map(repr, known))}, or a list of "
            f"tfcdo.plan.copy_tree.CopyTree; got {algorithm!r}"
        )
    return algorithm


def check_require_nccl(require_nccl: Any, algorithm: Algorithm) -> None:
    """Raises unless the argument `require_nccl` is a bool that fits `all_reduce_alg`.

    Raises:
      TypeError: if it is not a bool.
      ValueError: if it is True and the algorithm is not NCCL.
    """
    if not isinstance(require_nccl, bool):
        raise TypeError(f"require_nccl must be True or False; got {require_nccl!r}")
    if require_nccl and algorithm != "nccl":
        raise ValueError(
            f"require_nccl must be False unless all_reduce_alg is 'nccl'; got all_reduce_alg="
            f"{algorithm!r}, which does not use NCCL"
        )


def read_plan(path: Any) -> SavedPlan:
    """Reads the file that the argument `plan` names.

    Raises:
      TypeError: if it is not a path.
      ValueError: if it is not the file of a plan.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"plan must be the path of a file, or None; got {path!r}")
    try:
        return SavedPlan.read(os.fspath(path))
    except ValueError as error:
        raise ValueError(
            f"plan must be a file that `tfcdo plan --save` has written: {error}"
        ) from None
