"""Values sent in 16 bits: the casts, the bound of their error, and values that are exact."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from testing_utils import ARGUMENTS, EAGER, FUNCTION, MEAN, SUM
from wire_bounds import error_bound, roundoff

import tfcdo
from tfcdo import tf_internals

WIRES = ("bfloat16", "float16")
_PAIRS = [(wire, dtype) for wire in WIRES for dtype in (tf.float32, tf.float64)]
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


class CastTest(tf.test.TestCase, parameterized.TestCase):
    def send(self, values: np.ndarray, wire_dtype: str) -> np.ndarray:
        """Sends values to a device that has zeros, and their sum back."""
        ops = tfcdo.ReductionToOneDevice("/cpu:0", wire_dtype=wire_dtype)
        value = tu.per_replica([np.zeros_like(values), values])
        total = ops.batch_reduce(SUM, [(value, value)])[0].values[1].numpy()
        self.assertEqual(values.dtype, total.dtype)
        return total

    @parameterized.parameters(*_PAIRS)
    def test_all_numbers_of_the_wire_dtype_arrive_exactly(self, wire_dtype, dtype):
        with np.errstate(invalid="ignore"):  # Some are NaN.
            bits = np.arange(1 << 16, dtype=np.uint16).view(tf.as_dtype(wire_dtype).as_numpy_dtype)
            numbers = bits.astype(dtype.as_numpy_dtype)
        # TensorFlow's CPU kernels may take float32 that are not normal for 0.
        normal = np.isfinite(numbers) & ((np.abs(numbers) >= 2.0**-126) | (numbers == 0))
        np.testing.assert_array_equal(self.send(numbers[normal], wire_dtype), numbers[normal])

    @parameterized.parameters(*_PAIRS)
    def test_the_nearest_numbers_arrive(self, wire_dtype, dtype):
        """Of any size; numbers that are not finite change nothing else."""
        drawn = np.random.default_rng(0).standard_normal(1000)
        # A larger number is nearer to infinity than to a number with so few bits.
        most = float(np.finfo(dtype.as_numpy_dtype).max) * (1 - 2.0**-8)
        tiny = [1e-40] if dtype == tf.float32 else [1e-300]
        numbers = (most, 3.38e38, 65519.0, 65536.0, *tiny, 0.0)
        for values in (
            *(drawn * 2.0**exponent for exponent in (-100, 0, 16, 100)),
            *([number, -number, number / 3] for number in numbers),
            [np.nan, 3.0, np.inf, -np.inf, 0.1, 70000.0],
        ):
            values = np.array(values, dtype.as_numpy_dtype)
            largest = np.max(np.abs(values), where=np.isfinite(values), initial=0.0)
            lost = 2.0**-39 * largest * (wire_dtype == "float16")
            np.testing.assert_allclose(
                self.send(values, wire_dtype).astype(np.float64),
                values.astype(np.float64),
                rtol=roundoff(wire_dtype, dtype),
                atol=lost + 2.0**-126 * (dtype == tf.float32),
            )


class BoundTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*zip(SETTINGS, WIRES * 3, CASES * 2))
    def test_the_error_is_at_most_the_bound(self, setting, wire_dtype, case):
        make, depth = SETTINGS[setting]
        ops = make(wire_dtype=wire_dtype)
        count, dtype, reduce_op, mode = case
        draw = np.random.default_rng(0)
        # Numbers of all bits and many sizes, mostly of one sign.
        arrays = [
            [
                (draw.uniform(-0.2, 1, shape) * 2.0 ** draw.integers(-12, 3, shape)).astype(
                    dtype.as_numpy_dtype
                )
                for _ in range(count)
            ]
            for shape in SHAPES
        ]
        with tu.kernels_for("GPU"):
            explained = ops.explain(SHAPES, dtype, tu.device_names(count))
            most = depth or max(pack.tree.depth for pack in explained.packs)
            results = tu.all_reduce(ops, reduce_op, [tu.per_replica(own) for own in arrays], mode)
        for result in results:
            self.assert_bitwise_equal(result.values)
            self.assertEqual(dtype, result.value.dtype)
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
    def test_only_gradients_are_rounded(self):
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

    @parameterized.parameters(
        (tf.distribute.MirroredStrategy, True, False),
        (tfcdo.MirroredStrategy, False, True),
        (tfcdo.MultiWorkerMirroredStrategy, True, True),
    )
    def test_in_strategies(self, make, function, feedback):
        ops = tfcdo.AutoAllReduce(wire_dtype="bfloat16", error_feedback=feedback)
        several = make is tfcdo.MultiWorkerMirroredStrategy
        arguments = {"devices_per_worker": 3} if several else {"devices": tu.device_names(3)}
        strategy = make(cross_device_ops=ops, **arguments)
        on_read = {"trainable": False, "synchronization": tf.VariableSynchronization.ON_READ}
        with strategy.scope():
            variables = [
                tf.Variable(tf.fill([2000], 0.1), aggregation=kind, **on_read)
                for kind in (tf.VariableAggregation.MEAN, tf.VariableAggregation.SUM)
            ]
            alone, optimizer = keras.Variable([0.0, 0.0]), keras.optimizers.SGD(1.0)
            optimizer.build([alone])

        def replica() -> dict[str, Any]:
            all_reduce = tf.distribute.get_replica_context().all_reduce
            vector = tf.constant([1.2345678, 333.67])
            optimizer.apply([vector], [alone])
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
            return strategy.run(replica), [tf.identity(variable) for variable in variables]

        results, read = tf.function(step)() if function else step()
        results = tf.nest.map_structure(
            lambda value: strategy.experimental_local_results(value)[-1], results
        )
        # tfcdo's know an optimizer's gradient, also of one variable.
        one = [] if make is tf.distribute.MirroredStrategy else [-alone.numpy()]
        for total in results.pop("batch") + one:
            self.assertAllClose([3.7037034, 1001.01], total, rtol=0.02)
            self.assertNotAllClose([3.7037034, 1001.01], total, rtol=1e-4)
        exact = {
            "number": 1001.01,
            "numbers": {"a": 0.1, "b": [0.3]},
            "alone": [3.7037034, 1001.01],
            "gradient of it": [0.3, 0.9],
        }
        self.assertAllClose(exact, results, rtol=1e-6)
        self.assertAllClose([[0.1] * 2000, [0.3] * 2000], read, rtol=1e-6)


if __name__ == "__main__":
    tf.test.main()
