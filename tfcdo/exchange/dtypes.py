"""Facts about dtypes, by their names: sizes, and the dtypes that sums and means are formed in."""

from __future__ import annotations

import numpy as np

# Adding K values in 16 bits rounds K - 1 times, and a large sum swallows small terms. Partial sums
# are therefore kept in 32 bits; only the root rounds, once.
SUM_DTYPE = {"float16": "float32", "bfloat16": "float32"}
# The mean of integers is a float. Their sum might not fit the integers; as floats of this size they
# keep every bit. 64-bit integers are added as integers, then divided.
MEAN_DTYPE = {
    "int8": "float32",
    "uint8": "float32",
    "int16": "float32",
    "uint16": "float32",
    "int32": "float64",
    "uint32": "float64",
}
# The largest power of two of a dtype: a value may need a scale to fit a dtype with a smaller one.
LARGEST_EXPONENT = {"int8": 6, "float16": 15, "bfloat16": 127, "float32": 127, "float64": 1023}
# Values of these dtypes are cast where there is a wire dtype.
CAST = ("float32", "float64")


def needs_scale(wire: str, dtype: str) -> bool:
    """Returns whether values are scaled before a cast, as the wire's range is smaller."""
    return LARGEST_EXPONENT[wire] < LARGEST_EXPONENT[dtype]


def itemsize(dtype: str) -> int:
    """Returns the bytes of an element; 1 for dtypes that numpy does not know, such as float8."""
    if dtype == "bfloat16":
        return 2
    try:
        return int(np.dtype(dtype).itemsize) or 1
    except TypeError:
        return 1
