"""The classes to pass to `tf.distribute.MirroredStrategy(cross_device_ops=...)`.

Each is a choice of how to all-reduce; the work is done by `tfcdo.plan`, which decides what travels
where, and `tfcdo.execute`, which turns that into ops.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.execute import batch
from tfcdo.execute import gather
from tfcdo.execute import one_device
from tfcdo.execute.hosts import Hosts
from tfcdo.execute.reduction import Reduction
from tfcdo.execute.reduction import check_broadcast
from tfcdo.execute.reduction import check_choice
from tfcdo.execute.reduction import check_count
from tfcdo.execute.reduction import check_device
from tfcdo.execute.reduction import check_gather
from tfcdo.execute.reduction import check_numeric
from tfcdo.execute.reduction import check_options
from tfcdo.execute.reduction import check_pair
from tfcdo.execute.reduction import check_pairs
from tfcdo.execute.reduction import check_reduce_op
from tfcdo.execute.reduction import devices_of
from tfcdo.execute.reduction import existing_device
from tfcdo.plan import algorithms
from tfcdo.plan import packing
from tfcdo.plan.batch_plan import UNKNOWN
from tfcdo.topology.topology import Topology

# A tf.function rewrites the Python that it calls, for tensors in `if` and `for`. There are none
# here, so rewriting all of tfcdo would only make tracing slow.
_as_written = tf.autograph.experimental.do_not_convert


class ReductionToOneDevice(tf.distribute.CrossDeviceOps):
    """Copies all values to one device, accumulates them there, and copies the result back.

    Args:
      reduce_to_device: the device to reduce on, in any spelling that TensorFlow reads; None for the
        first destination of each reduction.
      accumulation_fn: called with the list of the replicas' tensors, in the order of the replicas,
        on that device; returns their sum, or whatever else the caller wants of them. None for
        `tf.math.add_n`, in 32 bits for 16-bit floats. `tf.IndexedSlices` are always joined.

    Raises:
      ValueError: if `reduce_to_device` does not spell a device; when values are reduced, if that
        device does not exist.
      TypeError: if `accumulation_fn` cannot be called; when values are reduced, if it returns no
        tensor.

    Example:
      >>> strategy = tf.distribute.MirroredStrategy(
      ...     ["/cpu:0"], cross_device_ops=ReductionToOneDevice(reduce_to_device="/cpu:0"))
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[list[tf.Tensor]], tf.Tensor] | None = None,
    ) -> None:
        super().__init__()
        if reduce_to_device is not None:
            check_device("reduce_to_device", reduce_to_device)
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(
                "accumulation_fn must be a callable from a list of tensors to a tensor, or None; "
                f"got {accumulation_fn!r}"
            )
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn
        self._hosts: Hosts | None = None

    @_as_written
    def reduce(
        self,
        reduce_op: tf.distribute.ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: Any = None,
    ) -> Any:
        """See `AllReduceCrossDeviceOps.reduce`."""
        return self.reduce_implementation(reduce_op, per_replica_value, destinations, options)

    @_as_written
    def batch_reduce(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """See `AllReduceCrossDeviceOps.batch_reduce`."""
        return self.batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    def reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: Any,
    ) -> Any:
        """Reduces one value; see `reduce`."""
        check_reduce_op(reduce_op)
        check_options(options)
        return self._reduce(reduce_op, [check_pair(per_replica_value, destinations)])[0]

    def batch_reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: Any,
    ) -> list[Any]:
        """Reduces several values; see `batch_reduce`."""
        check_reduce_op(reduce_op)
        check_options(options)
        return self._reduce(reduce_op, check_pairs(value_destination_pairs))

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to each destination; see `broadcast`."""
        return _broadcast(tensor, destinations)

    def _gather_implementation(
        self, per_replica_value: Any, destinations: Any, axis: Any, options: Any
    ) -> Any:
        check_options(options)
        reduction = _placed(check_gather(per_replica_value, destinations, axis), self._hosts)
        root = self._root_of()(reduction)
        return _gather_on_one_device(reduction, axis, root, self._hosts)

    @property
    def _num_between_graph_workers(self) -> int:
        return self._hosts.count if self._hosts else 1

    def _between(self, hosts: Hosts) -> ReductionToOneDevice:
        """Returns the same ops for several hosts that reduce together."""
        if self.accumulation_fn is not None:
            raise ValueError(
                "cross_device_ops must add, to be used between hosts; got a ReductionToOneDevice "
                f"with accumulation_fn={self.accumulation_fn!r}"
            )
        ops = copy.copy(self)
        ops._hosts = hosts
        return ops

    def _reduce(
        self, reduce_op: tf.distribute.ReduceOp, reductions: Sequence[Reduction]
    ) -> list[Any]:
        root_of = self._root_of()
        # What an accumulation_fn makes of other dtypes is its own business, unless it is divided.
        if self.accumulation_fn is None or reduce_op == tf.distribute.ReduceOp.MEAN:
            check_numeric(reductions)
        if self.accumulation_fn is None:
            return batch.reduce_on_roots(reduce_op, reductions, root_of, self._hosts)
        return [
            batch.reduce_on_one_device(
                reduction,
                root_of(reduction),
                self._accumulate,
                batch.final_op_for(reduce_op, reduction),
            )
            for reduction in reductions
        ]

    def _accumulate(self, values: list[tf.Tensor]) -> tf.Tensor:
        """Calls the caller's function and checks what it returns."""
        assert self.accumulation_fn is not None
        total = self.accumulation_fn(values)
        if not isinstance(total, tf.Tensor):
            raise TypeError(f"accumulation_fn must return a tensor; it returned {total!r}")
        return total

    def _root_of(self) -> Callable[[Reduction], str]:
        """What tells the device that a value is reduced on."""
        if self.reduce_to_device is None:
            return lambda reduction: reduction.destinations[0]
        root = existing_device("reduce_to_device", self.reduce_to_device)
        return lambda reduction: root


class AllReduceCrossDeviceOps(tf.distribute.CrossDeviceOps):
    """All-reduces batches of values, packed, along copy trees or with NCCL.

    Before the all-reduce, values are repacked:
      1. if `num_packs` > 0, all values of one dtype are laid end to end and cut into that many
         packs;
      2. otherwise, if `agg_small_grads_max_bytes` > 0 and `agg_small_grads_max_group` > 0, values
         smaller than that many bytes are put together in groups of at most that many values;
      3. otherwise each value is a pack of its own.
    `options.bytes_per_pack`, when positive, caps the size of a pack. Reductions that are not
    all-reduces (the result goes elsewhere than to the values' own devices) go to one device and are
    copied from there.

    Args:
      all_reduce_alg: "nccl", or the algorithm that gives the copy trees: "hierarchical_copy" or
        another of `tfcdo.plan.algorithms.ALGORITHMS`. Where NCCL cannot run, "nccl" says why, once,
        and uses "hierarchical_copy".
      num_packs: see above; 0 for no such packing.
      agg_small_grads_max_bytes: see above.
      agg_small_grads_max_group: see above.
      topology: the machine that the devices are part of; None to find out.
      require_nccl: raise `RuntimeError` where "nccl" is asked for and NCCL cannot sum some values,
        rather than use copy trees. `tf.IndexedSlices` are never summed, so this is not about them.

    Raises:
      ValueError: if a number is negative or the algorithm is unknown.
      TypeError: if a number is not an int, `topology` not a topology or `require_nccl` not a bool.

    Example:
      >>> ops = AllReduceCrossDeviceOps("ring", num_packs=4)
      >>> strategy = tf.distribute.MirroredStrategy(["/cpu:0"], cross_device_ops=ops)
    """

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        *,
        topology: Topology | None = None,
        require_nccl: bool = False,
    ) -> None:
        super().__init__()
        check_choice("all_reduce_alg", all_reduce_alg, ("nccl", *algorithms.ALGORITHMS))
        if topology is not None and not isinstance(topology, Topology):
            raise TypeError(f"topology must be a tfcdo.topology.Topology or None; got {topology!r}")
        if not isinstance(require_nccl, bool):
            raise TypeError(f"require_nccl must be True or False; got {require_nccl!r}")
        nccl = all_reduce_alg == "nccl"
        self._config = batch.AllReduceConfig(
            algorithm="hierarchical_copy" if nccl else all_reduce_alg,
            packing=packing.PackingOptions(
                check_count("num_packs", num_packs),
                check_count("agg_small_grads_max_bytes", agg_small_grads_max_bytes),
                check_count("agg_small_grads_max_group", agg_small_grads_max_group),
            ),
            topology=topology,
            nccl=nccl,
            require_nccl=require_nccl,
        )

    @_as_written
    def reduce(
        self,
        reduce_op: tf.distribute.ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: Any = None,
    ) -> Any:
        """Reduces one value to its destinations.

        Args:
          reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`.
          per_replica_value: a `tf.distribute.DistributedValues`, or a tensor.
          destinations: a `tf.distribute.DistributedValues`, variable, tensor or device name; the
            result goes to its devices. Give the value itself to all-reduce. A variable is not
            updated.
          options: a `tf.distribute.experimental.CommunicationOptions`; `bytes_per_pack` is used.

        Returns:
          A `Mirrored` with one component per destination device, or a tensor for one device; dtype
          and shape as given, but for the MEAN of integers, which is a float.

        Raises:
          ValueError: if `reduce_op` is no `ReduceOp`, the replicas differ in dtype or static shape,
            a dtype cannot be added, a destination is none, or the topology is of another number of
            devices.
          TypeError: if `options` are none.
          RuntimeError: if `require_nccl` and NCCL cannot sum the value.
        """
        return self.reduce_implementation(reduce_op, per_replica_value, destinations, options)

    @_as_written
    def batch_reduce(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Reduces several values to their destinations.

        Args:
          reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`.
          value_destination_pairs: `(value, destinations)` tuples; each as for `reduce`.
          options: as for `reduce`.

        Returns:
          One result per pair, in order.

        Raises:
          ValueError: as for `reduce`, and if a pair is no 2-tuple; the message names the pair.
        """
        return self.batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    def reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: Any,
    ) -> Any:
        """Reduces one value; see `reduce`."""
        check_reduce_op(reduce_op)
        config = self._config_with(options)
        reduction = check_pair(per_replica_value, destinations)
        return _reduce(reduce_op, [reduction], config)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: Any,
    ) -> list[Any]:
        """Reduces several values together; see `batch_reduce`."""
        check_reduce_op(reduce_op)
        config = self._config_with(options)
        return _reduce(reduce_op, check_pairs(value_destination_pairs), config)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to each destination; see `broadcast`."""
        return _broadcast(tensor, destinations)

    def _gather_implementation(
        self, per_replica_value: Any, destinations: Any, axis: Any, options: Any
    ) -> Any:
        check_options(options)
        hosts = self._config.across_hosts
        reduction = _placed(check_gather(per_replica_value, destinations, axis), hosts)
        self._config.check_topology([reduction])
        if not reduction.is_all_reduce:
            return _gather_on_one_device(reduction, axis, reduction.destinations[0], hosts)
        devices = reduction.devices
        tree = self._config.plan([UNKNOWN], devices).packs[0].tree
        root = devices[tree.root]
        exchange = None if hosts is None else hosts.exchange_gather(root, reduction, axis)
        gathered = gather.all_gather(tree, reduction.values, devices, axis, exchange)
        return batch.to_mirrored(gathered, reduction)

    @property
    def _num_between_graph_workers(self) -> int:
        hosts = self._config.across_hosts
        return hosts.count if hosts else 1

    def _between(self, hosts: Hosts) -> AllReduceCrossDeviceOps:
        """Returns the same ops for several hosts that reduce together."""
        ops = copy.copy(self)
        ops._config = dataclasses.replace(self._config, across_hosts=hosts)
        return ops

    def _config_with(self, options: Any) -> batch.AllReduceConfig:
        check_options(options)
        if options is None or not options.bytes_per_pack:
            return self._config
        most = check_count("options.bytes_per_pack", options.bytes_per_pack)
        packs = dataclasses.replace(self._config.packing, bytes_per_pack=most)
        return dataclasses.replace(self._config, packing=packs)


class NcclAllReduce(AllReduceCrossDeviceOps):
    """All-reduces with NCCL, NVIDIA's library for its GPUs.

    Where NCCL cannot run (see `tfcdo.nccl_status`), the reason is logged once and the values go
    along the copy trees of `HierarchicalCopyAllReduce`.

    Args:
      num_packs: into how many packs all values of one dtype are cut; 0 for one pack per value.
      topology: the machine that the devices are part of; None to find out. Only the copy trees use
        it.
      require_nccl: raise `RuntimeError`, when values are reduced, instead of using copy trees.

    Raises:
      ValueError: if `num_packs` is negative.
      TypeError: if `num_packs` is not an int, `topology` not a topology or `require_nccl` not a
        bool.

    Example:
      >>> strategy = tf.distribute.MirroredStrategy(["/cpu:0"], cross_device_ops=NcclAllReduce())
    """

    def __init__(
        self,
        num_packs: int = 1,
        *,
        topology: Topology | None = None,
        require_nccl: bool = False,
    ) -> None:
        super().__init__("nccl", num_packs, topology=topology, require_nccl=require_nccl)


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """Reduces to one device along the edges of a hierarchy, and copies back along the same path.

    Each pack has a copy tree of two levels: the devices are in two groups, each group is summed on
    one of its devices, and one edge joins the two. The roots of the packs are spread over the
    devices. On 8 devices these are the trees that fit a DGX-1; on any other number, odd ones too,
    they are of the same kind and leave no device out.

    Args:
      num_packs: into how many packs all values of one dtype are cut; 0 for one pack per value.
      topology: the machine that the devices are part of; None to find out.

    Raises:
      ValueError: if `num_packs` is negative.
      TypeError: if `num_packs` is not an int, or `topology` not a topology.

    Example:
      >>> strategy = tf.distribute.MirroredStrategy(
      ...     ["/cpu:0"], cross_device_ops=HierarchicalCopyAllReduce(num_packs=2))
    """

    def __init__(self, num_packs: int = 1, *, topology: Topology | None = None) -> None:
        super().__init__("hierarchical_copy", num_packs, topology=topology)


class AutoAllReduce(AllReduceCrossDeviceOps):
    """All-reduces along the copy trees that are fastest on this machine for the size at hand.

    All known algorithms are simulated on the topology, once per size, and the fastest gives the
    number of packs, their sizes and their trees.

    Args:
      topology: the machine that the devices are part of; None to find out.

    Raises:
      TypeError: if `topology` is not a topology.

    References:
      Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020 (packing
      spanning trees); Cai et al., "Synthesizing Optimal Collective Algorithms", PPoPP 2021.

    Example:
      >>> strategy = tf.distribute.MirroredStrategy(["/cpu:0"], cross_device_ops=AutoAllReduce())
    """

    def __init__(self, *, topology: Topology | None = None) -> None:
        super().__init__("auto", topology=topology)
        own_packs = dataclasses.replace(self._config.packing, num_packs=None)
        self._config = dataclasses.replace(self._config, packing=own_packs)


def _broadcast(tensor: Any, destinations: Any) -> Any:
    devices = devices_of(destinations)
    return tf_internals.mirrored(one_device.copy_to(check_broadcast(tensor), devices))


def _reduce(
    reduce_op: tf.distribute.ReduceOp,
    reductions: Sequence[Reduction],
    config: batch.AllReduceConfig,
) -> list[Any]:
    check_numeric(reductions)
    return batch.reduce(reduce_op, reductions, config)


def _placed(reduction: Reduction, hosts: Hosts | None) -> Reduction:
    return reduction if hosts is None else hosts.placed(reduction)


def _gather_on_one_device(reduction: Reduction, axis: Any, device: str, hosts: Hosts | None) -> Any:
    with tf.device(device):
        gathered = tf.concat(list(reduction.values), axis)
    if hosts is not None:
        exchange = hosts.exchange_gather(device, reduction, axis)
        gathered = exchange.concat(gathered, axis, device)
    return tf_internals.mirrored(one_device.copy_to(gathered, reduction.destinations))
