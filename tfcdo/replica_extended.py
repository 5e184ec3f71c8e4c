"""What the work of both strategies for TensorFlow shares."""

from __future__ import annotations

from typing import Any

from tfcdo import moving_statistics
from tfcdo import tf_internals
from tfcdo.execute.base import ConfiguredCrossDeviceOps


class ReplicaExtended:
    """Has each replica keep its own moving statistics, and gathers several values in one go."""

    def _create_variable(self, next_creator: Any, **options: Any) -> Any:
        averaged = moving_statistics.averaged_when_read(options)
        return super()._create_variable(next_creator, **averaged)  # type: ignore[misc]

    def _batch_gather_to(self, value_destination_pairs: Any, axis: Any, options: Any = None) -> Any:
        ops, pairs = self._cross_device_ops, list(value_destination_pairs)  # type: ignore[attr-defined]
        distributed = (isinstance(one, tf_internals.DistributedValues) for one, _ in pairs)
        if isinstance(ops, ConfiguredCrossDeviceOps) and all(distributed):
            return ops._batch_gather([(one, self._located(to)) for one, to in pairs], axis, options)
        return super()._batch_gather_to(pairs, axis, options)  # type: ignore[misc]

    def _located(self, destinations: Any) -> Any:
        return destinations
