"""The contract of `tf.distribute.CrossDeviceOps`, as tests that any list of settings can run.

`settings_tests` makes one test class per setting and part of the contract, so that another file can
run the same suite over other classes, or in another environment. contract_values has the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

FLOATS_16 = (tf.float16, tf.bfloat16)
DTYPES = (
    *FLOATS_16, tf.float32, tf.float64, tf.int32, tf.int64, tf.complex64, tf.complex128,
    tf.int8, tf.uint8, tf.int16, tf.uint16, tf.uint32, tf.uint64,
)  # fmt: skip
SHAPES = ((), (0,), (7,), (2, 3), (1, 1, 1), (40, 5), (3, 0, 2))


class Contract(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    """The base of the contract's parts."""

    make: Callable[[], tf.distribute.CrossDeviceOps]


def settings_tests(
    part: type[Contract],
    settings: Mapping[str, Callable[[], tf.distribute.CrossDeviceOps]],
    module: str,
) -> dict[str, type]:
    """Makes test classes of a part of the contract."""
    ending = part.__name__.replace("Contract", "Test")
    return {
        f"{name}{ending}": type(
            f"{name}{ending}", (part,), {"make": staticmethod(make), "__module__": module}
        )
        for name, make in settings.items()
    }


def batch(count: int, seed: int = 0, dtypes: Any = DTYPES[:7]) -> list[list[np.ndarray]]:
    """One array per replica for each of some values: all shapes, each with two of the dtypes."""
    kinds = [
        (shape, dtypes[(2 * index + turn) % len(dtypes)])
        for index, shape in enumerate(SHAPES)
        for turn in range(min(2, len(dtypes)))
    ]
    return [
        [tu.numbers(shape, dtype, seed + 100 * index + rank) for rank in range(count)]
        for index, (shape, dtype) in enumerate(kinds)
    ]


def slices(count: int, seed: int = 0, dtype: Any = tf.float32) -> list[tf.IndexedSlices]:
    """Slices of a table of 6 rows; each replica another number of rows, repeated, or none."""
    generator = np.random.default_rng(seed)
    return [
        tf.IndexedSlices(
            tf.constant(tu.numbers((rows, 2), dtype, seed + rank)),
            tf.constant(generator.integers(0, 6, rows)),
            tf.constant([6, 2], tf.int64),
        )
        for rank, rows in enumerate(generator.integers(0, 5, count))
    ]
