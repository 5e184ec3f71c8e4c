"""The base of all classes: from a caller's arguments to a plan that is run."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.execute import copy_trees
from tfcdo.execute import explain
from tfcdo.execute import interpreter
from tfcdo.execute import nccl
from tfcdo.execute import question as questioning
from tfcdo.execute import request
from tfcdo.execute.between import Exchange
from tfcdo.execute.between import Network
from tfcdo.execute.codec import check_wire_dtype
from tfcdo.execute.devices import devices_of
from tfcdo.execute.devices import existing_device
from tfcdo.execute.explain import Explanation
from tfcdo.execute.feedback import ErrorFeedback
from tfcdo.execute.feedback import Residuals
from tfcdo.execute.question import Question
from tfcdo.execute.request import Reduction
from tfcdo.plan import decide as deciding
from tfcdo.plan import plan as plans
from tfcdo.plan.decide import BetweenHosts
from tfcdo.plan.decide import Machine
from tfcdo.plan.decide import Options
from tfcdo.plan.plan import Plan
from tfcdo.topology import detection
from tfcdo.topology.topology import Topology

# A tf.function rewrites the Python that it calls, for tensors in `if` and `for`. There are none
# here, so rewriting all of tfcdo would only make tracing slow.
_as_written = tf.autograph.experimental.do_not_convert
_lock = threading.Lock()  # All threads must get the same function for the same residuals.


class ConfiguredCrossDeviceOps(tf.distribute.CrossDeviceOps, tf_internals.Trackable):
    """Does the work that all classes share; they differ in their `Options`.

    Args:
      options: the choices of the class.
      accumulation_fn: combines the values on one device; None to add them.
      reduce_to_device: the device that everything is reduced on; None to choose.
    """

    def __init__(
        self,
        options: Options,
        accumulation_fn: Callable[[list[tf.Tensor]], tf.Tensor] | None = None,
        reduce_to_device: str | None = None,
    ) -> None:
        super().__init__()
        self._options = options
        self._arguments: dict[str, Any] = {}
        self.accumulation_fn = accumulation_fn
        self.reduce_to_device = reduce_to_device
        self._feedback = ErrorFeedback() if options.error_feedback else None
        if self._feedback is not None:
            self._track_trackable(self._feedback, "error_feedback")
        self._network: Network | None = None

    def _show(self, **arguments: Any) -> None:
        """Has the `repr` show these arguments, and those of all classes that are not the default."""
        common = {"sparse_as_dense": self._options.sparse_as_dense, "wire_dtype": self._options.wire}
        if self._options.wire is not None:
            common["error_feedback"] = self._options.error_feedback
        defaults = ("auto", None)
        shown = {name: value for name, value in common.items() if value not in defaults}
        self._arguments = {**arguments, **shown}

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
        request.check_reduce_op(reduce_op)
        request.check_options(options)
        reduction = request.check_lone_pair(per_replica_value, destinations)
        return self._reduce(reduce_op, [reduction], options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: Any,
    ) -> list[Any]:
        """Reduces several values together; see `batch_reduce`."""
        request.check_reduce_op(reduce_op)
        request.check_options(options)
        return self._reduce(reduce_op, request.check_pairs(value_destination_pairs), options)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to each destination; see `broadcast`."""
        devices = devices_of(destinations)
        value = request.check_broadcast(tensor)
        return tf_internals.mirrored([_copied(value, device) for device in devices])

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
          devices: the replicas' devices; None for the current strategy's or, outside a strategy,
            for those of `tf.distribute.MirroredStrategy()`.

        Returns:
          The algorithm and why, packs, copy trees, bytes between devices and hosts, and graph ops;
          its `str` is made to be read.

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
        known = devices if devices is not None or self._network is None else self._network.devices
        return explain.explain(repr(self), shapes, dtype, known, self._plans_of, self._emit)

    def reset_error_feedback(self) -> None:
        """Sets the rounding errors that are kept for the next step to 0.

        Call it where training begins again with the same object, as with new weights.

        Raises:
          ValueError: if this object has no `error_feedback`.
        """
        if self._feedback is None:
            raise ValueError(
                f"error_feedback must be True for there to be something to reset; got {self!r}"
            )
        self._feedback.reset()

    def _gather_implementation(
        self, per_replica_value: Any, destinations: Any, axis: Any, options: Any
    ) -> Any:
        return self._batch_gather([(per_replica_value, destinations)], axis, options)[0]

    def _batch_gather(
        self, value_destination_pairs: Sequence[tuple[Any, Any]], axis: Any, options: Any
    ) -> list[Any]:
        """Concatenates several values over the replicas, together."""
        request.check_options(options)
        reductions = [
            request.check_gather(value, destinations, axis)
            for value, destinations in value_destination_pairs
        ]
        return self._answer("gather", reductions, options, axis)

    def _reduce(
        self, reduce_op: tf.distribute.ReduceOp, reductions: Sequence[Reduction], options: Any
    ) -> list[Any]:
        op: Literal["sum", "mean"] = (
            "mean" if reduce_op == tf.distribute.ReduceOp.MEAN else "sum"
        )
        if self.accumulation_fn is None or op == "mean":
            # An accumulation_fn may take other dtypes, until the result is divided.
            request.check_numeric(reductions)
        return self._answer(op, reductions, options)

    def _answer(
        self, op: str, reductions: Sequence[Reduction], options: Any, axis: Any = None
    ) -> list[Any]:
        """Plans all questions before the first op is created, then runs the plans."""
        results: dict[int, Any] = {}
        for question, plan in self._plans_of(op, reductions, options, axis):
            results.update(self._run(question, plan, axis))
        return [results[position] for position in range(len(reductions))]

    def _plans_of(
        self, op: str, reductions: Sequence[Reduction], options: Any = None, axis: Any = None
    ) -> list[tuple[Question, Plan]]:
        if self._network is not None:
            known = self._network.with_known_devices
            reductions = [questioning.placed(reduction, known) for reduction in reductions]
        questions = questioning.questions(
            op,
            reductions,
            num_hosts=self._network.num_hosts if self._network else 1,
            root=self._root,
            one_device=self._options.one_device,
            user=self.accumulation_fn is not None,
            tables=self._options.sparse_as_dense is True,
            axis=axis,
        )
        chosen = self._options_of(options)
        return [(question, self._plan(question, chosen)) for question in questions]

    @property
    def _root(self) -> str | None:
        """Returns the full name of the device that everything is reduced on, if one was given."""
        if self.reduce_to_device is None:
            return None
        return existing_device("reduce_to_device", self.reduce_to_device)

    def _options_of(self, options: Any) -> Options:
        """Returns the choices for one call, with the caller's `bytes_per_pack`."""
        if options is None or not options.bytes_per_pack:
            return self._options
        most = request.check_count("options.bytes_per_pack", options.bytes_per_pack)
        packing = dataclasses.replace(self._options.packing, bytes_per_pack=most)
        return dataclasses.replace(self._options, packing=packing)

    def _plan(self, question: Question, options: Options) -> Plan:
        batch, devices = question.batch, question.devices[: question.batch.replicas]
        reasons = []
        for dtype in sorted(deciding.nccl_dtypes(batch, options)):
            status = nccl.nccl_status(devices, dtype)
            reasons.append((dtype, "" if status.can_run else str(status)))
        between = ""
        if self._network is not None and self._network.hint != "nccl":
            between = next((reason for _, reason in reasons if reason), "") or (
                "ask for implementation NCCL in communication_options, and leave wire_between out"
            )
        topology = options.topology or self._topology_of(devices)
        return deciding.decide(batch, options, Machine(topology, tuple(reasons), between))

    def _topology_of(self, devices: Sequence[str]) -> Topology:
        return detection.detect(tuple(devices))

    def _run(
        self, question: Question, plan: Plan, axis: Any
    ) -> list[tuple[int, Any]]:
        """Runs a plan; returns the results by their position in the caller's batch."""
        devices = question.devices
        if self._network is not None and any(pack.over_hosts for pack in plan.packs):
            # The members of a collective are known by their devices, so each replica takes part
            # with its own, even where several values lie on one: TensorFlow would wait for ever.
            devices = self._network.devices
        residuals = self._residuals(plan, question)
        if plan.one_function and tf.executing_eagerly():
            # The ops wait for each other, so they must run at the same time, not one by one. A
            # concrete function is a function even where tf.config.run_functions_eagerly(True) rules.
            values = [list(value) for value in question.values]
            function = _eager_function(plan, devices, self._network, residuals)
            results = function.get_concrete_function(values)(values)
            # The result of a function is on the device of its last op, but TensorFlow may name
            # another device.
            results = [
                [copy_trees.copy([own], to)[0] for own, to in zip(value, question.devices, strict=True)]
                for value in results
            ]
        else:
            accumulate = self._accumulate if self.accumulation_fn is not None else None
            runtime = interpreter.Runtime(
                _exchange(plan, self._network), residuals, accumulate, axis
            )
            results = interpreter.run(plan, question.values, devices, runtime)
        return [
            (position, tf_internals.mirrored([result[node] for node in asked.to]))
            for position, result, asked in zip(
                question.positions, results, question.batch.requests, strict=True
            )
        ]

    def _emit(self, question: Question, plan: Plan) -> None:
        """Creates the ops of a plan in the current graph, without residuals: nothing is reduced."""
        runtime = interpreter.Runtime(_exchange(plan, self._network), None, self._accumulate)
        interpreter.run(plan, question.values, question.devices, runtime)

    def _residuals(self, plan: Plan, question: Question) -> Residuals | None:
        if self._feedback is None or not plan.has_feedback:
            return None
        questioning.check_known_shapes(question)
        return self._feedback.residuals(plans.residual_key(plan), question.devices)

    def _accumulate(self, values: list[tf.Tensor]) -> tf.Tensor:
        """Calls the caller's function and checks its result."""
        assert self.accumulation_fn is not None
        total = self.accumulation_fn(values)
        if not isinstance(total, tf.Tensor):
            raise TypeError(f"accumulation_fn must return a tensor; it returned {total!r}")
        return total

    @property
    def _num_between_graph_workers(self) -> int:
        return self._network.num_hosts if self._network else 1

    def _between(self, network: Network, between: BetweenHosts) -> ConfiguredCrossDeviceOps:
        """Returns the same ops for several hosts that reduce together."""
        if self.accumulation_fn is not None:
            raise ValueError(
                "cross_device_ops must not have an accumulation_fn, which is not supported between "
                f"hosts; got {self!r}"
            )
        ops = copy.copy(self)
        ops._network = network
        ops._options = dataclasses.replace(self._options, between=between)
        return ops


def _exchange(plan: Plan, network: Network | None) -> Exchange | None:
    """Begins the exchange between hosts that a plan asks for."""
    if network is None or not any(pack.root.hosts for pack in plan.packs):
        return None
    return network.exchange(plan)


def _eager_function(
    plan: Plan, devices: tuple[str, ...], network: Network | None, residuals: Residuals | None
) -> Any:
    """Returns the function that runs a plan eagerly; it lives as long as its residuals."""
    if residuals is None:
        return _function(plan, devices, network)
    with _lock:
        if (plan, devices) not in residuals.functions:
            residuals.functions[plan, devices] = _make_function(plan, devices, network, residuals)
        return residuals.functions[plan, devices]


def _make_function(
    plan: Plan,
    devices: tuple[str, ...],
    network: Network | None,
    residuals: Residuals | None = None,
) -> Any:
    def run(values: Any) -> list[list[Any]]:
        runtime = interpreter.Runtime(_exchange(plan, network), residuals)
        return interpreter.run(plan, values, devices, runtime)

    return tf.function(run, autograph=False)


# Tracing costs much more than running; the bound keeps a process that draws ever new shapes small.
_function = functools.lru_cache(maxsize=64)(_make_function)


def _copied(value: Any, device: str) -> Any:
    """Copies a tensor or `tf.IndexedSlices` to a device."""
    with tf.device(device):
        if not isinstance(value, tf.IndexedSlices):
            return tf.identity(value)
        shape = None if value.dense_shape is None else tf.identity(value.dense_shape)
        return tf.IndexedSlices(tf.identity(value.values), tf.identity(value.indices), shape)


def class_options(
    wire_dtype: Any = None, error_feedback: Any = False, sparse_as_dense: Any = "auto"
) -> dict[str, Any]:
    """Checks the arguments that all classes have; returns them as fields of `Options`.

    Raises:
      ValueError: if `sparse_as_dense` is none of its values, `wire_dtype` is another dtype, or
        there is error feedback without one.
      TypeError: if `wire_dtype` is not a dtype, or `error_feedback` not a bool.
    """
    request.check_sparse_as_dense(sparse_as_dense)
    wire = check_wire_dtype("wire_dtype", wire_dtype)
    request.check_error_feedback(error_feedback, wire)
    return {"wire": wire, "error_feedback": error_feedback, "sparse_as_dense": sparse_as_dense}
