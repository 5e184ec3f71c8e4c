"""Shuffles in a dataset that each host would draw for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfcdo import log

_OFF = tf.data.experimental.AutoShardPolicy.OFF
_READERS = ("RecordDataset", "TextLineDataset")


def made_from(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and all that it is made from."""
    left = [dataset]
    while left:
        one = left.pop()
        yield one
        left += one._inputs()


def warn_if_unseeded(dataset: tf.data.Dataset) -> None:
    """Warns if hosts take their parts of one dataset in unlike orders."""
    if dataset.options().experimental_distribute.auto_shard_policy == _OFF:
        return
    parts = list(made_from(dataset))
    # TensorFlow deals out the files, if there are any, before all else.
    if any(map(_draws_an_order, parts)) and not any(map(_reads_files, parts)):
        log.warn_once(
            "a dataset is shuffled without a seed: each host draws another order and takes its "
            "part of it, so an epoch has some examples twice and others not at all; call "
            "keras.utils.set_random_seed(n) with the same n on all hosts before the data is made, "
            "give shuffle() a seed, or use tfcdo.keras.resumable"
        )


def _reads_files(dataset: tf.data.Dataset) -> bool:
    kinds = [type(dataset).__name__, *(node.op for node in _nodes(dataset))]
    return any(reader in kind for kind in kinds for reader in _READERS)


def _draws_an_order(dataset: tf.data.Dataset) -> bool:
    """Tells whether a dataset is in a random order without a seed, as seeds of 0 mean."""
    # `shuffle` and the choices of `sample_from_datasets`; Keras shuffles the indices of arrays.
    if hasattr(dataset, "_seed2") and int(dataset._seed) == int(dataset._seed2) == 0:
        return True
    drawn = (node.attr for node in _nodes(dataset) if node.op == "RandomShuffle")
    return any(attributes["seed"].i == attributes["seed2"].i == 0 for attributes in drawn)


def _nodes(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the nodes of a dataset's functions, and of the functions in these."""
    for wrapper in dataset._functions():
        if hasattr(wrapper.function, "graph"):  # Not in tf.data's debug mode.
            graph = wrapper.function.graph.as_graph_def()
            yield from graph.node
            for function in graph.library.function:
                yield from function.node_def
