"""Describes the values to all-reduce: one value of a given size, or the gradients of a model."""

from __future__ import annotations

import dataclasses
import json
import math
import pkgutil
from collections.abc import Iterator

import numpy as np

from tfcdo.exchange import dtypes

# The dtypes by the names that nccl-tests has for them.
DTYPES = {"float": "float32", "double": "float64", "half": "float16"}
DTYPES |= {name: name for name in ("bfloat16", "int32", "int64")}

# The optimizers of Keras whose updates are measured, by the names that it has for them.
OPTIMIZERS = (
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lamb", "lion"),
    *("muon", "nadam", "rmsprop", "sgd"),
)

# By name: "runs" has pairs of how often a shape comes in a row, and the shape.
MODELS = json.loads(pkgutil.get_data("tfcdo.bench", "models.json") or "")

# Sums of integers up to this one are exact in every dtype, the narrow floats among them, so that a
# wrong element can be told from a rounded one.
_LARGEST_VALUE = 4


@dataclasses.dataclass(frozen=True)
class Workload:
    """Values that are all-reduced together."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"

    @property
    def count(self) -> int:
        """Returns the number of elements that one device holds."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """Returns the number of bytes that one device holds."""
        return self.count * dtypes.itemsize(self.dtype)


def gradients_of(model: str, dtype: str = "float32") -> Workload:
    """Returns the gradients of one of `MODELS`, in the order of its variables."""
    runs = MODELS[model]["runs"]
    shapes = [tuple(shape) for repeats, shape in runs for _ in range(repeats)]
    return Workload(model, tuple(shapes), dtype)


def sizes(begin: int, end: int, factor: int) -> Iterator[int]:
    """Yields the sizes from `begin` to `end`, each `factor` times as large as the one before."""
    size = begin
    while size <= end:
        yield size
        size *= factor


def one_value(size: int, dtype: str = "float32") -> Workload:
    """Returns one flat value of about `size` bytes: whole elements, at least one."""
    count = max(1, size // dtypes.itemsize(dtype))
    return Workload("sweep", ((count,),), dtype)


def draw_values(workload: Workload, seed: int) -> list[np.ndarray]:
    """Draws one device's values: small integers, to be converted to the workload's dtype."""
    generator = np.random.default_rng(seed)
    return [
        generator.integers(-_LARGEST_VALUE, _LARGEST_VALUE + 1, shape, np.int8)
        for shape in workload.shapes
    ]
