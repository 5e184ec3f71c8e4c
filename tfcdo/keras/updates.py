"""Changes the order in which a Keras optimizer works: first the sum over replicas, then the rest.

Keras clips on each replica, and accumulates in a `tf.cond`, where the replicas cannot meet. Here a
*leaf* is an optimizer that updates variables by itself, not one that wraps others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.keras import sharding
from tfcdo.keras.sharding import Shards
from tfcdo.replaced import replaced

SUM = tf.distribute.ReduceOp.SUM


def leaves(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the optimizers that update variables by themselves, in order."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return leaves(optimizer.inner_optimizer)
    if hasattr(optimizer, "optimizers"):
        return [leaf for part in optimizer.optimizers for leaf in leaves(part)]
    return [optimizer]


@contextlib.contextmanager
def summed_first(
    optimizer: keras.optimizers.Optimizer, shards: Shards | None = None
) -> Iterator[None]:
    """Has an optimizer sum over the replicas before all else; enter it where the replicas meet."""
    with contextlib.ExitStack() as stack:
        for leaf in leaves(optimizer):
            apply_gradients = functools.partial(_apply_gradients, leaf, shards)
            stack.enter_context(replaced(leaf, "_backend_apply_gradients", apply_gradients))
            stack.enter_context(replaced(leaf, "_all_reduce_sum_gradients", lambda summed: summed))
            name = "_overwrite_variables_directly_with_gradients"
            if hasattr(leaf, name):  # Keras before float8 has no such variables.
                overwrite = functools.partial(_overwrite_with_largest, getattr(leaf, name))
                stack.enter_context(replaced(leaf, name, overwrite))
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            stack.enter_context(replaced(optimizer, "check_finite", _finite_on_all_replicas))
        yield


@contextlib.contextmanager
def accumulated_on_each_replica(
    optimizer: keras.optimizers.Optimizer, shards: Shards | None = None
) -> Iterator[None]:
    """Has an optimizer that is built within keep one gradient accumulator for each replica."""
    # Keras makes one value that all replicas are supposed to share. The sum of these accumulators
    # is saved in the midst of an accumulation, as on one device.
    with contextlib.ExitStack() as stack:
        for leaf in leaves(optimizer):
            if shards is not None:
                stack.enter_context(sharding.slots_on_owners(leaf, shards))
            add_variable = functools.partial(_add_variable, leaf, leaf.add_variable_from_reference)
            stack.enter_context(replaced(leaf, "add_variable_from_reference", add_variable))
        known = leaves(optimizer)
        yield
    if shards is not None and leaves(optimizer) != known:
        raise ValueError(
            "shard_optimizer_state=True needs a MultiOptimizer that is given an OptimizerMap; got "
            "one that chooses its optimizers by a function, which are not known until it is built"
        )
    for leaf in leaves(optimizer):
        accumulators = getattr(leaf, "_accumulated_gradients", ())
        pairs = zip(accumulators, leaf._trainable_variables, strict=True) if accumulators else ()
        if any(own.synchronization != "on_read" and not _is_overwritten(of) for own, of in pairs):
            raise ValueError(
                "a MultiOptimizer whose optimizers accumulate gradients must be given an "
                "OptimizerMap; got one that chooses its optimizers by a function, "
                f"of which {leaf.name} has gradient_accumulation_steps="
                f"{leaf.gradient_accumulation_steps}"
            )


def of_one_kind(
    strategy: tf.distribute.Strategy, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """Gives each variable a gradient of one kind on all replicas of this host."""
    if len(gradients) != len(variables):
        return list(gradients)  # Keras raises the error.
    devices = strategy.extended.worker_devices
    return [
        _of_one_kind(gradient, list(variable.shape), devices)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _of_one_kind(gradient: Any, shape: list[int], devices: Sequence[str]) -> Any:
    if gradient is None or len(devices) == 1:
        return gradient
    if not isinstance(gradient, tf.distribute.DistributedValues):
        # TensorFlow's classes would count a tensor of all replicas once for all.
        copies = []
        for device in devices:
            with tf.device(device):
                copies.append(tf.identity(gradient))
        return tf_internals.per_replica(copies)
    present = [part for part in gradient.values if part is not None]
    kinds = {isinstance(part, tf.IndexedSlices) for part in present}
    if len(present) == len(gradient.values) and len(kinds) == 1:
        return gradient
    dtype, parts = present[0].dtype, []
    for part, device in zip(gradient.values, devices, strict=True):
        with tf.device(device):
            if part is None and kinds == {True}:
                no_indices = tf.zeros([0], present[0].indices.dtype)
                part = tf.IndexedSlices(tf.zeros([0, *shape[1:]], dtype), no_indices)
            elif part is None:
                part = tf.zeros(shape, dtype)
            if isinstance(part, tf.IndexedSlices):
                part = tf.IndexedSlices(part.values, part.indices, tf.constant(shape))
            if kinds != {True}:
                part = tf.convert_to_tensor(part)
        parts.append(part)
    return tf_internals.per_replica(parts)


def _overwrite_with_largest(
    original: Any, gradients: Sequence[Any], variables: Sequence[Any]
) -> Any:
    """Overwrites variables, the scales of float8, with the largest of the replicas' gradients."""
    context = tf.distribute.get_replica_context()
    gradients = list(gradients)
    overwritten = [index for index, one in enumerate(variables) if _is_overwritten(one)]
    if overwritten:
        own = [tf.convert_to_tensor(gradients[index])[None] for index in overwritten]
        for index, of_all in zip(overwritten, context.all_gather(own, axis=0), strict=True):
            gradients[index] = tf.reduce_max(of_all, 0)
    return original(gradients, variables)


def _is_overwritten(variable: Any) -> bool:
    return getattr(variable, "overwrite_with_gradient", False)


def _finite_on_all_replicas(gradients: Sequence[Any]) -> tf.Tensor:
    """Tells each replica whether all gradients of all replicas are finite."""
    finite = [
        tf.reduce_all(tf.math.is_finite(getattr(gradient, "values", gradient)))
        for gradient in gradients
        if gradient is not None
    ]
    failures = tf.cast(tf.logical_not(tf.reduce_all(finite)), tf.float32)
    return tf.equal(tf.distribute.get_replica_context().all_reduce(SUM, failures), 0.0)


def _add_variable(
    leaf: Any, original: Any, reference_variable: Any, name: str | None = None, **options: Any
) -> keras.Variable:
    """Makes a variable for an optimizer, as Keras does but for accumulators."""
    # The gradients of variables to be overwritten are alike on all replicas, as are their largest.
    if name != "gradient_accumulator" or _is_overwritten(reference_variable):
        return original(reference_variable, name=name, **options)
    path = getattr(reference_variable, "path", None) or reference_variable.name
    with keras.name_scope(leaf.name):
        accumulator = keras.Variable(
            "zeros",
            shape=tuple(reference_variable.shape),
            dtype=keras.backend.standardize_dtype(reference_variable.dtype),
            trainable=False,
            synchronization="on_read",
            aggregation="sum",
            name=f"{path}_{name}".replace("/", "_").replace(":", "_"),
        )
    leaf._track_variable(accumulator)
    return accumulator


def _apply_gradients(
    leaf: Any, shards: Shards | None, gradients: Sequence[Any], variables: Sequence[Any]
) -> None:
    """Stands for a leaf's `_backend_apply_gradients`, on each replica."""
    tf.distribute.get_replica_context().merge_call(
        functools.partial(_apply_across_replicas, leaf, shards),
        args=(list(gradients), list(variables)),
    )


def _apply_across_replicas(
    leaf: Any,
    shards: Shards | None,
    strategy: tf.distribute.Strategy,
    gradients: list[Any],
    variables: list[Any],
) -> None:
    def run(step: Any, *arguments: Any) -> Any:
        return strategy.run(functools.partial(step, leaf), args=arguments)

    def update() -> None:
        if shards is None:
            run(_update, gradients, variables)
        elif leaf.gradient_accumulation_steps:
            sharding.update(leaf, shards, run(_with_accumulated, gradients, variables), variables)
            run(_reset_accumulators)
        else:
            sharding.update(leaf, shards, gradients, variables)

    # A replica cannot meet the others within a `tf.cond` of its own, so the branch is chosen here.
    if leaf.gradient_accumulation_steps:
        is_update = tf.equal((leaf._iterations + 1) % leaf.gradient_accumulation_steps, 0)
        tf.cond(is_update, update, lambda: run(_accumulate, gradients, variables))
    else:
        update()
    if leaf.use_ema:
        run(lambda leaf: leaf._update_model_variables_moving_average(leaf._trainable_variables))
        if leaf.ema_overwrite_frequency:
            is_overwrite = tf.equal((leaf.iterations + 1) % leaf.ema_overwrite_frequency, 0)
            tf.cond(is_overwrite, lambda: _overwrite_with_average(leaf), lambda: None)


def _update(leaf: Any, gradients: list[Any], variables: list[Any]) -> None:
    """Makes one update, on each replica."""
    steps = leaf.gradient_accumulation_steps
    if steps:
        gradients = _with_accumulated(leaf, gradients, variables)
    gradients = tf.distribute.get_replica_context().all_reduce(SUM, gradients)
    if steps:
        gradients = [gradient / steps for gradient in gradients]
    gradients = leaf._clip_gradients(gradients)
    leaf._apply_weight_decay(variables)
    leaf._backend_update_step(gradients, variables, leaf.learning_rate)
    if steps:
        _reset_accumulators(leaf)


def _with_accumulated(leaf: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Returns a replica's gradients with those that it has accumulated."""
    return [
        accumulator.value + tf.convert_to_tensor(gradient)
        for gradient, accumulator in zip(gradients, _accumulators(leaf, variables), strict=True)
    ]


def _reset_accumulators(leaf: Any) -> None:
    for accumulator in leaf._accumulated_gradients:
        accumulator.assign(tf.zeros_like(accumulator.value))


def _accumulate(leaf: Any, gradients: list[Any], variables: list[Any]) -> None:
    """Adds a replica's gradients to its own accumulators; nothing is sent."""
    for gradient, accumulator in zip(gradients, _accumulators(leaf, variables), strict=True):
        accumulator.assign_add(tf.convert_to_tensor(gradient))


def _accumulators(leaf: Any, variables: list[Any]) -> list[keras.Variable]:
    return [leaf._accumulated_gradients[leaf._get_variable_index(one)] for one in variables]


def _overwrite_with_average(leaf: Any) -> None:
    leaf._overwrite_model_variables_with_average_value(leaf._trainable_variables)
