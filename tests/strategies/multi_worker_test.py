"""Training on several hosts, processes of this machine, compared with training on one device."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref
from typing import Any
from unittest import mock

import clusters
import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from clusters import other_strategy, scope, weights
from host_scenarios import all_values, check_all_reduces, unlike_correct, unlike_refused  # noqa: F401

import tfcdo
from tfcdo import tf_internals


def end_of_data(strategy: Any) -> dict[str, np.ndarray]:
    """Fits several steps at a time, and decays weights, on data of which one host has less."""
    keras.utils.set_random_seed(9)
    draw = np.random.default_rng(2).normal
    # Eleven examples on one host and five on the other, in batches of two for each replica.
    parts = [draw(size=(rows, 3)).astype(np.float32) for rows in (11, 5)]
    with scope(strategy):
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.3)
        model.compile(optimizer, "mse", steps_per_execution=2)

    def dataset(arrays: list[np.ndarray]) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(
            lambda: ((array, array[:, :1] > 0) for array in arrays),
            output_signature=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1], tf.bool)),
        )

    if strategy:
        own = np.split(parts[strategy.cluster_resolver.task_id], range(2, 11, 2))
        own = [batch for batch in own if len(batch)]
        data = strategy.distribute_datasets_from_function(lambda _: dataset(own))
    else:
        data = dataset([np.concatenate([part[s : s + 4] for part in parts]) for s in (0, 4, 8)])
    model.fit(data, epochs=2, verbose=0)
    return {**weights(strategy, model.weights), "steps": optimizer.iterations.numpy()}


def explained(strategy: Any) -> None:
    """What a strategy explains is what it runs: devices, packs in their order, bytes."""
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=40_000)
    shapes = [(100,), (120, 100), (7, 30), (3_500,), (9_000,)]
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
        assert told.devices == other.extended.worker_devices, told
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
        check_all_reduces(strategy, tu.MEAN)
        total = summed(1.0)
        traced = len(members)
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
                total, _ = ops.batch_reduce(tu.SUM, [(value, value)] * 2)
                losses = map(tf.reduce_sum, strategy.experimental_local_results(total))
                loss = tf.add_n(list(losses))
            return tape.gradient(loss, values)

        function = tf.function(step, autograph=False)
        gradients = function()
        count = strategy.num_replicas_in_sync
        assert all(np.all(each.numpy() == count) for each in gradients), gradients
        graph = weakref.ref(function.get_concrete_function().graph)
        del function
        gc.collect()
        assert graph() is None, wire


def another_strategy(strategy: Any) -> None:
    """Sums with a strategy that the process makes after its first one."""
    check_all_reduces(other_strategy(strategy))


_TIMEOUT = 240.0
_TRAINING = ("end_of_data", "flat")
_OTHERS = ("unlike_correct", "unlike_refused", "explained", "all_values", "functions_end")


class TrainingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (2, 2, (*_OTHERS, *_TRAINING)),
        (3, 1, ("all_values",)),
        (1, 2, ("another_strategy",)),
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
