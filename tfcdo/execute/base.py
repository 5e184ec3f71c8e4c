"""The base of all classes: what they share, from a caller's arguments to a batch that is run."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.execute import batch
from tfcdo.execute import explanation
from tfcdo.execute import one_device
from tfcdo.execute.config import AllReduceConfig
from tfcdo.execute.config import SparseAsDense
from tfcdo.execute.devices import devices_of
from tfcdo.execute.explanation import Explanation
from tfcdo.execute.feedback import ErrorFeedback
from tfcdo.execute.hosts import Hosts
from tfcdo.execute.reduction import Reduction
from tfcdo.execute.reduction import check_broadcast
from tfcdo.execute.reduction import check_error_feedback
from tfcdo.execute.reduction import check_gather
from tfcdo.execute.reduction import check_lone_pair
from tfcdo.execute.reduction import check_numeric
from tfcdo.execute.reduction import check_options
from tfcdo.execute.reduction import check_pairs
from tfcdo.execute.reduction import check_reduce_op
from tfcdo.execute.reduction import check_sparse_as_dense
from tfcdo.execute.reduction import check_topology
from tfcdo.execute.travel import Wire
from tfcdo.execute.wire import check_wire_dtype
from tfcdo.topology.topology import Topology

# A tf.function rewrites the Python that it calls, for tensors in `if` and `for`. There are none
# here, so rewriting all of tfcdo would only make tracing slow.
_as_written = tf.autograph.experimental.do_not_convert


class ConfiguredCrossDeviceOps(tf.distribute.CrossDeviceOps, tf_internals.Trackable):
    """Does what all classes share; they differ in the config that they give to each reduction.

    Args:
      sparse_as_dense: see `AllReduceCrossDeviceOps`.
      wire_dtype: the same.
      error_feedback: the same.
      **arguments: the other arguments of the class, for its `repr`.

    Raises:
      ValueError: if `sparse_as_dense` is none of its values, `wire_dtype` is another dtype, or
        there is error feedback without one.
      TypeError: if `wire_dtype` is not a dtype, or `error_feedback` not a bool.
    """

    def __init__(
        self,
        *,
        sparse_as_dense: Any = "auto",
        wire_dtype: Any = None,
        error_feedback: Any = False,
        **arguments: Any,
    ) -> None:
        super().__init__()
        check_sparse_as_dense(sparse_as_dense)
        dtype = check_wire_dtype("wire_dtype", wire_dtype)
        check_error_feedback(error_feedback, dtype)
        # What is seldom asked for is not shown where it is not.
        if sparse_as_dense != "auto":
            arguments.update(sparse_as_dense=sparse_as_dense)
        if dtype is not None:
            arguments.update(wire_dtype=dtype.name, error_feedback=error_feedback)
        self._arguments = arguments
        self._sparse_as_dense: SparseAsDense = sparse_as_dense
        self._wire = Wire(dtype, ErrorFeedback() if error_feedback else None)
        if self._wire.feedback is not None:
            self._track_trackable(self._wire.feedback, "error_feedback")
        self._hosts: Hosts | None = None

    @abc.abstractmethod
    def _config_for(self, options: Any) -> Callable[[Reduction], AllReduceConfig]:
        """Returns a function that says how a value is to be reduced.

        Args:
          options: the checked options of the call.
        """

    @property
    def _common_config(self) -> dict[str, Any]:
        """Returns the attributes of an `AllReduceConfig` that are the same for all classes."""
        return {"across_hosts": self._hosts, "sparse_as_dense": self._sparse_as_dense}

    def _show(self, *names: str) -> None:
        """Leaves all arguments but these and those of all classes out of the `repr`."""
        shown = (*names, "sparse_as_dense", "wire_dtype", "error_feedback")
        self._arguments = {name: self._arguments[name] for name in shown if name in self._arguments}

    @property
    def compared_among_hosts(self) -> str:
        """Returns in words what all hosts have to agree in: the class, and the wire if it casts."""
        name = type(self).__name__
        if self._wire.dtype is None:
            return name
        feedback = self._wire.feedback is not None
        return f"{name} with wire_dtype={self._wire.dtype.name!r}, error_feedback={feedback}"

    def __repr__(self) -> str:
        arguments = ", ".join(
            f"{name}={value.name if isinstance(value, Topology) else value!r}"
            for name, value in self._arguments.items()
        )
        return f"{type(self).__name__}({arguments})"

    @_as_written
    def reduce(
        self,
        reduce_op: tf.distribute.ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: Any = None,
    ) -> Any:
        """Reduces one value to its destinations.

        A plain tensor counts once outside a strategy: its sum is the tensor. In the cross-replica
        context of a strategy of K replicas it stands for K equal values, since `MirroredStrategy`
        passes one plain tensor if all replicas hold the same object: its sum is K times the tensor.

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
          ValueError: if `reduce_op` is not a `ReduceOp`, the replicas differ in dtype or static
            shape, a dtype cannot be added, `destinations` is None, or the topology is of another
            number of devices.
          TypeError: if `options` is neither None nor a `CommunicationOptions`.
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
          ValueError: as for `reduce`, and if a pair is not a 2-tuple; the message names the pair.
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
        check_options(options)
        # A strategy always passes options.
        reduction = check_lone_pair(per_replica_value, destinations, options is not None)
        return self._reduce(reduce_op, [reduction], options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: Any,
    ) -> list[Any]:
        """Reduces several values together; see `batch_reduce`."""
        check_reduce_op(reduce_op)
        check_options(options)
        reductions = check_pairs(value_destination_pairs, options is not None)
        return self._reduce(reduce_op, reductions, options)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to each destination; see `broadcast`."""
        devices = devices_of(destinations)
        return tf_internals.mirrored(one_device.copy_to(check_broadcast(tensor), devices))

    def explain(
        self,
        shapes: Iterable[Any],
        dtype: Any = tf.float32,
        devices: Sequence[str] | None = None,
    ) -> Explanation:
        """Says what all-reducing such a batch would do, without doing it.

        Args:
          shapes: the shape of each value, fully known, in any form that `tf.TensorShape` takes.
          dtype: the dtype of all values.
          devices: the replicas' devices; None for those of the current strategy or, outside a
            strategy, of `tf.distribute.MirroredStrategy()`.

        Returns:
          The algorithm and why, packs, copy trees, bytes between devices and graph ops (but those
          of `error_feedback`); its `str` is made to be read.

        Raises:
          ValueError: if `devices` is empty or holds something that is not a device name, or a shape
            is not fully known; and as `reduce`.
          TypeError: if `shapes` is not a list, or `dtype` is not a dtype.
          RuntimeError: as `reduce`.

        Example:
          >>> ops = HierarchicalCopyAllReduce(num_packs=2)
          >>> ops.explain([(1000,)], devices=["/cpu:0", "/cpu:1"]).num_packs
          2
        """
        # What is explained is not reduced: it has no residuals.
        asked = copy.copy(self)
        asked._wire = Wire(self._wire.dtype)
        return explanation.explain(
            asked, self._config_for(None), asked._wire, shapes, dtype, devices
        )

    def reset_error_feedback(self) -> None:
        """Sets what the casts have lost so far to 0.

        Call it where training begins anew with the same object, as with new weights.

        Raises:
          ValueError: if this object has no `error_feedback`.
        """
        if self._wire.feedback is None:
            raise ValueError(
                f"error_feedback must be True for there to be something to reset; got {self!r}"
            )
        self._wire.feedback.reset()

    def _gather_implementation(
        self, per_replica_value: Any, destinations: Any, axis: Any, options: Any
    ) -> Any:
        return self._batch_gather([(per_replica_value, destinations)], axis, options)[0]

    def _batch_gather(
        self, value_destination_pairs: Sequence[tuple[Any, Any]], axis: Any, options: Any
    ) -> list[Any]:
        """Concatenates several values over the replicas, together."""
        check_options(options)
        reductions = [
            self._placed(check_gather(value, destinations, axis))
            for value, destinations in value_destination_pairs
        ]
        config_for = self._config_for(None)
        configs = [config_for(reduction) for reduction in reductions]
        for reduction, config in zip(reductions, configs, strict=True):
            check_topology(config.topology, reduction)
        return batch.gather_values(reductions, axis, configs)

    def _reduce(
        self, reduce_op: tf.distribute.ReduceOp, reductions: Sequence[Reduction], options: Any
    ) -> list[Any]:
        config_for = self._config_for(options)
        reductions = [self._placed(reduction) for reduction in reductions]
        configs = [config_for(reduction) for reduction in reductions]
        accumulates = any(config.accumulate for config in configs)
        if not accumulates or reduce_op == tf.distribute.ReduceOp.MEAN:
            # What an accumulation_fn makes of other dtypes is its own business until it is divided.
            check_numeric(reductions)
        for reduction, config in zip(reductions, configs, strict=True):
            check_topology(config.topology, reduction)
            if reduction.is_all_reduce:
                config.check_plan(reduction.devices)
        return batch.reduce(reduce_op, reductions, configs, self._wire)

    def _placed(self, reduction: Reduction) -> Reduction:
        return reduction if self._hosts is None else self._hosts.placed(reduction)

    @property
    def _num_between_graph_workers(self) -> int:
        return self._hosts.count if self._hosts else 1

    def _between(self, hosts: Hosts) -> ConfiguredCrossDeviceOps:
        """Returns the same ops for several hosts that reduce together."""
        ops = copy.copy(self)
        ops._hosts = hosts
        return ops
