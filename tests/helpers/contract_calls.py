"""The contract: broadcast, gather, and the refusal of bad input."""

from __future__ import annotations

from typing import Any

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

    # Bad input.

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
