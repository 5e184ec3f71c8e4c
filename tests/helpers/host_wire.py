"""Hosts all-reduce values that `wire_between` may round, and compare explanations with graphs."""

from __future__ import annotations

import collections
import re
from typing import Any

import graph_testing
import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo import tf_internals
from tfcdo.execute import between
from tfcdo.execute import planned
from tfcdo.plan import summary

WIRE_DTYPES = ("bfloat16", "float16")
_INFINITE = (np.nan, np.inf, -np.inf, np.inf, 1.0)


def numbers(case: str, replica: int) -> np.ndarray:
    """Returns what a replica gives in a case; more than 4 KiB, but for "small"."""
    draw = np.random.default_rng(replica).normal
    match case:
        case "float32":  # A size that no number of hosts divides.
            return draw(size=1501).astype(np.float32)
        case "float64":
            return draw(size=601) * 1e200
        case "far apart":  # Of magnitudes that differ between hosts, up to nearly the largest.
            return (draw(size=1201) * (7e37 if replica == 0 else 1e-30)).astype(np.float32)
        case "small":
            return draw(size=7).astype(np.float32)
        case "exact":
            return np.random.default_rng(replica).integers(-9, 10, 1100).astype(np.float32)
        case "not swallowed":  # 256 + 1 + 1 is 256 if partial sums are rounded to bfloat16.
            return np.full(1100, 256.0 if replica == 0 else float(replica < 3), np.float32)
        case "not finite":
            values = draw(size=1100).astype(np.float32)
            values[: len(_INFINITE)] = np.roll(_INFINITE, replica)
            return values
        case "int32":
            return np.random.default_rng(replica).integers(-(1 << 24), 1 << 24, 1100, np.int32)
        case "float16":
            return draw(size=2101).astype(np.float16)
    raise ValueError(case)


CASES = (
    *("float32", "float64", "far apart", "small", "exact", "not swallowed", "not finite"),
    *("int32", "float16"),
)


def casting(strategy: Any, name: str | None, ops: Any = None) -> Any:
    """Returns a strategy of the same hosts and devices that casts between hosts."""
    return tfcdo.MultiWorkerMirroredStrategy(
        None,
        tf.distribute.experimental.CommunicationOptions(timeout_seconds=200.0),
        devices_per_worker=len(strategy.extended.worker_devices),
        cross_device_ops=ops,
        wire_between=name,
    )


def wire_between(strategy: Any) -> dict[str, np.ndarray]:
    """Sums each case with nothing cast and with each wire dtype, and takes means of integers."""
    results = _sums("uncast", strategy)
    for name in WIRE_DTYPES:
        cast = casting(strategy, name)
        results |= _sums(name, cast)
        results |= _gradient(name, cast)
    return results


def _gradients_sum(context: Any, value: tf.Tensor) -> tf.Tensor:
    """Sums a value in a batch, as gradients are: alone, it would be exact."""
    return context.all_reduce("SUM", [value, tf.zeros([2], value.dtype)])[0]


def _sums(name: str, strategy: Any) -> dict[str, np.ndarray]:
    values = {
        case: strategy.experimental_distribute_values_from_function(
            lambda context, case=case: tf.constant(numbers(case, context.replica_id_in_sync_group))
        )
        for case in CASES
    }

    @tf.function(autograph=False)
    def reduce(values: Any) -> Any:
        def step(values: Any) -> Any:
            context = tf.distribute.get_replica_context()
            # In batches of their own: values of a batch share packs, and packs their scales.
            sums = {case: _gradients_sum(context, value) for case, value in values.items()}
            means = context.all_reduce("MEAN", {c: values[c] for c in ("int32", "float64")})
            alone = context.all_reduce("SUM", values["float32"])
            return {**sums, "mean of int32": means["int32"], "alone": alone}

        return strategy.run(step, (values,))

    return {
        f"{name} {case}": np.stack([p.numpy() for p in strategy.experimental_local_results(total)])
        for case, total in reduce(values).items()
    }


def _gradient(name: str, strategy: Any) -> dict[str, np.ndarray]:
    """Differentiates through the cast: a sum's gradient is the sum of all gradients."""

    @tf.function(autograph=False)
    def differentiate() -> Any:
        def step() -> Any:
            context = tf.distribute.get_replica_context()
            replica = tf.cast(context.replica_id_in_sync_group, tf.float32)
            value = tf.ones([1100])
            with tf.GradientTape() as tape:
                tape.watch(value)
                total = _gradients_sum(context, value)
                loss = tf.reduce_sum(total) * (replica + 1.0)
            return tape.gradient(loss, value)

        return strategy.run(step)

    parts = strategy.experimental_local_results(differentiate())
    return {f"{name} gradient": np.stack([part.numpy() for part in parts])}


def explained(strategy: Any) -> None:
    """Compares explanations with the ops of the graphs that run: packs, bytes and collectives."""
    for ops in (
        tfcdo.HierarchicalCopyAllReduce(num_packs=2),
        tfcdo.HierarchicalCopyAllReduce(wire_dtype="float16"),
        tfcdo.AllReduceCrossDeviceOps("ring"),
    ):
        for wire in (None, "float16"):
            cast = casting(strategy, wire, ops)
            for shapes, dtype in (([(4801,), (30, 70), ()], "float32"), ([(500,)], "bfloat16")):
                _check_explanation(cast, shapes, tf.as_dtype(dtype))


def _check_explanation(strategy: Any, shapes: Any, dtype: tf.DType) -> None:
    ops, devices = strategy.extended._cross_device_ops, strategy.extended.worker_devices
    told = ops.explain(shapes, dtype, devices)

    @tf.function(autograph=False)
    def reduce() -> Any:
        values = []
        for shape in shapes:
            parts = []
            for device in devices:
                with tf.device(device):
                    parts.append(tf.ones(shape, dtype))
            values.append(tf_internals.per_replica(parts))
        results = ops.batch_reduce(tf.distribute.ReduceOp.SUM, [(value, value) for value in values])
        return [strategy.experimental_local_results(result) for result in results]

    num_hosts = ops._num_between_graph_workers
    for results in reduce():
        for result in results:
            np.testing.assert_array_equal(result, np.full(result.shape, num_hosts * len(devices)))
    graph = reduce.get_concrete_function().graph
    copied = graph_testing.copied_bytes(graph, devices)
    assert copied == told.bytes_by_link, (copied, told)
    names = [op.name for op in graph.get_operations()]
    packs = {int(found[1]) for name in names if (found := re.match(r"tfcdo/pack(\d+)/", name))}
    assert packs == set(range(told.num_packs)), (packs, told)
    collectives = [op for op in graph.get_operations() if op.type.startswith("Collective")]
    assert round(sum(map(_bytes_sent, collectives))) == told.bytes_between_hosts, told
    kinds = {kind: n for kind, n in told.num_ops.items() if kind.startswith("Collective")}
    assert collections.Counter(op.type for op in collectives) == kinds, (kinds, collectives)
    plan = planned.recent()[0].plan
    assert summary.num_collectives(plan, between._num_copied) == len(collectives), plan


def _bytes_sent(op: tf.Operation) -> float:
    """The bytes that a host sends in a collective, by a ring or directly."""
    given = graph_testing.num_bytes(op.inputs[0])
    hosts = int(tf.get_static_value(op.inputs[1]))
    parts = {"CollectiveReduceV2": 2 / hosts, "CollectiveAllToAllV2": 1 / hosts}
    return given * (hosts - 1) * parts.get(op.type, 1.0)


def requires_nccl(strategy: Any) -> None:
    """Asserts that NCCL is not replaced where it is required."""
    required = tfcdo.MultiWorkerMirroredStrategy(
        cross_device_ops=tfcdo.NcclAllReduce(require_nccl=True),
        devices_per_worker=len(strategy.extended.worker_devices),
    )

    def step() -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([3]))

    try:
        required.run(step)
    except RuntimeError as error:
        assert "NCCL cannot run (require_nccl=True)" in str(error), error
    else:
        raise AssertionError("it did not raise")
