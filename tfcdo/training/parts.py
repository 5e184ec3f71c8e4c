"""Cuts each batch of a dataset into the replicas' parts, which differ by one example at most."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcdo import log, tf_internals
from tfcdo.cluster import protocol
from tfcdo.cluster.session import Session
from tfcdo.training import step

_POLICY = tf.data.experimental.AutoShardPolicy
SEEDS = "_tfcdo_seeds"  # The attribute of a dataset whose order nothing else shows.
_READERS, _CACHES = ("RecordDataset", "TextLineDataset"), ("CacheDataset",)


def made_from(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and all that it is made from."""
    left = [dataset]
    while left:
        one = left.pop()
        yield one
        left += tf_internals.inputs_of(one)


def prepared(dataset: tf.data.Dataset, session: Session | None) -> tf.data.Dataset:
    """Returns a dataset to distribute, by hosts with a session; warns if it trains unexpectedly."""
    if int(dataset.cardinality()) == 0:
        log.warn_once(
            "a dataset without elements is distributed; Keras's fit and evaluate end with "
            "StopIteration where one device trains nothing"
        )
    # Elsewhere TensorFlow deals out files, or each host has data of its own.
    if session is not None and _is_cut_between_hosts(dataset):
        _check_alike(dataset, session)
    # TensorFlow takes a NumPy array as it is if its address divides by 64. It splits the batch, and
    # then takes the last part to be alone in using the memory, so that an op may write into an
    # array that Python still has.
    is_of_python = _has([*made_from(dataset)], ("PyFunc",))
    return dataset.map(_of_elements(dataset, _copies)) if is_of_python else dataset


def is_cut_here(dataset: tf.data.Dataset, several_hosts: bool, replicas: int) -> bool:
    """Returns whether tfcdo cuts a dataset's batches, rather than TensorFlow."""
    if replicas == 1:
        return False
    if not several_hosts:
        # TensorFlow cuts batches that are always full, and that divide, into the same parts.
        sizes = _sizes(dataset.element_spec)
        return len(set(sizes)) != 1 or not _divide(sizes, replicas)
    return _is_cut_between_hosts(dataset)


def _is_cut_between_hosts(dataset: tf.data.Dataset) -> bool:
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy != _POLICY.AUTO:
        return bool(policy == _POLICY.DATA)
    # TensorFlow deals files to hosts, if there are any. But `predict` returns rows in the order of
    # the data, if it has one; and a cache would give all who use it a host's files only.
    made = [*made_from(dataset)]
    is_in_order = (0, 0) not in (seed for one in made for seed in seeds(one))
    keeps_order = step.now.keeps_order and is_in_order
    return keeps_order or _has(made, _CACHES) or not _has(made, _READERS)


def cut(dataset: tf.data.Dataset, first: int, count: int, replicas: int) -> tf.data.Dataset:
    """Returns the parts of replicas [first, first + count) of each batch, one after the other.

    Parts differ by at most one example, the larger ones first. A batch with fewer examples than
    replicas leaves some parts empty. The first tensor's rows are the examples: another one with a
    multiple of them, such as the patches of images, is cut where the examples are. One of a
    single row is for all examples.
    """
    for spec in tf.nest.flatten(dataset.element_spec):
        if getattr(spec, "shape", tf.TensorShape(None)).rank == 0:
            raise ValueError(
                "the dataset must have batches, to be divided among replicas; got elements of "
                f"{dataset.element_spec}: call .batch(n) on it"
            )
    _warn_of_unlike_sizes(dataset, replicas)
    are_even = _divide(_sizes(dataset.element_spec), replicas)

    def parts(batch: Any) -> tf.data.Dataset:
        indices = tf.data.Dataset.range(first, first + count)
        return indices.map(lambda index: _part(batch, index, replicas, are_even))

    number = int(dataset.cardinality())
    parts_of_all = dataset.flat_map(_of_elements(dataset, parts))
    if number != tf.data.UNKNOWN_CARDINALITY:
        number = number * count if number >= 0 else number
        parts_of_all = parts_of_all.apply(tf.data.experimental.assert_cardinality(number))
    return parts_of_all.prefetch(count)


def _warn_of_unlike_sizes(dataset: tf.data.Dataset, replicas: int) -> None:
    first, *others = sizes = _sizes(dataset.element_spec) or [None]
    known = {None, *map(tf_internals.batch_size_of, made_from(dataset))}
    given = (n for n in others if n is not None and n not in known | {1, first})
    unlike: list[int | None] = [n for n in given if not first or n % first]
    if first not in known and None in others:
        unlike = [first, *unlike]
    if unlike:
        log.warn_once(
            f"a dataset has batches with a tensor of {unlike[0]} rows, where others have other "
            f"numbers: {sizes}. Each replica gets its part of these rows; the first tensor, in a "
            "dict by key, must have a row for each example. If all examples use all rows of "
            "another one, as of a mask of time steps, call tfcdo.keras.global_batch with it in the "
            f"model; else losses equal one device's if all numbers of rows divide by {replicas}"
        )


def _part(batch: Any, index: tf.Tensor, replicas: int, are_even: bool) -> Any:
    first = next(filter(tf.is_tensor, tf.nest.flatten(batch)), None)

    def own(value: Any) -> Any:
        if not tf.is_tensor(value):
            return value
        part = _own_rows(value, first, index, replicas)
        if are_even and isinstance(part, tf.Tensor):
            part.set_shape([value.shape[0] // replicas, *value.shape[1:]])
        return part

    # A dataset's structure is TensorFlow's, with composite tensors as leaves.
    return tf.nest.map_structure(own, batch)


def _own_rows(value: Any, first: Any, index: Any, replicas: int) -> Any:
    """Returns a replica's rows of a value, one or several per row of the first one of its batch."""
    if _sizes(value) == [1] != _sizes(first):  # For all examples.
        return tf.nest.map_structure(tf.identity, value, expand_composites=True)
    counts = step.rows_of(value), step.rows_of(first)
    known: Any = [None if tf.is_tensor(index) else tf.get_static_value(one) for one in counts]
    ops, (rows, total) = (tf, counts) if None in known else (np, known)
    each = rows // ops.maximum(total, 1)
    each = ops.maximum(ops.where(each * total == rows, each, 1), 1)
    size, more = rows // each // replicas, rows // each % replicas
    begin, end = ((at * size + ops.minimum(more, at)) * each for at in (index, index + 1))
    return step.slice_rows(value, begin, end - begin)


def of_one_batch(batch: Any, devices: Sequence[str]) -> Any:
    """Divides a batch that no dataset has, such as `train_on_batch`'s, among a host's devices."""

    def to_tensor(value: Any) -> Any:
        return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value

    batch = tf.nest.map_structure(to_tensor, batch)
    if len(devices) == 1:
        return batch
    first = next(filter(step.is_of_rows, tf.nest.flatten(batch)), None)

    def divided(value: Any) -> Any:
        if not step.is_of_rows(value):
            return value
        own = functools.partial(_own_rows, _copies(value), first, replicas=len(devices))
        return step.on_each(devices, own, range(len(devices)))

    return tf.nest.map_structure(divided, batch)


def _sizes(spec: Any) -> list[int | None]:
    """Returns the first size of each tensor in a batch, None if it is not known."""
    shapes = [getattr(one, "shape", None) for one in tf.nest.flatten(spec)]
    return [shape[0] if shape is not None and shape.rank else None for shape in shapes]


def _divide(sizes: Sequence[int | None], replicas: int) -> bool:
    """Returns whether the numbers of rows are known and divide by the number of replicas."""
    return all(rows is not None and rows % replicas == 0 for rows in sizes)


def _of_elements(dataset: tf.data.Dataset, function: Callable[[Any], Any]) -> Any:
    """Returns a function for `map`, which passes the parts of a plain tuple, not of a named one."""
    is_tuple = type(dataset.element_spec) is tuple

    def of_elements(*parts: Any) -> Any:
        return function(parts if is_tuple else parts[0])

    return of_elements


def _copies(values: Any) -> Any:
    def copy(value: Any) -> Any:
        is_number = tf.is_tensor(value) and value.dtype not in (tf.string, tf.variant, tf.resource)
        return tf.raw_ops.DeepCopy(x=value) if is_number else value

    def of_one(value: Any) -> Any:
        # Keras has it for None in a generator's batch, and makes it None again in a step.
        if isinstance(value, tf.experimental.Optional):
            return None
        return tf.nest.map_structure(copy, value, expand_composites=True)

    return tf.nest.map_structure(of_one, values)


def _check_alike(dataset: tf.data.Dataset, session: Session) -> None:
    """Raises an error if hosts take their parts of unlike batches; warns of unlike orders."""
    parts = list(made_from(dataset))
    specs = tf.nest.flatten(dataset.element_spec)
    kind = protocol.digest({"elements": [str(getattr(one, "shape", [0])[1:]) for one in specs]})
    orders = [seed for part in parts for seed in seeds(part)]
    sizes = {
        # One host may have steps more that change no order, such as `prefetch`.
        "lengths": sorted({int(part.cardinality()) for part in parts}),
        "batch_size": list(filter(None, map(tf_internals.batch_size_of, parts))),
    }
    me = session.cluster.index
    unlike = session.differing(kind, json.dumps([sizes, orders]))
    for host, text in unlike.items():
        others, _ = json.loads(text)
        if others != sizes:
            details = protocol.differences(sizes, f"host {me}", others, f"host {host}")
            raise protocol.DisagreementError(
                f"the data of {session.cluster.name(me)} and {session.cluster.name(host)} differ: "
                f"{details}"
            )
    if (0, 0) in orders:
        how = "is shuffled without a seed, or has deterministic=False"
    elif unlike:
        how = "is shuffled with other seeds than on another host, or has other examples there"
    else:
        return
    log.warn_once(
        f"a dataset {how}: each host takes its part of another order, so an epoch has some "
        "examples twice and others not at all; give all hosts all of the data, make the strategy "
        "before the data, call keras.utils.set_random_seed(n) with the same n on all hosts before "
        "the data is made, give shuffle(), or whatever shuffles, the same seed on all hosts, or "
        "use tfcdo.keras.resumable_dataset"
    )


def _has(datasets: Sequence[tf.data.Dataset], kinds: Sequence[str]) -> bool:
    """Returns whether some datasets, or those that their functions make, are of some kinds."""
    ops = (node.op for one in datasets for node in tf_internals.nodes_of(one))
    found = [*(type(one).__name__ for one in datasets), *ops]
    return any(kind in one for one in found for kind in kinds)


def of_py_dataset(own: Callable[[Any], Any], adapter: Any) -> Any:
    """Stands for `get_tf_dataset` of a PyDataset, which Keras shuffles by Python's `random`."""
    dataset = own(adapter)
    setattr(dataset, SEEDS, [hash(random.getstate()[1])] if adapter.shuffle else [])
    return dataset


def seeds(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields what a dataset's order follows, such as seeds; two zeros are no seed."""
    # `shuffle` and the choices of `sample_from_datasets`; Keras shuffles the indices of arrays.
    yield from tf_internals.seeds_of(dataset)
    yield from getattr(dataset, SEEDS, ())
    for node in tf_internals.nodes_of(dataset):
        if node.op == "RandomShuffle":
            yield node.attr["seed"].i, node.attr["seed2"].i
