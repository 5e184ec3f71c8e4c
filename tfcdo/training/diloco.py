"""`outer=DiLoCo(...)`: hosts train alone, and exchange their parameters' differences in turn.

Within `strategy.run` a host is alone, see `step.now`. `between_hosts` is around the update of
the outermost optimizer, and counts. After `every` updates the hosts meet in it, inside of the
traced step, however many steps an execution has. As hosts take the same number of steps, their
counts are equal, and all of them take the same branch.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcdo import keras_internals, tf_internals
from tfcdo.cluster import session
from tfcdo.exchange.diloco import DiLoCo
from tfcdo.plan.algorithms import deal_owners
from tfcdo.training import step
from tfcdo.training.step import SUM, ReplicaStep, components

_DEFAULT = functools.partial(keras.optimizers.SGD, 0.7, momentum=0.9, nesterov=True)
# Attributes of Keras's optimizers: of an inner one so that its checkpoints have the outer loop's
# state, and of an outer one.
_STATE, _IS_OUTER = "tfcdo_outer", "tfcdo_is_outer"


class OuterState(tf.Module):
    """The outer loop's state for one optimizer that updates variables by itself."""

    def __init__(self, strategy: Any, leaf: Any, variables: Sequence[Any]) -> None:
        super().__init__()
        self._strategy = strategy
        settings: DiLoCo = strategy.extended.outer
        self.period = settings.every * (leaf.gradient_accumulation_steps or 1)
        self.interval = self.period // settings.fragments
        self.trained = tuple(variables)  # Between two exchanges each host has its own.
        sizes = [one.shape.num_elements() * one.value.dtype.size for one in self.trained]
        self.fragments = deal_owners(sizes, settings.fragments)
        self.all_fragments = sorted(set(self.fragments))
        self.overlaps = settings.fragments > 1  # Exchanges run while the next step is computed.
        # Parameters of the last exchange, once steps have followed it; equal on all hosts.
        self.common = [
            # With trainable=False it would be a statistic, whose value differs between replicas.
            keras.Variable(
                "zeros", shape=tuple(one.shape), dtype=one.dtype, name=f"outer_{one.name}"
            )
            for one in self.trained
        ]
        # One for each fragment, as it counts the updates of the common parameters.
        self.optimizers = [_make(settings.optimizer) for _ in range(settings.fragments)]
        for fragment, optimizer in enumerate(self.optimizers):
            optimizer.build(self._of(fragment)[1])
        integer = functools.partial(keras.Variable, "zeros", dtype="int64", trainable=False)
        # Since all hosts were known to have the same parameters, with which `common` then begins.
        self.steps = integer(shape=(), name="outer_steps")
        # For each fragment, how many examples this host has trained since its exchange.
        self.examples = integer(shape=(settings.fragments,), name="outer_examples")
        self._exchange_now = tf.function(self._exchange, autograph=False)

    @property
    def variables_of_all(self) -> list[Any]:
        """Returns the variables that are equal on all hosts."""
        of_optimizers = [one for each in self.optimizers for one in each.variables]
        return [*self.common, *of_optimizers, self.steps]

    @property
    def num_steps(self) -> int:
        """Returns the number of steps since all hosts were known to have the same parameters."""
        return int(components(self.steps)[0].numpy())

    def begin(self) -> dict[int, Any]:
        """Begins a step: remembers the parameters if all hosts have the same.

        Returns the arguments for `end` of each fragment that is exchanged during this step.
        """
        exchanged = step.now.steps[0].exchanged if step.now.steps else {}
        for variable in self.trained:
            if exchanged.setdefault(id(variable), self) is not self:
                raise ValueError(
                    "with outer=, only one optimizer must be built for a weight, or hosts exchange "
                    f"it twice; got two for {variable.path!r}: before fit, call build of each "
                    "optimizer with the weights that it updates"
                )
        done = components(self.steps)[0].read_value()
        tf.cond(tf.equal(done, 0), lambda: _copy(self.trained, self.common), lambda: None)
        begun: dict[int, Any] = {}
        for fragment in self.all_fragments if self.overlaps else ():
            is_due = tf.logical_and(done > 0, self._is_due(done, fragment))
            meet = functools.partial(self._meet, fragment)
            nothing = functools.partial(self._nothing, fragment)
            begun[fragment] = is_due, tf.cond(is_due, meet, nothing)
        return begun

    def end(self, rows: Any, begun: Mapping[int, Any]) -> None:
        """Counts a step, and ends or makes the exchanges whose time it is."""
        for component in components(self.steps):
            component.assign_add(1)
        for component in components(self.examples):
            with tf.device(component.device):
                component.assign_add(tf.fill(component.shape, tf.cast(rows, tf.int64)))
        done = components(self.steps)[0].read_value()
        for fragment in self.all_fragments:
            if self.overlaps:
                is_due, (means, sent) = begun[fragment]
                update = functools.partial(self._update, fragment, means, sent, rows)
            else:
                is_due = self._is_due(done, fragment)
                update = functools.partial(self._exchange, fragment)
            tf.cond(is_due, update, lambda: None)

    def finish(self) -> None:
        """Exchanges all that hosts have trained since the last exchange."""
        done = self.num_steps
        for fragment in self.all_fragments if done else ():
            if self.overlaps or not self._is_due(done, fragment):
                self._exchange_now(fragment)
        self.begin_again()

    def begin_again(self) -> None:
        """Notes that all hosts have the same parameters."""
        for variable in (self.steps, self.examples):
            parts = components(variable)
            step.assign(variable, [tf.zeros_like(part) for part in parts])

    def _is_due(self, done: Any, fragment: int) -> Any:
        """Returns whether a fragment is exchanged after `done` steps, at least one."""
        return (done - (fragment + 1) * self.interval) % self.period == 0

    def _of(self, fragment: int) -> tuple[list[Any], list[Any]]:
        """Returns the trained and the common parameters of a fragment."""
        members = [at for at, one in enumerate(self.fragments) if one == fragment]
        return [self.trained[at] for at in members], [self.common[at] for at in members]

    def _exchange(self, fragment: int) -> None:
        """Exchanges a fragment; where this host's replicas meet."""
        means, own = self._meet(fragment)
        self._update(fragment, means, own, 0)

    def _meet(self, fragment: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the hosts' mean differences of a fragment, and this host's own parameters."""
        trained, common = self._of(fragment)
        extended = self._strategy.extended
        devices = extended.worker_devices
        with tf.device(devices[0]):
            examples = components(self.examples)[0][fragment]
        counts = step.of_host(examples, devices)
        with step.during(host_alone=False):
            total = extended.reduce_to(SUM, counts, counts)
            with tf.device(devices[0]):
                # A host counts by its examples, so that each example counts the same.
                of_all = tf_internals.components(total)[0]
                share = tf.math.divide_no_nan(*(tf.cast(n, tf.float64) for n in (examples, of_all)))
                own = [components(one)[0].read_value() for one in trained]
                changes = [
                    (components(before)[0].read_value() - now) * tf.cast(share, now.dtype)
                    for before, now in zip(common, own, strict=True)
                ]
            differences = [step.of_host(change, devices) for change in changes]
            paths = [one.path for one in trained]
            means = extended._cross_device_ops.sum_gradients(differences, paths, devices).sums
        return [tf_internals.components(mean)[0] for mean in means], own

    def _nothing(self, fragment: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns empty values in place of the results of `_meet`."""
        empty = [tf.zeros([0], one.dtype) for one in self._of(fragment)[0]]
        return empty, empty

    def _update(
        self, fragment: int, means: Sequence[tf.Tensor], sent: Sequence[tf.Tensor], rows: Any
    ) -> None:
        """Updates the common parameters; this host's own keep their changes since `sent`."""
        trained, common = self._of(fragment)
        outer, devices = self.optimizers[fragment], self._strategy.extended.worker_devices
        shaped = [tf.ensure_shape(mean, one.shape) for mean, one in zip(means, common, strict=True)]
        grads = [step.copies(mean, devices) for mean in shaped]
        step.on_each_alone(self._strategy, lambda grads: outer.apply(grads, common), grads)
        for source, target, before in zip(common, trained, sent, strict=True):
            for given, component in zip(components(source), components(target), strict=True):
                with tf.device(component.device):
                    value = tf.cast(given.read_value(), component.dtype)
                    if self.overlaps:
                        value += component.read_value() - tf.ensure_shape(before, component.shape)
                    component.assign(value)
        for component in components(self.examples):
            with tf.device(component.device):
                is_other = tf.range(component.shape[0]) != fragment
                left = tf.cast(rows, tf.int64)
                component.assign(tf.where(is_other, component.read_value(), left))


def between_hosts(optimizer: Any, variables: Any, update: Callable[[], Any]) -> Any:
    """Updates on a host that trains alone; before and after it hosts meet if it is time to."""
    context = tf.distribute.get_replica_context()
    begun: list[dict[int, Any]] = []

    def begin(strategy: tf.distribute.Strategy) -> None:
        if variables is not None:
            keras_internals.build(optimizer, variables)
        begun.extend(state.begin() for state in states_of(optimizer))
        # A LossScaleOptimizer calls its inner optimizer where the replicas meet.
        step.change_all(applies=True)

    def end(strategy: tf.distribute.Strategy) -> None:
        total = step.change_all(applies=False)[0].total
        for state, exchanges in zip(states_of(optimizer), begun, strict=True):
            # Without a batch, hosts count the same.
            state.end(1 if total is None else total, exchanges)

    context.merge_call(begin)
    with step.changed(applies=True):
        result = update()
    context.merge_call(end)
    return result


def states_of(optimizer: Any) -> list[OuterState]:
    """Returns the `OuterState` of each of an optimizer's parts; none without `outer`."""
    leaves = [] if optimizer is None else keras_internals.leaves(optimizer)
    return [getattr(leaf, _STATE) for leaf in leaves if hasattr(leaf, _STATE)]


def states_of_model(model: Any) -> list[OuterState]:
    """Returns the `OuterState` of each part of a model's optimizers."""
    optimizers = keras_internals.optimizers_of(model).values()
    states = [state for optimizer in optimizers for state in states_of(optimizer)]
    return list({id(state): state for state in states}.values())  # One may wrap another.


def build(strategy: tf.distribute.Strategy, leaf: Any, variables: Sequence[Any]) -> None:
    """Makes the outer loop's state for a newly built optimizer, if the strategy has `outer`."""
    outer = getattr(strategy.extended, "outer", None)
    if outer is None or is_outer(leaf) or hasattr(leaf, _STATE):
        return
    if keras_internals.leaves(leaf) != [leaf]:  # Its parts have theirs.
        return
    trained = [one for one in variables if not keras_internals.is_overwritten(one)]
    with tf.init_scope(), strategy.scope():
        state = OuterState(strategy, leaf, trained)
        setattr(leaf, _STATE, state)
        # Keras's `build` tracks nothing.
        leaf._track_trackable(state, _STATE, overwrite=True)


def finalize(own: Callable[..., Any], optimizer: Any, var_list: Any) -> Any:
    """Gives weights their moving averages, as `fit` does at its end: the means of all hosts'."""
    for state in states_of(optimizer) if optimizer.use_ema else ():
        extended = keras_internals.strategy_of(optimizer).extended
        for average in keras_internals.averages(optimizer, state.trained):
            values = tf_internals.per_replica([one.read_value() for one in components(average)])
            mean = extended.reduce_to("MEAN", values, values)  # Alone, so it is exact.
            step.assign(average, tf_internals.components(mean))
        state.begin_again()
    return own(optimizer, var_list)


def is_outer(optimizer: Any) -> bool:
    """Returns whether this is an outer optimizer."""
    return getattr(optimizer, _IS_OUTER, False)


def finish(strategy: tf.distribute.Strategy, states: Sequence[OuterState]) -> None:
    """Exchanges all that hosts have trained since the last exchange; all hosts must call it."""
    replicas = len(strategy.extended.worker_devices)
    steps = [ReplicaStep(index, replicas) for index in range(replicas)]
    with strategy.scope(), step.during(steps=steps):
        for state in states:
            state.finish()


@contextlib.contextmanager
def common_parameters(model: Any) -> Iterator[None]:
    """While this lasts, a model has the parameters of the last exchange."""
    states = [state for state in states_of_model(model) if state.num_steps]
    own = []
    for state in states:
        for variable in state.trained:
            own.append((variable.value, [one.read_value() for one in components(variable)]))
        _copy(state.common, state.trained)
    try:
        yield
    finally:
        for variable, values in own:
            step.assign(variable, values)


def _make(given: Any) -> Any:
    """Makes an outer optimizer; raises an error unless all hosts have made the same."""
    made = given() if callable(given) else given
    try:
        optimizer = keras.optimizers.get(_DEFAULT() if made is None else made)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "optimizer of outer=DiLoCo must make, or be, what keras.optimizers.get takes; "
            f"got {given!r}: {error!r}"
        ) from error
    setattr(optimizer, _IS_OUTER, True)
    joined = session.current()
    if joined is not None:
        config = {**optimizer.get_config(), "name": type(optimizer).__name__}
        joined.agree({"what": "outer optimizer", "config": json.dumps(config, default=str)})
    return optimizer


def _copy(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Gives variables the values of others, on each device of this host."""
    for source, target in zip(sources, targets, strict=True):
        step.assign(target, [one.read_value() for one in components(source)])
