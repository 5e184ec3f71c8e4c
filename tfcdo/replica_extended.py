"""Shared by both strategies: reducing structures, and the work for TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcdo import log
from tfcdo import moving_statistics
from tfcdo import tf_internals
from tfcdo.execute.base import ConfiguredCrossDeviceOps
from tfcdo.structures import gather_structure
from tfcdo.structures import reduce_structure


class ReducesStructures:
    """Has a strategy reduce and gather structures of values, as Keras 3 asks it to."""

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces a value, or each component of a structure of values; see `reduce_structure`."""
        extended, reduce = self.extended, super().reduce  # type: ignore[attr-defined, misc]
        several_hosts = extended._in_multi_worker_mode()
        return reduce_structure(reduce, reduce_op, value, axis, several_hosts)

    def gather(self, value: Any, axis: Any) -> Any:
        """Concatenates a value, or each of a structure of values; see `gather_structure`."""
        gather = super().gather  # type: ignore[misc]
        return gather_structure(self.extended, gather, value, axis)  # type: ignore[attr-defined]


class ReplicaExtended:
    """Has each replica keep its own moving statistics, and gathers several values in one go."""

    def _create_variable(self, next_creator: Any, **options: Any) -> Any:
        averaged = moving_statistics.averaged_when_read(options)
        return super()._create_variable(next_creator, **averaged)  # type: ignore[misc]

    def _batch_gather_to(self, value_destination_pairs: Any, axis: Any, options: Any = None) -> Any:
        ops = self._cross_device_ops  # type: ignore[attr-defined]
        pairs = [(self._distributed(one), to) for one, to in value_destination_pairs]
        distributed = (isinstance(one, tf_internals.DistributedValues) for one, _ in pairs)
        if isinstance(ops, ConfiguredCrossDeviceOps) and all(distributed):
            return ops._batch_gather([(one, self._located(to)) for one, to in pairs], axis, options)
        return super()._batch_gather_to(pairs, axis, options)  # type: ignore[misc]

    def _distributed(self, value: Any) -> Any:
        """Returns a value as it is to be gathered; for several hosts to say otherwise."""
        return value

    def _located(self, destinations: Any) -> Any:
        """Returns where results are to be; for several hosts to say otherwise."""
        return destinations

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        is_dataset = tf.executing_eagerly() and isinstance(dataset, tf.data.Dataset)
        if is_dataset and int(dataset.cardinality()) == 0:
            log.warn_once(
                "a dataset without elements is distributed; Keras's fit and evaluate end with "
                "StopIteration where one device trains nothing"
            )
        return super()._experimental_distribute_dataset(dataset, options)  # type: ignore[misc]
