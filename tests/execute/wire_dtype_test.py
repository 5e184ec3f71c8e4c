"""Values sent in 16 bits: the bound of their error, and values that are never rounded."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from testing_utils import ARGUMENTS, EAGER, FUNCTION, MEAN, SUM
from wire_bounds import error_bound

import tfcdo
from tfcdo import tf_internals

WIRES = ("bfloat16", "float16")
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


def _drawn(count: int, dtype: tf.DType, seed: int = 0) -> list[list[np.ndarray]]:
    """`[value][device]`: numbers of all bits and many sizes, mostly of one sign."""
    generator = np.random.default_rng(seed)
    return [
        [
            (generator.uniform(-0.2, 1, shape) * 2.0 ** generator.integers(-12, 3, shape)).astype(
                dtype.as_numpy_dtype
            )
            for _ in range(count)
        ]
        for shape in SHAPES
    ]


def _errors(
    ops: tf.distribute.CrossDeviceOps,
    arrays: Sequence[Sequence[np.ndarray]],
    depth: int,
    wire_dtype: str,
    reduce_op: Any = SUM,
    mode: str = EAGER,
) -> list[np.ndarray]:
    """All-reduces values and returns each error as a part of its bound, 1 for just as large."""
    results = tu.all_reduce(ops, reduce_op, [tu.per_replica(own) for own in arrays], mode)
    dtype = tf.as_dtype(arrays[0][0].dtype)
    # The bound is of a pack, whose largest number decides of float16's scale.
    magnitudes = [tu.oracle(reduce_op, [np.abs(one) for one in own]) for own in arrays]
    sizes = np.cumsum([one.size for one in magnitudes])[:-1]
    bounds = error_bound(
        np.concatenate([one.ravel() for one in magnitudes]),
        depth,
        len(arrays[0]),
        wire_dtype,
        dtype,
    )
    for result in results:
        for component in result.values:
            assert component.dtype == dtype
            np.testing.assert_array_equal(component, result.value)
    return [
        np.abs(tu.exact(result.value) - tu.oracle(reduce_op, own)).ravel() / bound
        for result, own, bound in zip(results, arrays, np.split(bounds, sizes), strict=True)
    ]


class BoundTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *zip([*SETTINGS, "ring", "Hierarchical"], itertools.cycle(WIRES), itertools.cycle(CASES))
    )
    def test_the_error_is_at_most_the_bound(self, setting, wire_dtype, case):
        make, depth = SETTINGS[setting]
        ops = make(wire_dtype=wire_dtype)
        count, dtype, reduce_op, mode = case
        with tu.kernels_for("GPU"):
            explained = ops.explain(SHAPES, dtype, tu.device_names(count))
            most = depth or max(pack.tree.depth for pack in explained.packs)
            arrays = _drawn(count, dtype)
            errors = np.concatenate(_errors(ops, arrays, most, wire_dtype, reduce_op, mode))
        self.assertLessEqual(np.max(errors), 1)
        # Something was rounded, and the bound is not far from what happens.
        self.assertGreater(np.max(errors), 0.05)


class ScopeTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    """Values that are cast, and values that are sent as without a wire dtype."""

    def test_only_gradients_are_rounded(self):
        ops = tfcdo.AutoAllReduce(wire_dtype="bfloat16")
        variables = []
        for rank in range(3):
            with tf.device(tu.device_name(rank)):
                variables.append(tf.Variable([0.1, 0.2]))
        state = tf_internals.mirrored(variables)
        value, loss = tu.per_replica([[0.1, 0.2]] * 3), tu.per_replica([0.1] * 3)
        # A strategy passes options. It reduces gradients in batches, and statistics alone.
        options = tf.distribute.experimental.CommunicationOptions()
        for total in (
            ops.reduce(SUM, state, state),
            ops.reduce(SUM, value, state),
            ops.reduce(SUM, value, value, options),
            ops.batch_reduce(SUM, [(value, value)], options)[0],
        ):
            self.assertAllClose([0.3, 0.6], total.values[0], rtol=1e-6)
        for total in (
            ops.reduce(SUM, loss, loss),
            ops.batch_reduce(SUM, [(value, value), (loss, loss)])[1],
        ):
            self.assertAllClose(0.3, total.values[0], rtol=1e-6)
        for total in (
            ops.reduce(SUM, value, value),
            ops.batch_reduce(SUM, [(value, state)])[0],
            ops.batch_reduce(SUM, [(value, value), (loss, loss)], options)[0],
        ):
            self.assertNotAllClose([0.3, 0.6], total.values[0], rtol=1e-6)

    @parameterized.parameters(("ring", "bfloat16"), ("ring", "float16"), ("OtherDevice", "float16"))
    def test_only_16_bits_go_from_device_to_device(self, setting, wire_dtype):
        ops = SETTINGS[setting][0](wire_dtype=wire_dtype)
        value = tu.per_replica([tf.ones([64])] * 4)
        names = {op.name: op for op in tu.traced_ops(lambda: ops.reduce(SUM, value, value))}
        crossing = [
            tensor
            for op in names.values()
            for tensor in op.inputs
            if tensor.op.device and op.device and tensor.op.device != op.device
        ]
        self.assertNotEmpty(crossing)
        # Beside them, only the scale.
        wide = [tensor for tensor in crossing if tensor.dtype != tf.as_dtype(wire_dtype)]
        for tensor in wide:
            self.assertEqual((wire_dtype, []), ("float16", tensor.shape.as_list()))

    @parameterized.parameters(("ring", True), ("OtherDevice", False))
    def test_graphs_end_with_their_functions(self, setting, error_feedback):
        ops = SETTINGS[setting][0](wire_dtype="float16", error_feedback=error_feedback)
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
        ops = tfcdo.AllReduceCrossDeviceOps("ring", wire_dtype="float16")
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
            own = [tu.place(tf.ones([5]), device) for device in tu.device_names(3)]
            with tf.GradientTape() as tape:
                tape.watch(own)
                result = tf.function(loss)(*own)
            gradients = tape.gradient(result, own)
        for gradient in gradients:
            self.assertAllClose(np.sum(weights, axis=0) / 3, gradient, rtol=1e-6)


class ArgumentsTest(parameterized.TestCase):
    @parameterized.parameters("ring", "Auto", "OneDevice")
    def test_are_checked(self, setting):
        make = SETTINGS[setting][0]
        with self.assertRaisesRegex(ValueError, "wire_dtype must be .*'float32'"):
            make(wire_dtype="float32")
        with self.assertRaisesRegex(TypeError, "wire_dtype must be .*16"):
            make(wire_dtype=16)
        with self.assertRaisesRegex(ValueError, "error_feedback must be False without wire_dtype"):
            make(error_feedback=True)
        with self.assertRaisesRegex(TypeError, "error_feedback must be True or False; got 1"):
            make(wire_dtype="float16", error_feedback=1)
        shown = repr(make(wire_dtype=tf.bfloat16, error_feedback=True))
        self.assertIn("wire_dtype='bfloat16', error_feedback=True", shown)
        self.assertNotIn("wire", repr(make()))


if __name__ == "__main__":
    tf.test.main()
