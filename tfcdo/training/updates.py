"""An optimizer's update: replicas sum once, then each works alone.

`apply` stands before each Keras optimizer's own `apply`. It sums the gradients where the replicas
meet, and calls Keras's on each replica, which then works alone: Keras clips, accumulates, decays,
updates and averages from the same sums, on each replica alike. With sharded state it updates
only the variables that it owns, and sends them to the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import keras_internals, log, tf_internals
from tfcdo.execute import device_ops, rows
from tfcdo.execute.base import ConfiguredCrossDeviceOps
from tfcdo.execute.interpreter import Summed
from tfcdo.plan.algorithms import deal_owners
from tfcdo.training import diloco, statistics, step

# A class of optimizers' own `apply`, of an optimizer, gradients and variables.
Call = Callable[[Any, Sequence[Any], Sequence[Any] | None], Any]
Function = Callable[..., Any]
_OWNER = "tfcdo_owner"  # An attribute of TensorFlow's variable: the index of its owner's device.


def apply(
    own: Function,
    optimizer: Any,
    grads: Any,
    trainable_variables: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stands for an optimizer's `apply`; hosts that train alone meet if it is time to."""
    own = tf_internals.converted(own)

    def own_apply(optimizer: Any, grads: Sequence[Any], variables: Any) -> Any:
        return own(optimizer, grads, variables, *args, **kwargs)  # A user's may have others.

    variables = None if trainable_variables is None else list(trainable_variables)
    update = functools.partial(_apply, own_apply, optimizer, grads, variables)
    here = step.now.step
    outer = getattr(tf.distribute.get_strategy().extended, "outer", None)
    if outer is None or here is None or here.alone or here.applies or here.trace is not None:
        return update()
    return diloco.between_hosts(optimizer, variables, update)


def apply_gradients(
    own: Function, optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands for a user's own `apply_gradients`, which gets the sums as an `apply` does."""
    own = tf_internals.converted(own)

    def own_apply(optimizer: Any, grads: Sequence[Any], variables: Any) -> Any:
        # A list, which it may go through twice.
        return own(optimizer, [*zip(grads, variables, strict=True)], *args, **kwargs)

    pairs = list(grads_and_vars)
    return apply(own_apply, optimizer, [grad for grad, _ in pairs], [one for _, one in pairs])


def _apply(own: Call, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any] | None) -> Any:
    """Applies gradients of this replica."""
    strategy = tf.distribute.get_strategy()
    here = step.now.step
    if here is None or here.alone or not step.is_ours(strategy):
        if here is None and (divided := _divided(optimizer)):
            raise ValueError(
                f"the optimizer {optimizer.name!r} must be applied in strategy.run or fit, because "
                f"each replica has its part of {divided}; it was applied outside of them"
            )
        return own(optimizer, grads, variables)
    grads = list(grads)
    check_made_here(optimizer, strategy, variables)
    if not grads:
        return own(optimizer, grads, variables)
    if here.replicas > 1 and step.now.method == "fit" and not here.losses:
        log.warn_once(
            "a train_step updates weights, and has computed no loss of Keras: the mean of a "
            f"replica's examples, such as tf.reduce_mean, counts {here.replicas} times on "
            f"{here.replicas} replicas. Divide it as docs/own-loops.md says under Losses, or use a "
            "class of keras.losses. If you have done so, or take a sum, nothing is wrong"
        )
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
    if not _divided(optimizer):
        sums = context.merge_call(
            lambda strategy, grads: _summed(strategy, unified(strategy, grads, known), known),
            [grads],
        )
        with step.changed(alone=True, counts_after=step.last_of(sums)):
            return own(optimizer, sums, variables)
    if keras_internals.leaves(optimizer) != [optimizer]:
        # Its parts come here again, each with gradients of its own.
        return own(optimizer, grads, variables)
    context.merge_call(lambda strategy, grads: _update(strategy, optimizer, grads, known), [grads])
    return optimizer.iterations


def _divided(optimizer: Any) -> str | None:
    """Returns which of an optimizer's state several replicas have in parts; None without one."""
    strategy = keras_internals.strategy_of(optimizer)
    if not step.is_ours(strategy) or strategy.num_replicas_in_sync == 1:
        return None
    if any(map(keras_internals.accumulates_parts, keras_internals.leaves(optimizer))):
        return "the gradients that gradient_accumulation_steps adds up"
    sharded = strategy.extended.shard_optimizer_state
    return "the state, by shard_optimizer_state=True" if sharded else None


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
        check_variable(variable, strategy)


def check_variable(
    variable: Any, strategy: Any, kind: str = "variable", line: str = "calls `enable_lora`"
) -> None:
    """Raises a ValueError unless a variable, such as a metric's, is of the strategy's scope."""
    value = keras_internals.value_of(variable)
    is_distributed = isinstance(value, tf_internals.DistributedValues)
    if not is_distributed or getattr(value, "distribute_strategy", strategy) is not strategy:
        raise ValueError(
            f"the {kind} {keras_internals.path_of(variable)!r} must be made in the scope of the "
            f"strategy that trains it, {type(strategy).__name__}; it was made outside: move the "
            f"line that makes it, or {line}, into `with strategy.scope():`"
        )


def _summed(
    strategy: tf.distribute.Strategy, grads: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """Sums unified gradients over all replicas; where these meet. None stays None."""
    results = list(grads)
    are_added = [not keras_internals.is_overwritten(variable) for variable in variables]
    at = [i for i, grad in enumerate(grads) if grad is not None and are_added[i]]
    if at:
        found, lookups = _lookups_summed(
            strategy, [grads[i] for i in at], [variables[i] for i in at]
        )
        for i, total in zip(at, rows.as_on_one_device(found.sums, lookups), strict=True):
            results[i] = tf_internals.per_replica(total)
    return results


def _lookups_summed(
    strategy: tf.distribute.Strategy,
    grads: Sequence[Any],
    variables: Sequence[Any],
    owners: Sequence[int] = (),
) -> tuple[Summed, Sequence[rows.Lookup]]:
    """Sums the rows of each lookup, or all of a gradient, for all devices or on an owner."""
    extended = strategy.extended
    ops = extended._cross_device_ops
    is_ours = isinstance(ops, ConfiguredCrossDeviceOps)
    examples = step.now.steps[0].known_rows if step.now.steps else None
    lookups = rows.by_lookup(grads, examples, is_ours and ops._options.sum_equal_rows)
    values = [one.rows for one in lookups]
    paths = [keras_internals.path_of(variables[one.of]) for one in lookups]
    if is_ours:
        of_lookups = [owners[one.of] for one in lookups] if owners else ()
        found = ops.sum_gradients(values, paths, extended.worker_devices, of_lookups)
    else:
        found = Summed(tuple(extended.batch_reduce_to("SUM", [*zip(values, values)])), ())
    # Replicas may update these in another order than others do.
    extended.updated_by_rows.update(
        path
        for path, total in zip(paths, found.sums, strict=True)
        if isinstance(tf_internals.components(total)[0], tf.IndexedSlices)
    )
    return found, lookups


def unified(
    strategy: tf.distribute.Strategy, grads: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """Gives each variable a gradient of one kind and of its shape on all replicas of this host.

    Variables that Keras overwrites with their gradients get the largest of all replicas'.
    """
    devices = strategy.extended.worker_devices
    found = [
        _shaped(_unified(grad, list(variable.shape), devices), variable.shape, devices)
        for grad, variable in zip(grads, variables, strict=True)
    ]
    overwriting = map(keras_internals.is_overwritten, variables)
    at = [i for i, is_whole in enumerate(overwriting) if is_whole and found[i] is not None]
    # The scales of float8, which Keras gets as gradients.
    for i, largest in zip(at, _largest(strategy, [found[i] for i in at]), strict=True):
        found[i] = largest
    return found


def _largest(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> list[Any]:
    """Returns the largest of all replicas' numbers, element by element."""
    on_each = functools.partial(step.on_each, strategy.extended.worker_devices)
    as_rows = [
        on_each(lambda own: tf.convert_to_tensor(own)[None], tf_internals.components(one))
        for one in values
    ]
    of_all = strategy.extended.gather_rows(as_rows) if as_rows else []
    return [
        on_each(lambda some: tf.reduce_max(some, 0), tf_internals.components(one)) for one in of_all
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
        return step.copies(grad, devices)
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


def _update(
    strategy: tf.distribute.Strategy, leaf: Any, grads: Sequence[Any], variables: Sequence[Any]
) -> None:
    """Updates, or accumulates, with an optimizer without inner ones; where the replicas meet."""
    keras_internals.check_known(leaf, variables)
    shards = strategy.extended.shard_optimizer_state
    grads = unified(strategy, grads, variables)
    at = [i for i, grad in enumerate(grads) if grad is not None]

    def work(grads: Sequence[Any]) -> None:
        step.on_each_alone(strategy, lambda grads: leaf.apply(grads, variables), grads)

    if not at:
        return work(grads)  # Keras raises the error.
    grads, variables = [grads[i] for i in at], [variables[i] for i in at]

    def update(grads: Sequence[Any]) -> None:
        if not shards:
            work(_summed(strategy, grads, variables))
            return
        pairs: tuple[list[Any], list[Any]] = ([], [])
        for grad, variable in zip(grads, variables, strict=True):
            pairs[keras_internals.is_overwritten(variable)].append((grad, variable))
        owned, whole = ([*zip(*some, strict=True)] or [(), ()] for some in pairs)
        _update_shards(strategy, leaf, *owned, *whole)

    if not leaf.gradient_accumulation_steps:
        update(grads)
        return
    # A replica cannot meet the others in a `tf.cond` of its own, so the branch is chosen here. No
    # gradients are sent while they accumulate.
    tf.cond(
        keras_internals.is_update_due(leaf),
        lambda: update(
            step.on_each_alone(strategy, lambda grads: _taken(leaf, grads, variables), grads)
        ),
        lambda: work(grads),
    )


def _taken(leaf: Any, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns a replica's gradients plus its accumulated ones, and empties the accumulators."""
    accumulators = keras_internals.accumulators(leaf, variables)
    scale = leaf.loss_scale_factor or 1  # Accumulated gradients are divided by it, others not yet.
    sums = []
    for grad, accumulator, variable in zip(grads, accumulators, variables, strict=True):
        if not keras_internals.is_overwritten(variable):
            grad = accumulator.value * scale + tf.convert_to_tensor(grad)
        sums.append(grad)
    # As Keras does, also accumulators of variables that are frozen since.
    of_all = keras_internals.trainable_variables(leaf)
    to_empty = [one for one in of_all if not keras_internals.is_overwritten(one)]
    for accumulator in keras_internals.accumulators(leaf, to_empty):
        accumulator.assign(tf.zeros_like(accumulator.value))
    return sums


# Sharded optimizer state: each variable is updated on one device, which sends it to the others.


def assign_owners(extended: Any, variables: Sequence[Any]) -> None:
    """Deals variables to the devices of this host by their bytes, before their slots are made."""
    values = [keras_internals.value_of(variable) for variable in variables]
    free = [
        value
        for value in values
        if isinstance(value, tf_internals.DistributedValues) and not hasattr(value, _OWNER)
    ]
    sizes = [value.shape.num_elements() * value.dtype.size for value in free]
    dealt = deal_owners(sizes, len(extended.worker_devices))
    for value, owner in zip(free, dealt, strict=True):
        setattr(value, _OWNER, owner)


def device_of_slots(extended: Any, variable: Any) -> str | None:
    """Returns the device on which the slots of a variable are made; None for all devices."""
    owner = getattr(keras_internals.value_of(variable), _OWNER, None)
    return None if owner is None else extended.worker_devices[owner]


def _update_shards(
    strategy: tf.distribute.Strategy,
    leaf: Any,
    grads: Sequence[Any],
    variables: Sequence[Any],
    overwriting: Sequence[Any],
    overwritten: Sequence[Any],
) -> None:
    """Sums gradients on the owners of their variables, updates these there, and sends them.

    Each replica also overwrites some variables with the largest of the replicas' gradients.
    """
    values = [keras_internals.value_of(variable) for variable in variables]
    owner = [getattr(value, _OWNER) for value in values]
    devices = strategy.extended.worker_devices
    grads = [_in_dtype(grad, value.dtype) for grad, value in zip(grads, values, strict=True)]
    found, lookups = _lookups_summed(strategy, grads, variables, owner)
    sums = [total for [total] in rows.as_on_one_device(found.sums, lookups)]
    # No owner begins before all sums exist, so a step that fails until then changes nothing.
    ready = [] if tf.executing_eagerly() else tf.nest.flatten(sums, expand_composites=True)
    all_there = [tf.group(*ready)] if ready else []
    norm = _norm(leaf, sums, [devices[at] for at in owner]) if leaf.global_clipnorm else None
    changed: list[Any] = [None] * len(sums)
    # Slots that are on all devices, and which replicas have written them.
    slots: dict[int, tuple[Any, list[int]]] = {}

    def on_owner(scales: Sequence[Any]) -> None:
        here = step.now.step
        assert here is not None
        mine = [at for at, index in enumerate(owner) if index == here.replica]
        written: dict[int, tuple[Any, list[Any]]] = {}
        alone = step.changed(alone=True, written=written, norm=norm)
        with alone, tf.control_dependencies(all_there):
            keras_internals.apply_to_own(
                leaf,
                [*(sums[at] for at in mine), *scales],
                [*(variables[at] for at in mine), *overwritten],
            )
            for at in mine:
                component = values[at].values[here.replica]
                _, indices = written.get(id(values[at]), (None, [None]))
                changed[at] = _new_value(leaf, variables[at], component, indices)

            for slot, _ in written.values():
                if isinstance(slot, tf_internals.DistributedValues):
                    slots.setdefault(id(slot), (slot, []))[1].append(here.replica)

    strategy.extended.call_for_each_replica(on_owner, args=(list(overwriting),))
    # Of several sums for one variable, the first one's place has it.
    of = [one.of for one in lookups]
    first = [of.index(i) for i in range(len(values))]
    arrived = found.send([changed[i] if first[i] == k else tf.zeros([0]) for k, i in enumerate(of)])
    for value, at, k in zip(values, owner, first, strict=True):
        _send(value, at, arrived[k])
    # Each replica has updated all averages, from its own values of the variables. Slots that Keras
    # does not know as a variable's are those that only one owner has written, as Adafactor's.
    of_owners = list(zip(keras_internals.averages(leaf, variables), owner, strict=False))
    known = {id(value) for value in values} | {id(average) for average, _ in of_owners}
    of_owners += [
        (slot, replicas[0])
        for key, (slot, replicas) in slots.items()
        if key not in known and len(replicas) == 1
    ]
    for slot, at in of_owners:
        _send(slot, at, [slot.values[at].read_value()] * len(devices))


def _in_dtype(grad: Any, dtype: tf.DType) -> Any:
    """Returns a gradient in the dtype of its variable, which is sent back in its place."""
    parts = tf_internals.components(grad)
    if all(part.dtype == dtype for part in parts):
        return grad
    return step.on_each([part.device for part in parts], lambda part: tf.cast(part, dtype), parts)


def _norm(leaf: Any, sums: Sequence[Any], devices: Sequence[str]) -> tf.Tensor:
    """Returns the norm of the gradients of all owners, on the devices where they are."""
    values = [getattr(one, "values", one) for one in sums]
    squares = device_ops.on_each(devices, lambda one: tf.reduce_sum(tf.square(one)), values)
    widest = max(tf.float32, *(one.dtype for one in squares), key=lambda dtype: dtype.size)
    with tf.device(devices[0]):  # In the order of the variables, as Keras adds them.
        norm = tf.sqrt(tf.add_n([tf.cast(square, widest) for square in squares]))
        # Keras divides gradients by these before it clips.
        divisor = (leaf.gradient_accumulation_steps or 1) * (leaf.loss_scale_factor or 1)
        return norm / tf.cast(divisor, widest)


def _new_value(leaf: Any, variable: Any, component: tf.Variable, indices: Sequence[Any]) -> Any:
    """Returns a variable's new value, or only the rows that were written, if these were all."""
    value = tf.convert_to_tensor(component)
    all_rows = indices[0] is None or any(each is not indices[0] for each in indices)
    if all_rows or keras_internals.changes_all_rows(leaf, variable):
        return value
    return tf.IndexedSlices(tf.gather(value, indices[0]), indices[0])


def _send(variable: Any, owner: int, arrived: Sequence[Any]) -> None:
    """Gives the components of all devices but the owner's their new values."""
    for index, (component, value) in enumerate(zip(variable.values, arrived, strict=True)):
        if index == owner:
            continue
        with tf.device(component.device):
            if isinstance(value, tf.IndexedSlices):
                component.scatter_update(value)
            else:
                component.assign(value)


# Stand before Keras's own.


def already_summed(own: Function, optimizer: Any, grads_and_vars: Any) -> Any:
    """Stands for `_all_reduce_sum_gradients`: a replica that works alone has the sums."""
    here = step.now.step
    is_alone = here is not None and here.alone
    return list(grads_and_vars) if is_alone else own(optimizer, grads_and_vars)


def finite(own: Function, optimizer: Any, grads: Sequence[Any]) -> Any:
    """Stands for `check_finite` of a LossScaleOptimizer, before replicas' gradients are summed."""
    here, is_finite = step.now.step, own(optimizer, grads)
    if here is None or here.alone or here.replicas == 1:
        return is_finite
    return tf.equal(step.summed(tf.cast(tf.logical_not(is_finite), tf.float32)), 0)


def norm_of_all(own: Function, value_list: Sequence[Any]) -> Any:
    """Stands for `global_norm`: an owner of some of the variables has only their gradients."""
    here = step.now.step
    if here is None or here.norm is None:
        return own(value_list)
    return tf.cast(here.norm, value_list[0].dtype)


def use_weight_decay(own: Function, optimizer: Any, variable: Any) -> Any:
    """Stands for `_use_weight_decay`: the variables of all replicas have the first one's name."""
    extended = keras_internals.strategy_of(optimizer).extended
    return own(optimizer, extended.value_container(variable))


def note_rows(own: Function, optimizer: Any, variable: Any, value: Any) -> None:
    """Notes that an optimizer writes a variable, and which rows."""
    _note(variable, getattr(value, "indices", None))
    own(optimizer, variable, value)


def note_write(own: Function, variable: Any, value: Any) -> Any:
    """Notes that all of a Keras variable is written."""
    in_step = step.current_several() is not None and step.now.method
    # Each replica assigns its own copy; one that was made outside would be assigned K times.
    if in_step and tf_internals.is_variable(keras_internals.value_of(variable)):
        check_variable(variable, tf.distribute.get_strategy())
    _note(variable, None)
    return own(variable, value)


def _note(variable: Any, indices: Any) -> None:
    here = step.now.step
    if here is not None and here.written is not None:
        value = keras_internals.value_of(variable)
        value = tf.distribute.get_strategy().extended.value_container(value)
        here.written.setdefault(id(value), (value, []))[1].append(indices)


def count(name: str, own: Function, variable: Any, value: Any) -> Any:
    """Adds to a Keras variable, or subtracts: optimizers count steps so."""
    # A step that fails on one replica must not be counted on others, which would then differ.
    here = step.now.step
    with tf.control_dependencies(() if here is None else here.counts_after):
        several = step.current_several()
        if several and statistics.is_summed(total := keras_internals.value_of(variable)):
            # Keras would assign the sum, and K replicas then the old value K times.
            value = tf.cast(value, total.dtype)
            if several.can_be_empty:
                value = tf.where(several.has_rows, value, tf.zeros_like(value))
            return getattr(total, name)(value)
        return own(variable, value)
