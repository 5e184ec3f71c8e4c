"""What is looked at in a dataset before replicas get their parts of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfcdo import log
from tfcdo.cluster import agreement
from tfcdo.cluster.session import Session

_OFF = tf.data.experimental.AutoShardPolicy.OFF
_READERS = ("RecordDataset", "TextLineDataset")


def made_from(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and all that it is made from."""
    left = [dataset]
    while left:
        one = left.pop()
        yield one
        left += one._inputs()


def prepared(dataset: tf.data.Dataset, session: Session | None) -> tf.data.Dataset:
    """Returns a dataset that can be distributed; warns of one that trains otherwise than expected.

    The session is the one of several hosts.
    """
    if int(dataset.cardinality()) == 0:
        log.warn_once(
            "a dataset without elements is distributed; Keras's fit and evaluate end with "
            "StopIteration where one device trains nothing"
        )
    if session is not None:
        _warn_if_unlike(dataset, session)
    python = (node.op for part in made_from(dataset) for node in _nodes(part))
    return _copied(dataset) if any("PyFunc" in op for op in python) else dataset


def _copied(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset of copies: replicas might write into an array that Python still has."""
    # TensorFlow takes a NumPy array as it is if its address divides by 64. It splits the batch, and
    # then takes the last part to be alone in using the memory, so that an op may write into it.
    is_tuple = type(dataset.element_spec) is tuple  # Of a named one, `map` passes no parts.

    @tf.autograph.experimental.do_not_convert
    def copies(*parts: Any) -> Any:
        own = tf.nest.map_structure(_copy, parts, expand_composites=True)
        return own if is_tuple else own[0]

    return dataset.map(copies)


def _copy(value: Any) -> Any:
    is_number = tf.is_tensor(value) and value.dtype not in (tf.string, tf.variant, tf.resource)
    return tf.raw_ops.DeepCopy(x=value) if is_number else value


def _warn_if_unlike(dataset: tf.data.Dataset, session: Session) -> None:
    """Warns if hosts take their parts of one dataset in unlike orders."""
    if dataset.options().experimental_distribute.auto_shard_policy == _OFF:
        return
    parts = list(made_from(dataset))
    # TensorFlow deals out the files, if there are any, before all else.
    seeds = [] if any(map(_reads_files, parts)) else [s for part in parts for s in _seeds(part)]
    if (0, 0) in seeds:
        how = "without a seed"
    elif seeds and session.differing(_kind(dataset), json.dumps(seeds)):
        how = "with other seeds than on another host"
    else:
        return
    log.warn_once(
        f"a dataset is shuffled {how}: each host draws another order and takes its part of it, so "
        "an epoch has some examples twice and others not at all; call "
        "keras.utils.set_random_seed(n) with the same n on all hosts before the data is made, give "
        "shuffle(), or whatever shuffles, the same seed on all hosts, or use tfcdo.keras.resumable"
    )


def _kind(dataset: tf.data.Dataset) -> str:
    return agreement.digest({"elements": str(dataset.element_spec)})


def _reads_files(dataset: tf.data.Dataset) -> bool:
    kinds = [type(dataset).__name__, *(node.op for node in _nodes(dataset))]
    return any(reader in kind for kind in kinds for reader in _READERS)


def _seeds(dataset: tf.data.Dataset) -> Iterator[tuple[int, int]]:
    """Yields the seeds of a dataset's random orders; two zeros are no seed."""
    # `shuffle` and the choices of `sample_from_datasets`; Keras shuffles the indices of arrays.
    if hasattr(dataset, "_seed2"):
        yield int(dataset._seed), int(dataset._seed2)
    for node in _nodes(dataset):
        if node.op == "RandomShuffle":
            yield node.attr["seed"].i, node.attr["seed2"].i


def _nodes(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the nodes of a dataset's functions, and of the functions in these."""
    for wrapper in dataset._functions():
        if hasattr(wrapper.function, "graph"):  # Not in tf.data's debug mode.
            graph = wrapper.function.graph.as_graph_def()
            yield from graph.node
            for function in graph.library.function:
                yield from function.node_def
