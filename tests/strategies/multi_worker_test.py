"""Training on several hosts, processes of this machine, compared with training on one device."""

from __future__ import annotations

import dataclasses
import gc
import math
import re
import weakref
from typing import Any
from unittest import mock

import clusters
import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from clusters import other_strategy, scope, weights
from host_unlike import unlike_correct, unlike_refused  # noqa: F401 - scenarios
from host_values import all_values, check_all_reduces  # noqa: F401 - a scenario

import tfcdo
from tfcdo import tf_internals

GLOBAL_BATCH = 24  # Divides by 2 x 2 replicas.
CLASSES = 5


def own_loop(strategy: Any) -> dict[str, np.ndarray]:
    """A training loop of one's own in mixed precision, which reduces a structure each step."""
    keras.utils.set_random_seed(8)
    inputs = np.random.default_rng(1).normal(size=[2 * GLOBAL_BATCH, 6]).astype(np.float32)
    with scope(strategy):
        dense = keras.layers.Dense(CLASSES, dtype="mixed_bfloat16")
        model = keras.Sequential([keras.layers.Input((6,)), dense])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(inputs: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = tf.cast(model(inputs, training=True), tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
            loss = tf.reduce_sum(losses) / GLOBAL_BATCH
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return tf.reduce_sum(losses), tf.size(losses)

    def train(inputs: Any, targets: Any) -> Any:  # A few steps are quicker eagerly than traced.
        if strategy is None:
            return step(inputs, targets)
        return strategy.reduce("SUM", strategy.run(step, (inputs, targets)), axis=None)

    labels = np.argmax(inputs[:, :CLASSES], 1)
    data = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(GLOBAL_BATCH)
    if strategy:
        data = strategy.experimental_distribute_dataset(data)
    sums = [[float(part) for part in train(*batch)] for batch in data]
    return {**weights(strategy, model.weights), "sums": np.array(sums)}


def end_of_data(strategy: Any) -> dict[str, np.ndarray]:
    """Keras fit of several steps at a time, on 2 x 2 replicas, where one host has less data.

    Of unknown length, and with an optimizer that changes weights without looking at gradients.
    """
    keras.utils.set_random_seed(9)
    generator = np.random.default_rng(2)
    # Eleven examples on one host and five on the other, in batches of two for each replica.
    parts = [generator.normal(size=(rows, 3)).astype(np.float32) for rows in (11, 5)]
    with scope(strategy):
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.3)
        model.compile(optimizer, "mse", steps_per_execution=2)

    def unknown_length(arrays: list[np.ndarray]) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(
            lambda: ((array, array[:, :1] > 0) for array in arrays),
            output_signature=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1], tf.bool)),
        )

    if strategy:
        own = parts[strategy.cluster_resolver.task_id]
        batches = [own[start : start + 2] for start in range(0, len(own), 2)]
        data = strategy.distribute_datasets_from_function(lambda _: unknown_length(batches))
    else:
        data = unknown_length(
            [np.concatenate([part[s : s + 4] for part in parts]) for s in range(0, 12, 4)]
        )
    model.fit(data, epochs=2, verbose=0)
    return {**weights(strategy, model.weights), "steps": optimizer.iterations.numpy()}


def explained(strategy: Any) -> None:
    """What a strategy explains is what it runs: devices, packs in their order, bytes."""
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=40_000)
    shapes, hosts = [(100,), (120, 100), (7, 30), (3_500,), (9_000,)], 2
    for ops in (None, tfcdo.HierarchicalCopyAllReduce(num_packs=0), tfcdo.ReductionToOneDevice()):
        other = other_strategy(strategy, options, cross_device_ops=ops)

        @tf.function(autograph=False)
        def step(other: Any = other) -> Any:
            def on_each() -> Any:
                # Not constants, which would all be one.
                values = [tf.random.stateless_uniform(shape, (1, 2)) for shape in shapes]
                return tf.distribute.get_replica_context().all_reduce("SUM", values)

            return other.run(on_each)

        ran = {
            int(found[1]): op.inputs[0].shape.num_elements() * 4
            for op in step.get_concrete_function().graph.get_operations()
            if op.type == "CollectiveReduceV2"
            and (found := re.search(r"tfcdo/pack(\d+)/", op.name))
        }
        told = other.explain(shapes)
        packs = [pack.num_bytes for pack in told.packs]
        assert [ran[pack] for pack in sorted(ran)] == packs, (ran, packs)
        assert len(set(packs)) > 1 or not isinstance(ops, tfcdo.HierarchicalCopyAllReduce), packs
        total = 4 * sum(math.prod(shape) for shape in shapes)
        assert told.bytes_between_hosts == 2 * total * (hosts - 1) // hosts, told
        assert told.devices == other.extended.worker_devices, told
    # Without a strategy, the devices of this host.
    told = tfcdo.AutoAllReduce().explain(shapes)
    assert set(strategy.extended.worker_devices) <= set(told.devices), told.devices
    assert len({device.rpartition("/")[0] for device in told.devices}) == 1, told.devices


def flat(strategy: Any) -> dict[str, np.ndarray]:
    """All-reduces with one collective over all devices, as NCCL would, by rings here.

    Every collective must have all replicas as its members.
    """
    extended = strategy.extended
    ops = extended._cross_device_ops
    between = dataclasses.replace(ops._options.between, flat=True)
    extended._cross_device_ops = ops._between(ops._network, between)
    members, reduce = [], tf.raw_ops.CollectiveReduceV2

    def counted(**arguments: Any) -> tf.Tensor:
        members.append(arguments["group_size"])
        return reduce(**arguments)

    with mock.patch.object(tf.raw_ops, "CollectiveReduceV2", counted):
        check_all_reduces(strategy)
        numbers = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(flat_numbers(context.replica_id_in_sync_group))
        )
        [total] = extended.batch_reduce_to("SUM", [(numbers, numbers)])
        traced = len(members)
        for turn in (1.0, 2.0):  # Other values of the same shape are not traced again.
            again = strategy.experimental_distribute_values_from_function(
                lambda context, turn=turn: (
                    turn * tf.constant(flat_numbers(context.replica_id_in_sync_group))
                )
            )
            [same] = extended.batch_reduce_to("SUM", [(again, again)])
            for one, other in zip(same.values, total.values, strict=True):
                np.testing.assert_array_equal(one, turn * other)
        assert len(members) == traced, (len(members), traced)
    extended._cross_device_ops = ops
    assert set(members) == {strategy.num_replicas_in_sync}, set(members)
    return {"sums": np.stack(strategy.experimental_local_results(total))}


def flat_numbers(replica: int) -> np.ndarray:
    """Returns what a replica gives to `flat`: float32, whose sums are rounded."""
    return np.random.default_rng(replica).normal(size=1001).astype(np.float32)


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


_TIMEOUT = 240.0
_UNLIKE = ("unlike_correct", "unlike_refused")
# (scenario, how far from one device): near float32 rounding, but for layers that compute in 16
# bits, whose gradients are rounded on each replica.
TRAINING = {"own_loop": 2e-2, "end_of_data": 2e-6}


class TrainingTest(tf.test.TestCase, parameterized.TestCase):
    """Hosts x devices of each: its scenarios in one set of processes."""

    # Other numbers of hosts or devices change who sends what, which values and sums show, and not
    # what a training asks for.
    @parameterized.parameters(
        (
            *(2, 2),
            (
                *_UNLIKE,
                "explained",
                "own_loop",
                "end_of_data",
                "all_values",
                "functions_end",
                "flat",
            ),
        ),
        (3, 1, ("all_values",)),
    )
    def test_as_one_device(self, hosts, devices, names):
        results, _ = clusters.run_scenarios(hosts, __file__, devices, names, _TIMEOUT)
        if "flat" in names:
            with self.subTest("flat"):
                self.check_flat(np.concatenate([own["sums"] for own in results["flat"]]))
        for name in TRAINING.keys() & set(names):
            with self.subTest(name):
                self.check(name, results[name], devices, TRAINING[name])

    def check_flat(self, replicas):
        """Asserts correct sums, of the same bits on all replicas of all hosts."""
        self.assertLen(replicas, 4)
        self.assertLen({replica.tobytes() for replica in replicas}, 1)
        numbers = [flat_numbers(r) for r in range(4)]
        self.assertAllClose(np.sum(numbers, 0, np.float64), replicas[0], rtol=0, atol=1e-5)

    def check(self, name, results, devices, tolerance):
        for key, expected in globals()[name](None).items():
            for own in results:
                actual = own[key]
                if key.startswith("replica"):
                    self.assertLen(actual, devices)
                    for replica in actual:
                        self.assertEqual(results[0][key][0].tobytes(), replica.tobytes(), key)
                    actual, expected_here = actual[0], expected[0]
                else:
                    expected_here = expected
                np.testing.assert_allclose(
                    actual, expected_here, rtol=tolerance, atol=tolerance, err_msg=key
                )


if __name__ == "__main__":
    tf.test.main()
