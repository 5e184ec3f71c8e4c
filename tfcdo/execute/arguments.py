"""The arguments of the cross-device ops: those that all classes accept, and the checks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import tensorflow as tf

from tfcdo import checks
from tfcdo.exchange.casts import CAST_DTYPES, Cast
from tfcdo.plan import algorithms, copy_tree
from tfcdo.plan.evaluation import Evaluation
from tfcdo.topology import measurement
from tfcdo.topology.measurement import Measured
from tfcdo.topology.topology import Topology


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
        default, to send values as they are, as integers, complex numbers, 16-bit floats and
        `tf.IndexedSlices` always are. Only gradients are cast: batches of several values. Single
        numbers and values that a strategy reduces alone (losses, metrics, statistics of
        synchronized layers, variables) are exact. NCCL adds in `wire_dtype` itself. On one device,
        the values that are on it are exact, and the result only if it is copied from there.
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


def check_common(
    owner: object, given: Mapping[str, Any], accepted: type[CommonOptions]
) -> dict[str, Any]:
    """Checks the keyword arguments that several classes accept; returns fields of `Options`."""
    for name in given.keys() - accepted.__annotations__.keys():
        raise TypeError(f"{type(owner).__name__}() got an unexpected keyword argument {name!r}")
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
        "measured": read_topology(given.get("topology")),
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


def read_topology(given: Any) -> Measured | None:
    """Returns the argument `topology`, or the file that it names, as a measurement."""
    if given is None:
        return None
    if isinstance(given, Topology):
        return Measured(given, "")
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"topology must be a tfcdo.topology.Topology, the path of a file or None; got {given!r}"
        )
    try:
        return measurement.read(given)
    except ValueError as error:
        raise ValueError(
            "topology must be a file that tfcdo.topology.measure or Topology.to_json has written: "
            f"{error}"
        ) from None


def check_algorithm(algorithm: Any) -> str | tuple[copy_tree.CopyTree, ...]:
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


def read_plan(path: Any) -> Evaluation:
    """Reads the file that the argument `plan` names."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"plan must be the path of a file, or None; got {path!r}")
    try:
        return Evaluation.read(os.fspath(path))
    except ValueError as error:
        raise ValueError(
            f"plan must be a file that `tfcdo plan --save` has written: {error}"
        ) from None
