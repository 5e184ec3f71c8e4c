"""The base of all classes: from a caller's arguments to a plan that is run."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import checks, tf_internals
from tfcdo.exchange.protocol import SUM, identity
from tfcdo.execute import device_ops, explain, interpreter, nccl, request
from tfcdo.execute.between import Network
from tfcdo.execute.device_ops import on_each
from tfcdo.execute.explain import Explanation
from tfcdo.execute.feedback import ErrorFeedback, Residuals
from tfcdo.execute.interpreter import Summed
from tfcdo.execute.request import Group, Reduction, devices_of
from tfcdo.plan import decide as deciding
from tfcdo.plan.algorithms import deal_owners
from tfcdo.plan.decide import BetweenHosts, Machine, Options
from tfcdo.plan.plan import Plan
from tfcdo.topology import detection
from tfcdo.topology.topology import Topology


class ConfiguredCrossDeviceOps(tf.distribute.CrossDeviceOps, tf_internals.Trackable):
    """Does the work that all classes share; they differ in their `Options`."""

    def __init__(
        self,
        options: Options,
        accumulation_fn: Callable[[list[tf.Tensor]], tf.Tensor] | None = None,
        reduce_to_device: str | None = None,
    ) -> None:
        super().__init__()
        self._options = options
        self._arguments: dict[str, Any] = {}  # The others, as `repr` shows them.
        self.accumulation_fn = accumulation_fn
        self.reduce_to_device = reduce_to_device
        self._feedback = ErrorFeedback() if options.wire and options.wire.error_feedback else None
        if self._feedback is not None:
            self._track_trackable(self._feedback, "error_feedback")
        self._network: Network | None = None

    @property
    def _common(self) -> dict[str, Any]:
        """Returns the arguments that all classes accept."""
        wire = self._options.wire
        return {
            "sparse_as_dense": self._options.sparse_as_dense,
            "sum_equal_rows": self._options.sum_equal_rows,
            "wire_dtype": wire.dtype if wire else None,
            "error_feedback": wire is not None and wire.error_feedback,
        }

    @property
    def compared_among_hosts(self) -> dict[str, str]:
        """Returns the class and its arguments, by name: all hosts must have the same."""
        arguments = {**self._common, **self._arguments}
        return {
            "cross_device_ops": type(self).__name__,
            **{f"cross_device_ops.{name}": _compared(each) for name, each in arguments.items()},
        }

    def __repr__(self) -> str:
        shown = {name: value for name, value in self._common.items() if value}
        arguments = ", ".join(
            f"{name}={value.name if isinstance(value, Topology) else value!r}"
            for name, value in {**self._arguments, **shown}.items()
        )
        return f"{type(self).__name__}({arguments})"

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
        op = request.check_reduce_op(reduce_op)
        request.check_options(options)
        reduction = request.check_lone_pair(
            per_replica_value, destinations, by_strategy=options is not None
        )
        return self._run(self._plans_of(op, [reduction], options))[0]

    def batch_reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: Any,
    ) -> list[Any]:
        """Reduces several values together; see `batch_reduce`."""
        op = request.check_reduce_op(reduce_op)
        request.check_options(options)
        # A strategy always passes options.
        pairs = request.check_pairs(value_destination_pairs, by_strategy=options is not None)
        return self._run(self._plans_of(op, pairs, options))

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to each destination; see `broadcast`."""
        devices = devices_of(destinations)
        value = request.check_broadcast(tensor)
        parts = tf.nest.flatten(value, expand_composites=True)
        copies = [device_ops.copy(parts, device) for device in devices]
        return tf_internals.mirrored(
            [tf.nest.pack_sequence_as(value, each, expand_composites=True) for each in copies]
        )

    def explain(
        self,
        shapes: Iterable[Any],
        dtype: Any = tf.float32,
        devices: Sequence[str] | None = None,
        shard_optimizer_state: bool = False,
    ) -> Explanation:
        """Describes the all-reduce of such a batch, without running it.

        Args:
          shapes: the shape of each value, fully known, in any form that `tf.TensorShape` takes.
          dtype: the dtype of all values.
          devices: the replicas' devices. None: the current strategy's devices or, outside a
            strategy, the devices that `tf.distribute.MirroredStrategy()` would take.
          shard_optimizer_state: whether the values are the gradients of variables whose optimizer
            state is sharded; see `tfcdo.MirroredStrategy`.

        Returns:
          The algorithm and why, packs, copy trees, bytes between devices and hosts, and graph ops;
          its `str` is made to be read.

        Raises:
          ValueError: if `devices` is empty or holds something that is not a device name, or a shape
            is not fully known; and as `reduce`.
          TypeError: if `shapes` is not a list, or `dtype` is not a dtype.
          RuntimeError: as `reduce`.

        Example:
          >>> import tfcdo
          >>> ops = tfcdo.HierarchicalCopyAllReduce(num_packs=2)
          >>> ops.explain([(1000,)], devices=["/cpu:0", "/cpu:1"]).num_packs
          2
        """
        dtype = request.check_dtype("dtype", dtype)
        if devices is None and self._network is not None:
            devices = self._network.devices
        names = explain.device_names(devices)
        listed = checks.items_of(shapes)
        if listed is None:
            raise TypeError(f"shapes must be a list with the shape of each value; got {shapes!r}")
        checks.check_bool("shard_optimizer_state", shard_optimizer_state)
        known = [request.known_shape(f"shapes[{i}]", shape) for i, shape in enumerate(listed)]
        sizes = [(shape.num_elements() or 0) * dtype.size for shape in known]
        sharded = shard_optimizer_state and len(names) > 1
        owners = deal_owners(sizes, len(names)) if sharded else ()
        found: list[tuple[Group, Plan]] = []

        def all_reduce() -> None:
            values = []
            for shape in known:
                placeholder = functools.partial(tf.raw_ops.Placeholder, dtype=dtype, shape=shape)
                values.append(tf_internals.per_replica(on_each(names, placeholder)))
            paths = [None] * len(values)
            reductions = request.check_gradients(values, paths, names, owners)
            found.extend(self._plans_of("sum", reductions))
            for group, plan in found:
                sums = interpreter.reduce_group(
                    group, plan, self._network, None, self._accumulate, remembered=False
                )
                if sharded:
                    interpreter.broadcast(plan, list(sums.values()), group.devices)

        graph = tf.function(all_reduce, autograph=False).get_concrete_function().graph
        types = [op.type for op in graph.get_operations() if op.type != "Placeholder"]
        owned = [
            sum(size for owner, size in zip(owners, sizes) if owner == index)
            for index in range(len(names) if sharded else 0)
        ]
        if not found:
            return Explanation(
                repr(self), names, "nothing", "the batch is empty", (), {}, {}, 0, tuple(owned)
            )
        [(group, plan)] = found  # Dense values of all devices are one group.
        return Explanation(
            repr(self),
            group.devices,
            plan.algorithm,
            plan.why,
            plan.packs,
            plan.bytes_by_edge(),
            dict(collections.Counter(types)),
            plan.bytes_between_hosts,
            tuple(owned),
        )

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
        return self._run(self._plans_of("gather", reductions, options), axis)

    def _run(self, found: Sequence[tuple[Group, Plan]], axis: Any = None) -> list[Any]:
        results: dict[int, Any] = {}
        # Residuals may be refused, before the first op is created.
        kept = [self._residuals(plan, group) for group, plan in found]
        for (group, plan), residuals in zip(found, kept, strict=True):
            results |= interpreter.reduce_group(
                group, plan, self._network, residuals, self._accumulate, axis
            )
        return [results[position] for position in range(len(results))]

    def sum_gradients(
        self,
        grads: Sequence[Any],
        paths: Sequence[str],
        devices: Sequence[str],
        owners: Sequence[int] = (),
    ) -> Summed:
        """Sums the gradients of variables, also one alone, for all devices or each on its owner."""
        found = self._plans_of("sum", request.check_gradients(grads, paths, devices, owners))
        return Summed(tuple(self._run(found)), tuple(found))

    def _plans_of(
        self, op: str, reductions: Sequence[Reduction], options: Any = None
    ) -> list[tuple[Group, Plan]]:
        chosen, is_user = self._options_of(options), self.accumulation_fn is not None
        found = request.grouped(
            op, reductions, chosen, self._network, self.reduce_to_device, is_user
        )
        return [(group, self._plan(group, chosen)) for group in found]

    def _options_of(self, options: Any) -> Options:
        """Returns the choices for one call, with the caller's `bytes_per_pack`."""
        if options is None or not options.bytes_per_pack:
            return self._options
        most = request.check_count("options.bytes_per_pack", options.bytes_per_pack)
        packing = dataclasses.replace(self._options.packing, bytes_per_pack=most)
        return dataclasses.replace(self._options, packing=packing)

    def _plan(self, group: Group, options: Options) -> Plan:
        batch, devices = group.batch, group.devices[: group.batch.replicas]
        reasons = []
        for dtype in sorted(deciding.nccl_dtypes(batch, options)):
            status = nccl.nccl_status(devices, dtype)
            reasons.append((dtype, None if status.can_run else str(status)))
        between = None
        if options.between is not None and not options.between.flat:
            between = next((reason for _, reason in reasons if reason), None) or (
                "ask for implementation NCCL in communication_options, and leave exchange out"
            )
        topology, origin = self._topology_of(options, devices)
        return deciding.decide(batch, options, Machine(topology, origin, tuple(reasons), between))

    def _topology_of(self, options: Options, devices: Sequence[str]) -> tuple[Topology, str]:
        """Returns the topology of some devices, and where it comes from."""
        if options.topology is not None:
            return options.topology, "was given"
        planned = options.saved.topology if options.saved else None
        if planned and planned.is_measured and planned.name == detection.name_of_measured(devices):
            return planned, "was given"  # The plan brings its measurement along.
        if self._network is not None:
            return self._network.topology_of(devices), "is the first host's"
        return detection.detect(tuple(devices)), "was detected"

    def _residuals(self, plan: Plan, group: Group) -> Residuals | None:
        if self._feedback is None or not plan.has_state:
            return None
        for pack in plan.packs:
            value = plan.values[pack.slices[0].value]
            if pack.wire and pack.wire.error_feedback and value.size is None:
                raise ValueError(
                    "error_feedback needs values whose shapes are known while a function is "
                    f"traced; got {value}"
                )
        return self._feedback.residuals(plan.residual_key, group.devices)

    def _accumulate(self, values: Sequence[tf.Tensor], name: str) -> tf.Tensor:
        """Calls the accumulation_fn and checks its result."""
        assert self.accumulation_fn is not None
        total = self.accumulation_fn(list(values))
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
        # The exchange may keep state: it is not known before it gets a variable's path.
        if between.exchange != SUM and ops._feedback is None:
            ops._feedback = ErrorFeedback()
            ops._track_trackable(ops._feedback, "error_feedback", overwrite=True)
        return ops


def _compared(value: Any) -> str:
    """Returns an argument as hosts compare it: equal text for equal values on any host."""
    if isinstance(value, Topology):
        return f"{value.name!r}, {value.fingerprint[:8]}"
    return identity(value)
