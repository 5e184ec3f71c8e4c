"""Shared by both strategies: where a step begins, and the work for TensorFlow."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import checks, keras_internals, tf_internals
from tfcdo.cluster import protocol, session
from tfcdo.exchange.diloco import DiLoCo
from tfcdo.execute.base import ConfiguredCrossDeviceOps
from tfcdo.execute.explain import Explanation
from tfcdo.training import parts, statistics, step
from tfcdo.training.step import ReplicaStep


class ReducesStructures:
    """Has a strategy run Keras's steps, and reduce and gather structures of values."""

    extended: Any  # TensorFlow sets it.

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs a function on each replica."""
        with step.during(host_alone=step.now.host_alone or self.extended.outer is not None):
            return super().run(fn, args, kwargs, options)  # type: ignore[misc]

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces a value, or each component of a structure of values."""
        tensorflows = super().reduce  # type: ignore[misc]

        def reduced(one: Any) -> Any:
            if statistics.is_averaged(one):
                # In 64 bits the mean of equal numbers is that number: frozen weights do not change.
                own = [tf.cast(component.read_value(), tf.float64) for component in one.values]
                return tf.cast(reduced(tf_internals.per_replica(own)), one.dtype)
            # Keras 3 reduces scalars along axis 0, too. Python's numbers have no shape.
            shape = getattr(tf_internals.components(one)[0], "shape", ())
            if axis is None or tf.TensorShape(shape).rank == 0:
                return tensorflows(reduce_op, one, axis=None)
            # TensorFlow runs a function, which is not a step, whose replicas all need examples.
            with step.during(steps=step.now.steps or self.extended._steps((), {}, False)):
                return tensorflows(reduce_op, one, axis=axis)

        return tf.nest.map_structure(reduced, value)

    def gather(self, value: Any, axis: Any) -> Any:
        """Concatenates a value, or each of a structure of values over the replicas, in one go."""
        flat = tf.nest.flatten(value)
        on_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
        if not tf.nest.is_nested(value) or not flat or on_replica:
            # One value as TensorFlow has it; on a replica, its error. On several hosts the code
            # below would take a replica's tensor for a component, and gather it.
            return super().gather(value, axis)  # type: ignore[misc]
        device = tf_internals.current_device() or self.extended._default_device or "/device:CPU:0"
        gathered = self.extended._batch_gather_to([(one, device) for one in flat], axis)
        results = [self.extended._local_results(one)[0] for one in gathered]
        return tf.nest.pack_sequence_as(value, results)

    def state_bytes(self, optimizer: Any) -> dict[str, int]:
        """Returns the bytes of an optimizer's variables on each device of this host.

        Args:
          optimizer: a Keras optimizer.

        Returns:
          The bytes, by the device's name; empty before the optimizer has variables.

        Raises:
          TypeError: if `optimizer` is not an optimizer, such as its name.

        Example:
          >>> import keras
          >>> import tfcdo
          >>> tfcdo.MirroredStrategy(["/cpu:0"]).state_bytes(keras.optimizers.SGD())
          {}
        """
        checks.check_optimizer(optimizer)
        held: dict[str, int] = {}
        for variable in optimizer.variables if optimizer.built else ():
            for component in step.components(variable):
                num_bytes = component.shape.num_elements() * component.dtype.size
                held[component.device] = held.get(component.device, 0) + num_bytes
        return dict(sorted(held.items()))

    def explain(
        self,
        shapes: Iterable[Any],
        dtype: Any = "float32",
        shard_optimizer_state: bool | None = None,
    ) -> Explanation:
        """Describes the all-reduce of such a batch in this strategy, without running it.

        Packs are in the order in which they are sent. On several hosts these are the devices, links
        and packs of this host; `bytes_between_hosts` are the bytes that it sends to the others.

        Args:
          shapes: the shape of each value, fully known, in any form that `tf.TensorShape` takes.
          dtype: the dtype of all values.
          shard_optimizer_state: whether the values are the gradients of variables whose optimizer
            state is sharded; None for the strategy's own setting.

        Returns:
          The algorithm and why, packs, copy trees, bytes between devices and to other hosts, and
          graph ops; its `str` is made to be read.

        Raises:
          ValueError: if a shape is not fully known; and as `reduce` of the cross-device ops.
          TypeError: if `shapes` is not a list, `dtype` is not a dtype, or the strategy's
            `cross_device_ops` is not one of tfcdo's.
          RuntimeError: as `reduce` of the cross-device ops.

        Example:
          >>> import tfcdo
          >>> tfcdo.MirroredStrategy(["/cpu:0"]).explain([(1000,), (10,)]).num_packs
          1
        """
        ops = self.extended._cross_device_ops
        if not isinstance(ops, ConfiguredCrossDeviceOps):
            raise TypeError(f"cross_device_ops must be one of tfcdo's to be explained; got {ops!r}")
        if shard_optimizer_state is None:
            shard_optimizer_state = self.extended.shard_optimizer_state
        return ops.explain(shapes, dtype, self.extended.worker_devices, shard_optimizer_state)


class ReplicaExtended:
    """Starts a step on all replicas or on none, and lets each replica work alone in it."""

    worker_devices: tuple[str, ...]  # TensorFlow has them.
    sums_once = True  # For `step.is_ours`.
    shard_optimizer_state = False
    synchronize_batch_norm = False
    checks_in_sync = False
    outer: DiLoCo | None = None

    @functools.cached_property
    def updated_by_rows(self) -> set[str]:
        """The paths of the variables whose gradients were rows."""
        return set()

    def _use_merge_call(self) -> bool:
        here = step.now.step
        return here is None or not here.alone

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        run = super()._call_for_each_replica  # type: ignore[misc]
        replicas = self._num_replicas_in_sync  # type: ignore[attr-defined]
        args, kwargs = args or (), kwargs or {}
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            return self._run_function(run, fn, args, kwargs)
        meeting = step.now.steps
        if meeting is not None:  # Replicas have met in a step, and continue there.
            return run(_entering(fn, meeting), args, kwargs)
        is_keras = step.now.method is not None
        flat = tf.nest.flatten((args, kwargs))
        of_dataset = any(isinstance(one, tf_internals.DistributedValues) for one in flat)
        several = replicas > 1 or self.outer is not None
        is_one_batch = is_keras and several and not of_dataset  # Such as `train_on_batch`'s.
        is_divided = is_one_batch and len(self.worker_devices) > 1
        if is_one_batch:
            args, kwargs = parts.of_one_batch((args, kwargs), self.worker_devices)
        steps = self._steps(args, kwargs, is_divided) if several else [ReplicaStep(0, 1)]
        begin = list(tf_internals.tensors_of_graph((args, kwargs)))
        some_can_be_empty = steps[0].some_can_be_empty
        if not is_keras and some_can_be_empty:
            begin += [_none_empty(steps[0].rows_of_all)]
        # Else a replica whose iterator has ended would stop after some of the others' updates.
        all_have_data = [tf.group(*begin)] if begin and not tf.executing_eagerly() else []

        instead: list[Any] = []
        if is_keras and some_can_be_empty:
            first = [tf_internals.components(one)[0] for one in tf.nest.flatten((args, kwargs))]
            with tf.device(self.worker_devices[0]):
                instead = step.stand_ins(steps, first)

        def with_examples(*args: Any, **kwargs: Any) -> Any:
            here = step.now.step
            if not is_keras or here is None:
                return fn(*args, **kwargs)
            if here.can_be_empty:
                args, kwargs = here.with_stand_in((args, kwargs), instead)
            results = fn(*args, **kwargs)
            here.note_names(results)
            results = tf.nest.map_structure(here.whole, results)
            # Of one host's metrics Keras takes the mean, also of those with a number per class.
            are_rows = step.now.method == "predict" or here.replicas > len(self.worker_devices)
            if are_rows:
                results = tf.nest.map_structure(here.without_stand_in, results)
            return results

        with step.during(steps=steps), tf.control_dependencies(all_have_data):
            result = run(_entering(with_examples, steps, all_have_data), args, kwargs)
            if is_keras and some_can_be_empty:
                statistics.adopt(self, steps)
        return result

    def _run_function(self, run: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        """Runs a `tf.function` for all replicas at once, as TensorFlow does."""
        if tf_internals.is_compiled(fn):
            return run(fn, args, kwargs)
        if not hasattr(self, "_functions"):
            self._functions: Any = weakref.WeakKeyDictionary()
        if fn not in self._functions:
            known = weakref.ref(fn)

            def on_all(*args: Any, **kwargs: Any) -> Any:
                function = tf_internals.converted(known().python_function)  # type: ignore[union-attr]
                return self._call_for_each_replica(function, args, kwargs)

            self._functions[fn] = tf_internals.with_python_function(fn, on_all)
        return self._functions[fn](*args, **kwargs)

    def _steps(self, args: Any, kwargs: Any, is_divided: bool) -> list[ReplicaStep]:
        """Returns each replica's view of a step that begins with these arguments."""
        devices = self.worker_devices
        replicas = self._num_replicas_in_sync  # type: ignore[attr-defined]
        values = [*filter(None, map(self._batch, tf.nest.flatten((args, kwargs))))]
        if not values:
            return [ReplicaStep(index, replicas) for index in range(len(devices))]
        # In an own loop other values with as many components may come before the batch, such as a
        # seed per replica, or any tensor where a host has one device. Keras's begin with examples.
        sizes = [[component.shape[0] for component in value] for value in values]
        likely = max(sizes, key=lambda one: (sizes.count(one), None in one or len(set(one)) > 1))
        static = sizes[0] if step.now.method else likely
        batch = values[sizes.index(static)]
        hosts, first = replicas // len(devices), self._first_replica()
        # Between hosts only a dataset's own shapes are the same. `fit` takes its batches inside of
        # its function; an argument of a function has the shapes of this host's part. So have all
        # batches since Keras 3.16, whose `fit` takes them before it calls its function.
        is_fit = step.now.method == "fit" and not is_divided
        caller = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
        is_inside = hasattr(caller, "captures")  # That graph is a function's, too.
        of_dataset = is_fit and is_inside and len(set(static)) == 1
        if None not in static and (hosts == 1 or of_dataset):
            rows = static * hosts
            joined = session.current()
            if hosts > 1 and joined is not None:
                joined.agree({"what": "a step of fit", "examples of a replica": rows[0]})
        else:
            own = list(step.on_each(devices, step.rows_of, batch).values)
            rows = own if hosts == 1 else self._of_all_hosts(own)
            rows[first : first + len(devices)] = own  # Some may be known while a step is traced.
        is_even = isinstance(rows[0], int) and rows[0] > 0 and len(set(rows)) == 1
        are_known = is_even and step.now.method
        alike = {one[0] for one in sizes if are_known and len(set(one)) == 1} - {None, 1}
        *befores, total = [0 * rows[0], *itertools.accumulate(rows)]
        return [
            ReplicaStep(index, replicas, rows[at], befores[at], total, rows, is_even, alike)
            for index, at in enumerate(range(first, first + len(devices)))
        ]

    def _first_replica(self) -> int:
        return int(self._get_replica_id_in_sync_group(0))  # type: ignore[attr-defined]

    def _of_all_hosts(self, own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the numbers of all hosts' replicas; `own` are the numbers of this host's."""
        replicas = self._num_replicas_in_sync  # type: ignore[attr-defined]
        first, devices = self._first_replica(), self.worker_devices
        value = step.on_each(
            devices,
            lambda replica, count: tf.one_hot(replica, replicas, dtype=tf.int64) * count,
            range(first, first + len(own)),
            own,
        )
        of_all = self.reduce_to("SUM", value, value)  # type: ignore[attr-defined]
        return list(tf.unstack(tf_internals.components(of_all)[0], replicas))

    def _batch(self, value: Any) -> tuple[Any, ...] | None:
        """Returns the replicas' components of a value if these are rows; else None."""
        components = tf_internals.components(value)
        of_each = len(components) == len(self.worker_devices)
        return components if of_each and all(map(step.is_of_rows, components)) else None

    def _get_cross_device_ops(self, value: Any) -> Any:
        # TensorFlow has others for int32, which it then cannot reduce in one batch with floats.
        ops = self._cross_device_ops  # type: ignore[attr-defined]
        is_ours = isinstance(ops, ConfiguredCrossDeviceOps)
        return ops if is_ours else super()._get_cross_device_ops(value)  # type: ignore[misc]

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if not self._use_merge_call():
            raise RuntimeError(
                "a replica cannot meet the others in an optimizer's update, where it works alone; "
                f"got an all-reduce of {value}"
            )
        # Where replicas meet. On several hosts, TensorFlow has each replica start a collective.
        reduce = tf.distribute.StrategyExtended._replica_ctx_all_reduce
        return reduce(self, reduce_op, value, options)

    def _create_variable(self, next_creator: Any, **options: Any) -> Any:
        kept = statistics.as_kept(options)
        with tf.control_dependencies(None):  # Its first value does not depend on data.
            variable = super()._create_variable(next_creator, **kept)  # type: ignore[misc]
        if isinstance(variable, tf_internals.SyncOnReadVariable):
            return statistics.OwnVariable(
                variable.distribute_strategy, variable.values, variable.aggregation
            )
        return variable

    def gather_rows(self, values: Sequence[Any]) -> list[Any]:
        """Concatenates the rows of each value over all replicas, for all replicas."""
        return list(self._batch_gather_to([(one, one) for one in values], 0))

    def _batch_gather_to(self, value_destination_pairs: Any, axis: Any, options: Any = None) -> Any:
        ops = self._cross_device_ops  # type: ignore[attr-defined]
        pairs = [(self._of_each(one), to) for one, to in value_destination_pairs]
        if self._in_multi_worker_mode():  # type: ignore[attr-defined]
            # On one of several hosts with one replica, TensorFlow passes only the component.
            pairs = [(tf_internals.per_replica([v]) if tf.is_tensor(v) else v, t) for v, t in pairs]
        distributed = (isinstance(one, tf_internals.DistributedValues) for one, _ in pairs)
        if isinstance(ops, ConfiguredCrossDeviceOps) and all(distributed):
            return ops._batch_gather(pairs, axis, options)
        return super()._batch_gather_to(pairs, axis, options)  # type: ignore[misc]

    def _of_each(self, value: Any) -> Any:
        """Returns a value of replicas that meet: a component for each, if all hold one object."""
        # TensorFlow passes only that; elsewhere it is this host's own value.
        if step.now.steps is None or isinstance(value, tf_internals.DistributedValues):
            return value
        return step.copies(value, self.worker_devices)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        distribute = super()._distribute_datasets_from_function  # type: ignore[misc]
        distributed = distribute(dataset_fn, options)
        return self._of_hosts(distributed, int(distributed.cardinality))

    def _of_hosts(self, distributed: Any, elements: int) -> Any:
        """Has Keras ask all hosts for the number of steps of data that each has for itself."""
        if self._in_multi_worker_mode():  # type: ignore[attr-defined]
            ask = functools.partial(self._num_steps, elements)
            setattr(distributed, keras_internals.NUM_STEPS, functools.cache(ask))
        return distributed

    def _num_steps(self, elements: int) -> int | None:
        """Returns the steps of hosts' own data; None if not known, or others on another host."""
        lengths = self.numbers_of_hosts(elements)
        if len(lengths) > 1 and tf.data.INFINITE_CARDINALITY in lengths:
            raise protocol.DisagreementError(
                "the data must be endless on all hosts or on none; got the lengths "
                f"{sorted(lengths)}, of which -1 is endless and -2 not known"
            )
        if len(lengths) > 1 or elements < 0:
            return None
        return math.ceil(elements / len(self.worker_devices))

    def numbers_of_hosts(self, own: int) -> set[int]:
        """Returns the numbers that hosts have; all meet for it."""
        of_replicas = [tf.constant(own, tf.int64)] * len(self.worker_devices)
        return {int(one) for one in self._of_all_hosts(of_replicas)}

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        distribute = super()._experimental_distribute_dataset  # type: ignore[misc]
        if not tf.executing_eagerly() or not isinstance(dataset, tf.data.Dataset):
            return distribute(dataset, options)
        several = self._in_multi_worker_mode()  # type: ignore[attr-defined]
        replicas = self._num_replicas_in_sync  # type: ignore[attr-defined]
        dataset = parts.prepared(dataset, session.current() if several else None)
        if not parts.is_cut_here(dataset, several, replicas):
            given = int(dataset.cardinality())  # TensorFlow makes smaller batches, and more.
            elements = given if given < 0 else tf.data.UNKNOWN_CARDINALITY
            return self._of_hosts(distribute(dataset, options), elements)
        own = parts.cut(dataset, self._first_replica(), len(self.worker_devices), replicas)
        return tf_internals.distributed_dataset(self, own, int(dataset.cardinality()), options)


def _entering(fn: Any, steps: Sequence[ReplicaStep], after: Sequence[Any] = ()) -> Any:
    """Returns a function that enters the step of the replica that calls it."""
    alone, method = step.now.host_alone, step.now.method

    def on_replica(*args: Any, **kwargs: Any) -> Any:
        here = steps[tf_internals.replica_on_host()]
        entered = step.during(step=here, host_alone=alone, method=method)
        with entered, tf.control_dependencies(after):
            return fn(*args, **kwargs)

    return on_replica


def _none_empty(rows_of_all: Sequence[Any]) -> Any:
    """Returns an op that fails if a replica has no examples in a loop that is not Keras's."""
    # A replica of any host: all hosts fail, and can continue.
    return tf.debugging.assert_positive(
        tf.stack([tf.cast(rows, tf.int64) for rows in rows_of_all]),
        f"a batch has fewer examples than the {len(rows_of_all)} replicas, and layers may fail on "
        "none: use dataset.batch(n, drop_remainder=True), or batches of which the last has enough "
        "examples; Model.fit, evaluate and predict accept such a batch. Examples per replica",
    )
