"""Sharded optimizer state: each variable is updated on one device, which sends it to the others.

A replica works alone, as after any sum, but only on the variables that it owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo import keras_internals, tf_internals
from tfcdo.execute import rows
from tfcdo.execute.base import ConfiguredCrossDeviceOps
from tfcdo.plan.algorithms import deal_owners
from tfcdo.training import step

_OWNER = "tfcdo_owner"  # The index of its owner's device, an attribute of TensorFlow's variable.


def check_strategy(extended: Any) -> None:
    """Raises a TypeError unless a strategy sums with one of tfcdo's all-reduce classes."""
    ops = extended._cross_device_ops
    if not isinstance(ops, ConfiguredCrossDeviceOps) or ops.is_one_device:
        raise TypeError(
            "shard_optimizer_state=True needs cross_device_ops that is one of tfcdo's all-reduce "
            f"classes, such as tfcdo.AutoAllReduce(), or None; got {ops!r}"
        )


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


def update(
    strategy: tf.distribute.Strategy,
    leaf: Any,
    grads: Sequence[Any],
    variables: Sequence[Any],
    overwriting: Sequence[Any] = (),
    overwritten: Sequence[Any] = (),
) -> None:
    """Sums gradients on the owners of their variables, updates these there, and sends them.

    Each replica also overwrites some variables with the largest of the replicas' gradients.
    """
    values = [keras_internals.value_of(variable) for variable in variables]
    owner = [getattr(value, _OWNER) for value in values]
    devices = strategy.extended.worker_devices
    grads = [_in_dtype(grad, value.dtype) for grad, value in zip(grads, values, strict=True)]
    paths = [keras_internals.path_of(variable) for variable in variables]
    owned = strategy.extended._cross_device_ops.reduce_to_owners(grads, paths, owner, devices)
    sums = [
        rows.add_equal(total) if rows.are_unique(tf_internals.components(grad)[0]) else total
        for total, grad in zip(owned.sums, grads, strict=True)
    ]
    # No owner begins before all sums exist, so a step that fails until then changes nothing.
    ready = [] if tf.executing_eagerly() else tf.nest.flatten(sums, expand_composites=True)
    all_there = [tf.group(*ready)] if ready else []
    sums = _clipped(leaf, owner, sums, devices)
    changed: list[Any] = [None] * len(sums)
    # Slots that are on all devices, and which replicas have written them.
    slots: dict[int, tuple[Any, list[int]]] = {}

    @tf.autograph.experimental.do_not_convert
    def on_owner(scales: Sequence[Any]) -> None:
        here = step.now.step
        assert here is not None
        mine = [at for at, index in enumerate(owner) if index == here.replica]
        written: dict[int, tuple[Any, list[Any]]] = {}
        with step.changed(alone=True, written=written), tf.control_dependencies(all_there):
            keras_internals.apply_to_own(
                leaf,
                [*(sums[at] for at in mine), *scales],
                [*(variables[at] for at in mine), *overwritten],
            )
            for at in mine:
                component = values[at].values[here.replica]
                _, indices = written.get(id(component), (component, [None]))
                changed[at] = _changed(leaf, variables[at], component, indices)

            for slot, _ in written.values():
                if isinstance(slot, tf_internals.DistributedValues):
                    slots.setdefault(id(slot), (slot, []))[1].append(here.replica)

    strategy.extended.call_for_each_replica(on_owner, args=(list(overwriting),))
    for value, at, arrived in zip(values, owner, owned.send(changed), strict=True):
        _assign(value.values, at, arrived, devices)
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
        value = slot.values[at].read_value()
        _assign(slot.values, at, [value] * len(devices), devices)


def _in_dtype(grad: Any, dtype: tf.DType) -> Any:
    """Returns a gradient in the dtype of its variable, which is sent back in its place."""
    parts = tf_internals.components(grad)
    if all(part.dtype == dtype for part in parts):
        return grad
    return step.on_each([part.device for part in parts], lambda part: tf.cast(part, dtype), parts)


def _clipped(
    leaf: Any, owner: Sequence[int], sums: Sequence[Any], devices: Sequence[str]
) -> list[Any]:
    """Clips by the norm of all gradients, which no owner has alone."""
    # Keras clips again by the norm of an owner's part, which is no larger: it changes nothing then.
    limit = leaf.global_clipnorm
    if not limit or limit <= 0:
        return list(sums)
    # Keras divides by these before it clips.
    limit *= (leaf.gradient_accumulation_steps or 1) * (leaf.loss_scale_factor or 1)
    squares = []
    for total, at in zip(sums, owner, strict=True):
        with tf.device(devices[at]):
            squares.append(tf.reduce_sum(tf.square(getattr(total, "values", total))))
    with tf.device(devices[0]):  # In the order of the variables, as Keras adds them.
        norm = tf.sqrt(tf.add_n([tf.cast(square, tf.float32) for square in squares]))
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    clipped = []
    for total, at in zip(sums, owner, strict=True):
        with tf.device(devices[at]):
            factor = tf.cast(scale, total.dtype)
            if isinstance(total, tf.IndexedSlices):
                clipped.append(
                    tf.IndexedSlices(total.values * factor, total.indices, total.dense_shape)
                )
            else:
                clipped.append(total * factor)
    return clipped


def _changed(leaf: Any, variable: Any, component: tf.Variable, indices: Sequence[Any]) -> Any:
    """Returns a variable's new value, or only the rows that were written, if these were all."""
    value = tf.convert_to_tensor(component)
    all_rows = indices[0] is None or any(each is not indices[0] for each in indices)
    if all_rows or keras_internals.changes_all_rows(leaf, variable):
        return value
    return tf.IndexedSlices(tf.gather(value, indices[0]), indices[0])


def _assign(
    components: Sequence[tf.Variable], owner: int, arrived: Sequence[Any], devices: Sequence[str]
) -> None:
    """Gives the components of all devices but the owner's their new values."""
    for index, (component, value) in enumerate(zip(components, arrived, strict=True)):
        if index == owner:
            continue
        with tf.device(devices[index]):
            if isinstance(value, tf.IndexedSlices):
                component.scatter_update(value)
            else:
                component.assign(value)
