"""Shared by most tests: eight virtual devices, values on them, ways to call, numpy's oracles."""

# Import it before anything makes a tensor: it configures the devices.
import atexit
import collections
import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from tfcdo import tf_internals, virtual_devices

NUM_DEVICES = 8
virtual_devices.configure_virtual_cpus(NUM_DEVICES)
# For the black boxes of tests.
os.environ["TFCDO_CACHE_DIR"] = tempfile.mkdtemp(prefix="tfcdo-tests-")
atexit.register(shutil.rmtree, os.environ["TFCDO_CACHE_DIR"], ignore_errors=True)

SUM = tf.distribute.ReduceOp.SUM
MEAN = tf.distribute.ReduceOp.MEAN
FLOATS_16 = (tf.float16, tf.bfloat16)
DTYPES = (
    *FLOATS_16, tf.float32, tf.float64, tf.int32, tf.int64, tf.complex64, tf.complex128,
    tf.int8, tf.uint8, tf.int16, tf.uint16, tf.uint32, tf.uint64,
)  # fmt: skip

# Calls: directly, in a `tf.function` that knows the values' devices, or with unknown devices.
EAGER, FUNCTION, ARGUMENTS = "eager", "function", "arguments"
function = functools.partial(tf.function, autograph=False)
_UNIT = 0.25  # Values are small multiples of this, so that sums of them are exact in float32.


def nightly(*cases: Any) -> tuple[Any, ...]:
    """Cases for `make test-nightly`: they take minutes, or a test has others like them."""
    return cases if "TFCDO_NIGHTLY" in os.environ else ()


def device_name(index: int) -> str:
    return f"/job:localhost/replica:0/task:0/device:CPU:{index}"


def device_names(count: int) -> tuple[str, ...]:
    return tuple(device_name(index) for index in range(count))


ALL_DEVICES = device_names(NUM_DEVICES)


def place(value: Any, device: str) -> Any:
    """A tensor or `tf.IndexedSlices` on a device."""
    with tf.device(device):
        if not isinstance(value, tf.IndexedSlices):
            return tf.identity(value)
        shape = None if value.dense_shape is None else tf.identity(value.dense_shape)
        return tf.IndexedSlices(tf.identity(value.values), tf.identity(value.indices), shape)


def per_replica(values: Sequence[Any], devices: Sequence[str] = ALL_DEVICES) -> Any:
    """A `PerReplica` with one value on each of the first devices."""
    own = devices[: len(values)]
    return tf_internals.per_replica([place(v, d) for v, d in zip(values, own, strict=True)])


def distributed(strategy: Any, make: Callable[[int], Any]) -> Any:
    """Has `make` give each replica of this host its value, by the number of the replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )


def variables(value: Any, count: int) -> list[tf.Variable]:
    """Equal variables, one on each of the first devices."""
    made = []
    for device in device_names(count):
        with tf.device(device):
            made.append(tf.Variable(value))
    return made


def kernels_for(*device_types: str) -> Any:
    """Pretends that TensorFlow has NCCL kernels for these device types only, whatever it has."""
    return mock.patch.object(
        tf_internals, "device_types_with_kernel", return_value=frozenset(device_types)
    )


def numbers(shape: Sequence[int], dtype: tf.DType, seed: int, limit: int = 100) -> np.ndarray:
    """Drawn values that any of the tested dtypes holds exactly, and whose sums float32 does."""
    generator = np.random.default_rng(seed)
    dtype = tf.as_dtype(dtype)
    steps = generator.integers(0 if dtype.is_unsigned else -limit, limit, shape)
    if dtype.is_integer:
        return steps.astype(dtype.as_numpy_dtype)
    if dtype.is_complex:
        steps = steps + 1j * generator.integers(-limit, limit, shape)
    return (steps * _UNIT).astype(dtype.as_numpy_dtype)


def exact(value: Any) -> np.ndarray:
    """A value in float64, complex128 or int64, which hold all that the tests use exactly."""
    array = np.asarray(value.numpy() if tf.is_tensor(value) else value)
    if np.issubdtype(array.dtype, np.complexfloating):
        return array.astype(np.complex128)
    if np.issubdtype(array.dtype, np.integer):
        return array.astype(np.int64)
    return array.astype(np.float64)


def dense(slices: tf.IndexedSlices, num_rows: int) -> np.ndarray:
    """The exact table that slices stand for, rows of equal index added up."""
    rows = exact(slices.values)
    table = np.zeros((num_rows, *rows.shape[1:]), rows.dtype)
    np.add.at(table, np.asarray(slices.indices), rows)
    return table


def oracle(reduce_op: tf.distribute.ReduceOp, values: Sequence[Any]) -> np.ndarray:
    """The exact sum or mean of one array per replica."""
    total = np.sum([exact(value) for value in values], axis=0)
    return total if reduce_op == SUM else total / len(values)


def result_dtype(reduce_op: tf.distribute.ReduceOp, dtype: tf.DType) -> tf.DType:
    """The dtype that TensorFlow's class gives to the result of reducing two replicas or more."""
    if reduce_op == SUM or not dtype.is_integer:
        return dtype
    return tf.float64 if dtype.size >= 4 else tf.float32


@dataclasses.dataclass(frozen=True)
class Result:
    """One result of a reduction."""

    mirrored: bool
    devices: tuple[str, ...]
    values: tuple[Any, ...]

    @property
    def value(self) -> Any:
        return self.values[0]


def call(mode: str, body: Callable[..., Any], *values: Any) -> list[Result]:
    """Calls a function that reduces, and takes what it returns apart."""
    traced: list[tuple[bool, tuple[str, ...]]] = []

    def components(*arguments: Any) -> list[tuple[Any, ...]]:
        results = body(*arguments)
        results = results if isinstance(results, (list, tuple)) else [results]
        parts = []
        for result in results:
            mirrored = isinstance(result, tf_internals.DistributedValues)
            parts.append(tuple(result.values) if mirrored else (result,))
            traced.append((mirrored, tuple(map(_device, parts[-1]))))
        return parts

    if mode == EAGER:
        parts = components(*values)
    elif mode == FUNCTION:
        parts = function(lambda: components(*values))()
    else:
        parts = function(components)(*values)
    return [Result(*trace, tuple(part)) for trace, part in zip(traced, parts, strict=True)]


def all_reduce(
    ops: tf.distribute.CrossDeviceOps,
    reduce_op: tf.distribute.ReduceOp,
    values: Sequence[Any],
    mode: str = EAGER,
) -> list[Result]:
    """All-reduces several `PerReplica` values to their own devices, in one batch."""
    return call(mode, lambda *own: ops.batch_reduce(reduce_op, [(v, v) for v in own]), *values)


def call_in_six_threads(work: Callable[[int], None]) -> None:
    """Calls `work` with the number of its thread; raises what one of them raises, or a hang."""
    list(futures.ThreadPoolExecutor(6).map(work, range(6), timeout=300))


def traced_ops(body: Callable[[], Any]) -> list[tf.Operation]:
    """The ops that a `tf.function` consists of."""
    return function(body).get_concrete_function().graph.get_operations()


def copied_bytes(
    operations: Sequence[tf.Operation], devices: Sequence[str]
) -> dict[tuple[int, int], int]:
    """Counts the bytes that ops copy between devices: each tensor once for each target."""
    copies = {
        (tensor.ref(), devices.index(tensor.op.device), devices.index(op.device))
        for op in operations
        for tensor in op.inputs
        if tensor.op.device in devices and op.device in devices and tensor.op.device != op.device
        if tensor.op.type != "Unpack"  # Keys of collectives.
    }
    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    for tensor, source, target in copies:
        known = tensor.deref()
        counts[source, target] += (known.shape.num_elements() or 0) * known.dtype.size
    return dict(counts)


class ValuesMixin:
    """Assertions on results, for `tf.test.TestCase`."""

    def assert_exact(self: Any, actual: Any, expected: np.ndarray, dtype: tf.DType) -> None:
        """Asserts an exact sum; or a mean, rounded as TensorFlow's graphs round its quotient."""
        self.assertEqual(dtype, actual.dtype)
        self.assertEqual(expected.shape, tuple(actual.shape))
        error = np.abs(exact(actual) - expected)
        slack = 1.001 if dtype in (tf.float16, tf.bfloat16) else 8 if dtype.is_complex else 2
        allowed = np.abs(expected) * unit_roundoff(dtype) * slack
        self.assertTrue(np.all(error <= allowed), f"got {actual}, expected {expected}")

    def assert_bitwise_equal(self: Any, results: Sequence[Any]) -> None:
        """Asserts that tensors or slices hold the same bits."""
        first, *others = [list(map(_bits, tf.nest.flatten(one, True))) for one in results]
        for other in others:
            self.assertEqual(first, other)

    def assert_on(self: Any, result: Result, devices: Sequence[str]) -> None:
        """Asserts that a result is as TensorFlow returns it, with a component on each device."""
        self.assertEqual(tuple(devices), result.devices)
        self.assertEqual(len(devices) > 1, result.mirrored)


def unit_roundoff(dtype: tf.DType) -> float:
    """The largest relative error of rounding once to a dtype; 0 for integers."""
    if dtype.is_integer:
        return 0.0
    return {tf.bfloat16: 2.0**-8, tf.float16: 2.0**-11, tf.float64: 2.0**-53}.get(dtype, 2.0**-24)


def _device(value: Any) -> str:
    """The device of a tensor, or of all parts of slices."""
    return " and ".join(sorted({part.device for part in tf.nest.flatten(value, True)}))


def _bits(tensor: tf.Tensor) -> tuple[Any, ...]:
    array = np.asarray(tensor.numpy())
    content = array.tolist() if array.dtype == object else array.tobytes()  # Texts, or numbers.
    return tensor.dtype, tuple(tensor.shape), content
