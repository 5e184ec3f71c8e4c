"""Several hosts, processes of this machine: values of every kind, hosts that differ, training."""

import contextlib
import dataclasses
import gc
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import clusters
import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from clusters import disagreeing, other_strategy, scope, weights
from keras_training import dense_layers, model_of
from testing_utils import DTYPES, MEAN, SUM

import tfcdo
from tfcdo import tf_internals
from tfcdo.cluster import session
from tfcdo.plan import algorithms, decide
from tfcdo.topology import detection
from tfcdo.topology.presets import preset

COPIED = (*DTYPES, tf.bool)
SHAPE = (3, 5)


def all_values(strategy: Any) -> None:
    """Checks everything: in functions where hosts have several devices, and otherwise eagerly."""
    case = _Case(strategy)
    check_all_reduces(strategy)
    checks = (case.slices, case.gather, case.gather_structure, case.refused, case.cross_replica)
    for check in (*checks, case.loop, case.sizes):
        check()


def _context() -> Any:
    return tf.distribute.get_replica_context()


def _events_counted() -> int:
    """Counts how often collectives have been entered or left on this host."""
    shared = session.current()
    assert shared is not None
    return sum(one.marks.count() for one in shared.watch._watched.values())


def check_all_reduces(strategy: Any, *reduce_ops: Any) -> None:
    """Checks all-reduces of dense values only."""
    case = _Case(strategy)
    case.all_reduce(*(reduce_ops or (SUM, MEAN)))
    case.gradient()
    case.options()


class _Case:
    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.replicas = strategy.num_replicas_in_sync
        self.local = len(strategy.extended.worker_devices)
        self.hosts = self.replicas // self.local
        self.host = strategy.cluster_resolver.task_id
        self.wrap: Any = tu.function if self.local > 1 else lambda body: body

    def each(self, make: Callable[[int], Any]) -> list[Any]:
        return [make(replica) for replica in range(self.replicas)]

    def distributed(self, values: Sequence[Any]) -> Any:
        """Gives each replica of this host its own of these tensors, arrays or slices."""

        def own(replica: int) -> Any:
            value = values[replica]
            return value if isinstance(value, tf.IndexedSlices) else tf.constant(value)

        return tu.distributed(self.strategy, own)

    def same(self, expected: Any, value: Any, dtype: Any = None, slack: float = 0.0) -> None:
        """Asserts values, exact but for some roundings, on all replicas of this host."""
        for part in self.strategy.experimental_local_results(value):
            np.testing.assert_allclose(tu.exact(part), expected, rtol=slack, atol=slack)
            assert dtype is None or part.dtype == dtype, (part.dtype, dtype)

    def all_reduce(self, *reduce_ops: Any) -> None:
        values = {
            dtype.name: self.each(lambda r, dtype=dtype: tu.numbers(SHAPE, dtype, r, limit=8))  # type: ignore[misc]
            for dtype in DTYPES
        }
        values["scalar"] = self.each(lambda r: np.float32(r + 1))
        values["empty"] = self.each(lambda r: tf.constant(np.zeros([0, 2], np.float32)))
        # Numbers of 8 bits whose sums have more, so that a sum that is rounded is seen.
        wide = [tu.numbers((99,), tf.float32, r, 20_000) for r in range(self.replicas)]
        values["wide"] = [tf.cast(own, tf.bfloat16).numpy() for own in wide]
        for reduce_op in reduce_ops:

            def step(values: Any, reduce_op: Any = reduce_op) -> Any:
                return _context().all_reduce(reduce_op, values)

            reduce = self.wrap(lambda values, step=step: self.strategy.run(step, (values,)))
            results = reduce({name: self.distributed(own) for name, own in values.items()})
            for name, own in values.items():
                dtype = tu.result_dtype(reduce_op, tf.as_dtype(own[0].dtype))
                expected, slack = tu.oracle(reduce_op, own), 0.0
                if name == "wide":
                    expected = tu.exact(tf.cast(expected, tf.bfloat16))
                elif reduce_op == MEAN and name != "scalar":  # Sums of values up to 8 are exact.
                    slack = 8 * tu.unit_roundoff(dtype)
                self.same(expected, results[name], dtype, slack)

    def slices(self) -> None:
        """Four tables together: of three dtypes, and one of fewer bytes than its rows."""
        kinds = [
            # The table's rows, the shape of a row, dtypes, and each replica's number of rows.
            (9, (2,), tf.float32, tf.int64, 1), (4, (), tf.float32, tf.int32, 1),
            (9, (1, 3), tf.bfloat16, tf.int64, 1), (3, (2,), tf.int64, tf.int64, 7),
        ]  # fmt: skip

        def slices(replica: int, kind: Any) -> tf.IndexedSlices:
            # The first replica has no rows, all others the row of index 1.
            size, shape, dtype, index_dtype, more = kind
            return tf.IndexedSlices(
                tf.constant(tu.numbers((replica * more, *shape), dtype, replica, limit=8)),
                tf.constant((np.arange(replica * more) + 1) % size, index_dtype),
                tf.constant([size, *shape], tf.int64),
            )

        given = [[slices(replica, kind) for replica in range(self.replicas)] for kind in kinds]

        def merge(strategy: Any, *values: Any) -> Any:
            return tuple(strategy.extended.batch_reduce_to(MEAN, [(one, one) for one in values]))

        def step(*values: tf.IndexedSlices) -> Any:
            return _context().merge_call(merge, values)

        reduce = self.wrap(lambda *values: self.strategy.run(step, values))
        results = reduce(*map(self.distributed, given))
        for kind, own, result in zip(kinds, given, results, strict=True):
            expected = np.concatenate([tu.exact(one.values) for one in own]) / self.replicas
            indices = np.concatenate([one.indices for one in own])
            for part in self.strategy.experimental_local_results(result):
                assert part.indices.dtype == kind[3]
                assert part.values.dtype == tu.result_dtype(MEAN, kind[2])
                np.testing.assert_array_equal(part.indices, indices)
                slack = 4 * tu.unit_roundoff(part.values.dtype)
                np.testing.assert_allclose(tu.exact(part.values), expected, rtol=slack)

    def gather(self) -> None:
        """Gathers along other axes, and nothing; in one function, whose tracing takes longest."""
        given = []
        for axis in (1, -1):
            shapes = np.full([self.replicas, 3], 2)
            shapes[:, axis] += range(self.replicas)
            given.append((axis, [np.full(shape, r, np.float32) for r, shape in enumerate(shapes)]))
        # Nothing on any host: a collective of no elements would never end.
        for shape, axis in (((0, 2), 0), ((3, 0), 1), ((3, 0), 0)):
            given.append((axis, [np.zeros(shape, np.float32)] * self.replicas))

        def gather(values: Sequence[Any]) -> list[Any]:
            return [self.strategy.gather(value, axis) for (axis, _), value in zip(given, values)]

        results = self.wrap(gather)([self.distributed(own) for _, own in given])
        for gathered, (axis, own) in zip(results, given, strict=True):
            self.same(np.concatenate(own, axis), gathered, tf.float32)

    def gather_structure(self) -> None:
        """Values of all dtypes and of several shapes in one go, where replicas meet and on each."""
        # The first has rows everywhere, like a batch.
        shapes: list[Callable[[int], tuple[int, ...]]] = [
            lambda replica: (2 * replica + 1,),
            lambda replica: (replica, 2),
            lambda replica: (1, 2, 1),
        ]
        kinds = [(shape, tf.float32) for shape in shapes]
        kinds += [(shapes[index % 3], dtype) for index, dtype in enumerate(COPIED)]
        given = [
            [tf.cast(tf.fill(shape(r), r), dtype) for r in range(self.replicas)]
            for shape, dtype in kinds
        ]
        same = given[2][0]  # All replicas hold this object.
        given.insert(5, [same] * self.replicas)
        values = [self.distributed(own) for own in given]

        def on_each(values: Any) -> Any:
            return _context().all_gather([*values[:5], same], axis=0)

        for body, count in (
            (lambda values: self.strategy.gather(values, 0), len(values)),
            (lambda values: self.strategy.run(on_each, (values,)), 6),
        ):
            step = self.wrap(body)
            gathered = step(values[:count])
            if isinstance(step, tf.types.experimental.PolymorphicFunction):
                # All values of a dtype in one collective, after one for how many rows there are.
                nodes = step.get_concrete_function(values[:count]).graph.as_graph_def().node
                collectives = [node.name for node in nodes if "Collective" in node.op]
                assert len(collectives) <= 1 + len(COPIED), collectives
            for own, result in zip(given[:count], gathered, strict=True):
                self.same(tu.exact(np.concatenate(own)), result, own[0].dtype)

    def refused(self) -> None:
        """Texts are refused before a collective has begun, which would never end."""
        texts = self.distributed(self.each(lambda replica: [str(replica)]))
        numbers = self.distributed(self.each(lambda replica: [replica]))
        before = _events_counted()
        for value in (texts, {"numbers": numbers, "texts": texts}):
            told = "dtype that TensorFlow gathers between hosts; got string"
            with np.testing.assert_raises_regex(ValueError, told):
                self.wrap(lambda value=value: self.strategy.gather(value, 0))()
        with tf.Graph().as_default(), np.testing.assert_raises_regex(ValueError, "of TensorFlow 1"):
            self.strategy.reduce("SUM", tf.constant(1.0), axis=None)
        assert _events_counted() == before, (before, _events_counted())

    def cross_replica(self) -> None:
        counted = self.distributed(self.each(lambda r: r + 1))
        rows = self.distributed(self.each(lambda r: np.full([r + 1, 2], r, np.float32)))
        total = sum(range(1, self.replicas + 1))
        of_rows = sum(r * (r + 1) for r in range(self.replicas))

        def reduce(counted: Any, rows: Any, own: Any) -> Any:
            reduce = self.strategy.reduce
            return [
                reduce("SUM", counted, axis=None),
                *(reduce("MEAN", counted, axis=axis) for axis in (None, 0)),
                reduce("MEAN", rows, axis=0),
                *reduce("SUM", {"loss": rows, "count": counted}, axis=0).values(),
                reduce("SUM", own, axis=None),
            ]

        mean = total / self.replicas
        # A value of the host's own, as of early stopping, counts once a host.
        of_hosts = sum(range(1, self.hosts + 1))
        expected = [total, mean, mean, [of_rows / total] * 2, [of_rows] * 2, total, of_hosts]
        results = self.wrap(reduce)(counted, rows, tf.constant(self.host + 1.0))
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-6)
        same = tf.constant([1.0, 2.0])  # All replicas hold this object.
        sums = self.wrap(lambda: self.strategy.run(lambda: _context().all_reduce(SUM, same)))()
        self.same([self.replicas, 2 * self.replicas], sums)
        with self.strategy.scope():  # The chief sends its first value.
            empty = tf.Variable(np.zeros([0, 2], np.float32))
            count = tf.Variable(0, aggregation=tf.VariableAggregation.SUM)
        self.same(np.zeros([0, 2]), empty, tf.float32)
        self.wrap(lambda: self.strategy.run(lambda: count.assign_add(1)))()
        self.same(self.replicas, count)

    def gradient(self) -> None:
        """The sum on each replica depends on all inputs: the gradient is a sum over replicas."""

        def step() -> tf.Tensor:
            value = tf.constant([1.0, 2.0])
            with tf.GradientTape() as tape:
                tape.watch(value)
                total = _context().all_reduce(SUM, value)
                loss = tf.reduce_sum(total * total)
            return tape.gradient(loss, value)

        expected = 2.0 * self.replicas**2 * np.array([1.0, 2.0])
        self.same(expected, tf.function(lambda: self.strategy.run(step))())

    def loop(self) -> None:
        """Collectives in a loop of TensorFlow's, called twice."""

        @tf.function
        def repeat(value: Any) -> tf.Tensor:
            factor = tf.constant(1.0)
            for _ in tf.range(3):

                def step(value: tf.Tensor, factor: tf.Tensor = factor) -> tf.Tensor:
                    return _context().all_reduce(SUM, value * factor)

                factor = self.strategy.reduce("MEAN", self.strategy.run(step, (value,)), None)
            return factor

        value = self.distributed(self.each(lambda r: float(r + 1)))
        for _ in range(2):
            total = sum(range(1, self.replicas + 1))
            np.testing.assert_allclose(repeat(value).numpy(), total**3, rtol=1e-6)

    def sizes(self) -> None:
        """A size that differs from step to step; it must not differ from host to host."""
        strategy, run, spec = self.strategy, self.strategy.run, [tf.TensorSpec([None])]
        add = tf.function(lambda v: strategy.reduce("SUM", run(tf.square, (v,)), None), spec)
        for size in (*range(1, 65), 128):
            np.testing.assert_equal(add(tf.fill([size], 2.0)).numpy(), [4.0 * self.replicas] * size)
        gather = lambda v: strategy.gather(run(tf.expand_dims, (v, 0)), 0)  # noqa: E731
        for call, more in ((add, 1), (add, 9), (gather, 1)):  # Padded to one size, and to two.
            with np.testing.assert_raises_regex(tf.errors.InvalidArgumentError, "different sizes"):
                call(tf.ones([22 + more * (self.host == 0)]))

    def options(self) -> None:
        """Packs of a few bytes: many collectives, on all devices in turn."""
        numbers = self.each(lambda r: tu.numbers((40,), tf.float32, r))
        value = self.distributed(numbers)
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=32)
        [result] = self.strategy.extended.batch_reduce_to(SUM, [(value, value)], options)
        self.same(tu.oracle(SUM, numbers), result)


# Flat and not, some of one shape, which are stacked; the sum of no two sizes is a third one's.
_SHAPES = ((400,), (20, 30), (1000,), (), (20, 30), (7, 11), (1300,), (2, 2, 3), (7, 11))

# The argument's name in the error, its values on host 0 and on others, and how the error shows
# each; `mirrored_test` has the other arguments.
SETTINGS: Sequence[tuple[Any, ...]] = (
    ("", {"cross_device_ops": tfcdo.AutoAllReduce()}, {}, "AutoAllReduce", "by default"),
    ("shard_optimizer_state", {}, {"shard_optimizer_state": True}, "False", "True"),
    ("devices_per_worker", {}, {"devices_per_worker": 1}, "2", "1"),
)


def unlike_refused(strategy: Any) -> None:
    """Makes strategies whose arguments differ between hosts: refused, before any step."""
    is_chief = strategy.cluster_resolver.task_id == 0
    for number, (key, first, other, left, right) in enumerate(SETTINGS):
        first_shown, other_shown = f"[^:]*{left}[^:]* on host 0", f"[^:]*{right}[^:]* on host 1"
        either = f"{first_shown}, {other_shown}|{other_shown}, {first_shown}"
        with disagreeing(f"{number} {key}", f"differ: .*{key}: ({either})"):
            other_strategy(strategy, **(first if is_chief else other))
    _refused_steps(strategy, is_chief)
    _refused_batches(strategy, is_chief)


def _refused_steps(strategy: Any, is_chief: bool) -> None:
    """Takes steps that differ between hosts although their strategies do not."""

    def packed_otherwise(other: Any) -> None:
        with mock.patch.object(algorithms, "_SECONDS_PER_OP", 6.5e-6 if is_chief else 0.0):
            decide.decide.cache_clear()
            _check_sums(other)

    def another_op(other: Any) -> None:
        value = other.run(lambda: tf.ones([3]))
        other.extended.batch_reduce_to(SUM if is_chief else MEAN, [(value, value)])

    def size_known_on_one_host(other: Any) -> None:
        def on_replica(own: tf.Tensor) -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce(SUM, own)

        signature = [tf.TensorSpec([3] if is_chief else [None])]
        step = tf.function(lambda value: other.run(on_replica, [value]), signature, autograph=False)
        step(tf.ones([3]))

    cases = {
        "size": (size_known_on_one_host, r"values, element 0 of 1: f\S*\[(3|\?)\] on host \d"),
        "packing": (packed_otherwise, r"packs, element \d of \d: \d+ elements on CPU:"),
        "SUM and MEAN": (another_op, "mean over: (None.* 4|4.* None)"),
    }
    for case, (run, pattern) in cases.items():
        with disagreeing(case, f"differ: .*{pattern}"):
            run(other_strategy(strategy))


def _refused_batches(strategy: Any, is_chief: bool) -> None:
    """Fits on batches that each host makes, and of which each takes the others' to be alike."""
    size, arrays = 4 if is_chief else 6, (np.ones([24, 4]), np.ones([24, 2]))
    rows = tf.data.Dataset.from_tensor_slices(arrays).repeat().batch(size, drop_remainder=True)
    with strategy.scope():
        model = model_of(dense_layers, "sgd", run_eagerly=False)
    batches = strategy.distribute_datasets_from_function(lambda _: rows)
    with disagreeing("batches", "examples of a replica: (4.* 6|6.* 4)"):
        model.fit(batches, steps_per_epoch=2, shuffle=False, verbose=0)
    endless = strategy.distribute_datasets_from_function(lambda _: rows.take(3 - 4 * is_chief))
    with disagreeing("endless", r"endless on all hosts or on none; got the lengths \[-1, 3\]"):
        model.fit(endless, steps_per_epoch=2, shuffle=False, verbose=0)
    with disagreeing("batch size", r"batch_size: (4.* 6|6.* 4).*class_weight: \[\(1, [12]\)\]"):
        model.fit(*arrays, size, verbose=0, class_weight={1: 1 + is_chief})
    with disagreeing("weights", r"differ: shapes of sample_weight: \[(None|\(24,\))\]"):
        model.fit(*arrays, verbose=0, sample_weight=arrays[1][:, 0] if is_chief else None)
    unlike = type("Unlike", (keras.utils.PyDataset,), {"num_batches": 2 + is_chief})()
    with disagreeing("length", "differ: batches of x: (2.* 3|3.* 2)"):
        model.fit(unlike, verbose=0)
    with disagreeing("call", "differ: .*call 2 of fit"):  # A slow worker may be at the first.
        model.fit(*arrays, epochs=0, verbose=0)
        model.fit(*arrays, epochs=0) if is_chief else model.evaluate(*arrays, verbose=0)
    rows = tf.data.Dataset.from_tensor_slices((*arrays, arrays[1])[: 2 + is_chief]).batch(8)
    model.steps_per_execution = 1 + is_chief
    with disagreeing("tensors", "tensors of x: (2.* 3|3.* 2).*; steps_per_execution: [12] "):
        model.fit(rows, verbose=0)
    with disagreeing("optimizer", "making of an optimizer (Adam|SGD)"), strategy.scope():
        (keras.optimizers.SGD if is_chief else keras.optimizers.Adam)()
    with strategy.scope():
        model.layers[0].kernel_regularizer = keras.regularizers.L2(1 + is_chief)
        model.compile("sgd", keras.losses.Huber(1.0 + is_chief), metrics=["mae"] * is_chief)
    with disagreeing("loss", r"metrics: [01] .*loss.*: delta: [12]\.0 .*regularizer: l2: [12]\.0 "):
        model.fit(*arrays, verbose=0)


def unlike_correct(strategy: Any) -> None:
    """Sums on hosts that take their machines to be different."""
    with contextlib.ExitStack() as stack:
        if strategy.cluster_resolver.task_id:
            pcie = preset("pcie", len(strategy.extended.worker_devices))
            machine = dataclasses.replace(pcie, addition_bandwidth=1e3)
            stack.enter_context(
                mock.patch.object(detection, "_choose", return_value=(machine, "for a test"))
            )
        detection.detect_with_reason.cache_clear()
        for arguments in (
            {"exchange": "bfloat16"},
            {"cross_device_ops": tfcdo.HierarchicalCopyAllReduce(wire_dtype="bfloat16")},
            {"cross_device_ops": tfcdo.AllReduceCrossDeviceOps("packed_trees", 0)},
        ):
            _check_sums(other_strategy(strategy, **arguments))
    detection.detect_with_reason.cache_clear()


def _check_sums(strategy: Any) -> None:
    count = strategy.num_replicas_in_sync
    arrays = [  # Numbers whose sums over a few replicas are exact, in 16 bits too.
        [tu.numbers(shape, tf.float32, 99 * position + r, 9) for r in range(count)]
        for position, shape in enumerate(_SHAPES)
    ]
    devices = strategy.extended.worker_devices
    place = lambda own: lambda r: tu.place(own[r], devices[r % len(devices)])  # noqa: E731
    values = [tu.distributed(strategy, place(own)) for own in arrays]
    results = strategy.extended.batch_reduce_to(SUM, [(value, value) for value in values])
    for own, result in zip(arrays, results, strict=True):
        _Case(strategy).same(tu.oracle(SUM, own), result)


def end_of_data(strategy: Any) -> dict[str, np.ndarray]:
    """Fits several steps at a time, and decays weights, on data of which one host has less."""
    draw = np.random.default_rng(2).normal
    options: dict[str, Any] = {"run_eagerly": False, "steps_per_execution": 2}
    # Eleven examples on one host and five on the other, in batches of two for each replica.
    parts = [draw(size=(rows, 3)).astype(np.float32) for rows in (11, 5)]
    with scope(strategy):
        optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.3)
        model = model_of(lambda: [keras.Input((3,)), keras.layers.Dense(1)], optimizer, **options)

    def dataset(arrays: list[np.ndarray]) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(
            lambda: ((array, array[:, :1] > 0) for array in arrays),
            output_signature=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1], tf.bool)),
        )

    if strategy:
        batches = np.split(parts[strategy.cluster_resolver.task_id], range(2, 11, 2))
        own = dataset([*filter(len, batches)])
        data = strategy.distribute_datasets_from_function(lambda _: own)
        length = tf.data.experimental.assert_cardinality(len([*filter(len, batches)]))
        known = strategy.distribute_datasets_from_function(lambda _: own.apply(length))
        alike = strategy.distribute_datasets_from_function(lambda _: own.repeat().take(4))
        model.evaluate(alike, verbose=0, callbacks=[seen := keras.callbacks.Callback()])
        assert seen.params["steps"] == 4 // len(strategy.extended.worker_devices), seen.params
    else:
        whole = (np.concatenate([part[s : s + 4] for part in parts]) for s in (0, 4, 8))
        data = known = dataset([*whole])
    found = model.fit(data, epochs=2, verbose=0, validation_data=known).history
    return {**weights(strategy, model.weights), **found, "steps": optimizer.iterations.numpy()}


def explained(strategy: Any) -> None:
    """What a strategy explains is what it runs: devices, packs in their order, bytes."""
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=40_000)
    shapes = [(100,), (120, 100), (7, 30), (3_500,), (9_000,)]
    ops = tfcdo.HierarchicalCopyAllReduce(num_packs=0)
    other = other_strategy(strategy, options, cross_device_ops=ops)

    @tf.function(autograph=False)
    def step() -> Any:
        def on_each() -> Any:
            # Not constants, which would all be one, and be added before the step.
            values = [tf.random.uniform(shape) for shape in shapes]
            return tf.distribute.get_replica_context().all_reduce("SUM", values)

        return other.run(on_each)

    ran = {
        int(found[1]): op.inputs[0].shape.num_elements() * 4
        for op in step.get_concrete_function().graph.get_operations()
        if op.type == "CollectiveReduceV2" and (found := re.search(r"tfcdo/pack(\d+)/", op.name))
    }
    told = other.explain(shapes)
    packs = [pack.num_bytes for pack in told.packs]
    assert [ran[pack] for pack in sorted(ran)] == packs and len(set(packs)) > 1, (ran, packs)
    assert told.devices == other.extended.worker_devices, told
    with tfcdo.trace("0.json") if tfcdo.is_chief() else contextlib.nullcontext() as traced:
        step()  # TensorFlow's profiler crashes at times on a host that is not the chief.
    runs = traced.recording.runs if traced and traced.recording else ()
    sent = {(run.pack, run.way) for run in runs if run.kind == "broadcast"}
    assert sent == {(p, ("0→1", "1→0")[p % 2]) for p in range(len(packs)) if traced}, sent
    told = tfcdo.AutoAllReduce().explain(shapes)
    assert set(strategy.extended.worker_devices) <= set(told.devices), told.devices
    assert len({device.rpartition("/")[0] for device in told.devices}) == 1, told.devices


def flat(strategy: Any) -> dict[str, np.ndarray]:
    """All-reduces with one collective over all replicas, as NCCL would, by rings here."""
    given = [np.random.default_rng(r).normal(size=1001).astype(np.float32) for r in range(4)]
    if strategy is None:
        return {"replica_sums": np.stack([np.sum(given, 0, np.float64)])}
    extended = strategy.extended
    ops = extended._cross_device_ops
    between = dataclasses.replace(ops._options.between, flat=True)
    extended._cross_device_ops = ops._between(ops._network, between)
    members, reduce = [], tf.raw_ops.CollectiveReduceV2

    def counted(**arguments: Any) -> tf.Tensor:
        members.append(arguments["group_size"])
        return reduce(**arguments)

    def summed(factor: float) -> Any:
        numbers = tu.distributed(strategy, lambda r: tf.constant(factor * given[r]))
        [total] = extended.batch_reduce_to("SUM", [(numbers, numbers)])
        return np.stack(strategy.experimental_local_results(total))

    with mock.patch.object(tf.raw_ops, "CollectiveReduceV2", counted):
        check_all_reduces(strategy, MEAN)
        total, traced = summed(1.0), len(members)
        np.testing.assert_array_equal(summed(2.0), 2.0 * total)
        assert len(members) == traced, (len(members), traced)
    extended._cross_device_ops = ops
    assert set(members) == {strategy.num_replicas_in_sync}, set(members)
    return {"replica_sums": total}


def functions_end(strategy: Any) -> None:
    """Asserts that graphs of sums between hosts and of their gradients end with their functions."""
    for wire in (None, "int8"):
        other = other_strategy(strategy, exchange=wire)
        ops = other.cross_device_ops

        def step(ops: Any = ops, devices: Any = other.extended.worker_devices) -> Any:
            values = [tu.place(tf.ones([2000]), device) for device in devices]
            with tf.GradientTape() as tape:
                tape.watch(values)
                value = tf_internals.per_replica(values)
                total, _ = ops.batch_reduce(SUM, [(value, value)] * 2)
                sums = strategy.experimental_local_results(total)
                loss = tf.add_n([*map(tf.reduce_sum, sums)])
            return tape.gradient(loss, values)

        function = tf.function(step, autograph=False)
        expected = np.full([2, 2000], strategy.num_replicas_in_sync)
        np.testing.assert_equal(np.stack(function()), expected)
        graph = weakref.ref(function.get_concrete_function().graph)
        del function
        gc.collect()
        assert graph() is None, wire


def another_strategy(strategy: Any) -> None:
    """Sums with a strategy that the process makes after its first one."""
    other = other_strategy(strategy)
    assert not hasattr(other.extended, "_check_health_thread"), "TensorFlow ends collectives, too"
    check_all_reduces(other)


_TIMEOUT = 240.0
_TRAINING = ("end_of_data", "flat")
_OTHERS = ("unlike_correct", "unlike_refused", "explained", "all_values", "functions_end")


class TrainingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (2, 2, (*_OTHERS, *_TRAINING)), (3, 1, ("all_values",)), (1, 2, ("another_strategy",))
    )
    def test_as_one_device(self, hosts, devices, names):
        results, _ = clusters.run_scenarios(hosts, __file__, devices, names, _TIMEOUT)
        for name in set(_TRAINING) & set(names):
            for key, expected in globals()[name](None).items():
                with self.subTest(f"{name}: {key}"):
                    self.check(key, expected, [own[key] for own in results[name]])

    def check(self, key, expected, results):
        if key.startswith("replica"):
            [expected], results = expected, np.concatenate(results)
            self.assertLen(results, 4)
            self.assertLen({replica.tobytes() for replica in results}, 1)
        for actual in results:
            np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)


if __name__ == "__main__":
    tf.test.main()
