"""Describes the values to all-reduce: one value of a given size, or the gradients of a model."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pkgutil
import re
from collections.abc import Iterator

import numpy as np

Shape = tuple[int, ...]

# The dtypes by the names that nccl-tests has for them. Each ends in its number of bits.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "int32": "int32",
    "int64": "int64",
}

# The optimizers of Keras whose updates are measured, by the names that it has for them.
OPTIMIZERS = (
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lamb", "lion"),
    *("muon", "nadam", "rmsprop", "sgd"),
)

# Sums of integers up to this one are exact in every dtype, the narrow floats among them, so that a
# wrong element can be told from a rounded one.
_LARGEST_VALUE = 4


@dataclasses.dataclass(frozen=True)
class Workload:
    """Values that are all-reduced together."""

    name: str
    shapes: tuple[Shape, ...]
    dtype: str = "float32"

    @property
    def count(self) -> int:
        """Returns the number of elements that one device holds."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def itemsize(self) -> int:
        """Returns the number of bytes of an element."""
        return _bytes_of(self.dtype)

    @property
    def size(self) -> int:
        """Returns the number of bytes that one device holds."""
        return self.count * self.itemsize


@functools.cache
def _runs_of_models() -> dict[str, list[tuple[int, list[int]]]]:
    """Returns for each model pairs of how often a shape comes in a row, and the shape."""
    models = json.loads(pkgutil.get_data("tfcdo.bench", "models.json") or "")
    return {name: model["runs"] for name, model in models.items()}


def model_names() -> list[str]:
    """Returns the names that `gradients_of` takes."""
    return list(_runs_of_models())


def gradients_of(model: str, dtype: str = "float32") -> Workload:
    """Returns the gradients of a model, in the order of its variables."""
    if model not in _runs_of_models():
        raise ValueError(f"model must be one of {', '.join(model_names())}; got {model!r}")
    shapes = [tuple(shape) for repeats, shape in _runs_of_models()[model] for _ in range(repeats)]
    return Workload(model, tuple(shapes), dtype)


def sizes(begin: int, end: int, factor: int) -> Iterator[int]:
    """Yields the sizes from `begin` to `end`, each `factor` times as large as the one before."""
    size = begin
    while size <= end:
        yield size
        size *= factor


def one_value(size: int, dtype: str = "float32") -> Workload:
    """Returns one flat value of about `size` bytes: whole elements, at least one."""
    count = max(1, size // _bytes_of(dtype))
    return Workload("sweep", ((count,),), dtype)


def _bytes_of(dtype: str) -> int:
    (bits,) = re.findall(r"\d+$", dtype)
    return int(bits) // 8


def draw_values(workload: Workload, seed: int) -> list[np.ndarray]:
    """Draws one device's values: small integers, to be converted to the workload's dtype."""
    generator = np.random.default_rng(seed)
    return [
        generator.integers(-_LARGEST_VALUE, _LARGEST_VALUE + 1, shape, np.int8)
        for shape in workload.shapes
    ]
