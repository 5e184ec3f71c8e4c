"""The contract of `tf.distribute.CrossDeviceOps`, as tests that any list of settings can run.

Its parts say which values are reduced to what and where, and what is refused. `settings_tests`
makes one test class per setting and part, so that another file can run the same suite over other
classes, or in another environment.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from testing_utils import ARGUMENTS, EAGER, FUNCTION, MEAN, SUM

from tfcdo import tf_internals
from tfcdo.plan import decide

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


def batch(count: int, seed: int = 0, dtypes: Any = tu.DTYPES[:7]) -> list[list[np.ndarray]]:
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


def check_slices(case, reduce_op, result, own):
    """Asserts the rows of all replicas, one after the other, divided for a mean."""
    divisor = len(own) if reduce_op == MEAN else 1
    expected = np.concatenate([tu.exact(one.values) for one in own]) / divisor
    first = result.value
    case.assertIsInstance(first, tf.IndexedSlices)
    case.assertEqual(own[0].values.dtype, first.values.dtype)
    case.assertEqual(own[0].indices.dtype, first.indices.dtype)
    case.assertAllEqual([6, 2], first.dense_shape)
    slack = 4 * tu.unit_roundoff(first.values.dtype)
    case.assertAllClose(expected, tu.exact(first.values), rtol=slack, atol=0)
    case.assertAllEqual(np.concatenate([one.indices for one in own]), first.indices)
    case.assert_bitwise_equal([(one.values, one.indices) for one in result.values])


class BatchesContract(Contract):
    """Tests of values that settings pack in different ways."""

    @parameterized.parameters(
        # property_test draws the other combinations.
        (EAGER, SUM, 1),
        (FUNCTION, MEAN, 5),
        (EAGER, SUM, 3),
        (ARGUMENTS, MEAN, 3),
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
            check_slices(self, reduce_op, results.pop(2 * position), own)
        for result, own in zip(results, arrays, strict=True):
            dtype = tf.as_dtype(own[0].dtype)
            # TensorFlow gives the value itself back if there is one replica and nowhere to go.
            expected_dtype = tu.result_dtype(reduce_op, dtype) if count > 1 else dtype
            self.assert_exact(result.value, tu.oracle(reduce_op, own), expected_dtype)
            self.assert_bitwise_equal(result.values)
            if mode != ARGUMENTS:
                self.assert_on(result, tu.device_names(count))

    @parameterized.parameters(
        (tf.float16, SUM, EAGER), (tf.bfloat16, MEAN, EAGER), (tf.bfloat16, SUM, FUNCTION)
    )
    def test_rounds_16_bit_floats_once(self, dtype, reduce_op, mode):
        # Adding 1 to the large value is lost in 16 bits, but seven of them are not.
        large = 2048 if dtype == tf.float16 else 256
        own = [np.full([9], value, dtype.as_numpy_dtype) for value in [large] + [1] * 7]
        for result in tu.all_reduce(self.make(), reduce_op, [tu.per_replica(own)] * 2, mode):
            self.assert_exact(result.value, tu.oracle(reduce_op, own), dtype)

    @parameterized.parameters((SUM, None, 3), (MEAN, [None, 2], 2), (MEAN, [3, None], 5))
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

        full = {None: (4,), (None, 2): (0, 2), (3, None): (3, 4)}
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

    def test_shapes_that_differ_at_run_time_raise(self):
        ops = self.make()

        @tf.function(input_signature=[tf.TensorSpec(None)] * 3, autograph=False)
        def reduce(*own):
            value = tu.per_replica(own)
            return ops.reduce(SUM, value, value).values

        for first, second in ((1,), (4,)), ((), (3,)), ((2, 2), (4,)), ((0,), (1,)):
            ok, bad = tf.ones(first), tf.ones(second)
            for own in [ok, ok, bad], [bad, ok, ok], [ok, bad, ok]:
                with self.assertRaises(tf.errors.InvalidArgumentError):
                    reduce(*own)
            # The step after it works.
            self.assertAllEqual(np.full(first, 3.0), reduce(ok, ok, ok)[2])

    @parameterized.parameters((EAGER, SUM), (ARGUMENTS, MEAN))
    def test_results_are_on_the_destinations(self, mode, reduce_op):
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


class ValuesContract(Contract):
    """Tests of single values: packs make no difference."""

    @parameterized.parameters(SUM, MEAN)
    def test_keeps_the_dtype(self, reduce_op):
        dtypes = 2 * tu.DTYPES
        # The sum of three fits in 8 bits.
        arrays = [
            [tu.numbers((5,), dtype, rank, limit=40) for rank in range(3)] for dtype in dtypes
        ]
        results = tu.all_reduce(self.make(), reduce_op, [tu.per_replica(own) for own in arrays])
        for result, own, dtype in zip(results, arrays, dtypes, strict=True):
            expected_dtype = tu.result_dtype(reduce_op, dtype)
            self.assert_exact(result.value, tu.oracle(reduce_op, own), expected_dtype)

    def test_mean_of_integers_whose_sum_overflows(self):
        dtypes = 2 * (tf.uint8, tf.int8, tf.int16, tf.int32)
        # Every float has this power of two, and no integer of this dtype has three times as much.
        arrays = [
            np.full([9], 2 ** (8 * dtype.size - (1 if dtype == tf.uint8 else 2)), dtype.name)
            for dtype in dtypes
        ]
        values = [tu.per_replica([array] * 3) for array in arrays]
        results = tu.all_reduce(self.make(), MEAN, values, FUNCTION)
        for result, array, dtype in zip(results, arrays, dtypes, strict=True):
            self.assert_exact(result.value, tu.exact(array), tu.result_dtype(MEAN, dtype))
        # No float64 holds the first, so a sum of floats is 0.
        own = [np.array([2**60 + 3]), np.array([-(2**60)])]
        (result,) = tu.all_reduce(self.make(), MEAN, [tu.per_replica(own)])
        self.assertAllEqual([1.5], result.value)

    def test_sums_special_values(self):
        own = [np.array([np.inf, -np.inf, np.nan, 1], np.float32), np.ones([4], np.float32)]
        own.append(np.array([1, 1, 1, np.inf], np.float32))
        (result,) = tu.all_reduce(self.make(), SUM, [tu.per_replica(own)])
        self.assertAllEqual([np.inf, -np.inf, np.nan, np.inf], result.value)

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

    def test_mean_of_one_integer_is_a_float_elsewhere(self):
        dtypes = (tf.int64, tf.int16)
        values = [tu.per_replica([tf.constant(3, dtype)]) for dtype in dtypes]
        for to in ("/cpu:5", tu.per_replica([0, 0, 0])):
            pairs = [(value, to) for value in values]
            results = tu.call(EAGER, lambda: self.make().batch_reduce(MEAN, pairs))  # noqa: B023
            for result, dtype in zip(results, dtypes, strict=True):
                self.assert_exact(result.value, np.array(3.0), tu.result_dtype(MEAN, dtype))

    def test_empty_batch(self):
        self.assertEqual([], self.make().batch_reduce(SUM, []))
        self.assertEqual([], self.make().batch_reduce(MEAN, iter(())))

    def test_slices_without_a_dense_shape(self):
        own = [tf.IndexedSlices(tf.ones([2, 3]) * rank, tf.constant([0, 0])) for rank in range(3)]
        (result,) = tu.all_reduce(self.make(), SUM, [tu.per_replica(own)])
        for component in result.values:
            self.assertIsNone(component.dense_shape)
            expected = np.repeat([0.0, 1.0, 2.0], 2)[:, np.newaxis] * np.ones(3)
            self.assertAllEqual(expected, component.values)
            self.assertAllEqual([0] * 6, component.indices)

    @parameterized.parameters("/cpu:5", None)
    def test_slices_to_another_place(self, device):
        own = slices(3, seed=2)
        destinations = device or tu.per_replica([0] * 2, tu.ALL_DEVICES[4:6])
        (result,) = tu.call(
            EAGER, lambda: self.make().reduce(MEAN, tu.per_replica(own), destinations)
        )
        self.assert_on(result, [tu.device_name(5)] if device else tu.ALL_DEVICES[4:6])
        check_slices(self, MEAN, result, own)

    def test_slices_of_16_bits_and_of_whole_rows(self):
        own = slices(3, seed=7, dtype=tf.bfloat16)
        (result,) = tu.all_reduce(self.make(), SUM, [tu.per_replica(own)])
        check_slices(self, SUM, result, own)
        own = [tf.IndexedSlices(tf.constant([1.0]), tf.constant([rank])) for rank in range(3)]
        (result,) = tu.all_reduce(self.make(), SUM, [tu.per_replica(own)])
        self.assertAllEqual([0, 1, 2], result.value.indices)

    @parameterized.parameters(tf.int8, tf.int64)
    def test_mean_of_slices_of_integers(self, dtype):
        own = slices(3, seed=7, dtype=dtype)
        expected = tu.oracle(MEAN, [tu.dense(one, 6) for one in own])
        value = tu.per_replica(own)
        pairs = [(value, "/cpu:1"), (value, value)]
        for result in tu.call(EAGER, lambda: self.make().batch_reduce(MEAN, pairs)):
            self.assertEqual(tu.result_dtype(MEAN, dtype), result.value.values.dtype)
            self.assertAllClose(expected, tu.dense(result.value, 6), rtol=1e-6)


class InstancesContract(Contract):
    """Tests of what is promised of each class, in every setting, whatever the values are."""

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

    # Isolation and determinism.

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
        runs = [tu.all_reduce(self.make(), MEAN, values, mode) for _ in range(2)]
        for own in zip(*runs, strict=True):
            self.assert_bitwise_equal([component for result in own for component in result.values])

    def test_deep_copies_give_the_same_bits(self):
        ops = self.make()
        arrays = batch(3, dtypes=(tf.float32,))
        values = [tu.per_replica(own) for own in arrays]
        results = [tu.all_reduce(one, SUM, values) for one in (ops, copy.deepcopy(ops))]
        for own in zip(*results, strict=True):
            self.assert_bitwise_equal([result.value for result in own])

    def test_six_threads_share_one_instance(self):
        ops = self.make()

        def work(thread: int) -> None:
            for step in range(3):
                arrays = batch(2 + thread, seed=1000 * thread + step, dtypes=(tf.float32,))
                values = [tu.per_replica(own) for own in arrays]
                results = tu.all_reduce(ops, SUM, values, EAGER if step else FUNCTION)
                for result, own in zip(results, arrays, strict=True):
                    np.testing.assert_array_equal(tu.oracle(SUM, own), result.value)

        tu.call_in_six_threads(work)

    def test_plans_are_computed_once(self):
        ops = self.make()

        def reduce(seed: int) -> None:
            arrays = batch(7, seed=seed, dtypes=(tf.float32,))
            tu.all_reduce(ops, SUM, [tu.per_replica(own) for own in arrays])

        reduce(0)
        computed = decide.decide.cache_info().misses
        for seed in range(1, 4):
            reduce(seed)
        self.assertEqual(computed, decide.decide.cache_info().misses)

    # Gradients.

    def test_gradient(self):
        count = 3
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


class CallsContract(Contract):
    """Tests of broadcast, gather, and the refusal of bad input."""

    @parameterized.parameters((EAGER, 1), (FUNCTION, 3))
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

    @parameterized.parameters(
        (EAGER, 1, 0, "own"), (FUNCTION, 5, -1, "own"), (EAGER, 5, 0, "one"),
        (EAGER, 3, -1, "others"),
    )  # fmt: skip
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

    def test_gather_along_an_axis_that_is_known_later(self):
        own = [tu.numbers((2, 2), tf.float32, rank) for rank in range(3)]
        value, ops = tu.per_replica(own), self.make()

        @tf.function(autograph=False)
        def gather(axis):
            return ops._gather(value, value, axis).values

        for axis in 0, 1, -1:
            for component in gather(tf.constant(axis)):
                self.assertAllEqual(np.concatenate(own, axis), component)

    def test_gathers_any_dtype(self):
        kinds = [[str(rank)] for rank in range(3)], [[rank > 1, True] for rank in range(3)]
        for arrays in (*kinds, [tf.constant([rank, 2], tf.bfloat16) for rank in range(3)]):
            value = tu.per_replica(arrays)
            result = self.make()._gather(value, value, 0)
            self.assertAllEqual(
                np.concatenate([one.numpy() for one in value.values]), result.values[2]
            )

    def test_bad_input_is_refused_before_any_op(self):
        """What each entry point is given; request_test has more of what is refused, and why."""
        good = tu.per_replica([tf.ones([2])] * 3)
        row = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
        wide = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0]))
        refused = {
            r"shape.*\(2,\).*CPU:0.*\(3,\).*CPU:1": [tf.ones([2]), tf.ones([3])],
            "dtype.*float32.*CPU:0.*int32.*CPU:1": [tf.constant(1.0), tf.constant(1)],
            "IndexedSlices": [tf.ones([1, 2]), row],
            r"shape.*\(2,\).*\(3,\)": [row, wide],
            "adds; got string": [tf.constant("a"), tf.constant("b")],
            "tensor": [tf.ragged.constant([[1], [2, 3]])] * 2,
        }
        ops, rows = self.make(), tu.per_replica([row] * 2)
        calls: list[tuple[str, Any]] = []
        for message, own in refused.items():
            bad = tu.per_replica(own) if message != "tensor" else tf_internals.per_replica(own)
            calls += [
                (message, lambda bad=bad: ops.reduce(SUM, bad, "/cpu:1")),
                (f"pair 1: .*{message}", lambda bad=bad: self.both(ops, (good, good), (bad, bad))),
            ]
        for reduce_op in ("SUM", None, tf.VariableAggregation.SUM):
            calls += [
                ("reduce_op.*SUM.*MEAN", lambda op=reduce_op: ops.reduce(op, good, good)),
                ("reduce_op.*SUM.*MEAN", lambda op=reduce_op: ops.batch_reduce(op, [])),
            ]
        for pairs in ([good], [(good,)], [(good, good, good)], [(good, good), None], None, "ab"):
            calls.append(("value_destination_pairs", lambda p=pairs: ops.batch_reduce(SUM, p)))
        for to in (None, "", ["/cpu:0"], "nonsense", "/cpu:99", "/gpu:0"):
            calls += [
                ("destinations", lambda to=to: ops.reduce(SUM, good, to)),
                ("pair 1: .*destinations", lambda to=to: self.both(ops, (good, good), (good, to))),
                ("destinations", lambda to=to: ops.broadcast(1.0, to)),
                ("destinations", lambda to=to: ops._gather(good, to, 0)),
            ]
        calls.append(("IndexedSlices", lambda: ops._gather(rows, "/cpu:1", 0)))
        calls.append(("options", lambda: ops.batch_reduce(SUM, [(good, good)], "nonsense")))
        calls.append(("options", lambda: ops._gather(good, good, 0, "nonsense")))

        @tf.function(autograph=False)
        def trace() -> None:
            for message, refused_call in calls:
                with self.assertRaisesRegex((ValueError, TypeError), f"(?s){message}"):
                    refused_call()

        self.assertEmpty(trace.get_concrete_function().graph.get_operations())

    @staticmethod
    def both(ops: Any, *pairs: Any) -> Any:
        return ops.batch_reduce(SUM, pairs)
