"""The contract of `tf.distribute.CrossDeviceOps`, as tests that any list of settings can run.

`settings_tests` makes one test class per setting, so that another file can run the same suite over
other classes, or in another environment.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from testing_utils import ARGUMENTS
from testing_utils import EAGER
from testing_utils import FUNCTION
from testing_utils import MEAN
from testing_utils import SUM

from tfcdo import tf_internals
from tfcdo.plan import packing

FLOATS_16 = (tf.float16, tf.bfloat16)
DTYPES = (
    *FLOATS_16, tf.float32, tf.float64, tf.int32, tf.int64, tf.complex64, tf.complex128,
    tf.int8, tf.uint8, tf.int16, tf.uint16, tf.uint32, tf.uint64,
)  # fmt: skip
SHAPES = ((), (0,), (7,), (2, 3), (1, 1, 1), (40, 5), (3, 0, 2))


def settings_tests(
    settings: Mapping[str, Callable[[], tf.distribute.CrossDeviceOps]], module: str
) -> dict[str, type]:
    """Makes the contract's test classes.

    Args:
      settings: by name, what makes the cross-device ops to test.
      module: the name of the module that the classes are put in.

    Returns:
      By name, one test class per setting.
    """
    return {
        f"{name}Test": type(
            f"{name}Test",
            (CrossDeviceOpsContract,),
            {"make": staticmethod(make), "__module__": module},
        )
        for name, make in settings.items()
    }


def batch(count: int, seed: int = 0, dtypes: Any = DTYPES[:7]) -> list[list[np.ndarray]]:
    """One array per replica for each of some values: all shapes, each with three of the dtypes."""
    kinds = [
        (shape, dtypes[(3 * index + turn) % len(dtypes)])
        for index, shape in enumerate(SHAPES)
        for turn in range(min(3, len(dtypes)))
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


class CrossDeviceOpsContract(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    """What is promised of each class, in every setting."""

    make: Callable[[], tf.distribute.CrossDeviceOps]

    # Values.

    @parameterized.parameters(
        *[(EAGER, op, count) for op in (SUM, MEAN) for count in (1, 2, 3, 4, 5, 6, 7, 8)],
        *[(FUNCTION, SUM, count) for count in (1, 5, 8)],
        *[(ARGUMENTS, MEAN, count) for count in (1, 3, 8)],
    )
    def test_all_reduces_a_mixed_batch(self, mode, reduce_op, count):
        arrays = batch(count)
        own_slices = [slices(count, seed) for seed in range(3)]
        values = [tu.per_replica(own) for own in arrays]
        for position, own in enumerate(own_slices):
            values.insert(3 * position, tu.per_replica(own))  # In between, and first.

        results = tu.all_reduce(self.make(), reduce_op, values, mode)

        self.assertLen(results, len(values))
        for position, own in enumerate(own_slices):
            self._check_slices(reduce_op, results.pop(2 * position), own)
        for result, own in zip(results, arrays, strict=True):
            dtype = tf.as_dtype(own[0].dtype)
            # TensorFlow gives the value itself back if there is one replica and nowhere to go.
            expected_dtype = tu.result_dtype(reduce_op, dtype) if count > 1 else dtype
            self.assert_exact(result.value, tu.oracle(reduce_op, own), expected_dtype)
            self.assert_bitwise_equal(result.values)
            if mode != ARGUMENTS:
                self.assert_on(result, tu.device_names(count))

    def _check_slices(self, reduce_op, result, own):
        expected = tu.oracle(reduce_op, [tu.dense(one, 6) for one in own])
        first = result.value
        self.assertIsInstance(first, tf.IndexedSlices)
        self.assertEqual(own[0].values.dtype, first.values.dtype)
        self.assertEqual(own[0].indices.dtype, first.indices.dtype)
        self.assertAllEqual([6, 2], first.dense_shape)
        self.assertAllClose(expected, tu.dense(first, 6), rtol=1e-6, atol=1e-6)
        # The rows are those of the replicas, in their order: none is added up or left out.
        self.assertAllEqual(np.concatenate([one.indices for one in own]), first.indices)
        self.assert_bitwise_equal([(one.values, one.indices) for one in result.values])

    @parameterized.product(dtype=DTYPES, reduce_op=(SUM, MEAN))
    def test_keeps_the_dtype(self, dtype, reduce_op):
        # The sum of three fits in 8 bits.
        arrays = [[tu.numbers((5,), dtype, rank, limit=40) for rank in range(3)]] * 2
        results = tu.all_reduce(self.make(), reduce_op, [tu.per_replica(own) for own in arrays])
        for result, own in zip(results, arrays, strict=True):
            self.assert_exact(
                result.value, tu.oracle(reduce_op, own), tu.result_dtype(reduce_op, dtype)
            )

    @parameterized.product(dtype=FLOATS_16, reduce_op=(SUM, MEAN), mode=(EAGER, FUNCTION))
    def test_rounds_16_bit_floats_once(self, dtype, reduce_op, mode):
        # Adding 1 to the large value is lost in 16 bits, but seven of them are not.
        large = 2048 if dtype == tf.float16 else 256
        own = [np.full([9], value, dtype.as_numpy_dtype) for value in [large] + [1] * 7]
        for result in tu.all_reduce(self.make(), reduce_op, [tu.per_replica(own)] * 2, mode):
            self.assert_exact(result.value, tu.oracle(reduce_op, own), dtype)

    @parameterized.product(dtype=(tf.uint8, tf.int8, tf.int16, tf.int32), mode=(EAGER, FUNCTION))
    def test_mean_of_integers_whose_sum_is_none(self, dtype, mode):
        # Every float has this power of two, and no integer of this dtype has three times as much.
        large = 2 ** (8 * dtype.size - (1 if dtype == tf.uint8 else 2))
        own = [np.full([9], large, dtype.as_numpy_dtype) for _ in range(3)]
        for result in tu.all_reduce(self.make(), MEAN, [tu.per_replica(own)] * 2, mode):
            self.assert_exact(result.value, np.full([9], large), tu.result_dtype(MEAN, dtype))

    @parameterized.parameters(EAGER, FUNCTION)
    def test_mean_of_64_bits_loses_none(self, mode):
        # No float64 holds the first, so whoever adds floats gets 0.
        own = [np.array([2**60 + 3]), np.array([-(2**60)])]
        for result in tu.all_reduce(self.make(), MEAN, [tu.per_replica(own)] * 2, mode):
            self.assertAllEqual([1.5], result.value)

    def test_sums_special_values(self):
        own = [np.array([np.inf, -np.inf, np.nan, 1], np.float32), np.ones([4], np.float32)]
        own.append(np.array([1, 1, 1, np.inf], np.float32))
        (result,) = tu.all_reduce(self.make(), SUM, [tu.per_replica(own)])
        self.assertAllEqual([np.inf, -np.inf, np.nan, np.inf], result.value)

    @parameterized.parameters(2, 3, 8)
    def test_reduces_one_value(self, count):
        own = [tu.numbers((4, 3), tf.float32, rank) for rank in range(count)]
        value = tu.per_replica(own)
        ops = self.make()
        (result,) = tu.call(EAGER, lambda: ops.reduce(SUM, value, value))
        self.assert_on(result, tu.device_names(count))
        self.assert_exact(result.value, tu.oracle(SUM, own), tf.float32)

    def test_one_replica_keeps_its_value(self):
        value = tu.per_replica([np.arange(3)], tu.ALL_DEVICES[2:])
        for reduce_op in SUM, MEAN:
            (result,) = tu.all_reduce(self.make(), reduce_op, [value])
            self.assertAllEqual([0, 1, 2], result.value)
            self.assert_on(result, [tu.device_name(2)])

    def test_reduces_a_tensor_as_one_replica(self):
        results = tu.call(
            EAGER, lambda: self.make().reduce(SUM, tf.constant([1.0, 2.0]), tu.per_replica([0] * 3))
        )
        self.assert_on(results[0], tu.device_names(3))
        for component in results[0].values:
            self.assertAllEqual([1.0, 2.0], component)

    @parameterized.parameters(tf.int32, tf.int64, tf.int16)
    def test_mean_of_one_integer_is_a_float_elsewhere(self, dtype):
        value = tu.per_replica([tf.constant(3, dtype)])
        for destinations in "/cpu:5", tu.per_replica([0, 0, 0]):
            result = tu.call(EAGER, lambda: self.make().reduce(MEAN, value, destinations))[0]  # noqa: B023
            self.assert_exact(result.value, np.array(3.0), tu.result_dtype(MEAN, dtype))

    def test_reads_variables(self):
        variables = []
        for rank in range(3):
            with tf.device(tu.device_name(rank)):
                variables.append(tf.Variable([1.0 + rank]))
        value = tf_internals.per_replica(variables)
        (result,) = tu.all_reduce(self.make(), SUM, [value])
        self.assert_on(result, tu.device_names(3))
        self.assertAllEqual([6.0], result.value)

    def test_reads_arrays_and_numbers(self):
        for own in ([1.5, 2.5, 3.0], [np.float32(1.5), np.float32(2.5), np.float32(3.0)]):
            (result,) = tu.all_reduce(self.make(), SUM, [tf_internals.per_replica(own)])
            self.assertLen(result.values, 3)
            self.assertAllEqual([7.0] * 3, result.values)

    def test_empty_batch(self):
        self.assertEqual([], self.make().batch_reduce(SUM, []))
        self.assertEqual([], self.make().batch_reduce(MEAN, iter(())))

    def test_takes_any_iterable_of_pairs(self):
        value = tu.per_replica([1.0, 2.0])
        results = self.make().batch_reduce(SUM, ((value, value) for _ in range(3)))
        self.assertLen(results, 3)

    # Shapes.

    @parameterized.product(
        reduce_op=(SUM, MEAN), shape=(None, [None], [None, 2], [3, None]), count=(2, 3, 8)
    )
    def test_shapes_unknown_while_traced(self, reduce_op, shape, count):
        ops = self.make()
        spec = [tf.TensorSpec(shape, dtype) for dtype in (tf.float32, tf.bfloat16, tf.int64)]

        @tf.function(input_signature=[[spec] * count], autograph=False)
        def reduce(rows):
            values = [tu.per_replica(own) for own in zip(*rows, strict=True)]
            # Values of known shape travel in the same batch.
            values.insert(1, tu.per_replica([tf.ones([2, 2])] * count))
            results = ops.batch_reduce(reduce_op, [(value, value) for value in values])
            return [result.values for result in results]

        full = {None: (4,), (None,): (5,), (None, 2): (0, 2), (3, None): (3, 4)}
        own_shape = full[None if shape is None else tuple(shape)]
        rows = [
            [tu.numbers(own_shape, own.dtype, 10 * rank + i) for i, own in enumerate(spec)]
            for rank in range(count)
        ]
        results = reduce([[tf.constant(one) for one in row] for row in rows])
        known = results.pop(1)
        self.assertAllEqual(np.full([2, 2], count if reduce_op == SUM else 1), known[-1])
        for result, own, one in zip(results, zip(*rows, strict=True), spec, strict=True):
            for component in result:
                self.assert_exact(
                    component, tu.oracle(reduce_op, own), tu.result_dtype(reduce_op, one.dtype)
                )

    @parameterized.parameters(((1,), (4,)), ((4,), (1,)), ((), (3,)), ((2, 2), (4,)), ((0,), (1,)))
    def test_shapes_that_differ_at_run_time_fail(self, first, second):
        ops = self.make()

        @tf.function(input_signature=[tf.TensorSpec(None)] * 3, autograph=False)
        def reduce(*own):
            value = tu.per_replica(own)
            return ops.reduce(SUM, value, value).values

        ok, bad = tf.ones(first), tf.ones(second)
        for own in [ok, ok, bad], [bad, ok, ok], [ok, bad, ok]:
            with self.assertRaises(tf.errors.InvalidArgumentError):
                reduce(*own)
        # The step after it works.
        self.assertAllEqual(np.full(first, 3.0), reduce(ok, ok, ok)[2])

    def test_the_number_of_rows_unknown_while_traced(self):
        ops = self.make()

        @tf.function(
            input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int64)] * 3,
            autograph=False,
        )
        def reduce(*parts):
            value = tu.per_replica(
                [tf.IndexedSlices(*parts[i : i + 2], tf.constant([6, 2])) for i in (0, 2, 4)]
            )
            (result,) = ops.batch_reduce(SUM, [(value, value)])
            return result.values

        own = slices(3, seed=5)
        result = reduce(*[part for one in own for part in (one.values, one.indices)])
        self.assertAllEqual(sum(tu.dense(one, 6) for one in own), tu.dense(result[1], 6))

    # Slices.

    def test_slices_without_a_dense_shape(self):
        own = [tf.IndexedSlices(tf.ones([2, 3]) * rank, tf.constant([0, 0])) for rank in range(3)]
        (result,) = tu.all_reduce(self.make(), SUM, [tu.per_replica(own)])
        for component in result.values:
            self.assertIsNone(component.dense_shape)
            self.assertAllEqual([0, 0, 1, 1, 2, 2], component.values[:, 0])
            self.assertAllEqual([0] * 6, component.indices)

    @parameterized.parameters("/cpu:5", None)
    def test_slices_to_another_place(self, device):
        own = slices(3, seed=2)
        destinations = device or tu.per_replica([0] * 2, tu.ALL_DEVICES[4:6])
        (result,) = tu.call(
            EAGER, lambda: self.make().reduce(MEAN, tu.per_replica(own), destinations)
        )
        self.assert_on(result, [tu.device_name(5)] if device else tu.ALL_DEVICES[4:6])
        self._check_slices(MEAN, result, own)

    def test_slices_of_16_bits_and_of_whole_rows(self):
        own = slices(3, seed=7, dtype=tf.bfloat16)
        (result,) = tu.all_reduce(self.make(), SUM, [tu.per_replica(own)])
        self._check_slices(SUM, result, own)
        own = [tf.IndexedSlices(tf.constant([1.0]), tf.constant([rank])) for rank in range(3)]
        (result,) = tu.all_reduce(self.make(), SUM, [tu.per_replica(own)])
        self.assertAllEqual([0, 1, 2], result.value.indices)

    @parameterized.parameters(tf.int8, tf.int32, tf.int64)
    def test_mean_of_slices_of_integers(self, dtype):
        own = slices(3, seed=7, dtype=dtype)
        expected = tu.oracle(MEAN, [tu.dense(one, 6) for one in own])
        for value, destinations in [(tu.per_replica(own), "/cpu:1"), (tu.per_replica(own),) * 2]:
            result = tu.call(EAGER, lambda: self.make().reduce(MEAN, value, destinations))[0]  # noqa: B023
            self.assertEqual(tu.result_dtype(MEAN, dtype), result.value.values.dtype)
            self.assertAllClose(expected, tu.dense(result.value, 6), rtol=1e-6)

    def test_slices_with_indices_of_two_dtypes(self):
        own = [
            tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank], dtype))
            for rank, dtype in enumerate([tf.int32, tf.int64, tf.int32])
        ]
        for value, destinations in [(tu.per_replica(own), "/cpu:1"), (tu.per_replica(own),) * 2]:
            result = tu.call(EAGER, lambda: self.make().reduce(SUM, value, destinations))[0]  # noqa: B023
            self.assertAllEqual([0, 1, 2], result.value.indices)
            self.assertEqual(tf.int64, result.value.indices.dtype)

    # Destinations.

    @parameterized.product(mode=tu.MODES, reduce_op=(SUM, MEAN))
    def test_destinations(self, mode, reduce_op):
        with tf.device("/cpu:6"):
            variable = tf.Variable([9.0, 9.0])
            tensor = tf.constant(0)
        with tf.device("/cpu:4"):
            tall = tf.Variable(1, dtype=tf.int64)
        cases = {
            "/cpu:3": [3],
            "cpu:3": [3],
            "CPU:0": [0],
            "/device:CPU:7": [7],
            tu.device_name(2): [2],
            variable.ref(): [6],
            tall.ref(): [4],
            tensor.ref(): [6],
            "others": [5, 4],
            "same": [0, 1, 2],
            "turned": [2, 0, 1],
            "more": [0, 1, 2, 3],
            "one of them": [1],
        }
        destinations = []
        for key, devices in cases.items():
            if isinstance(key, str) and key[-1].isdigit():
                destinations.append(key)
            elif isinstance(key, str):
                on = [tu.device_name(index) for index in devices]
                destinations.append(tu.per_replica([0] * len(devices), on))
            else:
                destinations.append(key.deref())
        arrays = [
            [tu.numbers((2,), tf.float32, 10 * i + rank) for rank in range(3)]
            for i in range(len(cases))
        ]
        ops = self.make()
        results = tu.call(
            mode,
            lambda *own: ops.batch_reduce(reduce_op, list(zip(own, destinations, strict=True))),
            *[tu.per_replica(own) for own in arrays],
        )
        for result, devices, own in zip(results, cases.values(), arrays, strict=True):
            self.assert_on(result, [tu.device_name(index) for index in devices])
            for component in result.values:
                self.assert_exact(component, tu.oracle(reduce_op, own), tf.float32)
        self.assertAllEqual([9.0, 9.0], variable)
        self.assertEqual(1, tall.numpy())

    def test_variables_are_not_changed(self):
        variables = []
        for rank in range(3):
            with tf.device(tu.device_name(rank)):
                variables.append(tf.Variable([5.0]))
        ops = self.make()
        value = tu.per_replica([[1.0], [2.0], [3.0]])
        mirrored = tf_internals.mirrored(variables)
        (result,) = tu.call(EAGER, lambda: ops.reduce(SUM, value, mirrored))
        self.assert_on(result, tu.device_names(3))
        self.assertAllEqual([[6.0]] * 3, result.values)
        (result,) = tu.call(EAGER, lambda: ops.broadcast(tf.constant([7.0]), mirrored))
        self.assert_on(result, tu.device_names(3))
        self.assertAllEqual([[5.0]] * 3, variables)

    # Broadcast and gather.

    @parameterized.product(mode=(EAGER, FUNCTION), count=(1, 3, 8))
    def test_broadcast(self, mode, count):
        ops = self.make()
        destinations = tu.per_replica([0] * count)
        for tensor in [
            tf.constant([[1.5, 2.0]]),
            tf.constant(["a", "b"]),
            tf.constant(True),
            2.5,
            np.arange(4),
            tf.Variable([1, 2]),
        ]:
            (result,) = tu.call(mode, lambda: ops.broadcast(tensor, destinations))  # noqa: B023
            self.assert_on(result, tu.device_names(count))
            for component in result.values:
                self.assertAllEqual(tensor, component)

    def test_broadcast_slices(self):
        own = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([3, 1]), tf.constant([6, 2]))
        ops = self.make()
        (result,) = tu.call(EAGER, lambda: ops.broadcast(own, tu.per_replica([0] * 3)))
        self.assert_on(result, tu.device_names(3))
        self.assert_bitwise_equal([own, *result.values])

    def test_broadcast_to_one_device(self):
        ops = self.make()
        for destination, device in [("/cpu:5", 5), (tu.place(0, "/cpu:2"), 2)]:
            (result,) = tu.call(EAGER, lambda: ops.broadcast(tf.constant(3), destination))  # noqa: B023
            self.assert_on(result, [tu.device_name(device)])
            self.assertEqual(3, result.value.numpy())

    @parameterized.product(
        mode=(EAGER, FUNCTION), count=(1, 5, 8), axis=(0, -1), place=("own", "one", "others")
    )
    def test_gather(self, mode, count, axis, place):
        generator = np.random.default_rng(count)
        shapes = [[2, 3, 4] for _ in range(count)]
        for shape in shapes:
            shape[axis] = int(generator.integers(0, 4))
        own = [tu.numbers(shape, tf.float32, rank) for rank, shape in enumerate(shapes)]
        value = tu.per_replica(own)
        devices = {
            "own": tu.device_names(count),
            "one": (tu.device_name(5),),
            "others": tu.ALL_DEVICES[6:],
        }[place]
        destinations = "/cpu:5" if place == "one" else tu.per_replica([0] * len(devices), devices)
        ops = self.make()
        (result,) = tu.call(
            mode, lambda: ops._gather(value, value if place == "own" else destinations, axis)
        )
        self.assert_on(result, devices)
        for component in result.values:
            self.assertAllEqual(np.concatenate(own, axis), component)
        self.assert_bitwise_equal(result.values)

    @parameterized.parameters(0, 1, -1)
    def test_gather_along_an_axis_that_is_known_later(self, axis):
        own = [tu.numbers((2, 2), tf.float32, rank) for rank in range(3)]
        value, ops = tu.per_replica(own), self.make()

        @tf.function(autograph=False)
        def gather(axis):
            return ops._gather(value, value, axis).values

        for component in gather(tf.constant(axis)):
            self.assertAllEqual(np.concatenate(own, axis), component)

    def test_gather_of_unknown_shapes(self):
        @tf.function(input_signature=[tf.TensorSpec(None)] * 2, autograph=False)
        def gather(*values):
            value = tf_internals.per_replica(values)
            return self.make()._gather(value, value, 0).values

        for component in gather(tf.ones([1, 2]), tf.ones([2, 2])):
            self.assertAllEqual(tf.ones([3, 2]), component)

    @parameterized.parameters(tf.string, tf.bool, tf.int32, tf.bfloat16)
    def test_gather_any_dtype(self, dtype):
        own = [tf.cast([rank % 2, rank], dtype) if dtype != tf.string else tf.constant([str(rank)])
               for rank in range(3)]  # fmt: skip
        value = tu.per_replica(own)
        (result,) = tu.call(EAGER, lambda: self.make()._gather(value, value, 0))
        self.assertAllEqual(np.concatenate([one.numpy() for one in own]), result.value)

    # Isolation and determinism.

    @parameterized.parameters(1, 3, 8)
    def test_users_data_is_never_changed(self, count):
        arrays = batch(count)
        values = [tu.per_replica(own) for own in arrays]
        slices_before = slices(count)
        values.append(tu.per_replica(slices_before))
        before = [[np.array(one) for one in own] for own in arrays]
        self_ops = self.make()
        results = self_ops.batch_reduce(MEAN, [(value, value) for value in values])
        for own, value, old in zip(arrays, values[:-1], before, strict=True):
            for one, held, unchanged in zip(own, value.values, old, strict=True):
                self.assertAllEqual(unchanged, one)
                self.assertAllEqual(unchanged, held)
        self.assert_bitwise_equal([slices(count), slices_before])
        self.assertLen(results, len(values))

    def test_results_do_not_follow_what_is_written_later(self):
        variables = []
        for rank in range(3):
            with tf.device(tu.device_name(rank)):
                variables.append(tf.Variable([1.0, 2.0]))
        value = tf_internals.per_replica(variables)
        single = tf_internals.per_replica(variables[:1])
        results = tu.all_reduce(self.make(), SUM, [value, value])
        results += tu.all_reduce(self.make(), SUM, [single])
        for variable in variables:
            variable.assign([8.0, 8.0])
        for result, expected in zip(results, ([3, 6], [3, 6], [1, 2]), strict=True):
            self.assertAllEqual(expected, result.value)

    @parameterized.parameters(EAGER, FUNCTION)
    def test_repeats_bit_for_bit(self, mode):
        generator = np.random.default_rng(0)
        values = [
            tu.per_replica([generator.normal(size=shape).astype(dtype) for _ in range(7)])
            for shape in ((), (9,), (64, 5))
            for dtype in (np.float32, np.float64, np.float16)
        ]
        runs = [tu.all_reduce(self.make(), MEAN, values, mode) for _ in range(3)]
        for own in zip(*runs, strict=True):
            self.assert_bitwise_equal([component for result in own for component in result.values])

    def test_one_instance_for_many_batches(self):
        ops = self.make()
        for seed, count in enumerate([3, 8, 3, 2, 8, 5]):
            arrays = batch(count, seed=1000 * seed, dtypes=(tf.float32, tf.int64))
            results = tu.all_reduce(ops, SUM, [tu.per_replica(own) for own in arrays])
            for result, own in zip(results, arrays, strict=True):
                self.assertAllEqual(tu.oracle(SUM, own), result.value)

    def test_copies_work_alike(self):
        ops = self.make()
        arrays = batch(3, dtypes=(tf.float32,))
        values = [tu.per_replica(own) for own in arrays]
        results = [tu.all_reduce(one, SUM, values) for one in (ops, copy.deepcopy(ops))]
        for own in zip(*results, strict=True):
            self.assert_bitwise_equal([result.value for result in own])

    def test_six_threads_at_once(self):
        ops = self.make()
        failures: list[str] = []

        def work(thread: int) -> None:
            try:
                for step in range(5):
                    arrays = batch(2 + thread, seed=1000 * thread + step, dtypes=(tf.float32,))
                    values = [tu.per_replica(own) for own in arrays]
                    mode = EAGER if step else FUNCTION
                    for result, own in zip(
                        tu.all_reduce(ops, SUM, values, mode), arrays, strict=True
                    ):
                        np.testing.assert_array_equal(tu.oracle(SUM, own), result.value)
            except BaseException:  # Whatever it is, it must not be lost in the thread.
                failures.append(traceback.format_exc())

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(6)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(timeout=120)
        self.assertFalse(any(one.is_alive() for one in threads))
        self.assertEmpty(failures, "\n".join(failures))

    def test_plans_are_computed_once(self):
        ops = self.make()

        def reduce(seed: int) -> None:
            arrays = batch(7, seed=seed, dtypes=(tf.float32,))
            tu.all_reduce(ops, SUM, [tu.per_replica(own) for own in arrays])

        reduce(0)
        computed = packing.plan_batch.cache_info().misses
        for seed in range(1, 4):
            reduce(seed)
        self.assertEqual(computed, packing.plan_batch.cache_info().misses)

    # Gradients.

    @parameterized.parameters(2, 3, 8)
    def test_gradient(self, count):
        own = [tf.constant(tu.numbers((5,), tf.float32, rank)) for rank in range(count)]
        weights = [tu.numbers((5,), tf.float32, 50 + rank) for rank in range(count)]
        ops = self.make()

        def loss() -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                tape.watch(own)
                value = tu.per_replica(own)
                results = ops.reduce(MEAN, value, value).values
                total = tf.add_n(
                    [tf.reduce_sum(w * one) for w, one in zip(weights, results, strict=True)]
                )
            return tape.gradient(total, own)

        for gradients in loss(), tf.function(loss, autograph=False)():
            for gradient in gradients:
                self.assertAllClose(np.sum(weights, axis=0) / count, gradient, rtol=1e-6)

    # Bad input.

    @parameterized.parameters("SUM", "sum", None, 0, "MAX", tf.VariableAggregation.SUM)
    def test_unknown_reduce_op(self, reduce_op):
        value = tu.per_replica([1.0, 2.0])
        ops = self.make()
        for call in [
            lambda: ops.reduce(reduce_op, value, value),
            lambda: ops.batch_reduce(reduce_op, [(value, value)]),
            lambda: ops.batch_reduce(reduce_op, []),
        ]:
            with self.assertRaisesRegex(ValueError, r"reduce_op.*SUM.*MEAN"):
                call()

    def test_shapes_that_differ(self):
        good = tu.per_replica([tf.ones([2, 2])] * 3)
        bad = tu.per_replica([tf.ones([2, 3]), tf.ones([2, 3]), tf.ones([3, 2])])
        for mode in EAGER, FUNCTION:
            with self.assertRaisesRegex(
                ValueError, r"(?s)pair 1: .*shape.*\(2, 3\).*CPU:0.*\(3, 2\).*CPU:2"
            ):
                tu.all_reduce(self.make(), SUM, [good, bad], mode)
        with self.assertRaisesRegex(ValueError, r"(?s)shape.*\(2, 3\).*CPU:0.*\(3, 2\).*CPU:2"):
            self.make().reduce(SUM, bad, bad)
        with self.assertRaisesRegex(ValueError, "shape"):
            rank = tu.per_replica([tf.ones([4]), tf.ones([2, 2])])
            self.make().reduce(SUM, rank, "/cpu:1")

    def test_dtypes_that_differ(self):
        bad = tu.per_replica([tf.constant(1.0), tf.constant(1)])
        with self.assertRaisesRegex(
            ValueError, r"(?s)pair 0: .*dtype.*float32.*CPU:0.*int32.*CPU:1"
        ):
            tu.all_reduce(self.make(), SUM, [bad])

    def test_kinds_that_differ(self):
        row = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
        for own in [tf.ones([1, 2]), row], [row, tf.ones([1, 2])]:
            bad = tu.per_replica(own)
            with self.assertRaisesRegex(ValueError, r"pair 0: .*IndexedSlices"):
                tu.all_reduce(self.make(), SUM, [bad])

    def test_slices_whose_rows_differ(self):
        own = [tf.IndexedSlices(tf.ones([1, width]), tf.constant([0])) for width in (2, 3)]
        with self.assertRaisesRegex(ValueError, r"pair 0: .*shape.*\(2,\).*\(3,\)"):
            tu.all_reduce(self.make(), SUM, [tu.per_replica(own)])

    @parameterized.parameters(
        (lambda v: [v],),
        (lambda v: [[v, v]],),
        (lambda v: [(v,)],),
        (lambda v: [(v, v, v)],),
        (lambda v: [(v, v), v],),
        (lambda v: [(v, v), None],),
        (lambda v: v,),
        (lambda v: None,),
        (lambda v: 3,),
        (lambda v: tf.ones([2, 2]),),
        (lambda v: "ab",),
    )
    def test_pairs_that_are_none(self, pairs):
        value = tu.per_replica([1.0, 2.0])
        with self.assertRaisesRegex(ValueError, "value_destination_pairs"):
            self.make().batch_reduce(SUM, pairs(value))

    @parameterized.parameters(
        (None,),
        ("",),
        (3,),
        (["/cpu:0"],),
        (("/cpu:0", "/cpu:1"),),
        ("nonsense",),
        ("/cpu:99",),
        ("/gpu:0",),
        ("/tpu:1",),
    )
    def test_destinations_that_are_none(self, destinations):
        value = tu.per_replica([1.0, 2.0])
        ops = self.make()
        for call in [
            lambda: ops.reduce(SUM, value, destinations),
            lambda: ops.batch_reduce(SUM, [(value, value), (value, destinations)]),
            lambda: ops.broadcast(tf.constant(1), destinations),
            lambda: ops._gather(value, destinations, 0),
        ]:
            with self.assertRaisesRegex(ValueError, "destinations"):
                call()
        with self.assertRaisesRegex(ValueError, "pair 1: "):
            ops.batch_reduce(SUM, [(value, value), (value, destinations)])

    @parameterized.parameters(
        (lambda: tf.ragged.constant([[1], [2, 3]]),),
        (lambda: tf.sparse.from_dense([[1]]),),
        (lambda: tf.constant("text"),),
        (lambda: tf.constant(True),),
        (lambda: None,),
    )
    def test_values_that_cannot_be_added(self, make_value):
        own = [make_value() for _ in range(2)]
        ops = self.make()
        for value in tf_internals.per_replica(own), own[0]:
            for destinations in "/cpu:0", tu.per_replica([0, 0]):
                with self.assertRaises(ValueError):
                    ops.reduce(SUM, value, destinations)
                with self.assertRaises(ValueError):
                    ops.batch_reduce(SUM, [(value, destinations)])

    def test_gather_of_slices(self):
        value = tu.per_replica(slices(2))
        with self.assertRaisesRegex(ValueError, "IndexedSlices"):
            self.make()._gather(value, value, 0)

    def test_bad_input_makes_no_op(self):
        good = tu.per_replica([tf.ones([2])] * 3)
        bad = tu.per_replica([tf.ones([2]), tf.ones([3]), tf.ones([2])])
        text = tu.per_replica([tf.constant("a")] * 3)
        ops = self.make()
        with tf.Graph().as_default() as graph:
            for pairs in [
                [(good, good), (bad, bad)],
                [(good, good), (good, "nonsense")],
                [(good, good), (text, text)],
            ]:
                with self.assertRaises(ValueError):
                    ops.batch_reduce(SUM, pairs)
            with self.assertRaises(ValueError):
                ops.batch_reduce("SUM", [(good, good)])
            with self.assertRaises(ValueError):
                ops.broadcast(1.0, "nonsense")
            for options in "nonsense", tf.distribute.experimental.CommunicationOptions:
                with self.assertRaises(TypeError):
                    ops.batch_reduce(SUM, [(1.0, good)], options)
                with self.assertRaises(TypeError):
                    ops._gather(good, good, 0, options)
            self.assertEmpty(graph.get_operations())
