"""An optimizer's update: replicas sum once, then each works alone.

`apply` stands before each Keras optimizer's own `apply`. It sums the gradients where the replicas
meet, and calls Keras's on each replica, which then works alone: Keras clips, accumulates, decays,
updates and averages from the same sums, bitwise identically on each replica.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import keras_internals, tf_internals
from tfcdo.execute import rows
from tfcdo.training import sharding, step

# A class of optimizers' own `apply`, of an optimizer, gradients and variables.
Call = Callable[[Any, Sequence[Any], Sequence[Any] | None], Any]


def apply(own: Call, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any] | None) -> Any:
    """Applies gradients of this replica; `own` is Keras's method."""
    strategy = tf.distribute.get_strategy()
    here = step.now.step
    on_replica = step.is_ours(strategy) and not tf.distribute.in_cross_replica_context()
    if not on_replica or here is None or here.alone:
        return own(optimizer, grads, variables)
    grads = list(grads)
    check_made_here(optimizer, strategy, variables)
    if not grads:
        return own(optimizer, grads, variables)
    if here.trace is not None:
        return here.trace.defer(own, optimizer, grads, variables)
    context = tf.distribute.get_replica_context()
    if not optimizer.built and variables is not None:
        context.merge_call(lambda strategy: keras_internals.build(optimizer, variables))
    grads = here.keep(grads)
    if here.replicas == 1:
        with step.changed(alone=True):
            return own(optimizer, grads, variables)
    known = keras_internals.trainable_variables(optimizer) if variables is None else variables
    if len(grads) != len(known):
        return own(optimizer, grads, variables)  # Keras raises the error.
    leaves = keras_internals.leaves(optimizer)
    shards = strategy.extended.shard_optimizer_state
    if not shards and not any(map(keras_internals.accumulates_parts, leaves)):
        sums = context.merge_call(lambda strategy, grads: summed(strategy, grads, known), [grads])
        with step.changed(alone=True, counts_after=_last_of(sums)):
            return own(optimizer, sums, variables)
    if leaves != [optimizer]:  # Its parts come here again, each with gradients of its own.
        return own(optimizer, _finite_on_all(list(grads)), variables)
    context.merge_call(lambda strategy, grads: _update(strategy, optimizer, grads, known), [grads])
    return optimizer.iterations


def check_made_here(optimizer: Any, strategy: Any, variables: Sequence[Any] | None) -> None:
    """Raises a ValueError unless an optimizer and its variables are of the strategy's scope."""
    for leaf in (optimizer, *keras_internals.leaves(optimizer)):
        if keras_internals.strategy_of(leaf) is not strategy:
            raise ValueError(
                f"the optimizer {leaf.name!r} must be made in the scope of the strategy that runs "
                f"it, {type(strategy).__name__}; it was made outside: move the line that makes "
                "it, or that calls model.compile with its name, into `with strategy.scope():`"
            )
    for variable in variables or ():
        value = keras_internals.value_of(variable)
        if getattr(value, "distribute_strategy", strategy) is not strategy or not isinstance(
            value, tf_internals.DistributedValues
        ):
            raise ValueError(
                f"the variable {keras_internals.path_of(variable)!r} must be made in the scope "
                f"of the strategy that trains it, {type(strategy).__name__}; it was made outside: "
                "move the line that makes the model into `with strategy.scope():`"
            )


@tf.autograph.experimental.do_not_convert
def summed(
    strategy: tf.distribute.Strategy, grads: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """Sums gradients over all replicas; where these meet. None stays None."""
    grads = unified(strategy, grads, variables)
    results = _largest(strategy, grads, variables)
    at = [i for i, grad in enumerate(grads) if grad is not None and i not in results]
    if at:
        paths = [keras_internals.path_of(variables[i]) for i in at]
        sums = strategy.extended.sum_gradients([grads[i] for i in at], paths)
        for i, total in zip(at, sums, strict=True):
            results[i] = total
            if rows.are_unique(tf_internals.components(grads[i])[0]):
                devices = strategy.extended.worker_devices
                parts = tf_internals.components(total)
                results[i] = step.on_each(devices, rows.add_equal, parts)
    return [results.get(i) for i in range(len(grads))]


def _largest(
    strategy: tf.distribute.Strategy, grads: Sequence[Any], variables: Sequence[Any]
) -> dict[int, Any]:
    """Returns the largest of the replicas' gradients of variables that these overwrite."""
    # The scales of float8, which Keras gets as gradients.
    at = [
        i
        for i, v in enumerate(variables)
        if keras_internals.is_overwritten(v) and grads[i] is not None
    ]
    if not at:
        return {}
    on_each = functools.partial(step.on_each, strategy.extended.worker_devices)
    as_rows = [
        on_each(lambda grad: tf.convert_to_tensor(grad)[None], tf_internals.components(grads[i]))
        for i in at
    ]
    of_all = strategy.extended.gather_rows(as_rows)
    largest = (
        on_each(lambda some: tf.reduce_max(some, 0), tf_internals.components(one)) for one in of_all
    )
    return dict(zip(at, largest, strict=True))


def unified(
    strategy: tf.distribute.Strategy, grads: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """Gives each variable a gradient of one kind and of its shape on all replicas of this host."""
    devices = strategy.extended.worker_devices
    return [
        _shaped(_unified(grad, list(variable.shape), devices), variable.shape, devices)
        for grad, variable in zip(grads, variables, strict=True)
    ]


def _shaped(grad: Any, shape: tf.TensorShape, devices: Sequence[str]) -> Any:
    # Where a layer has reshaped its inputs, as Dense does with three axes, TensorFlow does not know
    # the shape of its kernel's gradient while it traces. Values of unknown sizes are not packed.
    parts = tf_internals.components(grad)
    if all(not isinstance(part, tf.Tensor) or part.shape.is_fully_defined() for part in parts):
        return grad
    return step.on_each(devices, functools.partial(tf.ensure_shape, shape=shape), parts)


def _unified(grad: Any, shape: list[int], devices: Sequence[str]) -> Any:
    if grad is None or len(devices) == 1:
        return grad
    if not isinstance(grad, tf.distribute.DistributedValues):
        # TensorFlow's classes would count a tensor of all replicas once for all.
        copy = functools.partial(tf.nest.map_structure, tf.identity, expand_composites=True)
        return step.on_each(devices, copy, [grad] * len(devices))
    present = [part for part in grad.values if part is not None]
    kinds = {isinstance(part, tf.IndexedSlices) for part in present}
    if len(present) == len(grad.values) and len(kinds) == 1:
        return grad
    dtype = present[0].dtype

    def unify(part: Any) -> Any:
        if part is None and kinds == {True}:
            no_indices = tf.zeros([0], present[0].indices.dtype)
            part = tf.IndexedSlices(tf.zeros([0, *shape[1:]], dtype), no_indices)
        elif part is None:
            part = tf.zeros(shape, dtype)
        if isinstance(part, tf.IndexedSlices):
            part = tf.IndexedSlices(part.values, part.indices, tf.constant(shape))
        return part if kinds == {True} else tf.convert_to_tensor(part)

    return step.on_each(devices, unify, grad.values)


def _finite_on_all(grads: list[Any]) -> list[Any]:
    """Returns gradients, one of them NaN if another replica has one that is not finite."""
    # A LossScaleOptimizer looks for such gradients on each replica, before they are summed.
    present = [i for i, grad in enumerate(grads) if grad is not None]
    if not present:
        return grads  # Keras raises the error.
    at = min(present, key=lambda i: isinstance(grads[i], tf.IndexedSlices))
    grads[at] = tf.convert_to_tensor(grads[at])
    finite = [
        tf.reduce_all(tf.math.is_finite(getattr(grads[i], "values", grads[i]))) for i in present
    ]
    failures = step.summed(tf.cast(tf.logical_not(tf.reduce_all(finite)), tf.float32))
    nan = tf.constant(float("nan"), grads[at].dtype)
    grads[at] = tf.where(failures > 0, nan, grads[at])
    return grads


@tf.autograph.experimental.do_not_convert
def _update(
    strategy: tf.distribute.Strategy, leaf: Any, grads: Sequence[Any], variables: Sequence[Any]
) -> None:
    """Updates, or accumulates, with an optimizer without inner ones; where the replicas meet."""
    keras_internals.check_known(leaf, variables)
    shards = strategy.extended.shard_optimizer_state
    grads = unified(strategy, grads, variables)
    at = [i for i, grad in enumerate(grads) if grad is not None]
    grads, variables = [grads[i] for i in at], [variables[i] for i in at]

    def work(grads: Sequence[Any]) -> None:
        alone(strategy, lambda grads: leaf.apply(grads, variables), grads)

    def update(grads: Sequence[Any]) -> None:
        if not shards:
            work(summed(strategy, grads, variables))
            return
        pairs: tuple[list[Any], list[Any]] = ([], [])
        for grad, variable in zip(grads, variables, strict=True):
            pairs[keras_internals.is_overwritten(variable)].append((grad, variable))
        owned, whole = ([*zip(*some, strict=True)] or [(), ()] for some in pairs)
        sharding.update(strategy, leaf, *owned, *whole)

    # While gradients accumulate, nothing is sent but the scales of float8.
    if shards or leaf.gradient_accumulation_steps:
        for i, largest in _largest(strategy, grads, variables).items():
            grads[i] = largest
    if not leaf.gradient_accumulation_steps:
        update(grads)
        return
    # A replica cannot meet the others in a `tf.cond` of its own, so the branch is chosen here.
    tf.cond(
        keras_internals.is_update_due(leaf),
        lambda: update(alone(strategy, lambda grads: _taken(leaf, grads, variables), grads)),
        lambda: work(grads),
    )


def alone(strategy: tf.distribute.Strategy, function: Any, grads: Sequence[Any]) -> Any:
    """Calls a function on each replica, which works alone."""
    last = _last_of(grads)

    @tf.autograph.experimental.do_not_convert
    def on_replica(grads: Sequence[Any]) -> Any:
        with step.changed(alone=True, counts_after=last):
            return function(grads)

    return strategy.extended.call_for_each_replica(on_replica, args=(list(grads),))


def _last_of(grads: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the tensors of the last gradient; a step that fails in its forward pass has none."""
    last = next((tf_internals.components(one) for one in reversed(grads) if one is not None), ())
    return list(tf.nest.flatten(last, expand_composites=True))


def _taken(leaf: Any, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns a replica's gradients plus its accumulated ones, and empties the accumulators."""
    accumulators = keras_internals.accumulators(leaf, variables)
    sums = []
    for grad, accumulator, variable in zip(grads, accumulators, variables, strict=True):
        if not keras_internals.is_overwritten(variable):
            grad = accumulator.value + tf.convert_to_tensor(grad)
        sums.append(grad)
    # As Keras does, also those of variables that are frozen since.
    of_all = keras_internals.trainable_variables(leaf)
    to_empty = [one for one in of_all if not keras_internals.is_overwritten(one)]
    for accumulator in keras_internals.accumulators(leaf, to_empty):
        accumulator.assign(tf.zeros_like(accumulator.value))
    return sums
