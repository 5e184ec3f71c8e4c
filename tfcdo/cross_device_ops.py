"""The classes to pass to `tf.distribute.MirroredStrategy(cross_device_ops=...)`.

Each class chooses how to all-reduce. `tfcdo.plan` makes the packs and copy trees, and
`tfcdo.execute` turns them into ops.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import tensorflow as tf
from typing_extensions import Unpack

from tfcdo import checks
from tfcdo.cluster.protocol import digest
from tfcdo.exchange.casts import CAST_DTYPES, Cast
from tfcdo.execute.base import ConfiguredCrossDeviceOps
from tfcdo.execute.request import check_count, check_device
from tfcdo.plan import algorithms, copy_tree
from tfcdo.plan.algorithms import PackingOptions
from tfcdo.plan.decide import Options
from tfcdo.plan.evaluation import Evaluation
from tfcdo.topology import measurement
from tfcdo.topology.measurement import Measured
from tfcdo.topology.topology import Topology

_T = TypeVar("_T")


class CommonOptions(TypedDict, total=False):
    """The keyword arguments that all classes accept.

    Attributes:
      sparse_as_dense: whether each replica's `tf.IndexedSlices` become a dense tensor first, and
        the result is dense, as in Horovod. False, the default: the result has the rows of all
        replicas one after the other, as one device has them for the whole batch. True sends the
        table once in each direction, instead of the rows of all replicas to each replica. It
        changes the training with Adam, RMSprop, Adagrad and clipping: they square or clip the sum
        of the rows of an index, not each row, and change all rows of the table. Slices without
        `dense_shape` are sent as rows.
      sum_equal_rows: whether rows of the same index are added before they are copied to the
        replicas, as rows or as tables, whichever has fewer bytes; by default False. The result is
        `tf.IndexedSlices` of each index once, sorted. This sends fewer bytes where words repeat. It
        changes the training with optimizers that square or clip rows; SGD without clipping trains
        as on one device.
      wire_dtype: "bfloat16" or "float16" to send float32 and float64 in 16 bits: they are cast
        before each copy to another device and added in their own dtype where they arrive, so that
        only copies are rounded, never partial sums. Replicas stay bitwise identical. None, the
        default, to send values as they are, as integers, complex numbers, 16-bit floats and rows of
        `tf.IndexedSlices` always are. Only gradients are cast: those that a Keras optimizer applies
        under tfcdo's strategies, and batches of several values. Single numbers and values that a
        strategy reduces alone (losses, metrics, statistics, variables) are exact, and values that
        stay on their device. NCCL adds in `wire_dtype` itself.
      error_feedback: whether the rounding errors of a step are added to the gradients of the next
        step, so that over many steps nothing is lost: with all-reduces in a `tf.function`, or
        eagerly in batches of the same shapes; by default False. It is kept in variables, saved by
        `tf.train.Checkpoint(ops=...)` and set to 0 by `reset_error_feedback`. The errors of NCCL's
        additions are not kept.

    Raises:
      ValueError: if `wire_dtype` is another dtype, or None although there is `error_feedback`.
      TypeError: if `sparse_as_dense`, `sum_equal_rows` or `error_feedback` is not a bool, or
        `wire_dtype` not a dtype.

    References:
      Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
      Distributed Training of Speech DNNs", Interspeech 2014; Karimireddy et al., "Error Feedback
      Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.

    Example:
      >>> import tfcdo
      >>> tfcdo.NcclAllReduce(wire_dtype="float16")
      NcclAllReduce(num_packs=1, topology=None, require_nccl=False, wire_dtype='float16')
    """

    sparse_as_dense: bool
    sum_equal_rows: bool
    wire_dtype: str | tf.DType | None
    error_feedback: bool


class AllReduceOptions(CommonOptions, total=False):
    """The keyword arguments that all classes but `ReductionToOneDevice` accept.

    Attributes:
      topology: the machine that the devices are part of, or a file with one, as
        `tfcdo.topology.measure` writes it; None, the default: detect automatically, without
        measurements. NCCL does not use it.

    Raises:
      TypeError: if `topology` is not a topology or a path.
      ValueError: if it is the path of something else; when values are reduced, if it is of another
        number of devices; and both as `CommonOptions`.

    Example:
      >>> import tfcdo
      >>> tfcdo.HierarchicalCopyAllReduce(topology=tfcdo.topology.preset("dgx1"))
      HierarchicalCopyAllReduce(num_packs=1, topology='dgx1')
    """

    topology: Topology | str | os.PathLike[str] | None


class ReductionToOneDevice(ConfiguredCrossDeviceOps):
    """Copies all values to one device, accumulates them there, and copies the result back.

    Args:
      reduce_to_device: the device to reduce on, in any spelling that TensorFlow reads; None for the
        first destination of each reduction.
      accumulation_fn: called with the list of the replicas' tensors, in the order of the replicas,
        on that device; returns their sum or another combination. None for
        `tf.math.add_n`, in 32 bits for 16-bit floats. It does not get `tf.IndexedSlices`. It
        is refused on several hosts.
      **common: see `CommonOptions`.

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
        **common: Unpack[CommonOptions],
    ) -> None:
        chosen = _check_common(self, common, CommonOptions)
        if reduce_to_device is not None:
            check_device("reduce_to_device", reduce_to_device)
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(
                "accumulation_fn must be a callable from a list of tensors to a tensor, or None; "
                f"got {accumulation_fn!r}"
            )
        super().__init__(
            Options("one_device", one_device=True, **chosen), accumulation_fn, reduce_to_device
        )
        self._arguments = {"reduce_to_device": reduce_to_device, "accumulation_fn": accumulation_fn}

    @property
    def compared_among_hosts(self) -> dict[str, str]:
        """Returns the class and its arguments, by name: all hosts must have the same."""
        device = tf.DeviceSpec.from_string(self.reduce_to_device or "")
        # Its job and task are another one on each host.
        name = f"{device.device_type}:{device.device_index or 0}" if device.device_type else "None"
        return {**super().compared_among_hosts, "cross_device_ops.reduce_to_device": name}


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
      num_packs: see above; 0 for no such packing. None for as many as the algorithm needs: 1 for
        "nccl" and "hierarchical_copy", as in TensorFlow; "ring" is then a ring, and "auto" is
        `AutoAllReduce`.
      agg_small_grads_max_bytes: see above.
      agg_small_grads_max_group: see above.
      require_nccl: raise `RuntimeError` where NCCL cannot sum some values, rather than use copy
        trees; only with "nccl". This is not about `tf.IndexedSlices`, which go along copy trees.
      **common: see `AllReduceOptions`.

    Raises:
      ValueError: if a number is negative, the algorithm is unknown, NCCL is required with another
        algorithm, or as `AllReduceOptions`; when values are reduced, if copy trees do not span
        their devices.
      TypeError: if a number is not an int, `require_nccl` not a bool, or as `AllReduceOptions`.

    Example:
      >>> ops = AllReduceCrossDeviceOps("ring", num_packs=4)
      >>> strategy = tf.distribute.MirroredStrategy(["/cpu:0"], cross_device_ops=ops)
    """

    def __init__(
        self,
        all_reduce_alg: str | Sequence[copy_tree.CopyTree] = "nccl",
        num_packs: int | None = None,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        *,
        require_nccl: bool = False,
        **common: Unpack[AllReduceOptions],
    ) -> None:
        chosen = _check_common(self, common, AllReduceOptions)
        algorithm = _check_algorithm(all_reduce_alg)
        checks.check_bool("require_nccl", require_nccl)
        if require_nccl and algorithm != "nccl":
            raise ValueError(
                "require_nccl must be False unless all_reduce_alg is 'nccl'; got all_reduce_alg="
                f"{algorithm!r}, which does not use NCCL"
            )
        if num_packs is None and algorithm in ("nccl", "hierarchical_copy"):
            num_packs = 1
        packing = PackingOptions(
            None if num_packs is None else check_count("num_packs", num_packs),
            check_count("agg_small_grads_max_bytes", agg_small_grads_max_bytes),
            check_count("agg_small_grads_max_group", agg_small_grads_max_group),
        )
        nccl = algorithm == "nccl"
        super().__init__(
            Options(
                "hierarchical_copy" if nccl else algorithm,
                packing,
                nccl="always" if nccl else "auto" if algorithm == "auto" else "never",
                require_nccl=require_nccl,
                **chosen,
            )
        )
        self._arguments = {
            "all_reduce_alg": algorithm,
            "num_packs": num_packs,
            "agg_small_grads_max_bytes": agg_small_grads_max_bytes,
            "agg_small_grads_max_group": agg_small_grads_max_group,
            "topology": self._options.topology,
            "require_nccl": require_nccl,
        }


class NcclAllReduce(AllReduceCrossDeviceOps):
    """All-reduces with NCCL, NVIDIA's library for its GPUs.

    Where NCCL cannot run (see `tfcdo.nccl_status`), the reason is logged once and the values go
    along the copy trees of `HierarchicalCopyAllReduce`.

    NCCL adds in the dtype that it sends. With `wire_dtype="float16"` partial sums are therefore
    rounded to 16 bits, up to K - 1 times on K devices; one scale for all devices, which a small
    all-reduce finds, keeps the sum from overflowing. TensorFlow's op does not take bfloat16: with
    that, values go along the copy trees.

    Args:
      num_packs: into how many packs all values of one dtype are cut; 0 for one pack per value.
      require_nccl: raise `RuntimeError`, when values are reduced, instead of using copy trees.
      **common: see `AllReduceOptions`.

    Raises:
      ValueError: if `num_packs` is negative, or as `AllReduceCrossDeviceOps`.
      TypeError: if `num_packs` is not an int, `topology` not a topology or `require_nccl` not a
        bool, or as `AllReduceCrossDeviceOps`.

    Example:
      >>> strategy = tf.distribute.MirroredStrategy(["/cpu:0"], cross_device_ops=NcclAllReduce())
    """

    def __init__(
        self, num_packs: int = 1, *, require_nccl: bool = False, **common: Unpack[AllReduceOptions]
    ) -> None:
        _check_names(self, common, AllReduceOptions)
        num_packs = check_count("num_packs", num_packs)
        super().__init__("nccl", num_packs, require_nccl=require_nccl, **common)
        self._arguments = {
            "num_packs": num_packs,
            "topology": self._options.topology,
            "require_nccl": require_nccl,
        }


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """Reduces to one device along the edges of a hierarchy, and copies back along the same path.

    Each pack has a copy tree of two levels: the devices are in two groups, each group is summed on
    one of its devices, and one edge joins the two. The roots of the packs are spread over the
    devices. On 8 devices these are the trees that fit a DGX-1; on any other number, odd ones too,
    they are of the same kind and leave no device out.

    Args:
      num_packs: into how many packs all values of one dtype are cut; 0 for one pack per value.
      **common: see `AllReduceOptions`.

    Raises:
      ValueError: if `num_packs` is negative, or as `AllReduceCrossDeviceOps`.
      TypeError: if `num_packs` is not an int, or `topology` not a topology, or as
        `AllReduceCrossDeviceOps`.

    Example:
      >>> strategy = tf.distribute.MirroredStrategy(
      ...     ["/cpu:0"], cross_device_ops=HierarchicalCopyAllReduce(num_packs=2))
    """

    def __init__(self, num_packs: int = 1, **common: Unpack[AllReduceOptions]) -> None:
        _check_names(self, common, AllReduceOptions)
        num_packs = check_count("num_packs", num_packs)
        super().__init__("hierarchical_copy", num_packs, **common)
        self._arguments = {"num_packs": num_packs, "topology": self._options.topology}


class AutoAllReduce(AllReduceCrossDeviceOps):
    """All-reduces in the way that is fastest on this machine for each size.

    NCCL is used where it can run, unless a measurement that is given as `topology` says that copy
    trees are faster for that size. Otherwise all known algorithms are simulated on the topology,
    once per size, and the fastest gives the number of packs, their sizes and their trees. The
    choice and its reason are logged.

    Args:
      plan: the path of a plan that `tfcdo plan --save` has written for this machine, whose copy
        trees are used for all sizes; None to plan here. With a plan, NCCL is not used.
      nccl: whether NCCL may be taken; False keeps to copy trees. So does a `wire_dtype`, in which
        NCCL would also add.
      **common: see `AllReduceOptions`.

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
        plan: str | os.PathLike[str] | None = None,
        nccl: bool = True,
        **common: Unpack[AllReduceOptions],
    ) -> None:
        _check_names(self, common, AllReduceOptions)
        super().__init__("auto", **common)
        checks.check_bool("nccl", nccl)
        if not nccl:
            self._options = dataclasses.replace(self._options, nccl="never")
        if plan is not None:
            if not isinstance(plan, (str, os.PathLike)):
                raise TypeError(f"plan must be the path of a file, or None; got {plan!r}")
            origin = "`tfcdo plan --save` has written"
            saved = _read_file("plan", plan, Evaluation.from_json, origin)
            self._options = dataclasses.replace(
                self._options, algorithm=saved.plan, nccl="never", saved=saved
            )
        self._arguments = {"topology": self._options.topology, "plan": plan, "nccl": nccl}

    @property
    def compared_among_hosts(self) -> dict[str, str]:
        """Returns the class and its arguments, by name: all hosts must have the same."""
        saved = self._options.saved
        # By its content: its path may be another one on each host.
        content = digest({"plan": saved.to_json()}) if saved else "None"
        return {**super().compared_among_hosts, "cross_device_ops.plan": content}


def _check_names(owner: object, given: Mapping[str, Any], accepted: type[CommonOptions]) -> None:
    """Raises a TypeError for a keyword argument that a class does not accept."""
    for name in given.keys() - accepted.__annotations__.keys():
        raise TypeError(f"{type(owner).__name__}() got an unexpected keyword argument {name!r}")


def _check_common(
    owner: object, given: Mapping[str, Any], accepted: type[CommonOptions]
) -> dict[str, Any]:
    """Checks the keyword arguments that several classes accept; returns fields of `Options`."""
    _check_names(owner, given, accepted)
    for name in ("sparse_as_dense", "sum_equal_rows", "error_feedback"):
        checks.check_bool(name, given.get(name, False))
    wire, feedback = _wire_dtype(given.get("wire_dtype")), given.get("error_feedback", False)
    if feedback and wire is None:
        raise ValueError(
            "error_feedback must be False without wire_dtype, as nothing is rounded then; "
            "got error_feedback=True and wire_dtype=None"
        )
    return {
        "sparse_as_dense": given.get("sparse_as_dense", False),
        "sum_equal_rows": given.get("sum_equal_rows", False),
        "wire": None if wire is None else Cast(wire, feedback),
        "measured": _read_topology(given.get("topology")),
    }


def _wire_dtype(value: Any) -> str | None:
    """Returns the argument `wire_dtype` as a name, or None."""
    names = ", ".join(map(repr, CAST_DTYPES))
    accepted = f"wire_dtype must be {names}, the tf.DType of one of them, or None"
    if value is None:
        return None
    if not isinstance(value, (str, tf.DType)):
        raise TypeError(f"{accepted}; got {value!r}")
    dtype = value if isinstance(value, str) else value.name
    if dtype not in CAST_DTYPES:
        raise ValueError(f"{accepted}; got {value!r}")
    return dtype


def _read_topology(given: Any) -> Measured | None:
    """Returns the argument `topology`, or the file that it names, as a measurement."""
    if given is None:
        return None
    if isinstance(given, Topology):
        return Measured(given, "")
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"topology must be a tfcdo.topology.Topology, the path of a file or None; got {given!r}"
        )
    origin = "tfcdo.topology.measure or Topology.to_json has written"
    return _read_file("topology", given, measurement.parse, origin)


def _check_algorithm(algorithm: Any) -> str | tuple[copy_tree.CopyTree, ...]:
    """Returns the argument `all_reduce_alg`: a known name, or copy trees."""
    trees = tuple(algorithm) if isinstance(algorithm, Sequence) else ()
    if trees and all(isinstance(tree, copy_tree.CopyTree) for tree in trees):
        return trees
    known = ("nccl", *algorithms.ALGORITHMS)
    if not isinstance(algorithm, str) or algorithm not in known:
        raise ValueError(
            f"all_reduce_alg must be one of {', '.join(map(repr, known))}, or a list of "
            f"tfcdo.plan.copy_tree.CopyTree; got {algorithm!r}"
        )
    return algorithm


def _read_file(name: str, path: Any, parse: Callable[[bytes], _T], origin: str) -> _T:
    """Returns the parsed content of the file that an argument names."""
    try:
        return parse(pathlib.Path(path).read_bytes())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{name} must be a file that {origin}: {os.fspath(path)}: {reason}"
        ) from None
