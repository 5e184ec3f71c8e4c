"""Bounds of the error of all-reduces that cast copies; docs/wire-numerics.md derives them."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfcdo.exchange import dtypes, rounding


class _Format(NamedTuple):
    roundoff: float  # The largest relative error of rounding to it, u.
    exponent: int  # The exponent of its largest power of two.
    # The largest absolute error of rounding a number too small to be a normal one. TensorFlow's CPU
    # kernels may set such numbers of bfloat16 to 0.
    lost: float


_FORMATS = {
    "bfloat16": _Format(2.0**-8, 127, 2.0**-126),
    "float16": _Format(2.0**-11, 15, 2.0**-25),
    "float32": _Format(2.0**-24, 127, 2.0**-126),
    "float64": _Format(2.0**-53, 1023, 2.0**-1022),
}


def roundoff(wire_dtype: str, dtype: tf.DType = tf.float32) -> float:
    """The largest relative error of one cast to the wire's dtype."""
    once = _FORMATS[wire_dtype].roundoff
    # TensorFlow casts float64 by way of float32.
    return once if dtype == tf.float32 else once * (1 + 2.0**-12)


def _growth(depth: int, num_devices: int, wire_dtype: str, dtype: tf.DType) -> float:
    wide = _FORMATS[dtype.name].roundoff
    return (1 + roundoff(wire_dtype, dtype)) ** (depth + 1) * (1 + wide) ** num_devices


def error_bound(
    magnitudes: Any, depth: int, num_devices: int, wire_dtype: str, dtype: tf.DType = tf.float32
) -> np.ndarray:
    """Bounds errors of elements, of sums of these magnitudes; `depth`: the most edges to a root."""
    magnitudes = np.asarray(magnitudes, np.float64)
    wire = _FORMATS[wire_dtype]
    growth = _growth(depth, num_devices, wire_dtype, dtype)
    lost = _FORMATS[dtype.name].lost
    if dtypes.needs_scale(wire_dtype, dtype.name):
        # A scale leaves the largest magnitude at least at half of 2^exponent, less one rounding.
        largest = np.max(magnitudes, initial=0.0)
        lost += wire.lost * largest * (1 + wire.roundoff) * 2.0**-wire.exponent
    else:
        lost += wire.lost
    return np.asarray((growth - 1) * magnitudes + num_devices * growth * lost)


def feedback_error_bound(
    magnitudes_by_step: Any, depth: int, num_devices: int, wire_dtype: str
) -> np.ndarray:
    """Bounds the difference of the sum of all results from the sum of all values, with feedback."""
    magnitudes = np.asarray(magnitudes_by_step, np.float64)
    wide = _FORMATS["float32"]
    once = error_bound(np.max(magnitudes, 0), depth, num_devices, wire_dtype)
    held = once / (2 - _growth(depth, num_devices, wire_dtype, tf.float32))
    added = np.sum(magnitudes + held, 0) * wide.roundoff + len(magnitudes) * wide.lost
    return np.asarray(held + 2 * num_devices * added)


def block_error_bound(terms: Any, num_terms: int, block: int) -> np.ndarray:
    """Bounds errors of a float32 sum in int8, of hosts' magnitudes; `block` values have a scale."""
    terms = np.abs(np.asarray(terms, np.float64))
    num_hosts, size = terms.shape
    padded = np.pad(terms, ((0, 0), (0, -size % block)))
    largest = padded.reshape(num_hosts, -1, block).max(axis=2).sum(axis=0)
    growth = (1 + _FORMATS["float32"].roundoff) ** (num_terms + 4)
    relative = 2 * rounding.ROUNDOFF["int8"] * growth + growth - 1
    return np.repeat(relative * largest, block)[:size] + (num_hosts + 1) * 2.0**-125
