"""Data where a training resumes: data whose order is known, and batches that are left out."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcdo import checks, keras_internals, tf_internals
from tfcdo.training import alike, parts

_ORDER = "_tfcdo_order"
# Examples of an endless dataset; fewer than int64 has, so that sums do not overflow.
_ENDLESS = 1 << 62
# `index_shuffle` puts this number before the two of a seed, but cannot do so for several seeds.
_FIRST_SEED = 498247692
_REMEDY = (
    "use tfcdo.keras.resumable_dataset(data, batch_size), or a dataset that gives the same batches "
    "each time, such as .shuffle(n, seed=7, reshuffle_each_iteration=False)"
)
# Transformations that give an element for each one of theirs, and begin where these do.
_ONE_FOR_ONE = ("Map", "ParallelMap", "Prefetch", "Zip", "Options", "AssertCardinality")


@dataclasses.dataclass(frozen=True)
class Order:
    """Where a dataset of `resumable_dataset` begins."""

    first: tf.Variable  # The first example, counted over all epochs.
    batch_size: int


def resumable_dataset(
    data: Any, batch_size: int, *, seed: int = 0, shuffle: bool = True
) -> tf.data.Dataset:
    """Returns an endless dataset that `BackupAndRestore` can start at any example.

    Epoch after epoch it gives each example once, in an order that is a function of the seed, the
    epoch and the example's index (`tf.random.experimental.index_shuffle`): the position is one
    number, and nothing is read to get there. Batches are full; one may begin in one epoch and
    end in the next. Without a `BackupAndRestore` it starts at the first example.

    Pass `steps_per_epoch` to `fit`, because the dataset has no end. Transformations that keep the
    order may follow, such as `map` and `prefetch`; random ones should draw from `seed` and the
    example, not from a generator.

    Args:
      data: arrays or tensors of the same length, alone or in a tuple or dict, as `fit` takes them;
        or an object with `__len__` and `__getitem__`, whose items all have the same structure,
        shapes and dtypes.
      batch_size: examples in a batch, of all replicas together.
      seed: chooses the orders, an int of at least 0; the same on all hosts.
      shuffle: False to keep the order of `data` in each epoch.

    Returns:
      A dataset of batches.

    Raises:
      TypeError: if `batch_size` or `seed` is not an int, `shuffle` not a bool, or `data` is none of
        the above.
      ValueError: if `batch_size` is less than 1 or `seed` negative, arrays have different lengths,
        or data is empty.

    References:
      Mitchell et al., "Bandwidth-optimal random shuffling for GPUs", 2021, whose bijective
      shuffle `index_shuffle` is.

    Example:
      >>> data = resumable_dataset((np.arange(4), np.arange(4) * 2), batch_size=2, seed=1)
      >>> [x.numpy().tolist() for x, y in data.take(4)]
      [[0, 3], [1, 2], [0, 3], [2, 1]]
    """
    checks.check_int("batch_size", batch_size, at_least=1)
    checks.check_int("seed", seed, at_least=0, at_most=checks.LARGEST_INT)
    checks.check_bool("shuffle", shuffle)
    size, take = _random_access(data)
    with tf_internals.plain_variables("/cpu:0"):
        first = tf.Variable(0, dtype=tf.int64)

    def examples(positions: tf.Tensor) -> Any:
        return take(_indices(positions, size, seed) if shuffle else positions % size)

    dataset = (
        # The variable is read when an iterator begins, not now.
        tf.data.Dataset.from_tensors(0)
        .flat_map(lambda _: tf.data.Dataset.range(first, _ENDLESS))
        .batch(batch_size, drop_remainder=True)
        .map(examples, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        .prefetch(tf.data.AUTOTUNE)
    )
    setattr(dataset, _ORDER, Order(first, batch_size))
    setattr(dataset, parts.SEEDS, [(seed, 1)] if shuffle else [])
    return dataset


def orders_of(epoch_iterator: Any) -> list[Order]:
    """Returns the order of each `resumable_dataset` in the data that a `fit` takes."""
    orders = (getattr(dataset, _ORDER, None) for dataset in _datasets(epoch_iterator))
    return [*filter(None, orders)]


def batch_size(epoch_iterator: Any, orders: Sequence[Order]) -> int:
    """Returns the examples in each batch of the data that a `fit` takes; 0 if it is not known."""
    if orders:
        return orders[0].batch_size
    if type(epoch_iterator.data_adapter).__name__ == "ArrayDataAdapter":
        return int(epoch_iterator.data_adapter.batch_size)
    specs = tf.nest.flatten(getattr(keras_internals.dataset_of(epoch_iterator), "element_spec", ()))
    is_known = bool(specs) and isinstance(specs[0], tf.TensorSpec) and specs[0].shape.rank
    return specs[0].shape[0] or 0 if is_known else 0


def begin_at(orders: Sequence[Order], examples: int) -> None:
    """Lets iterators begin at an example of the first dataset, and there in others beside it."""
    for order in orders:
        order.first.assign(examples * order.batch_size // orders[0].batch_size)


def why_not(epoch_iterator: Any, orders: Sequence[Order]) -> str | None:
    """Returns why the data that a `fit` takes cannot be resumed, in words; None if it can."""
    kind = type(epoch_iterator.data_adapter).__name__
    shuffle = keras_internals.is_shuffled(epoch_iterator.data_adapter)
    reason, remedy = None, _REMEDY
    if kind == "ArrayDataAdapter" and shuffle:
        reason = "fit(shuffle=True) draws another order in each epoch of each process"
    elif kind in ("GeneratorDataAdapter", "TorchDataLoaderAdapter"):
        reason = "the order of a generator is not known, and it may have begun"
    elif kind == "PyDatasetAdapter" and shuffle:
        reason = "fit(shuffle=True) draws another order of a PyDataset's batches in each epoch"
    elif keras_internals.notes_epochs(epoch_iterator):
        reason = "its on_epoch_begin or on_epoch_end, which resuming skips, may reorder the batches"
    for dataset in _datasets(epoch_iterator):
        if tf_internals.is_reshuffled(dataset):
            reason = "its shuffle() has reshuffle_each_iteration=True, which is the default"
        elif (0, 0) in parts.seeds(dataset) or hasattr(dataset, alike.OF_PROCESSES):
            reason = "it is shuffled without a seed, or has deterministic=False"
    left = [keras_internals.dataset_of(epoch_iterator)] if orders else []
    while left:
        if not hasattr(dataset := left.pop(), _ORDER):
            kind = type(dataset).__name__.strip("_").removesuffix("Dataset")
            if kind not in _ONE_FOR_ONE:
                reason = f"its {kind}, after or beside resumable_dataset, begins at its own start"
                remedy = "use only map, prefetch and zip of such datasets"
                break
            left += tf_internals.inputs_of(dataset)
    return None if reason is None else f"{reason}; {remedy}"


class SkipBatches:
    """Stands for a model's train function until `batch`; drops batches of the iterator first."""

    # Keras's own loop counts the batches, so that it ends the epoch where it always does.
    def __init__(
        self,
        model: keras.Model,
        batch: int,
        steps: int | None,
        logs: Any,  # The last batch's.
        epoch_iterator: Any,  # None if it begins at `batch` by itself.
        before: int,  # Batches that its iterator has given in earlier epochs.
    ) -> None:
        at_once = model.steps_per_execution
        if batch % at_once and batch < (steps or math.inf):
            raise ValueError(
                "steps_per_execution must divide the number of batches that are done, so that "
                f"training can go on inside the epoch; got {at_once} and a backup after batch "
                f"{batch}: compile with a divisor of it"
            )
        self._model = model
        self.stands_for = model.train_function
        self._batch, self._before = batch, before
        self._calls = math.ceil(min(batch, steps or batch) / at_once)
        self.logs = logs
        self._epoch_iterator = epoch_iterator
        model.train_function = self

    def __call__(self, iterator: Any) -> Any:
        """Skips one call of the train function, or ends the skipping."""
        if self._epoch_iterator is not None:
            self._drop(iterator)
        if self._calls:
            self._calls -= 1
            # Keras returns them if it trains no other batch.
            return self.logs or self._model.get_metrics_result()
        logs = self.stands_for(iterator)
        # Not before: an epoch without a batch reports by these logs.
        self._model.train_function = self.stands_for
        return logs

    def _drop(self, iterator: Any) -> None:
        """Drops, once, what the iterator gives before the batch."""
        keras_internals.count_batches(self._epoch_iterator, self._before)
        self._epoch_iterator = None
        # An iterator that ends now says so again in the next call, as it did before.
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            for _ in range(self._before + self._batch):
                next(iterator)


def _random_access(data: Any) -> tuple[int, Any]:
    """Returns the number of examples, and a function that takes the examples of some indices."""
    is_arrays = isinstance(data, (tuple, dict, np.ndarray)) or tf.is_tensor(data)
    if not is_arrays and (not hasattr(data, "__len__") or not hasattr(data, "__getitem__")):
        raise TypeError(
            "data must be arrays, a tuple or dict of arrays, or an object with __len__ and "
            f"__getitem__; got {data!r}"
        )
    if not is_arrays:
        size = len(data)
    else:
        try:
            tensors = tf.nest.map_structure(tf.convert_to_tensor, data)
            lengths = {int(tensor.shape[0]) for tensor in tf.nest.flatten(tensors)}
        except (ValueError, TypeError, IndexError) as error:
            raise TypeError(f"data must be dense arrays of examples; got {data!r}") from error
        if len(lengths) != 1:
            raise ValueError(f"data must be arrays of the same length; got {sorted(lengths)}")
        size = lengths.pop()
    if not size:
        raise ValueError("data must have at least one example; got none")
    if is_arrays:
        return size, lambda indices: tf.nest.map_structure(
            lambda tensor: tf.gather(tensor, indices), tensors
        )
    example = tf.nest.map_structure(tf.convert_to_tensor, data[0])
    dtypes = [tensor.dtype for tensor in tf.nest.flatten(example)]

    def fetch(indices: np.ndarray) -> list[np.ndarray]:
        items = [tf.nest.flatten(data[int(index)]) for index in indices]
        return [
            np.stack([np.asarray(value, dtype.as_numpy_dtype) for value in values])
            for dtype, values in zip(dtypes, zip(*items, strict=True), strict=True)
        ]

    def take(indices: tf.Tensor) -> Any:
        batch = tf.numpy_function(fetch, [indices], dtypes)
        for tensor, one in zip(batch, tf.nest.flatten(example), strict=True):
            tensor.set_shape([indices.shape[0], *one.shape])
        return tf.nest.pack_sequence_as(example, batch)

    return size, take


def _indices(positions: tf.Tensor, size: int, seed: int) -> tf.Tensor:
    """Returns which examples are at some positions, counted over all epochs."""
    epochs = positions // size
    constants = [tf.fill(tf.shape(epochs), tf.constant(n, tf.int64)) for n in (_FIRST_SEED, seed)]
    return tf.raw_ops.RandomIndexShuffle(
        index=positions % size,
        seed=tf.stack([*constants, epochs], 1),
        max_index=tf.constant(size - 1, tf.int64),
        rounds=4,
    )


def _datasets(epoch_iterator: Any) -> Iterable[tf.data.Dataset]:
    """Returns the dataset that a `fit` takes, and all that it is made from."""
    dataset = keras_internals.dataset_of(epoch_iterator)
    return parts.made_from(dataset) if isinstance(dataset, tf.data.Dataset) else ()
