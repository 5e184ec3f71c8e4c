"""Work of hosts in tests of `exchange`: all-reduces of values that a cast may round."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo import tf_internals

WIRE_DTYPES = ("float16", "int8")
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
    *("float32", "float64", "far apart", "small", "exact", "not finite"),
    *("int32", "float16"),
)


def other_strategy(
    strategy: Any, options: Any = None, devices_per_worker: int | None = None, **arguments: Any
) -> Any:
    """Returns another strategy of the same hosts, and devices unless others are asked for."""
    return tfcdo.MultiWorkerMirroredStrategy(
        None,
        options or tf.distribute.experimental.CommunicationOptions(timeout_seconds=200.0),
        devices_per_worker=devices_per_worker or len(strategy.extended.worker_devices),
        **arguments,
    )


def exchanges(strategy: Any) -> dict[str, np.ndarray]:
    """Sums each case with nothing cast and with each wire dtype, and takes means of integers."""
    results = _sums("uncast", strategy)
    for name in WIRE_DTYPES:
        cast = other_strategy(strategy, exchange=name)
        results |= _sums(name, cast)
        results |= _gradient(name, cast)
        results |= _explained(name, cast)
        _state(cast)
    return results


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
            # One by one: values of a batch would share packs, and packs their scales. The single
            # number is not cast, but a value that is reduced alone is taken for no gradient.
            sums = {
                case: context.all_reduce("SUM", [value, tf.ones([])])[0]
                for case, value in values.items()
            }
            alone = context.all_reduce("SUM", values["float32"])
            means = context.all_reduce("MEAN", {c: values[c] for c in ("int32", "float64")})
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
                total, _ = context.all_reduce("SUM", [value, tf.ones([])])
                loss = tf.reduce_sum(total) * (replica + 1.0)
            return tape.gradient(loss, value)

        return strategy.run(step)

    parts = strategy.experimental_local_results(differentiate())
    return {f"{name} gradient": np.stack([part.numpy() for part in parts])}


def _state(strategy: Any) -> None:
    """Reads a moving statistic of more than 4 KiB: the exact mean, which a checkpoint holds."""
    count = 2000
    with strategy.scope():
        statistic = tf.Variable(
            tf.zeros([count]),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )

    @tf.function(autograph=False)
    def assign() -> None:
        def step() -> None:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            # Neither dtype of the wire holds it, and its means are exact.
            statistic.assign(tf.fill([count], 1.0 + 2.0**-20 * (1 + tf.cast(replica, tf.float32))))

        strategy.run(step)

    assign()
    expected = 1.0 + 2.0**-20 * (strategy.num_replicas_in_sync + 1) / 2
    reads = (statistic.read_value, tf.function(statistic.read_value, autograph=False))
    for read in reads:
        np.testing.assert_array_equal(read(), np.full([count], expected, np.float32))


def functions_end(strategy: Any) -> None:
    """Asserts that graphs of sums between hosts and of their gradients end with their functions."""
    for wire in (None, "int8"):
        other = other_strategy(strategy, exchange=wire)
        ops = other.cross_device_ops

        def step(ops: Any = ops, devices: Any = other.extended.worker_devices) -> Any:
            values = []
            for device in devices:
                with tf.device(device):
                    values.append(tf.ones([2000]))
            with tf.GradientTape() as tape:
                tape.watch(values)
                value = tf_internals.per_replica(values)
                options = tf.distribute.experimental.CommunicationOptions()
                total, _ = ops.batch_reduce(
                    tf.distribute.ReduceOp.SUM, [(value, value)] * 2, options
                )
                losses = [
                    tf.reduce_sum(each) for each in strategy.experimental_local_results(total)
                ]
                loss = tf.add_n(losses)
            return tape.gradient(loss, values)

        function = tf.function(step, autograph=False)
        gradients = function()
        count = strategy.num_replicas_in_sync
        assert all(np.all(each.numpy() == count) for each in gradients), gradients
        graph = weakref.ref(function.get_concrete_function().graph)
        del function
        gc.collect()
        assert graph() is None, wire


def _explained(name: str, strategy: Any) -> dict[str, np.ndarray]:
    """Returns the bytes that each host sends for 4,800 numbers of float32, on each replica."""
    devices = strategy.extended.worker_devices
    bytes_sent = strategy.explain([(4800,)]).bytes_between_hosts
    return {f"{name} bytes": np.full([len(devices)], bytes_sent)}


def requires_nccl(strategy: Any) -> None:
    """Asserts that NCCL is not replaced where it is required."""
    ops = tfcdo.NcclAllReduce(require_nccl=True)
    required = other_strategy(strategy, cross_device_ops=ops)

    def step() -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([3]))

    try:
        required.run(step)
    except RuntimeError as error:
        assert "NCCL cannot run (require_nccl=True)" in str(error), error
    else:
        raise AssertionError("it did not raise")
