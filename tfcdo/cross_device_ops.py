"""The classes to pass to `tf.distribute.MirroredStrategy(cross_device_ops=...)`.

Each is a choice of how to all-reduce; the work is done by `tfcdo.plan`, which decides what travels
where, and `tfcdo.execute`, which turns that into ops.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf

from tfcdo.execute.auto_choices import with_choices
from tfcdo.execute.base import ConfiguredCrossDeviceOps
from tfcdo.execute.config import AllReduceConfig
from tfcdo.execute.config import SparseAsDense
from tfcdo.execute.config import along_star
from tfcdo.execute.config import check_algorithm
from tfcdo.execute.config import check_require_nccl
from tfcdo.execute.config import on_root
from tfcdo.execute.devices import check_device
from tfcdo.execute.devices import existing_device
from tfcdo.execute.hosts import Hosts
from tfcdo.execute.reduction import Reduction
from tfcdo.execute.reduction import check_count
from tfcdo.plan import copy_tree
from tfcdo.plan.packing import PackingOptions
from tfcdo.topology.topology import Topology

# The algorithms that TensorFlow's class of the same name has.
_TENSORFLOW_ALGORITHMS = ("nccl", "hierarchical_copy")


class ReductionToOneDevice(ConfiguredCrossDeviceOps):
    """Copies all values to one device, accumulates them there, and copies the result back.

    Args:
      reduce_to_device: the device to reduce on, in any spelling that TensorFlow reads; None for the
        first destination of each reduction.
      accumulation_fn: called with the list of the replicas' tensors, in the order of the replicas,
        on that device; returns their sum, or whatever else the caller wants of them. None for
        `tf.math.add_n`, in 32 bits for 16-bit floats. `tf.IndexedSlices` are always added by index.
      sparse_as_dense: how `tf.IndexedSlices` travel; see `AllReduceCrossDeviceOps`.
      wire_dtype: see `AllReduceCrossDeviceOps`. What is on the device already is not rounded, and
        the result only if it is copied from there.
      error_feedback: see `AllReduceCrossDeviceOps`.

    Raises:
      ValueError: if `reduce_to_device` does not spell a device, or as `AllReduceCrossDeviceOps`;
        when values are reduced, if that device does not exist.
      TypeError: if `accumulation_fn` cannot be called, or as `AllReduceCrossDeviceOps`; when values
        are reduced, if it does not return a tensor.

    Example:
      >>> strategy = tf.distribute.MirroredStrategy(
      ...     ["/cpu:0"], cross_device_ops=ReductionToOneDevice(reduce_to_device="/cpu:0"))
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[list[tf.Tensor]], tf.Tensor] | None = None,
        *,
        sparse_as_dense: SparseAsDense = "auto",
        wire_dtype: str | tf.DType | None = None,
        error_feedback: bool = False,
    ) -> None:
        super().__init__(
            reduce_to_device=reduce_to_device,
            accumulation_fn=accumulation_fn,
            sparse_as_dense=sparse_as_dense,
            wire_dtype=wire_dtype,
            error_feedback=error_feedback,
        )
        if reduce_to_device is not None:
            check_device("reduce_to_device", reduce_to_device)
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(
                "accumulation_fn must be a callable from a list of tensors to a tensor, or None; "
                f"got {accumulation_fn!r}"
            )
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    def _config_for(self, options: Any) -> Callable[[Reduction], AllReduceConfig]:
        del options  # What is not packed has no size of packs.
        fixed_root = None
        if self.reduce_to_device is not None:
            fixed_root = existing_device("reduce_to_device", self.reduce_to_device)
        common = self._common_config

        def config_for(reduction: Reduction) -> AllReduceConfig:
            root = fixed_root or reduction.destinations[0]
            accumulates = self.accumulation_fn is not None
            if accumulates or not reduction.is_all_reduce or root not in reduction.devices:
                accumulate = self._accumulate if accumulates else None
                return on_root(root, accumulate, **common)
            # One device is the simplest copy tree: a star, whose centre is that device.
            devices = reduction.devices
            return along_star(len(devices), devices.index(root), **common)

        return config_for

    def _accumulate(self, values: list[tf.Tensor]) -> tf.Tensor:
        """Calls the caller's function and checks what it returns."""
        assert self.accumulation_fn is not None
        total = self.accumulation_fn(values)
        if not isinstance(total, tf.Tensor):
            raise TypeError(f"accumulation_fn must return a tensor; it returned {total!r}")
        return total

    def _between(self, hosts: Hosts) -> ConfiguredCrossDeviceOps:
        if self.accumulation_fn is not None:
            raise ValueError(
                "cross_device_ops must add, to be used between hosts; got a ReductionToOneDevice "
                f"with accumulation_fn={self.accumulation_fn!r}"
            )
        return super()._between(hosts)


class AllReduceCrossDeviceOps(ConfiguredCrossDeviceOps):
    """All-reduces batches of values, packed, along copy trees or with NCCL.

    Before the all-reduce, values are repacked: if `num_packs` > 0, all values of one dtype are laid
    end to end and cut into that many packs; otherwise, if `agg_small_grads_max_bytes` > 0 and
    `agg_small_grads_max_group` > 0, values smaller than that many bytes are put together in groups
    of at most that many values; otherwise each value is a pack of its own.
    `options.bytes_per_pack`, when positive, caps the size of a pack. Reductions that are not
    all-reduces (the result goes elsewhere than to the values' own devices) go to one device and are
    copied from there.

    Args:
      all_reduce_alg: "nccl", or the algorithm that gives the copy trees: "hierarchical_copy" or
        another of `tfcdo.plan.algorithms.ALGORITHMS`; or copy trees of your own, which the packs
        get in turn. Where NCCL cannot run, "nccl" says why, once, and uses "hierarchical_copy".
      num_packs: see above; 0 for no such packing, None for as many packs as the algorithm asks for.
        Left out, it is 1 for TensorFlow's own algorithms, "nccl" and "hierarchical_copy", and None
        for all others: "ring" is then a ring, and "auto" is `AutoAllReduce`.
      agg_small_grads_max_bytes: see above.
      agg_small_grads_max_group: see above.
      topology: the machine that the devices are part of; None to find out.
      require_nccl: raise `RuntimeError` where NCCL cannot sum some values, rather than use copy
        trees; only with "nccl". This is not about `tf.IndexedSlices`, which go along copy trees.
      sparse_as_dense: how `tf.IndexedSlices` travel. "auto": as rows, or, where a replica's rows
        have more bytes than the table, as the table, which is found out when the step runs if not
        before; the result is `tf.IndexedSlices` in both cases, as an optimizer that updates only
        what was touched expects: rows sorted by index, each index once. False: always as rows.
        True: each replica's slices become a dense tensor first, and the result is dense, as in
        Horovod; slices without `dense_shape` cannot, and travel as rows.
      wire_dtype: "bfloat16" or "float16" to send float32 and float64 in 16 bits: they are cast
        before each copy to another device and added in their own dtype where they arrive, so that
        only copies are rounded, never partial sums. Replicas still get the same bits. None to
        send values as they are, as integers, complex numbers, 16-bit floats and
        `tf.IndexedSlices` always are; so are losses, metrics and moving averages: what `reduce`
        gets that is a variable, or for one, or a single number. NCCL adds in `wire_dtype` itself.
      error_feedback: add what the casts of a step lose to the gradients of the next step, so that
        over many steps nothing is lost: with all-reduces in a `tf.function`, or eagerly in batches
        of the same shapes. It is kept in variables, saved by `tf.train.Checkpoint(ops=...)` and set
        to 0 by `reset_error_feedback`. What NCCL loses in its additions is lost.

    Raises:
      ValueError: if a number is negative, the algorithm is unknown, NCCL is required with another
        algorithm, `sparse_as_dense` is none of its values, `wire_dtype` is another dtype, or None
        although there is `error_feedback`; when values are reduced, if copy trees do not span their
        devices.
      TypeError: if a number is not an int, `topology` not a topology, `require_nccl` or
        `error_feedback` not a bool or `wire_dtype` not a dtype.

    References:
      Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
      Distributed Training of Speech DNNs", Interspeech 2014; Karimireddy et al., "Error Feedback
      Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.

    Example:
      >>> ops = AllReduceCrossDeviceOps("ring", num_packs=4)
      >>> strategy = tf.distribute.MirroredStrategy(["/cpu:0"], cross_device_ops=ops)
    """

    def __init__(
        self,
        all_reduce_alg: str | Sequence[copy_tree.CopyTree] = "nccl",
        num_packs: int | Literal["default"] | None = "default",
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        *,
        topology: Topology | None = None,
        require_nccl: bool = False,
        sparse_as_dense: SparseAsDense = "auto",
        wire_dtype: str | tf.DType | None = None,
        error_feedback: bool = False,
    ) -> None:
        all_reduce_alg = check_algorithm(all_reduce_alg)
        if num_packs == "default":
            num_packs = 1 if all_reduce_alg in _TENSORFLOW_ALGORITHMS else None
        super().__init__(
            all_reduce_alg=all_reduce_alg,
            num_packs=num_packs,
            agg_small_grads_max_bytes=agg_small_grads_max_bytes,
            agg_small_grads_max_group=agg_small_grads_max_group,
            topology=topology,
            require_nccl=require_nccl,
            sparse_as_dense=sparse_as_dense,
            wire_dtype=wire_dtype,
            error_feedback=error_feedback,
        )
        if topology is not None and not isinstance(topology, Topology):
            raise TypeError(f"topology must be a tfcdo.topology.Topology or None; got {topology!r}")
        nccl = all_reduce_alg == "nccl"
        check_require_nccl(require_nccl, all_reduce_alg)
        self._config = AllReduceConfig(
            algorithm="hierarchical_copy" if nccl else all_reduce_alg,
            packing=PackingOptions(
                None if num_packs is None else check_count("num_packs", num_packs),
                check_count("agg_small_grads_max_bytes", agg_small_grads_max_bytes),
                check_count("agg_small_grads_max_group", agg_small_grads_max_group),
            ),
            topology=topology,
            nccl="always" if nccl else "auto" if all_reduce_alg == "auto" else "never",
            require_nccl=require_nccl,
        )

    def _config_for(self, options: Any) -> Callable[[Reduction], AllReduceConfig]:
        config = dataclasses.replace(self._config, **self._common_config)
        if options is not None and options.bytes_per_pack:
            most = check_count("options.bytes_per_pack", options.bytes_per_pack)
            packing = dataclasses.replace(config.packing, bytes_per_pack=most)
            config = dataclasses.replace(config, packing=packing)
        return lambda reduction: config


class NcclAllReduce(AllReduceCrossDeviceOps):
    """All-reduces with NCCL, NVIDIA's library for its GPUs.

    Where NCCL cannot run (see `tfcdo.nccl_status`), the reason is logged once and the values go
    along the copy trees of `HierarchicalCopyAllReduce`.

    NCCL adds in the dtype that it sends. With `wire_dtype="float16"` partial sums are therefore
    rounded to 16 bits, up to K - 1 times on K devices; one scale for all devices, which a small
    all-reduce finds, keeps the sum from overflowing. TensorFlow's op does not take bfloat16: with
    that, values go along the copy trees.

    Args:
      num_packs: into how many packs all values of one dtype are cut; 0 for one pack per value, None
        for as many as suit NCCL (one) or the copy trees.
      topology: the machine that the devices are part of; None to find out. Only the copy trees use
        it.
      require_nccl: raise `RuntimeError`, when values are reduced, instead of using copy trees.
      sparse_as_dense: how `tf.IndexedSlices` travel; see `AllReduceCrossDeviceOps`.
      wire_dtype: see `AllReduceCrossDeviceOps`.
      error_feedback: the same.

    Raises:
      ValueError: if `num_packs` is negative, or as `AllReduceCrossDeviceOps`.
      TypeError: if `num_packs` is not an int, `topology` not a topology or `require_nccl` not a
        bool, or as `AllReduceCrossDeviceOps`.

    Example:
      >>> strategy = tf.distribute.MirroredStrategy(["/cpu:0"], cross_device_ops=NcclAllReduce())
    """

    def __init__(
        self,
        num_packs: int | None = 1,
        *,
        topology: Topology | None = None,
        require_nccl: bool = False,
        sparse_as_dense: SparseAsDense = "auto",
        wire_dtype: str | tf.DType | None = None,
        error_feedback: bool = False,
    ) -> None:
        super().__init__(
            "nccl",
            num_packs,
            topology=topology,
            require_nccl=require_nccl,
            sparse_as_dense=sparse_as_dense,
            wire_dtype=wire_dtype,
            error_feedback=error_feedback,
        )
        self._show("num_packs", "topology", "require_nccl")


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """Reduces to one device along the edges of a hierarchy, and copies back along the same path.

    Each pack has a copy tree of two levels: the devices are in two groups, each group is summed on
    one of its devices, and one edge joins the two. The roots of the packs are spread over the
    devices. On 8 devices these are the trees that fit a DGX-1; on any other number, odd ones too,
    they are of the same kind and leave no device out.

    Args:
      num_packs: into how many packs all values of one dtype are cut; 0 for one pack per value, None
        for one pack per device.
      topology: the machine that the devices are part of; None to find out.
      sparse_as_dense: how `tf.IndexedSlices` travel; see `AllReduceCrossDeviceOps`.
      wire_dtype: see `AllReduceCrossDeviceOps`.
      error_feedback: the same.

    Raises:
      ValueError: if `num_packs` is negative, or as `AllReduceCrossDeviceOps`.
      TypeError: if `num_packs` is not an int, or `topology` not a topology, or as
        `AllReduceCrossDeviceOps`.

    Example:
      >>> strategy = tf.distribute.MirroredStrategy(
      ...     ["/cpu:0"], cross_device_ops=HierarchicalCopyAllReduce(num_packs=2))
    """

    def __init__(
        self,
        num_packs: int | None = 1,
        *,
        topology: Topology | None = None,
        sparse_as_dense: SparseAsDense = "auto",
        wire_dtype: str | tf.DType | None = None,
        error_feedback: bool = False,
    ) -> None:
        super().__init__(
            "hierarchical_copy",
            num_packs,
            topology=topology,
            sparse_as_dense=sparse_as_dense,
            wire_dtype=wire_dtype,
            error_feedback=error_feedback,
        )
        self._show("num_packs", "topology")


class AutoAllReduce(AllReduceCrossDeviceOps):
    """All-reduces in the way that is fastest on this machine for the size at hand.

    Where NCCL can run it does, unless a measurement of this machine (`tfcdo.topology.measure`) says
    that copy trees are faster for that size. Otherwise all known algorithms are simulated on the
    topology, once per size, and the fastest gives the number of packs, their sizes and their trees.
    What is chosen, and why, is logged.

    Args:
      topology: the machine that the devices are part of; None to find out.
      plan: the path of a plan that `tfcdo plan --save` has written for this machine, whose copy
        trees are used for all sizes; None to plan here. With a plan, NCCL is not used.
      nccl: whether NCCL may be taken; False keeps to copy trees. So does a `wire_dtype`, in which
        NCCL would also add.
      sparse_as_dense: how `tf.IndexedSlices` travel; see `AllReduceCrossDeviceOps`.
      wire_dtype: see `AllReduceCrossDeviceOps`.
      error_feedback: the same.

    Raises:
      TypeError: if `topology` is not a topology, `plan` is not a path, `nccl` is not a bool,
        or as `AllReduceCrossDeviceOps`.
      ValueError: if `plan` is not the file of a plan, or as `AllReduceCrossDeviceOps`; when values
        are reduced, if it is a plan for another machine or number of devices.

    References:
      Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020 (packing
      spanning trees); Cai et al., "Synthesizing Optimal Collective Algorithms", PPoPP 2021.

    Example:
      >>> strategy = tf.distribute.MirroredStrategy(["/cpu:0"], cross_device_ops=AutoAllReduce())
    """

    def __init__(
        self,
        *,
        topology: Topology | None = None,
        plan: str | os.PathLike[str] | None = None,
        nccl: bool = True,
        sparse_as_dense: SparseAsDense = "auto",
        wire_dtype: str | tf.DType | None = None,
        error_feedback: bool = False,
    ) -> None:
        super().__init__(
            "auto",
            topology=topology,
            sparse_as_dense=sparse_as_dense,
            wire_dtype=wire_dtype,
            error_feedback=error_feedback,
        )
        self._arguments.update(plan=plan, nccl=nccl)
        self._show("topology", "plan", "nccl")
        self._config = with_choices(self._config, plan, nccl)
