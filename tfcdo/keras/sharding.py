"""Optimizer state on owners: each variable is updated on one device, which sends it to the others.

An owner works as if it were the only replica, so every optimizer is the same as on one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfcdo import tf_internals
from tfcdo.execute.base import ConfiguredCrossDeviceOps
from tfcdo.plan import owners
from tfcdo.replaced import replaced


@dataclasses.dataclass(frozen=True)
class Shards:
    """Which device of this host owns which variable."""

    strategy: tf.distribute.Strategy
    owner: Mapping[int, int]  # The index of the owner's device, by the identity of the variable.

    @property
    def devices(self) -> tuple[str, ...]:
        """Returns the devices of this host."""
        return tuple(self.strategy.extended.worker_devices)

    def owner_of(self, variable: Any) -> int:
        """Returns the index of the device that owns a variable, Keras's or TensorFlow's."""
        return self.owner[id(_value(variable))]


def _value(variable: Any) -> Any:
    """Returns TensorFlow's variable of a Keras variable; another one as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Raises `TypeError` unless a strategy sums with tfcdo's all-reduce classes."""
    cross_device_ops = getattr(strategy.extended, "_cross_device_ops", None)
    if not isinstance(cross_device_ops, ConfiguredCrossDeviceOps) or cross_device_ops.is_one_device:
        raise TypeError(
            "shard_optimizer_state=True needs a strategy that sums with one of tfcdo's all-reduce "
            "classes, such as tfcdo.MirroredStrategy() or tf.distribute.MirroredStrategy("
            "cross_device_ops=tfcdo.AutoAllReduce()); got "
            f"{type(strategy).__name__} with {cross_device_ops!r}"
        )


def deal(strategy: tf.distribute.Strategy, variables: Sequence[Any]) -> Shards:
    """Deals variables to the devices of a host, by their bytes."""
    values = list(map(_value, variables))
    for variable, value in zip(variables, values, strict=True):
        if getattr(value, "distribute_strategy", None) is not strategy:
            raise ValueError(
                "shard_optimizer_state=True needs variables that were made in the scope of the "
                f"optimizer's strategy; got {getattr(variable, 'path', variable.name)!r}, made "
                "elsewhere: make the model in strategy.scope()"
            )
    sizes = [value.shape.num_elements() * value.dtype.size for value in values]
    owner = owners.deal(sizes, len(strategy.extended.worker_devices))
    return Shards(strategy, {id(value): at for value, at in zip(values, owner, strict=True)})


@contextlib.contextmanager
def slots_on_owners(leaf: Any, shards: Shards) -> Iterator[None]:
    """Has an optimizer that is built within make the slots of a variable on its owner only."""
    add_variable, build = leaf.add_variable, leaf.build
    watched = _Watched()

    def build_watching(variables: Sequence[Any]) -> None:
        watched[:] = variables
        build(watched)

    def add(*args: Any, **options: Any) -> Any:
        variable = watched.current
        if variable is None:
            added = add_variable(*args, **options)
            if len(added.shape):
                raise ValueError(
                    "shard_optimizer_state=True needs an optimizer whose build makes the slots of "
                    f"each variable in a loop over its variables; {type(leaf).__name__} makes "
                    f"{added.path!r} elsewhere: leave shard_optimizer_state out for it"
                )
            return added
        # SwapEMAWeights swaps a variable with its moving average, so this is on all devices, too.
        is_average = leaf.use_ema and str(options.get("name")).endswith("_average")
        if getattr(variable, "overwrite_with_gradient", False) or is_average:
            return add_variable(*args, **options)
        device = shards.devices[shards.owner_of(variable)]
        with tf_internals.plain_variables(device):
            return add_variable(*args, **options)

    with replaced(leaf, "add_variable", add), replaced(leaf, "build", build_watching):
        yield


class _Watched(list):  # type: ignore[type-arg]
    """A list that knows which of its variables a loop is at: some optimizers do not name it."""

    current: Any = None

    def __iter__(self) -> Iterator[Any]:
        try:
            for variable in super().__iter__():
                self.current = variable
                yield variable
        finally:
            self.current = None


class _Owner(tf.distribute.ReplicaContext):
    """A replica that meets no others: updates run at once, on its own components."""

    def __init__(self, shards: Shards, index: int) -> None:
        local = shards.strategy.extended._get_replica_id_in_sync_group(index)
        super().__init__(shards.strategy, local)
        self._index = index
        self.extended = self  # `merge_call` passes it on as a strategy.

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function at once, with a strategy that has only this replica."""
        return merge_fn(self, *args, **(kwargs or {}))

    def update(self, var: Any, fn: Any, args: Any = (), kwargs: Any = None, **_: Any) -> Any:
        """Updates the owner's component of a variable."""
        component = var.values[self._index] if hasattr(var, "values") else var
        return fn(component, *args, **(kwargs or {}))


@contextlib.contextmanager
def _at_owner(leaf: Any, shards: Shards, index: int) -> Iterator[None]:
    """Has an optimizer work on one device, as if there were no others."""
    context = _Owner(shards, index)
    with (
        tf.device(shards.devices[index]),
        context,
        tf.name_scope(f"owner{index}"),
        replaced(leaf, "_distribution_strategy", context),
    ):
        yield


def update(leaf: Any, shards: Shards, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Sums gradients on the owners of their variables, updates these there, and sends them."""
    owner = [shards.owner_of(variable) for variable in variables]
    gradients = list(map(_in_dtype, gradients, variables))
    cross_device_ops = shards.strategy.extended._cross_device_ops
    owned = cross_device_ops.reduce_to_owners(gradients, owner, shards.devices)
    sums = list(owned.sums)
    if leaf.gradient_accumulation_steps:
        sums = _on_owners(
            lambda total: total / leaf.gradient_accumulation_steps, shards, owner, sums
        )
    # No owner begins before all sums are there, so a step that fails until then changes nothing.
    ready = [] if tf.executing_eagerly() else tf.nest.flatten(sums, expand_composites=True)
    with tf.control_dependencies([tf.group(*ready)] if ready else []):
        sums = _clipped(leaf, shards, owner, sums)
        changed: list[Any] = [None] * len(sums)
        for index in range(len(shards.devices)):
            members = [position for position, at in enumerate(owner) if at == index]
            with _at_owner(leaf, shards, index):
                updated = _updated(
                    leaf, [sums[at] for at in members], [variables[at] for at in members]
                )
            for position, value in zip(members, updated, strict=True):
                changed[position] = value
    _assign(shards, owner, variables, owned.send(changed))


def _in_dtype(gradient: Any, variable: Any) -> Any:
    """Returns a gradient in the dtype of its variable, which is sent back in its place."""
    dtype = tf.as_dtype(variable.dtype)
    if all(part.dtype == dtype for part in gradient.values):
        return gradient
    parts = []
    for part in gradient.values:
        with tf.device(part.device):
            parts.append(tf.cast(part, dtype))
    return tf_internals.per_replica(parts)


def _on_owners(
    function: Callable[[Any], Any], shards: Shards, owner: Sequence[int], values: Sequence[Any]
) -> list[Any]:
    """Calls a function with each value on the device that owns it."""
    results = []
    for value, at in zip(values, owner, strict=True):
        with tf.device(shards.devices[at]):
            results.append(function(value))
    return results


def _clipped(leaf: Any, shards: Shards, owner: Sequence[int], sums: Sequence[Any]) -> list[Any]:
    """Clips by the norm of all gradients, which no owner has alone; other clips are left alone."""
    limit = leaf.global_clipnorm
    if leaf.clipnorm or not limit or limit <= 0:
        return list(sums)
    squares = _on_owners(lambda total: ops.sum(ops.square(total)), shards, owner, sums)
    with tf.device(shards.devices[0]):  # In the order of the variables, as Keras adds them.
        norm = ops.sqrt(ops.sum(ops.stack(squares)))
        scale = limit * ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    return _on_owners(lambda total: total * scale, shards, owner, sums)


def _updated(leaf: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Updates an owner's variables; returns their new values, or rows where only rows changed."""
    written: dict[str, list[Any]] = {}

    def note(assign: Any, variable: Any, value: Any) -> None:
        written.setdefault(leaf._var_key(variable), []).append(getattr(value, "indices", None))
        assign(variable, value)

    if not leaf.global_clipnorm:
        gradients = leaf._clip_gradients(gradients)
    leaf._apply_weight_decay(variables)
    with contextlib.ExitStack() as stack:
        for name in ("assign", "assign_add", "assign_sub"):
            stack.enter_context(replaced(leaf, name, functools.partial(note, getattr(leaf, name))))
        leaf._backend_update_step(gradients, variables, leaf.learning_rate)
    return [
        _changed(leaf, variable, written.get(leaf._var_key(variable), [None]))
        for variable in variables
    ]


def _changed(leaf: Any, variable: Any, indices: Sequence[Any]) -> Any:
    """Returns a variable's new value, or only the rows that were written, if these were all."""
    value = tf.convert_to_tensor(variable)
    decays = type(leaf)._apply_weight_decay is not keras.optimizers.Optimizer._apply_weight_decay
    if decays or leaf.weight_decay or any(each is not indices[0] for each in indices):
        return value
    if indices[0] is None:
        return value
    return tf.IndexedSlices(tf.gather(value, indices[0]), indices[0])


def _assign(
    shards: Shards, owner: Sequence[int], variables: Sequence[Any], arrived: Sequence[Any]
) -> None:
    """Gives the components of all devices but the owner's their new values."""
    for variable, at, values in zip(variables, owner, arrived, strict=True):
        components = _value(variable).values
        for index, (component, value) in enumerate(zip(components, values, strict=True)):
            if index == at:
                continue
            with tf.device(shards.devices[index]):
                if isinstance(value, tf.IndexedSlices):
                    component.scatter_update(value)
                else:
                    component.assign(value)
