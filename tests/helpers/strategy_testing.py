"""Shared by tests of the four classes inside a `tf.distribute.MirroredStrategy`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo

CLASSES: dict[str, Callable[[], tf.distribute.CrossDeviceOps]] = {
    "one_device": tfcdo.ReductionToOneDevice,
    "hierarchical": tfcdo.HierarchicalCopyAllReduce,
}
EAGER, FUNCTION = "eager", "function"  # The function is called by another function.

# Of classes that share a public base, and all the code that is not about packs, one. The contract
# has each in each mode.
BASES = [("one_device", 3), ("hierarchical", 5)]
BASE_CASES = [("one_device", FUNCTION, 3), ("hierarchical", EAGER, 5)]


def strategy_of(
    ops: tf.distribute.CrossDeviceOps, count: int, first: int = 0
) -> tf.distribute.MirroredStrategy:
    return tf.distribute.MirroredStrategy(
        tu.ALL_DEVICES[first : first + count], cross_device_ops=ops
    )


def in_mode(mode: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """The body as it is, or as a `tf.function` that is called by another one."""
    if mode == EAGER:
        return body
    function = tf.function(body, autograph=False)
    return tf.function(lambda *arguments: function(*arguments), autograph=False)


def context() -> Any:
    return tf.distribute.get_replica_context()


def on_replica(value: Any) -> Any:
    """The value with a device: a function's arguments have none while it is traced."""
    return tf.nest.map_structure(tf.identity, value)


def distributed(
    strategy: tf.distribute.Strategy, data: Any, batch_size: int
) -> tf.distribute.DistributedDataset:
    """Batches of `data`, without the thread that tunes what makes them.

    Such a thread may sleep on for seconds when its iterator ends, which waits for it.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(batch_size).with_options(options)
    return strategy.experimental_distribute_dataset(dataset)


class StrategyTestCase(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @contextlib.contextmanager
    def used(self, ops: tf.distribute.CrossDeviceOps, method: str = "batch_reduce") -> Iterator:
        """Asserts that the strategy calls a method of `ops`, so that this is what is tested."""
        with mock.patch.object(ops, method, wraps=getattr(ops, method)) as spy:
            yield
        self.assertGreater(spy.call_count, 0)

    def assert_close(self, expected: Any, actual: tf.Tensor, dtype: Any = None) -> None:
        """Asserts a result of a few roundings of numbers that may be larger than it is."""
        self.assertEqual(tf.as_dtype(dtype or actual.dtype), actual.dtype)
        self.assertEqual(np.shape(expected), tuple(actual.shape))
        rtol = 4 * tu.unit_roundoff(actual.dtype)
        np.testing.assert_allclose(tu.exact(actual), expected, rtol=rtol, atol=100 * rtol)

    def assert_replicas(self, expected: Any, value: Any, count: int) -> None:
        """Asserts the value of each replica, and that all have the same bits."""
        self.assert_components(expected, strategy_results(value), count)

    def assert_components(self, expected: Any, components: Sequence[Any], count: int) -> None:
        self.assertLen(components, count)
        for component in components:
            self.assert_close(expected, component)
        self.assert_bitwise_equal(components)


def strategy_results(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, "values", (value,)))
