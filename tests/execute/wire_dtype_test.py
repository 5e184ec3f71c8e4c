"""Values sent in 16 bits: the casts, the bound of their error, and values that are exact."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from testing_utils import ARGUMENTS, EAGER, FUNCTION, MEAN, SUM
from wire_bounds import error_bound, roundoff

import tfcdo
from tfcdo import tf_internals
from tfcdo.exchange import dtypes, rounding
from tfcdo.execute import copy_trees

WIRES = ("bfloat16", "float16")
_FLOATS = (tf.float32, tf.float64)
_PAIRS = [(wire, dtype) for wire in WIRES for dtype in _FLOATS]
# A larger number is nearer to infinity than to a number with so few bits.
_MOST_32 = float(np.finfo(np.float32).max) * (1 - 2.0**-8)
_MOST_64 = float(np.finfo(np.float64).max) * (1 - 2.0**-8)
STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tfcdo.MirroredStrategy,
    tfcdo.MultiWorkerMirroredStrategy,
)
# By name: the class, and the most edges to the root; None to ask its explanation.
SETTINGS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "ring": (lambda **kw: tfcdo.AllReduceCrossDeviceOps("ring", **kw), None),
    "Hierarchical": (lambda **kw: tfcdo.HierarchicalCopyAllReduce(3, **kw), None),
    "Auto": (tfcdo.AutoAllReduce, None),
    "OneDevice": (tfcdo.ReductionToOneDevice, 1),
    "OtherDevice": (lambda **kw: tfcdo.ReductionToOneDevice("/cpu:7", **kw), 1),
    "Accumulating": (lambda **kw: tfcdo.ReductionToOneDevice(None, tf.add_n, **kw), 1),
}
SHAPES = ((33,), (4, 5))
CASES = (
    (5, tf.float32, SUM, FUNCTION), (3, tf.float64, MEAN, EAGER), (2, tf.float32, SUM, ARGUMENTS),
)  # fmt: skip


def _there_and_back(
    values: Any, wire_dtype: str, num_terms: int = 1
) -> tuple[np.ndarray, np.ndarray, float]:
    """The encoded values, the decoded ones, and the scale; 1 where there is none."""
    tensor = tf.constant(values)
    scale = None
    if dtypes.needs_scale(wire_dtype, tensor.dtype.name):
        scale = rounding.scale_for(rounding.largest_magnitude([tensor]), wire_dtype, num_terms)
    sent = copy_trees.encode(tensor, wire_dtype, scale)
    arrived = copy_trees.decode(sent, tensor.dtype, scale)
    return sent.numpy(), arrived.numpy(), 1.0 if scale is None else float(scale)


class CastTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_PAIRS)
    def test_all_numbers_of_the_wire_dtype_arrive_exactly(self, wire_dtype, dtype):
        with np.errstate(invalid="ignore"):  # Some are NaN.
            bits = np.arange(1 << 16, dtype=np.uint16).view(tf.as_dtype(wire_dtype).as_numpy_dtype)
            numbers = bits.astype(dtype.as_numpy_dtype)
        # TensorFlow's CPU kernels may take float32 that are not normal for 0.
        normal = np.isfinite(numbers) & ((np.abs(numbers) >= 2.0**-126) | (numbers == 0))
        _, arrived, _ = _there_and_back(numbers[normal], wire_dtype)
        self.assertEqual(arrived.dtype, dtype)
        np.testing.assert_array_equal(arrived, numbers[normal])

    @parameterized.parameters(*[(*pair, e) for pair, e in zip(_PAIRS, (-100, 100, 0, 16))])
    def test_the_nearest_numbers_are_sent(self, wire_dtype, dtype, exponent):
        drawn = np.random.default_rng(exponent + 200).standard_normal(1000)
        values = (drawn * 2.0**exponent).astype(dtype.as_numpy_dtype)
        sent, arrived, scale = _there_and_back(values, wire_dtype)
        self.assertEqual(sent.dtype, tf.as_dtype(wire_dtype).as_numpy_dtype)
        np.testing.assert_array_equal(arrived.astype(np.float64) * scale, sent.astype(np.float64))
        error = np.abs(arrived - values.astype(np.float64))
        lost = 2.0**-126 + 2.0**-39 * np.max(np.abs(values)) * (wire_dtype == "float16")
        self.assertAllLessEqual(error - roundoff(wire_dtype, dtype) * np.abs(values), lost)
        self.assertGreater(np.max(error / np.abs(values)), 0.9 * roundoff(wire_dtype))

    @parameterized.parameters(*zip(WIRES, _FLOATS))
    def test_nan_and_infinity_stay_and_change_nothing_else(self, wire_dtype, dtype):
        values = np.array([np.nan, 3.0, np.inf, -np.inf, 0.1, 70000.0], dtype.as_numpy_dtype)
        _, arrived, _ = _there_and_back(values, wire_dtype)
        np.testing.assert_array_equal(arrived[:4], values[:4])
        np.testing.assert_allclose(arrived[4:], values[4:], rtol=roundoff(wire_dtype))

    @parameterized.parameters(
        ("float16", tf.float32, (_MOST_32, 65519.0, 65536.0, 1e-40, 0.0)),
        ("bfloat16", tf.float64, (_MOST_64, 3.4e38, 0.0)),
        ("float16", tf.float64, (_MOST_64, 1e-300)),
        ("bfloat16", tf.float32, (3.38e38,)),
    )
    def test_the_largest_and_the_smallest(self, wire_dtype, dtype, numbers):
        for number in numbers:
            values = np.array([number, -number, number / 3], dtype.as_numpy_dtype)
            _, arrived, scale = _there_and_back(values, wire_dtype)
            self.assertEqual(np.frexp(scale)[0], 0.5)
            np.testing.assert_allclose(
                arrived.astype(np.float64),
                values.astype(np.float64),
                rtol=roundoff(wire_dtype, dtype),
                atol=2.0**-126 if dtype == tf.float32 else 0,
            )

    def test_terms_that_are_added_in_the_wire_dtype_fit(self):
        for num_terms, number in itertools.product((1, 2, 3, 8), (65504.0, 65519.0, 1e30, 3e-7)):
            sent, _, _ = _there_and_back(np.array([number], np.float32), "float16", num_terms)
            self.assertTrue(np.isfinite(np.sum(np.repeat(sent, num_terms), dtype=np.float16)))
            # A scale of half the size would do for twice as many.
            self.assertGreater(float(sent[0]) * num_terms, 65504 / 4)


def _drawn(count: int, dtype: tf.DType) -> list[list[np.ndarray]]:
    """`[value][device]`: numbers of all bits and many sizes, mostly of one sign."""
    generator = np.random.default_rng(0)
    return [
        [
            (generator.uniform(-0.2, 1, shape) * 2.0 ** generator.integers(-12, 3, shape)).astype(
                dtype.as_numpy_dtype
            )
            for _ in range(count)
        ]
        for shape in SHAPES
    ]


class BoundTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*zip(SETTINGS, WIRES * 3, CASES * 2))
    def test_the_error_is_at_most_the_bound(self, setting, wire_dtype, case):
        make, depth = SETTINGS[setting]
        ops = make(wire_dtype=wire_dtype)
        count, dtype, reduce_op, mode = case
        arrays = _drawn(count, dtype)
        with tu.kernels_for("GPU"):
            explained = ops.explain(SHAPES, dtype, tu.device_names(count))
            most = depth or max(pack.tree.depth for pack in explained.packs)
            results = tu.all_reduce(ops, reduce_op, [tu.per_replica(own) for own in arrays], mode)
        for result in results:
            for component in result.values:
                self.assertEqual(dtype, component.dtype)
                self.assertAllEqual(result.value, component)
        # The bound is of a pack, whose largest number decides of float16's scale.
        exact, magnitudes, actual = (
            np.concatenate([np.ravel(one) for one in values])
            for values in (
                [tu.oracle(reduce_op, own) for own in arrays],
                [tu.oracle(reduce_op, list(map(np.abs, own))) for own in arrays],
                [tu.exact(result.value) for result in results],
            )
        )
        errors = np.abs(actual - exact) / error_bound(magnitudes, most, count, wire_dtype, dtype)
        self.assertLessEqual(np.max(errors), 1)
        # Something was rounded, and the bound is not far from what happens.
        self.assertGreater(np.max(errors), 0.05)


class ScopeTest(tf.test.TestCase, parameterized.TestCase):
    """Values that are cast, and values that are sent as without a wire dtype."""

    def test_only_gradients_are_rounded(self):
        """Without options, as from a user's code; `GradientsTest` has what strategies pass."""
        ops = tfcdo.AutoAllReduce(wire_dtype="bfloat16")
        state = tf_internals.mirrored(tu.variables([0.1, 0.2], 3))
        value, loss = tu.per_replica([[0.1, 0.2]] * 3), tu.per_replica([0.1] * 3)
        pairs = [(value, value), (loss, loss)]
        for total in (ops.reduce(SUM, state, state), ops.reduce(SUM, value, state)):
            self.assertAllClose([0.3, 0.6], total.values[0], rtol=1e-6)
        for total in (ops.reduce(SUM, loss, loss), ops.batch_reduce(SUM, pairs)[1]):
            self.assertAllClose(0.3, total.values[0], rtol=1e-6)
        for total in (
            ops.reduce(SUM, value, value),
            ops.batch_reduce(SUM, [(value, state)])[0],
            ops.batch_reduce(SUM, pairs)[0],
        ):
            self.assertNotAllClose([0.3, 0.6], total.values[0], rtol=1e-6)

    def test_graphs_end_with_their_functions(self):
        ops = SETTINGS["Hierarchical"][0](wire_dtype="float16", error_feedback=True)
        value = tu.per_replica([tf.ones([4])] * 3)
        function = tf.function(lambda: ops.batch_reduce(SUM, [(value, value)] * 2)[0].values)
        graph = weakref.ref(function.get_concrete_function().graph)
        self.assertIsNotNone(graph())
        del function
        gc.collect()
        self.assertIsNone(graph())

    @parameterized.parameters(False, True)
    def test_gradients_of_functions_and_of_tensorflow_1(self, of_tensorflow_1):
        """They come from the graph, not from a tape."""
        ops = SETTINGS["Hierarchical"][0](wire_dtype="float16")
        weights = [tu.numbers((5,), tf.float32, 50 + rank) for rank in range(3)]

        def loss(*own: tf.Tensor) -> tf.Tensor:
            value = tf_internals.per_replica(own)
            results = ops.batch_reduce(MEAN, [(value, value)])[0].values
            return tf.add_n([tf.reduce_sum(w * one) for w, one in zip(weights, results)])

        if of_tensorflow_1:
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                own = [tu.place(tf.ones([5]), device) for device in tu.device_names(3)]
                gradients = session.run(tf.gradients(loss(*own), own))
        else:
            own = tu.variables(tf.ones([5]), 3)
            with tf.GradientTape() as tape:
                result = tf.function(loss)(*own)
            gradients = tape.gradient(result, own)
        self.assertAllClose([np.sum(weights, axis=0) / 3] * 3, gradients, rtol=1e-6)


class GradientsTest(tf.test.TestCase, parameterized.TestCase):
    """Of what a strategy reduces, batches of gradients are cast, and nothing else."""

    def strategy(self, make: Any, **feedback: bool) -> tf.distribute.Strategy:
        ops = tfcdo.AutoAllReduce(wire_dtype="bfloat16", **feedback)  # type: ignore[arg-type]
        if make is tfcdo.MultiWorkerMirroredStrategy:
            return make(cross_device_ops=ops, devices_per_worker=3)
        return make(tu.device_names(3), ops)

    @parameterized.parameters(*zip(STRATEGIES, (True, False, True), (False, True, True)))
    def test_batches_are_cast_and_nothing_else(self, make, function, feedback):
        strategy = self.strategy(make, error_feedback=feedback)

        def replica() -> dict[str, Any]:
            all_reduce = tf.distribute.get_replica_context().all_reduce
            vector = tf.constant([1.2345678, 333.67])
            with tf.GradientTape() as tape:
                tape.watch(vector)
                total = all_reduce("SUM", vector)
                loss = tf.reduce_sum(total * [0.1, 0.3])
            return {
                "number": all_reduce("SUM", tf.constant(333.67)),
                "numbers": all_reduce("MEAN", {"a": tf.constant(0.1), "b": tf.fill([1], 0.3)}),
                "alone": total,
                "gradient of it": tape.gradient(loss, vector),
                "batch": all_reduce("SUM", [vector, vector]),
            }

        def step() -> Any:
            return strategy.run(replica)

        results = tf.nest.map_structure(
            lambda value: strategy.experimental_local_results(value)[-1],
            tf.function(step)() if function else step(),
        )
        for total in results.pop("batch"):
            self.assertAllClose([3.7037034, 1001.01], total, rtol=0.02)
            self.assertNotAllClose([3.7037034, 1001.01], total, rtol=1e-4)
        exact = {
            "number": 1001.01,
            "numbers": {"a": 0.1, "b": [0.3]},
            "alone": [3.7037034, 1001.01],
            "gradient of it": [0.3, 0.9],
        }
        self.assertAllClose(exact, results, rtol=1e-6)

    @parameterized.parameters(*zip(STRATEGIES, (False, True, True)))
    def test_what_is_read_of_variables_is_exact(self, make, function):
        strategy = self.strategy(make)
        with strategy.scope():
            variables = [
                tf.Variable(
                    tf.fill([2000], 1.2345678),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=aggregation,
                )
                for aggregation in (tf.VariableAggregation.MEAN, tf.VariableAggregation.SUM)
            ]

        def read() -> Any:
            return [tf.identity(variable) for variable in variables]

        mean, total = tf.function(read)() if function else read()
        self.assertAllClose(np.full(2000, 1.2345678), mean, rtol=1e-6)
        self.assertAllClose(np.full(2000, 1.2345678) * 3, total, rtol=1e-6)


if __name__ == "__main__":
    tf.test.main()
