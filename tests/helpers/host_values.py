"""Values of every kind, reduced and gathered over all replicas of all hosts; numpy checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import testing_utils as tu
from testing_utils import DTYPES, MEAN, SUM

from tfcdo.cluster import session

COPIED = (*DTYPES, tf.bool)
SHAPE = (3, 5)


def all_values(strategy: Any) -> None:
    """Checks everything: in functions where hosts have several devices, and otherwise eagerly."""
    case = _Case(strategy)
    wrap: Any = _function if case.local > 1 else lambda body: body
    case.all_reduce(wrap)
    case.slices(wrap)
    case.gather(wrap)
    case.gather_structure(wrap)
    case.refused(wrap)
    case.cross_replica(wrap)
    case.gradient()
    case.loop()
    case.options()


def _function(body: Any) -> Any:
    return tf.function(body, autograph=False)


def _events_counted() -> int:
    """Counts how often collectives have been entered or left on this host."""
    shared = session.current()
    assert shared is not None
    return sum(one.marks.count() for one in shared.watch._watched.values())


def check_all_reduces(strategy: Any) -> None:
    """Checks all-reduces of dense values only, in a function."""
    case = _Case(strategy)
    case.all_reduce(_function)
    case.gradient()
    case.options()


class _Case:
    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.replicas = strategy.num_replicas_in_sync
        self.local = len(strategy.extended.worker_devices)
        self.hosts = self.replicas // self.local
        self.host = strategy.cluster_resolver.task_id

    def per_replica(self, make: Callable[[int], Any]) -> Any:
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: make(context.replica_id_in_sync_group)
        )

    def distributed(self, arrays: Sequence[Any]) -> Any:
        return self.per_replica(lambda replica: tf.constant(arrays[replica]))

    def same(self, expected: np.ndarray, value: Any, dtype: tf.DType | None = None) -> None:
        """Asserts exact values, equal on all replicas of this host."""
        for part in self.strategy.experimental_local_results(value):
            np.testing.assert_array_equal(tu.exact(part), expected)
            assert dtype is None or part.dtype == dtype, (part.dtype, dtype)

    def all_reduce(self, wrap: Any) -> None:
        numbers = {
            dtype.name: [tu.numbers(SHAPE, dtype, r, limit=8) for r in range(self.replicas)]
            for dtype in DTYPES
        }
        scalars = [np.float32(r + 1) for r in range(self.replicas)]
        arguments = {name: self.distributed(own) for name, own in numbers.items()}
        arguments["scalar"] = self.distributed(scalars)
        # Numbers of 8 bits whose sums have more, so that a sum that is rounded is seen.
        wide = [
            tf.cast(tu.numbers((99,), tf.float32, r, 20_000), tf.bfloat16).numpy()
            for r in range(self.replicas)
        ]
        arguments["wide"] = self.distributed(wide)
        arguments["empty"] = self.per_replica(lambda r: tf.zeros([0, 2]))
        # Of means, one dtype of each kind of result.
        of_means = (tf.bfloat16, tf.float32, tf.int8, tf.int32, tf.complex64)
        for reduce_op, dtypes in ((SUM, DTYPES), (MEAN, of_means)):
            kept = {one.name for one in dtypes} | (arguments.keys() - numbers.keys())
            given = {name: value for name, value in arguments.items() if name in kept}

            def step(values: Mapping[str, tf.Tensor], reduce_op: Any = reduce_op) -> Any:
                return tf.distribute.get_replica_context().all_reduce(reduce_op, values)

            results = wrap(lambda values, step=step: self.strategy.run(step, (values,)))(given)
            self.same(tu.oracle(reduce_op, scalars), results["scalar"], tf.float32)
            self.same(np.zeros([0, 2]), results["empty"], tf.float32)
            once = tf.cast(tu.oracle(reduce_op, wide), tf.bfloat16)
            self.same(tu.exact(once), results["wide"], tf.bfloat16)
            for dtype in dtypes:
                # All sums of 8 values of up to 8 are exact; means are so for 4 replicas.
                expected = tu.oracle(reduce_op, numbers[dtype.name])
                wanted = tu.result_dtype(reduce_op, dtype)
                for part in self.strategy.experimental_local_results(results[dtype.name]):
                    assert part.dtype == wanted, (part.dtype, wanted)
                    slack = 8 * tu.unit_roundoff(wanted) if reduce_op == MEAN else 0.0
                    np.testing.assert_allclose(tu.exact(part), expected, rtol=slack, atol=slack)

    def slices(self, wrap: Any) -> None:
        """Four tables together: of three dtypes, and one of fewer bytes than its rows."""
        kinds = [
            # The table's rows, the shape of a row, dtypes, and each replica's number of rows.
            (9, (2,), tf.float32, tf.int64, 1),
            (4, (), tf.float32, tf.int32, 1),
            (9, (1, 3), tf.bfloat16, tf.int64, 1),
            (3, (2,), tf.int64, tf.int64, 7),
        ]

        def make(replica: int) -> tuple[tf.IndexedSlices, ...]:
            # The first replica has no rows, all others the row of index 1.
            return tuple(
                tf.IndexedSlices(
                    tf.constant(tu.numbers((replica * more, *shape), dtype, replica, limit=8)),
                    tf.constant((np.arange(replica * more) + 1) % size, index_dtype),
                    tf.constant([size, *shape], tf.int64),
                )
                for size, shape, dtype, index_dtype, more in kinds
            )

        given = list(zip(*(make(replica) for replica in range(self.replicas))))
        arguments = [self.per_replica(lambda r, own=own: own[r]) for own in given]  # type: ignore[misc]
        for reduce_op in (SUM, MEAN):

            def merge(strategy: Any, *values: Any, reduce_op: Any = reduce_op) -> Any:
                pairs = [(value, value) for value in values]
                return tuple(strategy.extended.batch_reduce_to(reduce_op, pairs))

            def step(*values: tf.IndexedSlices, merge: Any = merge) -> Any:
                return tf.distribute.get_replica_context().merge_call(merge, values)

            results = wrap(lambda *values, step=step: self.strategy.run(step, values))(*arguments)
            for kind, own, result in zip(kinds, given, results, strict=True):
                divisor = self.replicas if reduce_op == MEAN else 1
                expected = np.concatenate([tu.exact(one.values) for one in own]) / divisor
                indices = np.concatenate([one.indices for one in own])
                for part in self.strategy.experimental_local_results(result):
                    assert part.indices.dtype == kind[3]
                    assert part.values.dtype == tu.result_dtype(reduce_op, kind[2])
                    np.testing.assert_array_equal(part.indices, indices)
                    slack = 4 * tu.unit_roundoff(part.values.dtype)
                    np.testing.assert_allclose(tu.exact(part.values), expected, rtol=slack)

    def gather(self, wrap: Any) -> None:
        """Gathers along each axis; in one function, whose tracing takes longest."""
        values, axes, expected = [], [], []

        def add(arrays: Sequence[np.ndarray], axis: int) -> None:
            values.append(self.distributed(arrays))
            axes.append(axis)
            expected.append(np.concatenate(arrays, axis))

        boxes = [np.full([r + 1, 2, 2], r, np.float32) for r in range(self.replicas)]
        for axis in (0, 1, -1):
            add([np.moveaxis(box, 0, axis) for box in boxes], axis)
        # Nothing on any host: a collective of no elements would never end.
        for shape, axis in (((0, 2), 0), ((3, 0), 1), ((3, 0), 0)):
            add([np.zeros(shape, np.float32)] * self.replicas, axis)

        def gather(values: Sequence[Any]) -> list[Any]:
            return [self.strategy.gather(value, axis) for value, axis in zip(values, axes)]

        for gathered, wanted in zip(wrap(gather)(values), expected, strict=True):
            assert gathered.dtype == wanted.dtype, (gathered.dtype, wanted.dtype)
            np.testing.assert_array_equal(gathered.numpy(), wanted)

    def gather_structure(self, wrap: Any) -> None:
        """Values of all dtypes and of several shapes in one go, where replicas meet and on each."""
        shapes: Sequence[Callable[[int], tuple[int, ...]]] = (
            lambda replica: (2 * replica + 1,),
            lambda replica: (replica, 2),
            lambda replica: (1, 2, 1),
        )
        # All dtypes, and all shapes of one of them.
        kinds = [(tf.float32, shape) for shape in shapes]
        kinds += [(dtype, shapes[index % 3]) for index, dtype in enumerate(COPIED)]
        arrays = {
            index: [np.full(shape(r), r).astype(dtype.as_numpy_dtype) for r in range(self.replicas)]
            for index, (dtype, shape) in enumerate(kinds)
        }
        value = {index: self.distributed(own) for index, own in arrays.items()}

        def on_each(value: Any) -> Any:
            return tf.distribute.get_replica_context().all_gather(value, axis=0)

        for body, count in (
            (lambda value: self.strategy.gather(value, 0), 4),
            (lambda value: self.strategy.run(on_each, (value,)), len(kinds)),
        ):
            step, own = wrap(body), {index: value[index] for index in range(count)}
            gathered = step(own)
            if isinstance(step, tf.types.experimental.PolymorphicFunction):
                # All values of a dtype in one collective, after one for how many rows there are.
                nodes = step.get_concrete_function(own).graph.as_graph_def().node
                collectives = [node.name for node in nodes if "Collective" in node.op]
                assert len(collectives) <= 1 + len(COPIED), collectives
            for key, result in gathered.items():
                for part in self.strategy.experimental_local_results(result):
                    assert part.dtype == kinds[key][0]
                    np.testing.assert_array_equal(part.numpy(), np.concatenate(arrays[key]))

    def refused(self, wrap: Any) -> None:
        """Texts, which no collective takes, are refused before any has begun.

        One that has begun and never ends would count as waiting for ever, and end the training.
        """
        texts = self.per_replica(lambda replica: tf.constant([str(replica)]))
        numbers = self.per_replica(lambda replica: tf.constant([replica]))
        before = _events_counted()
        for value in (texts, {"numbers": numbers, "texts": texts}):
            try:
                wrap(lambda value=value: self.strategy.gather(value, 0))()
            except ValueError as error:
                assert "dtype that TensorFlow gathers between hosts; got string" in str(error)
            else:
                raise AssertionError("it did not raise")
        assert _events_counted() == before, (before, _events_counted())

    def cross_replica(self, wrap: Any) -> None:
        counted = self.per_replica(lambda r: tf.constant(r + 1))
        rows = self.per_replica(lambda r: tf.fill([r + 1, 2], float(r)))
        total = sum(range(1, self.replicas + 1))
        per_row = sum(r * (r + 1) for r in range(self.replicas)) / total

        def reduce(counted: Any, rows: Any) -> Any:
            loss = {"loss": rows, "count": counted}
            return {
                "sum": self.strategy.reduce("SUM", counted, axis=None),
                "mean": self.strategy.reduce("MEAN", counted, axis=None),
                "scalar along an axis": self.strategy.reduce("MEAN", counted, axis=0),
                "rows": self.strategy.reduce("MEAN", rows, axis=0),
                "structure": self.strategy.reduce("SUM", loss, axis=0),
            }

        results = wrap(reduce)(counted, rows)
        assert results["sum"].numpy() == total
        np.testing.assert_allclose(results["mean"].numpy(), total / self.replicas, rtol=1e-6)
        np.testing.assert_allclose(
            results["scalar along an axis"].numpy(), total / self.replicas, rtol=1e-6
        )
        np.testing.assert_allclose(results["rows"].numpy(), [per_row] * 2, rtol=1e-6)
        np.testing.assert_allclose(results["structure"]["loss"].numpy(), [per_row * total] * 2)
        assert results["structure"]["count"].numpy() == total
        # A value of the host's own, as of early stopping, counts once a host.
        own = wrap(lambda value: self.strategy.reduce("SUM", value, axis=None))(
            tf.constant(self.host + 1.0)
        )
        assert own.numpy() == sum(range(1, self.hosts + 1))

    def gradient(self) -> None:
        """The sum on each replica depends on all inputs: the gradient is a sum over replicas."""

        @tf.function
        def train() -> Any:
            def step() -> tf.Tensor:
                value = tf.constant([1.0, 2.0])
                with tf.GradientTape() as tape:
                    tape.watch(value)
                    total = tf.distribute.get_replica_context().all_reduce(SUM, value)
                    loss = tf.reduce_sum(total * total)
                return tape.gradient(loss, value)

            return self.strategy.run(step)

        expected = 2.0 * self.replicas * np.array([1.0, 2.0]) * self.replicas
        self.same(expected, train())

    def loop(self) -> None:
        """Collectives in a loop of TensorFlow's, called twice."""

        @tf.function
        def repeat(value: Any) -> tf.Tensor:
            factor = tf.constant(1.0)
            for _ in tf.range(3):

                def step(value: tf.Tensor, factor: tf.Tensor = factor) -> tf.Tensor:
                    return tf.distribute.get_replica_context().all_reduce(SUM, value * factor)

                factor = self.strategy.reduce("MEAN", self.strategy.run(step, (value,)), None)
            return factor

        value = self.per_replica(lambda r: tf.constant(float(r + 1)))
        for _ in range(2):
            total = sum(range(1, self.replicas + 1))
            np.testing.assert_allclose(repeat(value).numpy(), total**3, rtol=1e-6)

    def options(self) -> None:
        """Packs of a few bytes: many collectives, on all devices in turn."""
        numbers = [tu.numbers((40,), tf.float32, r) for r in range(self.replicas)]
        value = self.per_replica(lambda r: tf.constant(numbers[r]))
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=32)
        [result] = self.strategy.extended.batch_reduce_to(SUM, [(value, value)], options)
        self.same(tu.oracle(SUM, numbers), result)
