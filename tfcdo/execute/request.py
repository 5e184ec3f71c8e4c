"""Requests: a caller's arguments, checked before any op is created, in groups of one plan each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcdo import checks, log, tf_internals
from tfcdo.execute.between import Network, device_number
from tfcdo.plan.decide import Options
from tfcdo.plan.plan import Batch, Request, ValueSpec

# The public name is a function that makes one.
_OPTIONS = type(tf.distribute.experimental.CommunicationOptions())


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Holds one checked (value, destinations) pair of a batch."""

    values: tuple[Any, ...]  # One tensor or `tf.IndexedSlices` per replica.
    devices: tuple[str, ...]  # Each value's; `""` where it is not known at trace time.
    destinations: tuple[str, ...]  # The devices that get the result.
    exact: bool = False  # Never rounded where it is copied: only gradients are.
    # The replica that updates its variable with the sum; None if the sum itself is sent.
    owner: int | None = None
    path: str | None = None  # The path of its gradient's variable; None if it is not known.

    @property
    def is_sparse(self) -> bool:
        """Returns whether the values are `tf.IndexedSlices`."""
        return isinstance(self.values[0], tf.IndexedSlices)

    @property
    def is_all_reduce(self) -> bool:
        """Returns whether the result goes to exactly the devices that the values are on."""
        if self.devices == self.destinations:
            return True
        distinct = len(set(self.devices)) == len(self.devices)
        return distinct and sorted(self.devices) == sorted(self.destinations)


def check_reduce_op(reduce_op: Any) -> str:
    """Returns "sum" or "mean" for `tf.distribute.ReduceOp.SUM` or `MEAN`."""
    if not isinstance(reduce_op, tf.distribute.ReduceOp):
        raise ValueError(
            "reduce_op must be tf.distribute.ReduceOp.SUM or tf.distribute.ReduceOp.MEAN; "
            f"got {reduce_op!r}"
        )
    return "mean" if reduce_op == tf.distribute.ReduceOp.MEAN else "sum"


def check_count(name: str, value: Any) -> int:
    """Returns the argument `name` as an int; it must be a whole number of at least 0."""
    count = int(value) if isinstance(value, np.integer) else value
    checks.check_int(name, count, at_least=0)
    return count


def check_options(options: Any, name: str = "options") -> None:
    """Raises `TypeError` unless the argument `name` is None or a `CommunicationOptions`."""
    if options is not None and not isinstance(options, _OPTIONS):
        raise TypeError(
            f"{name} must be a tf.distribute.experimental.CommunicationOptions or None; "
            f"got {brief(options)}"
        )


def check_pairs(value_destination_pairs: Any, by_strategy: bool = False) -> list[Reduction]:
    """Checks the pairs that a `batch_reduce` is called with, by a strategy or a direct caller."""
    # An optimizer reduces all gradients in one batch. A synchronized layer reduces each statistic
    # alone, and nothing else distinguishes the two: a value that a strategy reduces alone is exact.
    expected = "value_destination_pairs must be a list of (value, destinations) tuples"
    if not isinstance(value_destination_pairs, Iterable) or tf.is_tensor(value_destination_pairs):
        raise ValueError(f"{expected}; got {type(value_destination_pairs).__name__}")
    pairs = list(value_destination_pairs)
    for index, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"{expected}; element {index} is {brief(pair)}")
    reductions = [
        check_pair(value, destinations, name=f"pair {index}: ")
        for index, (value, destinations) in enumerate(pairs)
    ]
    if by_strategy and len(reductions) == 1:
        return [dataclasses.replace(reductions[0], exact=True)]
    return reductions


def check_gradients(
    grads: Sequence[Any],
    paths: Sequence[str | None],
    devices: Sequence[str],
    owners: Sequence[int] = (),
) -> list[Reduction]:
    """Checks gradients of variables, one component per device; owners sum each on one device."""
    pairs, to = check_pairs([(grad, grad) for grad in grads]), tuple(devices)
    of_each: Sequence[int | None] = owners or [None] * len(pairs)
    return [
        dataclasses.replace(pair, devices=to, destinations=to, owner=owner, path=path)
        for pair, path, owner in zip(pairs, paths, of_each, strict=True)
    ]


def check_pair(value: Any, destinations: Any, name: str = "") -> Reduction:
    """Checks one value and its destinations; `name` begins error messages."""
    try:
        reduction = _reduction(value, destinations)
        _check_replicas_agree(reduction)
    except ValueError as error:
        raise ValueError(f"{name}{error}") from error
    return reduction


def check_lone_pair(value: Any, destinations: Any, by_strategy: bool = False) -> Reduction:
    """Checks one value that is reduced alone, and its destinations; see `check_pairs`."""
    # Direct callers may reduce a gradient alone. Variables (metrics, moving averages), and values
    # that are reduced for a variable, are exact.
    reduction = check_pair(value, destinations)
    exact = by_strategy or _is_variable(value) or _is_variable(destinations)
    return dataclasses.replace(reduction, exact=True) if exact else reduction


def _is_variable(value: Any) -> bool:
    """Returns whether a value is a variable, or one a replica."""
    return any(map(tf_internals.is_variable, tf_internals.components(value)))


def check_gather(value: Any, destinations: Any, axis: Any) -> Reduction:
    """Checks a value whose replicas are to be concatenated along an axis, also a tensor."""
    known_axis = _static_axis(axis)
    reduction = _reduction(value, destinations)
    if any(isinstance(component, tf.IndexedSlices) for component in reduction.values):
        raise ValueError("value must be a dense tensor to be gathered; got IndexedSlices")
    _check_same(reduction, "dtype", [component.dtype.name for component in reduction.values])
    if known_axis is not None:
        shapes = [_without_axis(component.shape, known_axis) for component in reduction.values]
        _check_same(reduction, f"shape but for axis {known_axis}", shapes)
    return reduction


def _static_axis(axis: Any) -> int | None:
    """Returns the axis as an int; None for a tensor whose value is known only when it runs."""
    if tf.is_tensor(axis) and axis.dtype.is_integer and axis.shape.rank in (0, None):
        value = tf.get_static_value(axis)
        return None if value is None else int(value)
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an int, or a 0-D tensor of ints; got {brief(axis)}")
    return int(axis)


def _without_axis(shape: tf.TensorShape, axis: int) -> tf.TensorShape:
    """Returns the shape with any size along an axis."""
    if shape.rank is None:
        return shape
    if not -shape.rank <= axis < shape.rank:
        raise ValueError(f"axis must be one of the value's; got {axis} for the shape {shape}")
    sizes = shape.as_list()
    sizes[axis] = None
    return tf.TensorShape(sizes)


def check_broadcast(tensor: Any) -> Any:
    """Returns the argument `tensor` of `broadcast` as a tensor or `tf.IndexedSlices`."""
    if isinstance(tensor, tf_internals.DistributedValues):
        raise ValueError(f"tensor must be one tensor to broadcast; got {brief(tensor)}")
    return _as_tensor(tensor, "", "tensor")


def _reduction(value: Any, destinations: Any) -> Reduction:
    if isinstance(value, tf_internals.DistributedValues):
        if not value.values:
            raise ValueError("value must hold at least one replica's value; it is empty")
        devices = tf_internals.devices_of_values(value)
        components = tuple(map(_as_tensor, value.values, devices))
        if destinations is value:
            return Reduction(components, devices, devices)
    else:
        tensor = _as_tensor(value, "")
        count = tf_internals.replicas_of_plain_value()
        devices, components = (tf_internals.known_device(tensor),) * count, (tensor,) * count
    return Reduction(components, devices, devices_of(destinations))


def _as_tensor(value: Any, device: str, name: str = "value") -> Any:
    """Returns the argument `name` as a tensor or slices; a variable is read on its own device."""
    if isinstance(value, tf.Tensor):
        return value
    if isinstance(value, (tf.SparseTensor, tf.RaggedTensor)):
        raise ValueError(
            f"{name} must be a dense tensor or tf.IndexedSlices; got {type(value).__name__}"
        )
    if isinstance(value, tf.IndexedSlices):
        if not value.indices.shape.is_compatible_with(value.values.shape[:1]):
            raise ValueError(
                f"{name} must have one index for each row; got tf.IndexedSlices with values of "
                f"shape {value.values.shape} and indices of shape {value.indices.shape}"
            )
        if value.dense_shape is None or tf.is_tensor(value.dense_shape):
            return value
        with tf.device(device or None):  # A Python sequence is accepted too.
            shape = tf.convert_to_tensor(value.dense_shape)
        return tf.IndexedSlices(value.values, value.indices, shape)
    with tf.device(device or None):
        try:
            return tf.convert_to_tensor(value)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{name} must be a tensor, or what tf.convert_to_tensor takes; got "
                f"{brief(value)}: {error}"
            ) from error


def _check_replicas_agree(reduction: Reduction) -> None:
    values = reduction.values
    _check_same(reduction, "kind", [_kind(value) for value in values])
    _check_same(reduction, "dtype", [value.dtype.name for value in values])
    _check_same(reduction, "shape", [_shape(value) for value in values])
    if reduction.is_sparse:
        _check_same(reduction, "dense_shape", [_table_shape(value) for value in values])


def _kind(value: Any) -> str:
    if not isinstance(value, tf.IndexedSlices):
        return "tensor"
    return "IndexedSlices" if value.dense_shape is not None else "IndexedSlices without dense_shape"


def _check_same(reduction: Reduction, what: str, traits: Sequence[Any]) -> None:
    """Raises `ValueError` unless traits of the replicas' values are equal, or compatible shapes."""
    are_shapes = isinstance(traits[0], tf.TensorShape)
    # Compatibility of partial shapes is not transitive, so compare all pairs.
    for first in range(len(traits) if are_shapes and not traits[0].is_fully_defined() else 1):
        for other in range(first + 1, len(traits)):
            one, two = traits[first], traits[other]
            if not (two.is_compatible_with(one) if are_shapes else one == two):
                places = [reduction.devices[i] or f"replica {i}" for i in (first, other)]
                raise ValueError(
                    f"the replicas' values must have the same {what}; "
                    f"got {one} on {places[0]} and {two} on {places[1]}"
                )


def _shape(value: Any) -> tf.TensorShape:
    """Returns the static shape that replicas must share; for slices, the shape of a row."""
    if not isinstance(value, tf.IndexedSlices):
        return value.shape
    if value.values.shape.rank == 0:
        raise ValueError("value must have rows to be added; got tf.IndexedSlices of a scalar")
    return value.values.shape[1:]


def _table_shape(slices: tf.IndexedSlices) -> tf.TensorShape:
    """Returns the shape of the table that the slices are rows of, as far as it is known."""
    known = None if slices.dense_shape is None else tf.get_static_value(slices.dense_shape)
    return tf.TensorShape(None if known is None else known.tolist())


def check_device(name: str, value: Any) -> None:
    """Raises `ValueError` unless the argument `name` spells a device; does not start TensorFlow."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a device name; got {value!r}")
    try:
        tf.DeviceSpec.from_string(value)
    except ValueError as error:
        raise _not_a_device(name, value, error) from error


def check_dtype(name: str, value: Any) -> tf.DType:
    """Returns the argument `name`, which `tf.as_dtype` takes."""
    try:
        return tf.as_dtype(value)
    except TypeError:
        raise TypeError(f"{name} must be a dtype such as 'float32'; got {value!r}") from None


def known_shape(name: str, value: Any) -> tf.TensorShape:
    """Returns the argument `name`, which `tf.TensorShape` takes and which is fully known."""
    try:
        shape = tf.TensorShape(value)
        if shape.is_fully_defined():
            return shape
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{name} must be a shape such as (3, 4); got {value!r}: {error}"
        ) from error
    raise ValueError(f"{name} must be fully known; got {shape}")


def devices_of(destinations: Any) -> tuple[str, ...]:
    """Returns the full names of the devices of the argument `destinations`; `""` if unknown."""
    if isinstance(destinations, tf_internals.DistributedValues):
        if not destinations.values:
            raise ValueError("destinations must name at least one device; it is empty")
        return tf_internals.devices_of_values(destinations)
    wrapped = getattr(destinations, "value", None)
    if isinstance(wrapped, tf_internals.DistributedValues) or tf_internals.is_variable(wrapped):
        return devices_of(wrapped)  # A Keras variable.
    if isinstance(destinations, str):
        device = destinations
    elif tf.is_tensor(destinations) or tf_internals.is_variable(destinations):
        device = tf_internals.known_device(destinations)
    else:
        raise ValueError(
            "destinations must be a tf.distribute.DistributedValues, a tf.Variable, a tensor or a "
            f"device name; got {brief(destinations)}"
        )
    if not device:
        # So a strategy names the device of a tensor that all replicas share, in a traced function
        # that got it as an argument.
        if tf.distribute.in_cross_replica_context():
            return tuple(tf.distribute.get_strategy().extended.worker_devices)
        raise ValueError(
            f"destinations must name at least one device; got {brief(destinations)}, which has none"
        )
    return (existing_device("destinations", device),)


def existing_device(name: str, device: str) -> str:
    """Returns the full name of a device, which the argument `name` gave."""
    try:
        found = tf_internals.canonical_device(device)
    except (ValueError, AssertionError) as error:
        raise _not_a_device(name, device, error) from error
    if tf.compat.v1.executing_eagerly_outside_functions():
        known = [
            tf_internals.canonical_device(known.name) for known in tf.config.list_logical_devices()
        ]
        if found not in known:
            raise ValueError(
                f"{name} must name a device that exists; got {device!r}, there are {known}"
            )
    return found


def different_devices(devices: Iterable[Any]) -> list[Any]:
    """Returns the argument `devices`, names of different devices that exist, as a list."""
    listed, names = list(devices), []
    for one in listed:
        given = getattr(one, "name", one)
        check_device("each of devices", given)
        names.append(existing_device("each of devices", given))
    if len(set(names)) < len(names):
        raise ValueError(f"devices must be different; got {names}")
    return listed


def _not_a_device(name: str, device: str, error: Exception) -> ValueError:
    return ValueError(f"{name} must name a device; got {device!r}: {error}")


def brief(value: Any) -> str:
    """Returns the `repr` of a value, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclasses.dataclass(frozen=True)
class Group:
    """Reductions of a batch that have one plan."""

    batch: Batch
    values: tuple[tuple[Any, ...], ...]  # `[v][r]` is value `v` of replica `r`.
    devices: tuple[str, ...]  # Each node's.
    positions: tuple[int, ...]  # The values' places in the caller's batch.


def grouped(
    op: Any,
    reductions: Sequence[Reduction],
    options: Options,
    network: Network | None,
    root: str | None,  # Where `one_device` reduces; None for the first destination.
    user: bool,  # Whether an accumulation_fn combines the values.
) -> list[Group]:
    """Divides a batch into groups: one for each set of devices, and for rows."""
    # An accumulation_fn may take other dtypes, until the result is divided.
    if op == "mean" or (op == "sum" and not user):
        _check_numeric(reductions)
    root = None if root is None else existing_device("reduce_to_device", root)
    one_device, tables = options.one_device, options.sparse_as_dense
    groups: dict[Any, list[int]] = {}
    if network is not None:
        reductions = [
            dataclasses.replace(
                reduction,
                devices=network.with_known_devices(reduction.devices),
                destinations=network.with_known_devices(reduction.destinations),
            )
            for reduction in reductions
        ]
    for position, reduction in enumerate(reductions):
        everywhere = reduction.is_all_reduce and not one_device
        to = None if everywhere else reduction.destinations
        key = reduction.devices, to, _stays_rows(reduction, tables)
        groups.setdefault(key, []).append(position)
    found = []
    for (devices, _, as_rows), positions in groups.items():
        members = [reductions[position] for position in positions]
        nodes = list(devices)
        for device in (*(root,) * one_device, *members[0].destinations):
            if device is not None and device not in nodes:
                nodes.append(device)
        requests = tuple(_request(op, member, as_rows, nodes, options) for member in members)
        chosen = None
        if one_device:
            chosen = requests[0].to[0] if root is None else nodes.index(root)
        batch = Batch(
            op,
            len(devices),
            network.num_hosts if network else 1,
            tuple(map(device_number, nodes)),
            requests,
            chosen,
            user,
        )
        values = tuple(reduction.values for reduction in members)
        found.append(Group(batch, values, tuple(nodes), tuple(positions)))
    return found


def _check_numeric(reductions: Sequence[Reduction]) -> None:
    """Raises `ValueError` unless all values can be added up."""
    for index, reduction in enumerate(reductions):
        dtype = reduction.values[0].dtype
        numeric = dtype.is_floating or dtype.is_integer or dtype.is_complex
        if not numeric or dtype not in tf_internals.dtypes_of_op("AddN"):
            pair = f"pair {index}: " if len(reductions) > 1 else ""
            raise ValueError(
                f"{pair}the values must be of a dtype that TensorFlow adds; got {dtype.name}"
            )


def _stays_rows(reduction: Reduction, tables: bool) -> bool:
    if not reduction.is_sparse:
        return False
    if tables and reduction.values[0].dense_shape is None:
        log.warn_once(
            "sparse_as_dense=True was requested, but tf.IndexedSlices without dense_shape cannot "
            "become dense; sending rows instead; set dense_shape"
        )
        return True
    return not tables


def _request(
    op: str, reduction: Reduction, as_rows: bool, nodes: Sequence[str], options: Options
) -> Request:
    spec = _spec(op, reduction, as_rows)
    exact = reduction.exact or spec.size == 1
    exchange = None
    if options.between is not None and not (exact or op == "gather" or spec.rows):
        exchange = options.between.exchange_of(reduction.path, spec)
    to = tuple(range(len(reduction.devices)))  # In the order of the destinations.
    if reduction.devices != reduction.destinations:
        to = tuple(map(nodes.index, reduction.destinations))
    return Request(spec, to, exact, exchange, reduction.owner)


def _spec(op: str, reduction: Reduction, as_rows: bool) -> ValueSpec:
    first = reduction.values[0]
    if as_rows:
        row = first.values.shape
        shape = None if row.rank is None else (None, *row.as_list()[1:])
        return ValueSpec(first.dtype.name, shape, rows=True)
    rank = first.shape.rank
    sizes = None if rank is None else tuple(first.shape.as_list())
    if op == "gather":  # Its sizes may differ between replicas and hosts.
        sizes = None if rank is None else (None,) * rank
    elif first.shape.is_fully_defined() and not all(
        value.shape.is_fully_defined() for value in reduction.values
    ):
        sizes = None  # Its size counts as known only if it is known of all replicas.
    return ValueSpec(first.dtype.name, sizes, table=reduction.is_sparse)
