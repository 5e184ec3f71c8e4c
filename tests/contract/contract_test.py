"""The contract of `tf.distribute.CrossDeviceOps`: any batch is reduced as numpy does it."""

import copy
import dataclasses
import gc
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import hypothesis
import nccl_on_cpu
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from hypothesis import strategies as st
from testing_utils import EAGER, FUNCTION, MEAN, SUM

import tfcdo
from tfcdo import tf_internals, topology
from tfcdo.plan import algorithms, decide

# More than every run does: TFCDO_EXAMPLES=5000 python tests/contract/contract_test.py
EXAMPLES = int(os.environ.get("TFCDO_EXAMPLES", "0"))
ROWS = 5  # Slices are of tables with this many rows.
# One for each way of a value: onto one device; in packs; alone, unless it is small.
SETTINGS: dict[str, Callable[[], tf.distribute.CrossDeviceOps]] = {
    "ReductionToOneDevice": tfcdo.ReductionToOneDevice,
    "HierarchicalManyPacks": lambda: tfcdo.HierarchicalCopyAllReduce(num_packs=5),
    "AllReduceSmallGroups": lambda: tfcdo.AllReduceCrossDeviceOps(
        "ring", num_packs=0, agg_small_grads_max_bytes=40, agg_small_grads_max_group=2
    ),
}
make_ops = SETTINGS["HierarchicalManyPacks"]


def at(devices: Sequence[str]) -> Any:
    return tu.per_replica([0] * len(devices), devices)


@dataclasses.dataclass(frozen=True)
class Value:
    dtype: tf.DType
    shape: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...] | None
    has_dense_shape: bool
    destinations: tuple[int, ...] | Literal["reversed"] | None  # None for the value itself.
    seed: int

    def arrays(self, count: int) -> list[Any]:
        # Sums of eight fit into 8 bits. Sums of 16-bit floats have more digits, and are rounded.
        limit = 15 if self.dtype.is_integer and self.dtype.size == 1 else 100
        if self.dtype in tu.FLOATS_16 and self.rows is None:
            limit = 2000

        def numbers(shape: tuple[int, ...], rank: int) -> np.ndarray:
            return tu.numbers(shape, self.dtype, self.seed + rank, limit)

        if self.rows is None:
            return [numbers(self.shape, rank) for rank in range(count)]
        return [
            tf.IndexedSlices(
                tf.constant(numbers((len(own), *self.shape), rank), self.dtype),
                tf.constant(own, tf.int64),
                tf.constant((ROWS, *self.shape), tf.int64) if self.has_dense_shape else None,
            )
            for rank, own in enumerate(self.rows[:count])
        ]

    def destinations_for(self, value: Any, count: int) -> Any:
        """The argument `destinations`, given the `PerReplica` that was made of the value."""
        devices = self.devices(count)
        if self.destinations is None:
            return value
        return at(devices) if len(devices) > 1 else devices[0]

    def devices(self, count: int) -> tuple[str, ...]:
        if isinstance(self.destinations, tuple):
            return tuple(map(tu.device_name, self.destinations))
        return tu.device_names(count)[:: -1 if self.destinations else 1]


def values() -> Any:
    device = st.integers(0, tu.NUM_DEVICES - 1)
    some = st.sampled_from([1, 4]).flatmap(
        lambda most: st.lists(device, min_size=1, max_size=most, unique=True).map(tuple)
    )
    rows = st.lists(st.integers(0, ROWS - 1), max_size=8).map(tuple)
    return st.builds(
        Value,
        dtype=st.sampled_from((*tu.DTYPES, *tu.FLOATS_16)),
        shape=st.lists(st.sampled_from([0, 1, 2, 3, 7]), max_size=3).map(tuple),
        rows=st.none() | st.none() | st.tuples(*[rows] * tu.NUM_DEVICES),
        has_dense_shape=st.sampled_from([True, True, False]),
        destinations=st.none() | some | some | st.just("reversed"),
        seed=st.integers(0, 10**6),
    )


SPARSE: dict[str, Any] = {
    "sparse_as_dense": st.sampled_from([False, False, False, True]),
    "sum_equal_rows": st.booleans(),
}


def by_copies(count: int) -> Any:
    topologies = st.none() | st.just(topology.preset("nvswitch", count))
    # For more devices, planning these takes seconds.
    packed = ("packed_trees",) if count <= 3 or EXAMPLES else ()
    return st.one_of(
        st.builds(
            tfcdo.ReductionToOneDevice,
            st.sampled_from([None, "/cpu:0", "/cpu:2", "/cpu:7"]),
            **SPARSE,
        ),
        st.builds(
            tfcdo.HierarchicalCopyAllReduce, st.integers(0, 6), topology=topologies, **SPARSE
        ),
        st.builds(tfcdo.NcclAllReduce, st.integers(0, 3), **SPARSE),
        st.builds(tfcdo.AutoAllReduce, topology=topologies, **SPARSE),
        st.builds(
            tfcdo.AllReduceCrossDeviceOps,
            st.sampled_from(("nccl", *packed, *algorithms.CLASSICS)),
            st.sampled_from([0, 0, 1, 2, 20]),
            st.sampled_from([0, 10, 50, 10**6]),
            st.sampled_from([0, 1, 2, 10]),
            topology=topologies,
            **SPARSE,
        ),
    )


def by_nccl(_: int) -> Any:
    """Draws ops that take NCCL for what it adds, and copy trees for the rest."""
    numbers = map(st.sampled_from, ([0, 0, 1, 3], [0, 50], [2, 10]))
    return st.builds(tfcdo.AllReduceCrossDeviceOps, st.just("nccl"), *numbers, **SPARSE)


OPTIONS = st.sampled_from([0, 0, 0, 8, 50]).map(
    lambda cap: tf.distribute.experimental.CommunicationOptions(bytes_per_pack=cap) if cap else None
)


def batches(ops: Callable[[int], Any], examples: int) -> Callable[[Any], Any]:
    settings = hypothesis.settings(
        max_examples=EXAMPLES or examples,
        deadline=None,
        derandomize=not EXAMPLES,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    given = hypothesis.given(
        counted_ops=st.integers(1, tu.NUM_DEVICES).flatmap(lambda n: st.tuples(st.just(n), ops(n))),
        reduce_op=st.sampled_from([SUM, MEAN]),
        batch=st.lists(values(), min_size=1, max_size=5),
        options=OPTIONS,
        mode=st.sampled_from([EAGER, EAGER, FUNCTION, tu.ARGUMENTS]),
    )
    return lambda test: settings(given(test))


class BatchReduceTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @batches(by_copies, 30)
    def test_any_batch(self, **drawn):
        self.check(**drawn)

    @batches(by_nccl, 12)
    def test_any_batch_by_nccl(self, **drawn):
        with nccl_on_cpu.running():
            self.check(**drawn)

    def check(self, counted_ops, reduce_op, batch, options, mode):
        count, ops = counted_ops
        arrays = [value.arrays(count) for value in batch]
        given = [tu.per_replica(own) for own in arrays]

        def reduce(*own):
            pairs = [
                (one, value.destinations_for(one, count))
                for one, value in zip(own, batch, strict=True)
            ]
            return ops.batch_reduce(reduce_op, pairs, options)

        results = tu.call(mode, reduce, *given)

        self.assertLen(results, len(batch))
        for value, own, one, result in zip(batch, arrays, given, results, strict=True):
            self.assert_bitwise_equal([one.values, tu.per_replica(value.arrays(count)).values])
            devices = value.devices(count)
            if mode != tu.ARGUMENTS or value.destinations is not None:
                self.assert_on(result, devices)
            self.assertLen(result.values, len(devices))
            self.assert_bitwise_equal(result.values)
            tables = own if value.rows is None else [tu.dense(one, ROWS) for one in own]
            expected = tu.oracle(reduce_op, tables)
            # One replica's value that is known to stay where it is keeps its dtype.
            seen = mode != tu.ARGUMENTS or value.destinations is None
            stays = count == 1 and devices == tu.device_names(1) and seen
            dtype = value.dtype if stays else tu.result_dtype(reduce_op, value.dtype)
            if value.rows is None:
                self.assert_exact(result.value, expected, dtype)
                continue
            # Replicas add up to 8 rows of an index before they round, as a table of their own.
            table = result.value
            if isinstance(table, tf.IndexedSlices):
                self.assertEqual(own[0].indices.dtype, table.indices.dtype)
                if value.has_dense_shape:
                    self.assertAllEqual(own[0].dense_shape, table.dense_shape)
                else:
                    self.assertIsNone(table.dense_shape)
                indices = [row for rows in value.rows[:count] for row in rows]
                if ops._options.sum_equal_rows:
                    indices = np.unique(indices).tolist()
                self.assertAllEqual(indices, table.indices)
                dtype_found, table = table.values.dtype, tu.dense(table, ROWS)
            else:
                self.assertTrue(ops._options.sparse_as_dense and value.has_dense_shape)
                dtype_found = table.dtype
            self.assertEqual(dtype, dtype_found)
            slack = 9 * 8 * 8 * 4 * tu.unit_roundoff(dtype)
            self.assertAllClose(expected, tu.exact(table), rtol=0, atol=slack)


class ValuesTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *zip(SETTINGS.values(), (SUM, MEAN, MEAN), (None, [None, 2], [3, None]), (3, 2, 5))
    )
    def test_shapes_unknown_while_traced(self, make, reduce_op, shape, count):
        ops = make()
        spec = [tf.TensorSpec(shape, dtype) for dtype in (tf.float32, tf.bfloat16, tf.int64)]

        @tf.function(input_signature=[[spec] * count], autograph=False)
        def reduce(rows):
            values = [tu.per_replica(own) for own in zip(*rows, strict=True)]
            values.insert(1, tu.per_replica([tf.ones([2, 2])] * count))
            results = ops.batch_reduce(reduce_op, [(value, value) for value in values])
            return [result.values for result in results]

        full = (4,) if shape is None else tuple(size or 4 for size in shape)
        rows = [
            [tu.numbers(full, own.dtype, 10 * rank + i) for i, own in enumerate(spec)]
            for rank in range(count)
        ]
        results = reduce([[tf.constant(one) for one in row] for row in rows])
        self.assertAllEqual(np.full([2, 2], count if reduce_op == SUM else 1), results.pop(1)[-1])
        for result, own, one in zip(results, zip(*rows), spec, strict=True):
            for component in result:
                dtype = tu.result_dtype(reduce_op, one.dtype)
                self.assert_exact(component, tu.oracle(reduce_op, own), dtype)

    @parameterized.named_parameters(*SETTINGS.items())
    def test_shapes_that_differ_at_run_time_raise(self, make):
        ops = make()

        @tf.function(input_signature=[tf.TensorSpec(None)] * 3, autograph=False)
        def reduce(*own):
            value = tu.per_replica(own)
            return ops.reduce(SUM, value, value).values

        for first, second in ((1,), (4,)), ((), (3,)), ((2, 2), (4,)), ((0,), (1,)):
            ok, bad = tf.ones(first), tf.ones(second)
            for own in [ok, ok, bad], [bad, ok, ok], [ok, bad, ok]:
                self.assertRaises(tf.errors.InvalidArgumentError, reduce, *own)
            self.assertAllEqual(np.full(first, 3.0), reduce(ok, ok, ok)[2])

    def test_mean_of_integers_whose_sum_overflows(self):
        dtypes = (tf.uint8, tf.int8, tf.int16, tf.int32)
        # Every float has this power of two, and no integer of this dtype has three times as much.
        arrays = [
            np.full([9], 2 ** (8 * dtype.size - (1 if dtype == tf.uint8 else 2)), dtype.name)
            for dtype in dtypes
        ]
        values = [tu.per_replica([array] * 3) for array in 2 * arrays]
        results = tu.all_reduce(make_ops(), MEAN, values, FUNCTION)
        for result, array, dtype in zip(results, 2 * arrays, 2 * dtypes, strict=True):
            self.assert_exact(result.value, tu.exact(array), tu.result_dtype(MEAN, dtype))
        # No float64 holds the first, so a sum of floats is 0.
        own = [np.array([2**60 + 3]), np.array([-(2**60)])]
        (result,) = tu.all_reduce(make_ops(), MEAN, [tu.per_replica(own)])
        self.assertAllEqual([1.5], result.value)

    @parameterized.parameters(*tu.FLOATS_16)
    def test_means_of_16_bits_are_rounded_once(self, dtype):
        arrays = [tu.numbers((100, 1), tf.float32, rank, limit=20_000) for rank in range(3)]
        arrays = [tf.cast(own, dtype).numpy() for own in arrays]
        expected = tf.cast(tu.oracle(MEAN, arrays), dtype)
        rows = [tf.IndexedSlices(tf.constant(own), tf.range(100)) for own in arrays]
        ops = tfcdo.ReductionToOneDevice(sum_equal_rows=True)
        dense, sparse = tu.all_reduce(ops, MEAN, [tu.per_replica(own) for own in (arrays, rows)])
        self.assertAllEqual(expected, dense.value)
        self.assertAllEqual(expected, sparse.value.values)

    def test_sums_special_values(self):
        own = [[np.inf, -np.inf, np.nan, 1], [1.0] * 4, [1, 1, 1, np.inf]]
        (result,) = tu.all_reduce(make_ops(), SUM, [tu.per_replica(own)])
        self.assertAllEqual([np.inf, -np.inf, np.nan, np.inf], result.value)

    def test_empty_batch(self):
        self.assertEqual([], make_ops().batch_reduce(MEAN, iter(())))


class InstancesTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    def test_results_do_not_follow_what_is_written_later(self):
        variables = tu.variables([1.0, 2.0], 3)
        value, single = (tf_internals.per_replica(own) for own in (variables, variables[:1]))
        results = tu.all_reduce(make_ops(), SUM, [value, value])
        results += tu.all_reduce(make_ops(), SUM, [single])
        for variable in variables:
            variable.assign([8.0, 8.0])
        for result, expected in zip(results, ([3, 6], [3, 6], [1, 2]), strict=True):
            self.assertAllEqual(expected, result.value)

    def test_copies_and_repeated_calls_give_the_same_bits(self):
        generator = np.random.default_rng(0)
        values = [
            tu.per_replica([generator.normal(size=shape).astype(dtype) for _ in range(5)])
            for shape, dtype in (((), np.float64), ((9,), np.float16), ((64, 5), np.float32))
        ]
        ops = make_ops()
        runs = [tu.all_reduce(one, MEAN, values) for one in (ops, ops, copy.deepcopy(ops))]
        for own in zip(*runs, strict=True):
            self.assert_bitwise_equal([component for result in own for component in result.values])

    def test_six_threads_share_one_instance(self):
        ops = make_ops()

        def work(thread: int) -> None:
            for step, mode in enumerate((FUNCTION, EAGER)):
                arrays = [
                    [tu.numbers(shape, tf.float32, 99 * step + rank) for rank in range(2 + thread)]
                    for shape in ((), (0,), (40, 5))
                ]
                results = tu.all_reduce(ops, SUM, list(map(tu.per_replica, arrays)), mode)
                for result, own in zip(results, arrays, strict=True):
                    np.testing.assert_array_equal(tu.oracle(SUM, own), result.value)

        tu.call_in_six_threads(work)

    def test_plans_are_computed_once(self):
        ops, computed = make_ops(), set()
        for number in range(3):
            tu.all_reduce(ops, SUM, [tu.per_replica([tf.fill([9], number)] * 7)])
            computed.add(decide.decide.cache_info().misses)
        self.assertLen(computed, 1)

    @parameterized.product(
        wire_dtype=(None, "float16"), mode=(EAGER, FUNCTION, "graph of TensorFlow 1")
    )
    def test_gradient(self, wire_dtype, mode):
        """From a tape, or from a graph; a function's ends with the function."""
        weights = [tu.numbers((5,), tf.float32, 50 + rank) for rank in range(3)]
        ops = tfcdo.HierarchicalCopyAllReduce(5, wire_dtype=wire_dtype)

        def loss(*own: tf.Tensor) -> tf.Tensor:
            value = tf_internals.per_replica(own)
            results = ops.batch_reduce(MEAN, [(value, value)])[0].values
            return tf.add_n([tf.reduce_sum(w * one) for w, one in zip(weights, results)])

        if mode in (EAGER, FUNCTION):
            own = tu.variables(tf.ones([5]), 3)
            step: Any = loss if mode == EAGER else tf.function(loss)
            with tf.GradientTape() as tape:
                result = step(*own)
            gradients = tape.gradient(result, own)
        else:
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                own = [tu.place(tf.ones([5]), device) for device in tu.device_names(3)]
                gradients = session.run(tf.gradients(loss(*own), own))
        self.assertAllClose([np.sum(weights, axis=0) / 3] * 3, gradients, rtol=1e-6)
        if mode == FUNCTION:
            graph = weakref.ref(step.get_concrete_function(*own).graph)
            del step, tape, result
            gc.collect()
            self.assertIsNone(graph())

    @parameterized.named_parameters(*SETTINGS.items())
    def test_every_op_has_its_device(self, make):
        value, ops = tu.per_replica([tf.ones([8], tf.int32)] * 3), make()
        traced = tu.traced_ops(lambda: ops.reduce(MEAN, value, value).values)
        self.assertContainsSubset(["AddN", "RealDiv"], [op.type for op in traced])
        casts = [op.device for op in traced if op.type == "Cast" and len(op.outputs[0].shape) == 1]
        self.assertCountEqual(tu.device_names(3), casts)
        elsewhere = [
            op.type
            for op in traced
            if op.device not in tu.device_names(3) and op.type not in ("Placeholder", "NoOp")
        ]
        self.assertEqual(["Identity"] * 3, elsewhere)  # What the function returns.


class CallsTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((EAGER, 1), (FUNCTION, 3))
    def test_broadcast(self, mode, count):
        ops, devices = make_ops(), tu.device_names(count)
        given = [tf.constant(["a", "b"]), tf.constant(True), 2.5, np.arange(4), tf.Variable([1, 2])]
        results = tu.call(mode, lambda: [ops.broadcast(one, at(devices)) for one in given])
        for tensor, result in zip(given, results, strict=True):
            self.assert_on(result, devices)
            for component in result.values:
                self.assertAllEqual(tensor, component)

    @parameterized.parameters(
        (EAGER, 1, 0, None), (FUNCTION, 5, -1, None),
        (EAGER, 5, 0, tu.ALL_DEVICES[5:6]), (EAGER, 4, -1, tu.ALL_DEVICES[6:]),
    )  # fmt: skip
    def test_gather(self, mode, count, axis, devices):
        shapes = np.full([count, 3], (2, 3, 4))
        shapes[:, axis] = np.random.default_rng(count).integers(0, 4, count)
        own = [tu.numbers(shape, tf.float32, rank) for rank, shape in enumerate(shapes)]
        value, ops = tu.per_replica(own), make_ops()
        destinations = at(devices) if devices else value
        (result,) = tu.call(mode, lambda own: ops._gather(own, destinations, axis), value)
        self.assert_on(result, devices or tu.device_names(count))
        self.assertAllEqual(np.concatenate(own, axis), result.value)
        self.assert_bitwise_equal(result.values)

    def test_gather_along_an_axis_that_is_known_later(self):
        own = [tu.numbers((2, 2), tf.float32, rank) for rank in range(3)]
        value, ops = tu.per_replica(own), make_ops()
        gather = tf.function(lambda axis: ops._gather(value, value, axis).values, autograph=False)
        for axis in 0, 1, -1:
            for component in gather(tf.constant(axis)):
                self.assertAllEqual(np.concatenate(own, axis), component)

    def test_gathers_any_dtype(self):
        kinds = [[str(rank)] for rank in range(3)], [[rank > 1, True] for rank in range(3)]
        for arrays in (*kinds, [tf.constant([rank, 2], tf.bfloat16) for rank in range(3)]):
            value = tu.per_replica(arrays)
            expected = np.concatenate([one.numpy() for one in value.values])
            self.assertAllEqual(expected, make_ops()._gather(value, value, 0).values[2])


if __name__ == "__main__":
    tf.test.main()
