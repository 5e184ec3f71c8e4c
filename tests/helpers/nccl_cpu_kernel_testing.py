"""Shared by tests of the CPU kernel for NcclAllReduce.

No test measures time. Where the devices must not wait for one another, the kernel is told to have
more patience than the test, so that a test that hangs fails with "still waiting".
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import unittest
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any
from unittest import mock

import nccl_cpu_kernel
import numpy as np
import tensorflow as tf

from tfcdo.virtual_devices import configure_virtual_cpus

# More than ten, as CPU:10 is a trap for those who sort names instead of numbers.
DEVICES = configure_virtual_cpus(11)

# Seconds. What does not hang takes a small part of one; the machine may be busy.
TEST_PATIENCE = 60.0
KERNEL_PATIENCE = 90.0

REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.sum,
    "prod": np.prod,
    "min": np.min,
    "max": np.max,
}
DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def load_kernel() -> None:
    """Loads the kernel, or skips the module that calls this where it cannot be built."""
    reason = nccl_cpu_kernel.why_unavailable()
    if reason is not None:
        raise unittest.SkipTest(reason)
    nccl_cpu_kernel.load()


def all_reduce(
    values: Sequence[tf.Tensor],
    shared_name: str,
    reduction: str = "sum",
    num_devices: int | None = None,
    devices: Sequence[str] | None = None,
) -> list[tf.Tensor]:
    """One op on each device, with nothing that holds them together."""
    results = []
    for value, device in zip(values, devices or DEVICES, strict=False):
        with tf.device(device):
            results.append(
                tf.raw_ops.NcclAllReduce(
                    input=value,
                    reduction=reduction,
                    num_devices=len(values) if num_devices is None else num_devices,
                    shared_name=shared_name,
                )
            )
    return results


def all_reduce_constants(values: Iterable[object], reduction: str = "sum") -> list[tf.Tensor]:
    @tf.function
    def run() -> list[tf.Tensor]:
        return all_reduce([tf.constant(value) for value in values], "pack", reduction)

    return run()


def delayed(value: tf.Tensor, seconds: float) -> tf.Tensor:
    """The same value, but only after a while."""

    def wait(array: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return array

    result = tf.numpy_function(wait, [value], value.dtype)
    result.set_shape(value.shape)
    return result


@contextlib.contextmanager
def waiting_at_most(seconds: float | str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {nccl_cpu_kernel.TIMEOUT_VARIABLE: str(seconds)}):
        yield


def without_hanging(function: Callable[[], Any]) -> Any:
    """Returns what the function returns and raises what it raises, unless it hangs."""
    outcome: futures.Future = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except Exception as error:
            outcome.set_exception(error)

    # Not a pool: one of its threads that hangs would keep the test from ending.
    threading.Thread(target=run, daemon=True).start()
    if not futures.wait([outcome], TEST_PATIENCE).done:
        raise AssertionError(f"still waiting after {TEST_PATIENCE:.0f} s")
    return outcome.result()
