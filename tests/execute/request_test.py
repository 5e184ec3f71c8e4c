"""From what a caller passes to checked reductions, and the messages where that cannot be."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

from tfcdo import tf_internals
from tfcdo.execute.request import (
    check_broadcast,
    check_gather,
    check_numeric,
    check_pair,
    check_pairs,
    devices_of,
)


class DestinationsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("/cpu:3", 3), ("CPU:3", 3), ("cpu:3", 3), ("/device:cpu:3", 3), ("/cpu", 0),
        ("/job:localhost/replica:0/task:0/device:CPU:7", 7), ("/job:localhost/cpu:2", 2),
    )  # fmt: skip
    def test_names(self, name, index):
        self.assertEqual((tu.device_name(index),), devices_of(name))

    def test_a_name_does_not_depend_on_the_scope(self):
        with tf.device("/cpu:5"):
            self.assertEqual((tu.device_name(3),), devices_of("/cpu:3"))

    def test_values(self):
        row = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
        strategy = tf.distribute.MirroredStrategy(["/cpu:1", "/cpu:3"])
        with strategy.scope():
            mirrored = tf.Variable(1.0)
            on_read = tf.Variable(
                1.0,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
        for value, *expected in (
            (tu.per_replica([0] * 3, tu.ALL_DEVICES[2:5]), 2, 3, 4),
            (tu.place(tf.constant(1), "/cpu:6"), 6),
            (tu.place(row, "/cpu:4"), 4),
            (tu.variables(1.0, 5)[4], 4),
            (mirrored, 1, 3),
            (on_read, 1, 3),
        ):
            self.assertEqual(tuple(map(tu.device_name, expected)), devices_of(value))

    def test_variables_of_a_graph(self):
        with tf.Graph().as_default(), tf.device("/cpu:2"):
            for resource in True, False:
                variable = tf.compat.v1.Variable(1.0, use_resource=resource)
                (device,) = devices_of(variable)
                self.assertEndsWith(device, "/replica:0/task:0/device:CPU:2")  # Such have no job.

    def test_a_tensor_of_a_host_has_no_known_device(self):
        @tf.function
        def trace():
            with tf.device("/job:localhost/task:0"):
                tensor = tf.constant(1.0)
            self.assertNotEmpty(tensor.device)
            self.assertEqual(check_pair(tensor, "CPU:0").devices, ("",))
            with tf.device("/job:localhost/task:0/device:CPU:1"):
                tensor = tf.identity(tensor)
            self.assertEqual(check_pair(tensor, "CPU:0").devices, (tensor.device,))
            return tensor

        trace.get_concrete_function()

    def test_no_device(self):
        @tf.function
        def trace(tensor):
            for nowhere in "", tensor:
                with self.assertRaisesRegex(ValueError, "destinations .*at least one device"):
                    devices_of(nowhere)
            return tensor

        trace(tf.constant(1))


class PairsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ([0, 1, 2], [0, 1, 2]), ([0, 1, 2], [2, 0, 1]), ([0], [0]), ([0, 1, 2], [0, 1]),
        ([0, 1], [0, 1, 2]), ([0, 1], [2, 3]), ([1], [0]), ([0, 0, 1], [0, 0, 1]),
        ([0, 0, 1], [0, 1, 0]), ([0, 0, 1], [0, 1]),
    )  # fmt: skip
    def test_what_is_an_all_reduce(self, on, to):
        value = tu.per_replica([0.0] * len(on), [tu.device_name(index) for index in on])
        names = [tu.device_name(index) for index in to]
        destinations = tu.per_replica([0.0] * len(to), names) if len(to) > 1 else names[0]
        expected = on == to or (len(set(on)) == len(on) and sorted(on) == sorted(to))
        self.assertEqual(expected, check_pair(value, destinations).is_all_reduce)

    def test_devices_unknown_while_traced(self):
        @tf.function(autograph=False)
        def trace(value):
            pair = check_pair(value, value)
            self.assertEqual(("", ""), pair.devices)
            self.assertTrue(pair.is_all_reduce)

        trace.get_concrete_function(tu.per_replica([1.0, 2.0]))

    def test_static_shapes_that_differ_on_two_later_replicas(self):
        # Both are compatible with the first replica's, but not with each other.
        @tf.function(
            input_signature=[tf.TensorSpec([None]), tf.TensorSpec([2]), tf.TensorSpec([3])],
            autograph=False,
        )
        def trace(*values):
            with self.assertRaisesRegex(ValueError, r"pair 0: .*shape.*\(2,\).*\(3,\)"):
                value = tf_internals.per_replica(values)
                check_pairs([(value, value)])
            return values[0]

        trace.get_concrete_function()

    def test_long_input_is_shortened(self):
        with self.assertRaisesRegex(ValueError, "^.{0,300}$"):
            check_pairs([list(range(10_000))])

    def test_what_is_empty(self):
        empty = tf_internals.per_replica([])
        with self.assertRaisesRegex(ValueError, "destinations must name at least one device"):
            check_pair(tu.per_replica([1.0]), empty)
        with self.assertRaisesRegex(ValueError, "value must hold at least one .* it is empty"):
            check_pair(empty, "/cpu:0")

    @parameterized.parameters(tf.bool, tf.dtypes.experimental.float8_e5m2)
    def test_numeric(self, dtype):
        good = check_pair(tu.per_replica([1.0, 2.0]), "/cpu:0")
        bad = check_pair(tu.per_replica([tf.cast(1.0, dtype)] * 2), "/cpu:0")
        check_numeric([good, good])
        with self.assertRaisesRegex(ValueError, f"pair 1: .*adds; got {dtype.name}"):
            check_numeric([good, bad])
        with self.assertRaisesRegex(ValueError, f"^the values .*adds; got {dtype.name}"):
            check_numeric([bad])


class GatherAndBroadcastTest(tf.test.TestCase, parameterized.TestCase):
    def test_other_axes_may_not(self):
        value = tu.per_replica([tf.ones([2, 1]), tf.ones([3, 1])])
        for axis in (1, -1):
            told = rf"but for axis {axis}; got \(2, None\) on .*CPU:0 and \(3, None\) on .*CPU:1"
            with self.assertRaisesRegex(ValueError, told):
                check_gather(value, "/cpu:0", axis)
        self.assertLen(check_gather(value, "/cpu:0", -2).values, 2)
        value = tu.per_replica([tf.ones([2, 1]), tf.ones([2, 2])])
        for axis in (0, -2):
            with self.assertRaisesRegex(ValueError, r"got \(None, 1\) on .* and \(None, 2\) on"):
                check_gather(value, "/cpu:0", axis)

    def test_shapes_that_are_not_known_are_compared_as_far_as_they_are(self):
        @tf.function(
            input_signature=[
                tf.TensorSpec(shape) for shape in (None, [None, None], [None, 2], [None, 3])
            ],
            autograph=False,
        )
        def gather(*values):
            check_gather(tf_internals.per_replica(values[:3]), "/cpu:0", 0)
            with self.assertRaisesRegex(ValueError, r"got \(None, 2\) on .* and \(None, 3\) on"):
                check_gather(tf_internals.per_replica(values), "/cpu:0", 0)

        gather.get_concrete_function()

    @parameterized.parameters("0", None, 0.0, True, lambda: tf.constant(0.0), lambda: [1])
    def test_an_axis_is_a_number(self, axis):
        axis = axis() if callable(axis) else axis
        with self.assertRaisesRegex(TypeError, "axis must be an int, or a 0-D tensor of ints; got"):
            check_gather(tu.per_replica([[1.0], [2.0]]), "/cpu:0", axis)

    def test_an_axis_that_is_known_later(self):
        value = tf_internals.per_replica([tf.ones([2, 1]), tf.ones([3, 2])])
        gather = tf.function(lambda axis: check_gather(value, "/cpu:0", axis).values)
        gather.get_concrete_function(tf.TensorSpec([], tf.int32))

    @parameterized.parameters(1, -2, np.int64(1), lambda: tf.constant(1))
    def test_there_must_be_such_an_axis(self, axis):
        axis = axis() if callable(axis) else axis
        with self.assertRaisesRegex(ValueError, f"axis must .* got {int(axis)} for the shape"):
            check_gather(tu.per_replica([[1.0], [2.0]]), "/cpu:0", axis)

    def test_none_is_no_value(self):
        for value in None, tf_internals.per_replica([None, None]):
            with self.assertRaisesRegex(ValueError, "^value must be a tensor.*got None"):
                check_pair(value, "/cpu:0")
        with self.assertRaisesRegex(ValueError, "^tensor must be a tensor.*got None"):
            check_broadcast(None)

    def test_slices_that_are_not_rows_of_one_table(self):
        def rows(shape: list[int] | None) -> tf.IndexedSlices:
            table = None if shape is None else tf.constant(shape, tf.int64)
            return tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), table)

        scalar = tf.IndexedSlices(tf.constant(1.0), tf.constant(0))
        lacking = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0]))
        for slices, message in (
            ([scalar] * 2, "rows .* got tf.IndexedSlices of a scalar"),
            ([lacking] * 2, r"one index for each row; .*\(2, 3\) .*\(1,\)"),
            ([rows([6, 2]), rows([7, 2])], r"dense_shape; got \(6, 2\) on .* and \(7, 2\) on"),
            (
                [rows(None), rows([7, 2])],
                "kind; got IndexedSlices without dense_shape on .* and IndexedSlices",
            ),
        ):
            with self.assertRaisesRegex(ValueError, message):
                check_pair(tu.per_replica(slices), "/cpu:0")
        check_pair(tu.per_replica([rows(None)] * 2), "/cpu:0")

    @parameterized.parameters(([7, 2],), (np.array([7, 2]),))
    def test_a_dense_shape_becomes_a_tensor_beside_its_rows(self, shape):
        rows = tu.place(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])), "/cpu:2")
        rows = tf.IndexedSlices(rows.values, rows.indices, shape)
        for value in check_pair(tf_internals.per_replica([rows, rows]), "/cpu:0").values:
            self.assertAllEqual([7, 2], value.dense_shape)
            self.assertEqual(tu.device_name(2), value.dense_shape.device)

    def test_broadcast_takes_one_tensor(self):
        self.assertAllEqual([1, 2], check_broadcast([1, 2]))
        with self.assertRaisesRegex(ValueError, "tensor must be one tensor"):
            check_broadcast(tu.per_replica([1, 2]))


if __name__ == "__main__":
    tf.test.main()
