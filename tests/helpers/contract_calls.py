"""The contract: broadcast, gather, and the refusal of bad input."""

from __future__ import annotations

import contract
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from testing_utils import EAGER, FUNCTION, SUM

from tfcdo import tf_internals


class CallsContract(contract.Contract):
    """Tests of what has the same code in all settings of a class: one setting of each suffices."""

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
    def test_gathers_any_dtype(self, dtype):
        own = [tf.cast([rank % 2, rank], dtype) if dtype != tf.string else tf.constant([str(rank)])
               for rank in range(3)]  # fmt: skip
        value = tu.per_replica(own)
        (result,) = tu.call(EAGER, lambda: self.make()._gather(value, value, 0))
        self.assertAllEqual(np.concatenate([one.numpy() for one in own]), result.value)

    # Bad input.

    @parameterized.parameters("SUM", "sum", None, 0, "MAX", tf.VariableAggregation.SUM)
    def test_rejects_unknown_reduce_op(self, reduce_op):
        value = tu.per_replica([1.0, 2.0])
        ops = self.make()
        for call in [
            lambda: ops.reduce(reduce_op, value, value),
            lambda: ops.batch_reduce(reduce_op, [(value, value)]),
            lambda: ops.batch_reduce(reduce_op, []),
        ]:
            with self.assertRaisesRegex(ValueError, r"reduce_op.*SUM.*MEAN"):
                call()

    def test_rejects_shapes_that_differ(self):
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

    def test_rejects_dtypes_that_differ(self):
        bad = tu.per_replica([tf.constant(1.0), tf.constant(1)])
        with self.assertRaisesRegex(
            ValueError, r"(?s)pair 0: .*dtype.*float32.*CPU:0.*int32.*CPU:1"
        ):
            tu.all_reduce(self.make(), SUM, [bad])

    def test_rejects_slices_among_dense_replicas(self):
        row = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
        for own in [tf.ones([1, 2]), row], [row, tf.ones([1, 2])]:
            bad = tu.per_replica(own)
            with self.assertRaisesRegex(ValueError, r"pair 0: .*IndexedSlices"):
                tu.all_reduce(self.make(), SUM, [bad])

    def test_rejects_slices_whose_row_shapes_differ(self):
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
    def test_rejects_malformed_pairs(self, pairs):
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
    def test_rejects_invalid_destinations(self, destinations):
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
    def test_rejects_values_that_cannot_be_added(self, make_value):
        own = [make_value() for _ in range(2)]
        ops = self.make()
        for value in tf_internals.per_replica(own), own[0]:
            for destinations in "/cpu:0", tu.per_replica([0, 0]):
                with self.assertRaises(ValueError):
                    ops.reduce(SUM, value, destinations)
                with self.assertRaises(ValueError):
                    ops.batch_reduce(SUM, [(value, destinations)])

    def test_gather_rejects_slices(self):
        value = tu.per_replica(contract.slices(2))
        with self.assertRaisesRegex(ValueError, "IndexedSlices"):
            self.make()._gather(value, value, 0)

    def test_bad_input_creates_no_op(self):
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
