"""Hosts that are not alike: either their sums are correct, or an error names the difference."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from clusters import disagreeing, other_strategy
from testing_utils import MEAN, SUM

import tfcdo
from tfcdo.plan import algorithms, decide
from tfcdo.topology import detection
from tfcdo.topology.presets import preset

# Flat and not, some of one shape, which are stacked; the sum of no two sizes is a third one's.
_SHAPES = ((400,), (20, 30), (1000,), (), (20, 30), (7, 11), (1300,), (2, 2, 3), (7, 11))

# The argument's name in the error: the strategy's arguments on host 0 and on all others, and how
# the error shows each. The first case once gave incorrect sums. `mirrored_test` has the other
# arguments.
SETTINGS: Sequence[tuple[Any, ...]] = (
    ("", {"cross_device_ops": tfcdo.AutoAllReduce()}, {}, "AutoAllReduce", "by default"),
    ("exchange", {}, {"exchange": "bfloat16"}, "Sum", "Cast.dtype='bfloat16'"),
    ("outer", {}, {"outer": tfcdo.exchange.DiLoCo(3)}, "None", "every=3"),
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
        value = _per_replica(other, lambda replica: tf.ones([3]))
        other.extended.batch_reduce_to(SUM if is_chief else MEAN, [(value, value)])

    def size_known_on_one_host(other: Any) -> None:
        signature = [tf.TensorSpec([3] if is_chief else [None])]

        @tf.function(input_signature=signature, autograph=False)
        def step(value: tf.Tensor) -> Any:
            def on_replica(own: tf.Tensor) -> tf.Tensor:
                return tf.distribute.get_replica_context().all_reduce(SUM, own)

            return other.run(on_replica, [value])

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

    def data(context: Any) -> tf.data.Dataset:
        rows = tf.data.Dataset.from_tensor_slices((np.ones([24, 2]), np.ones([24, 1])))
        return rows.repeat().batch(4 if is_chief else 6, drop_remainder=True)

    with strategy.scope():
        model = keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    batches = strategy.distribute_datasets_from_function(data)
    with disagreeing("batches", "examples of a replica: (4.* 6|6.* 4)"):
        model.fit(batches, steps_per_epoch=2, shuffle=False, verbose=0)


def unlike_correct(strategy: Any) -> None:
    """Sums on hosts that take their machines to be different."""
    is_chief = strategy.cluster_resolver.task_id == 0
    count = len(strategy.extended.worker_devices)
    slow: dict[str, Any] = {"addition_bandwidth": 1e3}
    with contextlib.ExitStack() as stack:
        if not is_chief:
            machine = dataclasses.replace(preset("pcie", count), **slow)
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


def _per_replica(strategy: Any, make: Callable[[int], Any]) -> Any:
    devices = strategy.extended.worker_devices

    def on_its_device(context: Any) -> Any:
        replica = context.replica_id_in_sync_group
        with tf.device(devices[replica % len(devices)]):
            return make(replica)

    return strategy.experimental_distribute_values_from_function(on_its_device)


def _check_sums(strategy: Any) -> None:
    count = strategy.num_replicas_in_sync
    arrays = [  # Of numbers whose sums over a few replicas are exact, in 16 bits too.
        [tu.numbers(shape, tf.float32, 99 * position + r, 9) for r in range(count)]
        for position, shape in enumerate(_SHAPES)
    ]
    values = [_per_replica(strategy, lambda r, own=own: tf.constant(own[r])) for own in arrays]  # type: ignore[misc]
    results = strategy.extended.batch_reduce_to(SUM, [(value, value) for value in values])
    for own, result in zip(arrays, results, strict=True):
        for part in strategy.experimental_local_results(result):
            np.testing.assert_array_equal(part, tu.oracle(SUM, own))
