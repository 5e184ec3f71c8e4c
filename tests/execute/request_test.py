"""What callers may pass, and the errors for everything else, which are raised before any op."""

from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from testing_utils import MEAN, SUM

import tfcdo
from tfcdo import tf_internals
from tfcdo.execute.request import check_pair

OPS = tfcdo.HierarchicalCopyAllReduce()


def rows(shape: Any, values: Any = ((1.0, 1.0),), indices: Any = (0,)) -> tf.IndexedSlices:
    table = None if shape is None else tf.constant(shape, tf.int64)
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), table)


class DestinationsTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("/cpu:3", 3), ("CPU:3", 3), ("cpu:3", 3), ("/device:cpu:3", 3), ("/cpu", 0),
        ("/job:localhost/replica:0/task:0/device:CPU:7", 7), ("/job:localhost/cpu:2", 2),
    )  # fmt: skip
    def test_names(self, name, index):
        self.assertEqual(tu.device_name(index), OPS.reduce(SUM, 1.0, name).device)

    def test_values(self):
        """A name does not depend on the scope."""
        with tf.distribute.MirroredStrategy(["/cpu:1", "/cpu:3"]).scope():
            mirrored = tf.Variable(1.0)
            on_read = tf.Variable(
                1.0,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
        for destinations, *expected in (
            (tu.per_replica([0] * 3, tu.ALL_DEVICES[2:5]), 2, 3, 4),
            (tu.place(tf.constant(1), "/cpu:6"), 6),
            (tu.place(rows(None), "/cpu:4"), 4),
            (tu.variables(1.0, 5)[4], 4),
            *((mirrored, 1, 3), (on_read, 1, 3), ("/cpu:3", 3)),
        ):
            for call in (lambda to: OPS.reduce(SUM, 2.0, to), lambda to: OPS.broadcast(2.0, to)):
                with tf.device("/cpu:5"):
                    [result] = tu.call(tu.EAGER, lambda call=call, to=destinations: call(to))
                self.assert_on(result, [*map(tu.device_name, expected)])
                self.assertAllEqual([2.0] * len(expected), result.values)
        self.assertAllEqual([1.0, 1.0], mirrored.values)  # They are not changed.

    @parameterized.parameters(True, False)
    def test_variables_of_a_graph(self, resource):
        with tf.Graph().as_default():
            with tf.device("/cpu:2"):
                variable = tf.compat.v1.Variable(1.0, use_resource=resource)
            device = OPS.reduce(SUM, tf.constant(1.0), variable).device
            self.assertEndsWith(device, "/replica:0/task:0/device:CPU:2")  # Such have no job.

    @parameterized.parameters(([1], [0]), ([0, 0, 1], [0, 0, 1]), ([0, 0, 1], [0, 1]))
    def test_from_one_device_or_one_that_is_there_twice(self, on, to):
        """The contract has other devices."""
        at, names = ([*map(tu.device_name, indices)] for indices in (on, to))
        value = tu.per_replica([float(2**rank) for rank in range(len(on))], at)
        destinations = tu.per_replica([0.0] * len(to), names) if len(to) > 1 else names[0]
        [result] = tu.call(tu.EAGER, lambda: OPS.reduce(SUM, value, destinations))
        self.assert_on(result, names)
        self.assertAllEqual([2.0 ** len(on) - 1] * len(to), result.values)

    def test_a_tensor_of_a_host_has_no_known_device(self):
        @tf.function(autograph=False)
        def trace():
            with tf.device("/job:localhost/task:0"):
                tensor = tf.constant(1.0)
            for value in (tensor, tf_internals.per_replica([tensor])):
                self.assertEqual(check_pair(value, "CPU:0").devices, ("",))
            with tf.device("/job:localhost/task:0/device:CPU:1"):
                tensor = tf.identity(tensor)
            self.assertEqual(check_pair(tensor, "CPU:0").devices, (tensor.device,))
            return tensor

        trace.get_concrete_function()

    @parameterized.parameters(([7, 2],), (np.array([7, 2]),))
    def test_a_dense_shape_need_not_be_a_tensor(self, shape):
        given = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), shape)
        value = tf_internals.per_replica([given, given])
        for result in OPS.reduce(SUM, value, tu.per_replica([0, 0])).values:
            self.assertAllEqual([7, 2], result.dense_shape)


class RefusalTest(tf.test.TestCase):
    def test_bad_input_is_refused_before_any_op(self):
        good, pair = tu.per_replica([tf.ones([2])] * 3), tu.per_replica([[1.0], [2.0]])
        table, empty = tu.per_replica([rows([5, 2])] * 3), tf_internals.per_replica([])
        calls: list[tuple[str, Any]] = []

        def both(*pairs: Any) -> Any:
            return OPS.batch_reduce(SUM, pairs)

        for message, *own in (
            (r"shape.*\(2,\).*CPU:0.*\(3,\).*CPU:1", tf.ones([2]), tf.ones([3])),
            ("dtype.*float32.*CPU:0.*int32.*CPU:1", tf.constant(1.0), tf.constant(1)),
            ("IndexedSlices", tf.ones([1, 2]), rows(None)),
            (r"shape.*\(2,\).*\(3,\)", rows(None), rows(None, [[1.0] * 3])),
            ("adds; got string", tf.constant("a"), tf.constant("b")),
            ("adds; got float8", *[tf.cast(1.0, tf.dtypes.experimental.float8_e5m2)] * 2),
            ("tensor", *[tf.ragged.constant([[1], [2, 3]])] * 2),
            ("value must be a tensor.*got None", None, None),
            ("value must hold at least one .* it is empty",),
            ("rows .* got tf.IndexedSlices of a scalar", *[rows(None, 1.0, 0)] * 2),
            (r"index for each row; .*\(2, 3\) .*\(1,\)", *[rows(None, np.ones([2, 3]))] * 2),
            (r"dense_shape; got \(6, 2\) on .* and \(7, 2\) on", rows([6, 2]), rows([7, 2])),
            ("kind; got IndexedSlices without dense_shape on .* and ", rows(None), rows([7, 2])),
        ):
            bad = tf_internals.per_replica([*own])
            if all(isinstance(each, tf.Tensor) for each in own):
                bad = tu.per_replica(own)
            calls += [
                (message, lambda bad=bad: OPS.reduce(SUM, bad, "/cpu:1")),
                (f"pair 1: .*{message}", lambda bad=bad: both((good, good), (bad, "/cpu:1"))),
            ]
        for reduce_op in ("SUM", None, tf.VariableAggregation.SUM):
            calls += [
                ("reduce_op.*SUM.*MEAN", lambda op=reduce_op: OPS.reduce(op, good, good)),
                ("reduce_op.*SUM.*MEAN", lambda op=reduce_op: OPS.batch_reduce(op, [])),
            ]
        for pairs in ([good], [(good,)], [(good, good, good)], [(good, good), None], None, "ab"):
            calls.append(("value_destination_pairs", lambda p=pairs: OPS.batch_reduce(SUM, p)))
        for to in (None, "", ["/cpu:0"], "nonsense", "/cpu:99", "/gpu:0", empty):
            calls += [
                ("destinations", lambda to=to: OPS.reduce(SUM, good, to)),
                ("pair 1: .*destinations", lambda to=to: both((good, good), (good, to))),
                ("destinations", lambda to=to: OPS.broadcast(1.0, to)),
                ("destinations", lambda to=to: OPS._gather(good, to, 0)),
            ]
        for axis in ("0", True, tf.constant(0.0), [1]):
            message = "axis must be an int, or a 0-D tensor of ints; got"
            calls.append((message, lambda axis=axis: OPS._gather(pair, "/cpu:0", axis)))
        for axis in (1, -2, np.int64(1), tf.constant(1)):
            message = f"axis must .* got {int(axis)} for the shape"
            calls.append((message, lambda axis=axis: OPS._gather(pair, "/cpu:0", axis)))
        for axis, other, told in (
            (1, [3, 1], r"but for axis 1; got \(2, None\) on .*CPU:0 and \(3, None\) on .*CPU:1"),
            (-1, [3, 1], r"but for axis -1; got \(2, None\) on .* and \(3, None\) on"),
            (0, [2, 2], r"got \(None, 1\) on .* and \(None, 2\) on"),
            (-2, [2, 2], r"got \(None, 1\) on .* and \(None, 2\) on"),
        ):
            uneven = tu.per_replica([tf.ones([2, 1]), tf.ones(other)])
            calls.append((told, lambda v=uneven, axis=axis: OPS._gather(v, "/cpu:0", axis)))
        for device in ("/cpu:77", "gpu", "/job:worker/task:5/cpu:0"):
            ops = tfcdo.ReductionToOneDevice(device)
            message = f"reduce_to_device .*exists; got '{device}'"
            calls.append((message, lambda ops=ops: ops.reduce(SUM, table, table)))
        large = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=8.0)
        any_true = tfcdo.ReductionToOneDevice(accumulation_fn=tf.math.reduce_any)
        for_four = tfcdo.AutoAllReduce(topology=tfcdo.topology.preset("nvswitch", 4))
        by_nccl = tfcdo.NcclAllReduce(require_nccl=True, sparse_as_dense=True)
        booleans = tu.per_replica([True, False])
        calls += [
            ("value must be a tensor.*got None", lambda: OPS.reduce(SUM, None, "/cpu:0")),
            ("^.{0,300}$", lambda: OPS.batch_reduce(SUM, [range(10_000)])),  # type: ignore[list-item]
            ("IndexedSlices", lambda: OPS._gather(table, "/cpu:1", 0)),
            ("options", lambda: OPS.batch_reduce(SUM, [(good, good)], "nonsense")),
            ("options", lambda: OPS._gather(good, good, 0, "nonsense")),
            ("options.bytes_per_pack .*; got 8.0", lambda: OPS.reduce(SUM, good, good, large)),
            ("tensor must be a tensor.*got None", lambda: OPS.broadcast(None, "/cpu:0")),
            ("tensor must be one tensor", lambda: OPS.broadcast(good, "/cpu:0")),
            ("adds; got bool", lambda: any_true.reduce(MEAN, booleans, booleans)),
            ("topology must .*3; 'nvswitch' has 4", lambda: for_four.reduce(MEAN, good, good)),
            ("require_nccl.*NcclAllReduce.*CPU", lambda: by_nccl.reduce(SUM, table, table)),
        ]

        @tf.function(autograph=False)
        def trace() -> None:
            for message, call in calls:
                errors = (ValueError, TypeError, RuntimeError)
                self.assertRaisesRegex(errors, f"(?s){message}", call)

        with tu.kernels_for():
            graph = trace.get_concrete_function().graph
        self.assertEmpty(graph.get_operations())

    def test_unknown_shapes_and_devices(self):
        shapes = (None, [None], [2], [3], [None, None], [None, 2], [None, 3])

        @tf.function(input_signature=[tf.TensorSpec(s) for s in shapes], autograph=False)
        def trace(unknown, vector, two, three, matrix, wide, wider):
            # The last two are compatible with the first, but not with each other.
            value = tf_internals.per_replica([vector, two, three])
            with self.assertRaisesRegex(ValueError, r"pair 0: .*shape.*\(2,\).*\(3,\)"):
                OPS.batch_reduce(SUM, [(value, value)])
            value = tf_internals.per_replica([unknown, matrix, wide])
            OPS._gather(value, "/cpu:0", 0)
            value = tf_internals.per_replica([unknown, matrix, wide, wider])
            with self.assertRaisesRegex(ValueError, r"got \(None, 2\) on .* and \(None, 3\) on"):
                OPS._gather(value, "/cpu:0", 0)
            with self.assertRaisesRegex(ValueError, "destinations .*at least one device"):
                OPS.reduce(SUM, 1.0, two)

        trace.get_concrete_function()


if __name__ == "__main__":
    tf.test.main()
