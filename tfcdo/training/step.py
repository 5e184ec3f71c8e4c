"""`ReplicaStep`: a replica's view of the step that it runs.

`ReplicaExtended` makes one for each replica where a step begins. Everything in training that
depends on the running step reads it here, and nothing else keeps such state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import tensorflow as tf

from tfcdo import keras_internals, tf_internals
from tfcdo.execute import device_ops
from tfcdo.execute.device_ops import Gradient

SUM = tf.distribute.ReduceOp.SUM
RETURNED_AS = "_tfcdo_returned_as"  # An attribute of a metric: names in logs of a user's own step.


@dataclasses.dataclass(frozen=True)
class ReplicaStep:
    """One replica's view of a running step.

    The numbers of examples are ints if they are known for all replicas, else 0-D int64 tensors;
    None if the step has no batch.
    """

    replica: int  # Its index on this host.
    replicas: int  # The number of them that train together: on all hosts, or on a host alone.
    rows: Any = None  # The number of this replica's examples.
    before: Any = None  # The number of examples on the replicas before it.
    total: Any = None  # The number of examples on all replicas.
    rows_of_all: Sequence[Any] = ()  # The number of examples of each replica, on all hosts.
    is_even: bool = False  # All replicas are known to have equally many examples, at least one.
    # Then the rows of the batch's tensors on each replica, but 1: such a row is for all examples.
    sizes: Set[Any] = frozenset()
    # The distributed variables that the replica assigns, by identity.
    writes: dict[int, Any] = dataclasses.field(default_factory=dict)
    # What Keras keeps for the thread that has begun the step.
    keras_state: dict[str, Any] = dataclasses.field(default_factory=keras_internals.state_of_thread)
    alone: bool = False  # Nothing may meet the other replicas.
    counts_after: Sequence[tf.Tensor] = ()  # An optimizer counts the step after these.
    trace: Any = None  # The part of the step that XLA compiles, see `jit.py`.
    # In a sharded update, what is written, by identity: a variable or a component of one, and the
    # indices of the rows of each write; None for all rows. See `updates.py`.
    written: dict[int, tuple[Any, list[Any]]] | None = None
    norm: Any = None  # In a sharded update, of the gradients of all variables.
    # Losses: this replica's parts of sums over all replicas, by identity.
    losses: dict[int, Any] = dataclasses.field(default_factory=dict)
    # What metrics have returned as their results, and which metric, by the result's identity.
    results: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    # What a layer passed to `add_loss` on this replica, by the layer's identity.
    added: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    # What it has set of layers' attributes, and of dicts among them: by the dict's identity, name.
    attributes: dict[tuple[int, Any], Any] = dataclasses.field(default_factory=dict)
    reports: bool = False  # Losses are being reported once per batch, see `losses.py`.
    # In a loss or metric: makes a loss that it calls the number that it expects, see `losses.py`.
    of_inner: Callable[[Any], Any] | None = None
    applies: bool = False  # An optimizer is applied; then hosts may meet, see `diloco.py`.
    # The outer loop's state that exchanges a variable, by the variable's identity.
    exchanged: dict[int, Any] = dataclasses.field(default_factory=dict)

    @property
    def can_be_empty(self) -> bool:
        """Returns whether this replica may have no examples, and a stand-in for one."""
        return self.rows is not None and _can_be_zero(self.rows)

    @property
    def some_can_be_empty(self) -> bool:
        """Returns whether a replica of any host may have no examples: the same on all hosts."""
        return any(map(_can_be_zero, self.rows_of_all))

    @property
    def has_rows(self) -> Any:
        """Returns whether this replica has examples: a bool or a 0-D tensor."""
        return self.rows > 0

    @property
    def known_rows(self) -> int | None:
        """Returns the number of this replica's examples; None if it is not known yet."""
        known = self.rows if isinstance(self.rows, int) else tf.get_static_value(self.rows)
        return None if known is None else int(known)

    def share(self, dtype: Any) -> tf.Tensor:
        """Returns this replica's part of all examples, a number from 0 to 1."""
        if self.rows is None or self.is_even:
            return tf.constant(1.0 / self.replicas, dtype)  # A cast would first make float32 of it.
        return tf.cast(tf.cast(self.rows, tf.float64) / tf.cast(self.total, tf.float64), dtype)

    def keep(self, values: Any) -> Any:
        """Returns values, or zeros on a replica without examples, whose own may be NaN."""
        # Eagerly on all replicas alike: a tape takes other ops, so its sums, in another order.
        if not (self.some_can_be_empty if tf.executing_eagerly() else self.can_be_empty):
            return values
        has_rows = self.has_rows  # One op for all of the values, and one for each dtype.
        factor = functools.cache(lambda dtype: tf.cast(has_rows, dtype))

        def kept(value: Any) -> Any:
            if isinstance(value, tf.IndexedSlices):
                return tf.IndexedSlices(kept(value.values), value.indices, value.dense_shape)
            if not tf.is_tensor(value):
                return value
            # In the value's own memory, where a `tf.where` would copy it.
            return tf.math.multiply_no_nan(value, factor(value.dtype))

        return tf.nest.map_structure(kept, values)

    def loss(self, value: Any) -> Any:
        """Returns a loss, a number that from now on is known as this replica's part of a sum."""
        self.losses[id(value)] = value
        return value

    def whole(self, value: Any) -> Any:
        """Returns a result whose mean over the replicas Keras takes: for a loss, the sum."""
        if now.method == "fit" and getattr(value, "dtype", type(value)) in (bool, tf.bool):
            return tf.cast(value, tf.float32)  # As one device reports it; it has no mean.
        return value * self.replicas if id(value) in self.losses else value

    def note_names(self, logs: Any) -> None:
        """Notes by which names the step returns metrics' results, at the metrics."""
        for name, value in logs.items() if isinstance(logs, dict) else ():
            self.note_names(value)
            if id(value) in self.results:
                vars(self.results[id(value)][1]).setdefault(RETURNED_AS, set()).add(name)

    def with_stand_in(self, values: Any, stand_ins: Sequence[Any]) -> Any:
        """Returns tensors of rows, or the stand-in of each on a replica without examples."""
        flat = tf.nest.flatten(values)
        places = [at for at, one in enumerate(flat) if is_of_rows(one) and not one.shape[0]]
        given, instead = ([tensors[at] for at in places] for tensors in (flat, stand_ins))
        if self.known_rows == 0:
            found = instead
        else:  # One op for all of them: each would take as long to trace as a layer.
            found = tf.cond(self.has_rows, lambda: given, lambda: instead) if given else []
        for at, value in zip(places, found, strict=True):
            if not isinstance(value, tf.RaggedTensor):
                value.set_shape([None, *flat[at].shape[1:]])
            flat[at] = value
        return tf.nest.pack_sequence_as(values, flat)

    def without_stand_in(self, value: Any) -> Any:
        """Returns a value, without the row of a stand-in."""
        if not (self.can_be_empty and is_of_rows(value)):
            return value
        if self.known_rows is not None:
            return value if self.known_rows else slice_rows(value, 0, 0)
        if value.shape[0] is not None:
            return value
        return slice_rows(value, 0, tf.where(self.has_rows, rows_of(value), 0))


def is_of_rows(value: Any) -> bool:
    """Returns whether a value is a tensor, dense or not, that has rows."""
    kinds = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
    return isinstance(value, kinds) and bool(value.shape.rank)


def stand_ins(steps: Sequence[ReplicaStep], values: Sequence[Any]) -> list[Any]:
    """Returns the first replica's first rows of some values, if a replica has no examples."""
    # Layers may fail on a row of zeros, such as a lookup without a place for unknown words. They
    # get one only where all replicas of a host have no examples.
    places = [at for at, one in enumerate(values) if is_of_rows(one)]
    counts = [tf.cast(here.rows, tf.int64) for here in steps]

    def rows() -> list[Any]:
        return [_first_rows(values[at], tf.maximum(counts[0], 1)) for at in places]

    def none() -> list[Any]:  # To be sent to the others.
        return [slice_rows(values[at], 0, 0) for at in places]

    # Not in a branch, from which sizes would be unknown.
    are_known = not places or all(here.known_rows is not None for here in steps)
    found = rows() if are_known else tf.cond(tf.reduce_any(tf.equal(counts, 0)), rows, none)
    filled = dict(zip(places, found, strict=True))
    return [filled.get(at) for at in range(len(values))]


def _first_rows(value: Any, examples: tf.Tensor) -> Any:
    """Returns the rows of the first of some examples; a row of zeros if there is none."""
    count = tf.maximum(rows_of(value) // examples, 1)
    parts = [slice_rows(value, 0, count), _row_of_zeros(value)]
    is_sparse = isinstance(value, tf.SparseTensor)
    both = tf.sparse.concat(0, parts) if is_sparse else tf.concat(parts, 0)
    return slice_rows(both, 0, count)


def _row_of_zeros(value: Any) -> Any:
    """Returns a row as a tensor has them: with one zero, or none, if its rows differ in size."""
    if isinstance(value, tf.RaggedTensor):  # With a value: layers may fail on no steps.
        splits = [tf.constant([0, 1], value.row_splits.dtype)] * value.ragged_rank
        return tf.RaggedTensor.from_nested_row_splits(_row_of_zeros(value.flat_values), splits)
    if isinstance(value, tf.SparseTensor):
        shape = tf.concat([[1], value.dense_shape[1:]], 0)
        return tf.SparseTensor(value.indices[:0], value.values[:0], shape)
    return tf.zeros(tf.concat([[1], tf.shape(value)[1:]], 0), value.dtype)


def slice_rows(value: Any, begin: Any, rows: Any) -> Any:
    """Returns some rows of a tensor, dense or not."""
    if not isinstance(value, tf.SparseTensor):
        return value[begin : begin + rows]
    others = value.dense_shape[1:]
    first = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(others)], 0)
    part = tf.sparse.slice(value, first, tf.concat([[tf.cast(rows, tf.int64)], others], 0))
    part.set_shape([None, *value.shape[1:]])  # `tf.sparse.slice` may lose it.
    return part


def _can_be_zero(rows: Any) -> bool:
    return not (isinstance(rows, int) and rows > 0)


class _Now(threading.local):
    """What a thread runs now."""

    # TensorFlow traces each replica in a thread of its own, and starts all of them from one thread.
    step: ReplicaStep | None = None  # In a replica's thread; None outside of a step.
    # All replicas' steps on this host, where these meet during a step.
    steps: Sequence[ReplicaStep] | None = None
    host_alone = False  # Whether this host trains alone, see `diloco.py`.
    method: str | None = None  # "fit" or "predict", which begins a step; None in an own loop.
    scales_losses = False  # Whether Keras adds up a step's losses, of layers, too.
    builds: Any = None  # A model that Keras builds before its first step.
    session: Any = None  # In `fit` and the like on several hosts: theirs.
    keeps_order = False  # Whether these are in `predict`, whose rows are in the data's order.
    # While Keras makes a dataset of arrays: what its order follows, see `alike.py`.
    order: tuple[int, tf.Variable] | None = None


now = _Now()


def current_several() -> ReplicaStep | None:
    """Returns the step that this thread's replica runs together with other replicas; else None."""
    step = now.step
    if step is None or step.alone:  # Such as in an optimizer's update.
        return None
    # A host alone with one replica may have no examples where other hosts have some.
    return step if step.replicas > 1 or step.can_be_empty else None


def change_all(**changes: Any) -> Sequence[ReplicaStep]:
    """Changes and returns all replicas' steps, from where these meet to the step's end."""
    assert now.steps is not None
    now.steps = [dataclasses.replace(one, **changes) for one in now.steps]
    return now.steps


@contextlib.contextmanager
def during(**values: Any) -> Iterator[None]:
    """Sets values of `now` for a while."""
    before = {name: getattr(now, name) for name in values}
    vars(now).update(values)
    try:
        yield
    finally:
        vars(now).update(before)


def changed(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """Changes attributes of the current step for a while."""
    step = now.step
    assert step is not None
    return during(step=dataclasses.replace(step, **changes))


# Values of all replicas of this host.


def is_ours(strategy: Any) -> bool:
    """Returns whether a strategy is one of tfcdo's."""
    return bool(getattr(strategy.extended, "sums_once", False))


def on_each(devices: Sequence[str], function: Callable[..., Any], *values: Sequence[Any]) -> Any:
    """Calls a function with each replica's component of some values, on that replica's device."""
    return tf_internals.per_replica(device_ops.on_each(devices, function, *values))


def rows_of(value: Any) -> Any:
    """Returns the number of rows of a tensor, dense or not, as int64."""
    if isinstance(value, tf.SparseTensor):
        return value.dense_shape[0]
    if isinstance(value, tf.RaggedTensor):
        return value.nrows(tf.int64)
    known = value.shape[0] if value.shape.rank else None
    return tf.shape(value, tf.int64)[0] if known is None else tf.constant(known, tf.int64)


def of_host(value: tf.Tensor, devices: Sequence[str]) -> Any:
    """Returns a host's value, to be summed over all hosts: its other replicas have zeros."""
    others = [tf.zeros(value.shape, value.dtype)] * (len(devices) - 1)
    return on_each(devices, tf.identity, [value, *others])


def copies(value: Any, devices: Sequence[str]) -> Any:
    """Returns a value of replicas that all hold the same object: a copy for each."""
    copy = functools.partial(tf.nest.map_structure, tf.identity, expand_composites=True)
    return on_each(devices, copy, [value] * len(devices))


def on_each_alone(strategy: tf.distribute.Strategy, function: Any, grads: Sequence[Any]) -> Any:
    """Calls a function on each replica, which works alone."""
    last = last_of(grads)

    def on_replica(grads: Sequence[Any]) -> Any:
        with changed(alone=True, counts_after=last):
            return function(grads)

    return strategy.extended.call_for_each_replica(on_replica, args=(list(grads),))


def last_of(grads: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the tensors of the last gradient; a step that fails in its forward pass has none."""
    last = next((tf_internals.components(one) for one in reversed(grads) if one is not None), ())
    return list(tf.nest.flatten(last, expand_composites=True))


def summed(value: Any) -> tf.Tensor:
    """Returns the sum of a value over all replicas, on each; they meet for it."""
    # TensorFlow's `ReplicaContext.all_reduce` has a `tf.custom_gradient`: see `gradients`.
    value = tf.convert_to_tensor(value)
    extended = tf.distribute.get_strategy().extended
    total = extended._replica_ctx_all_reduce(SUM, value)
    return _SUMMED.of(total, value)


def _kept(upstream: Any, *_: Any) -> Any:
    """Returns a gradient without a stand-in's, which one of a user's own does not leave out."""
    here = current_several()
    return upstream if here is None else here.keep(upstream)


def summed_gradient(upstream: Any) -> tf.Tensor:
    """Returns the sum of the gradients that come to all replicas' examples."""
    return summed(_kept(upstream))


with_kept_gradient = Gradient("TfcdoKept", _kept).of
_SUMMED = Gradient("TfcdoSummed", lambda upstream, _: summed_gradient(upstream))


def components(variable: Any) -> tuple[Any, ...]:
    """Returns the components of a variable, also of Keras's, on the devices of this host."""
    return tf_internals.components(keras_internals.value_of(variable))


def assign(variable: Any, values: Sequence[Any]) -> None:
    """Gives each component of a variable, also of Keras's, a value, on its device."""
    for component, value in zip(components(variable), values, strict=True):
        with tf.device(component.device):
            component.assign(tf.cast(value, component.dtype))
