"""Hosts that all-reduce together: how they pack a batch, and how they describe it to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.execute import exchange
from tfcdo.execute import handles
from tfcdo.execute import numerics
from tfcdo.execute import shares
from tfcdo.execute import wire
from tfcdo.execute.exchange import Exchange
from tfcdo.execute.reduction import Reduction
from tfcdo.plan.algorithms import Algorithm
from tfcdo.plan.algorithms import fastest_algorithm
from tfcdo.plan.batch_plan import BatchPlan
from tfcdo.plan.batch_plan import PackPlan
from tfcdo.plan.batch_plan import ValueSpec
from tfcdo.plan.packing import PackingOptions
from tfcdo.topology.topology import Topology


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Knows the hosts that all-reduce together, as one of them sees them.

    Attributes:
      network: what joins the hosts.
      devices: this host's devices, one a replica; as many on every host.
      bytes_per_pack: the most bytes that a pack has where the caller does not say.
      flat: whether dense values are all-reduced over all devices of all hosts by one collective,
        which NCCL does best, as it knows the whole machine; not along copy trees in each host.
      wire: the dtype that packs of float32 and float64 are cast to between hosts; None for none.
    """

    network: exchange.Network
    devices: tuple[str, ...]
    bytes_per_pack: int
    flat: bool = False
    wire: tf.DType | None = None

    @property
    def count(self) -> int:
        """Returns the number of hosts."""
        return self.network.num_hosts

    def runs_flat(self, reduction: Reduction) -> bool:
        """Returns whether a dense all-reduce runs as one collective over all hosts' devices."""
        return self.flat and len(reduction.values) == len(self.devices)

    def placed(self, reduction: Reduction) -> Reduction:
        """Returns a reduction with the devices filled in that are not known while tracing."""
        return dataclasses.replace(
            reduction,
            devices=self._filled(reduction.devices),
            destinations=self._filled(reduction.destinations),
            num_hosts=self.count,
        )

    def _filled(self, known: Sequence[str]) -> tuple[str, ...]:
        """Takes one value a replica to be on the replicas' devices, anything else on the CPU."""
        usual = self.devices
        if len(known) != len(self.devices):
            usual = (self.network.host_device,) * len(known)
        return tuple(device or default for device, default in zip(known, usual, strict=True))

    def packing_for(
        self,
        algorithm: Algorithm,
        options: PackingOptions,
        topology: Topology,
        specs: Sequence[ValueSpec],
    ) -> tuple[Algorithm, PackingOptions]:
        """Returns how to pack what crosses a network: in packs that begin to leave early.

        Args:
          algorithm: how to pack and reduce inside a host.
          options: the same.
          topology: this host's devices and their links.
          specs: what is known of the values.

        Returns:
          Both for several hosts: packs of limited size, whose trees have the devices as roots in
          turn, so that the way out of each device carries its share.
        """
        if algorithm == "auto":
            num_bytes = sum((spec.size or 0) * spec.itemsize for spec in specs)
            algorithm = fastest_algorithm(topology, num_bytes, topology.num_devices)
            # Where one device is as good as another, they still take turns.
            algorithm = "shuffle" if algorithm == "one_device" else algorithm
        num_packs = 1 if options.num_packs is None else options.num_packs
        most = options.bytes_per_pack or self.bytes_per_pack
        return algorithm, dataclasses.replace(options, num_packs=num_packs, bytes_per_pack=most)

    def wire_for(self, reduction: Reduction) -> tf.DType | None:
        """Returns the dtype that all-reduced values are cast to between hosts; None for none."""
        if self.wire is None or reduction.is_sparse or reduction.is_exact:
            return None
        casts = reduction.is_all_reduce and wire.is_cast(reduction.values[0].dtype)
        return self.wire if casts else None

    def exchange_packs(
        self,
        plan: BatchPlan,
        group: Sequence[Reduction],
        final_op: numerics.FinalOp,
        wire_dtype: tf.DType | None = None,
    ) -> Exchange:
        """Begins the exchange of dense values: one collective a pack, or two where it is cast."""
        devices = group[0].devices
        packs = [_describe_pack(pack, devices) for pack in plan.packs]
        what = "all-reduce over all devices" if self.flat else "all-reduce"
        description = {**_describe(what, group, final_op), "packs": packs}
        itemsize = group[0].values[0].dtype.size
        wires = [_unless_small(wire_dtype, _num_elements(pack), itemsize) for pack in plan.packs]
        return self.network.exchange_sums(description, wires)

    def exchange_slices(
        self, root: str, group: Sequence[Reduction], final_op: numerics.FinalOp
    ) -> Exchange:
        """Begins the exchange of slices of one dtype: rows and indices are gathered."""
        description = {
            **_describe("all-reduce of slices", group, final_op),
            "roots": [handles.device_number(root)],
        }
        rows = numerics.dtype_of_sum(group[0].values[0].dtype)
        # One to gather how many there are, one for the indices, and one for the rows.
        dtypes = {wire.dtype_copied(dtype) for dtype in (rows, tf.int64)}
        return self.network.exchange(description, 1 + len(dtypes))

    def exchange_on(
        self,
        root: str,
        reduction: Reduction,
        final_op: numerics.FinalOp,
        wire_dtype: tf.DType | None = None,
    ) -> Exchange:
        """Begins the exchange of a value that is reduced on one device."""
        if reduction.is_sparse:
            return self.exchange_slices(root, [reduction], final_op)
        description = {
            **_describe("reduction", [reduction], final_op),
            "roots": [handles.device_number(root)],
        }
        value = reduction.values[0]
        cast = _unless_small(wire_dtype, value.shape.num_elements(), value.dtype.size)
        return self.network.exchange_sums(description, [cast])

    def exchange_gather(self, root: str, group: Sequence[Reduction], axis: Any) -> Exchange:
        """Begins the exchange of values that are concatenated, those of a dtype together.

        Raises:
          ValueError: if a dtype, such as that of strings, cannot be gathered between hosts.
        """
        values = [reduction.values[0] for reduction in group]
        _check_gathered(values)
        fixed = tf.get_static_value(axis)
        description = {
            "what": "gathering",
            "values": [f"{value.dtype.name} of rank {value.shape.rank}" for value in values],
            "axis": None if fixed is None else int(fixed),
            "replicas of a host": len(group[0].values),
            "roots": [handles.device_number(root)],
        }
        dtypes = {wire.dtype_copied(value.dtype) for value in values}
        return self.network.exchange(description, 1 + len(dtypes))


def _check_gathered(values: Sequence[tf.Tensor]) -> None:
    """Raises `ValueError` unless collectives take all values: what has begun has to end."""
    taken = tf_internals.dtypes_of_op("CollectiveGatherV2", "T")
    for value in values:
        if wire.dtype_copied(value.dtype) not in taken:
            raise ValueError(
                "value must be of a dtype that TensorFlow gathers between hosts; got "
                f"{value.dtype.name}"
            )


def _describe(what: str, group: Sequence[Reduction], final_op: numerics.FinalOp) -> dict[str, Any]:
    return {
        "what": what,
        "values": [_describe_value(reduction.values[0]) for reduction in group],
        "mean over": final_op.divisor,
        "replicas of a host": len(group[0].values),
    }


def _describe_value(value: Any) -> str:
    if isinstance(value, tf.IndexedSlices):
        # The rows' number is free, and so is whether it is known while tracing.
        return f"rows of {value.dtype.name} of rank {value.values.shape.rank}"
    return exchange.describe(value)


def _describe_pack(pack: PackPlan, devices: Sequence[str]) -> str:
    total, root = _num_elements(pack), devices[pack.tree.root]
    return f"{'?' if total is None else total} elements on {handles.device_number(root)}"


def _num_elements(pack: PackPlan) -> int | None:
    """Returns how many elements a pack has; None if that is not known while tracing."""
    slices = [part for fused in pack.fused_tensors for part in fused.slices]
    known = all(part.stop is not None for part in slices)
    return sum(part.size for part in slices) if known else None


def _unless_small(wire_dtype: tf.DType | None, size: int | None, itemsize: int) -> tf.DType | None:
    """Returns the dtype to cast so many values to; None for few of them."""
    return None if size is not None and size * itemsize < shares.MIN_BYTES else wire_dtype
