"""Exchanges on several hosts, which are processes: as rehearsed."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import clusters
import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from clusters import disagreeing, other_strategy, weights
from exchange_cases import CASES, SHAPES, STEPS, given, numbers, shapes_for

import tfcdo
from tfcdo.exchange import Rehearsal
from tfcdo.execute.interpreter import recently_planned

_ROWS = 40
SMALL = (7, 3)  # Vectors of so few numbers that their pack is exact.


def contract(strategy: Any) -> dict[str, np.ndarray]:
    """Sums with half of the exchanges; returns what each replica of this host gets."""
    results: dict[str, np.ndarray] = {}
    for name, case in CASES.items():
        if case.devices == len(strategy.extended.worker_devices):
            results |= _contract(name, other_strategy(strategy, exchange=case.exchange))
    return results


def _contract(name: str, strategy: Any) -> dict[str, np.ndarray]:
    local = strategy.experimental_local_results

    distributed = functools.partial(tu.distributed, strategy)

    @tf.function(autograph=False)
    def reduce(values: Any) -> Any:
        def step(values: Any) -> Any:
            return tf.distribute.get_replica_context().all_reduce("SUM", values)

        return strategy.run(step, (values,))

    def of_step(step: int) -> Any:
        return distributed(lambda replica: list(map(tf.constant, numbers(replica, step))))

    def summed(values: Any) -> list[np.ndarray]:
        return [np.stack([part.numpy() for part in local(total)]) for total in reduce(values)]

    results = {}
    for step in range(STEPS):
        for index, total in enumerate(summed(of_step(step))):
            results[f"{name} {step} {index}"] = total
    order = [part.value for part in recently_planned()[0].plan.packs[0].slices]
    results[f"{name} order"] = np.array([order] * len(strategy.extended.worker_devices))
    _check_state(strategy.cross_device_ops, lambda: summed(of_step(STEPS)))
    spoiled = of_step(0)
    if strategy.cluster_resolver.task_id == 0:
        spoiled = distributed(lambda replica: [tf.fill(s, np.float32(np.nan)) for s in SHAPES])
    assert not all(np.all(np.isfinite(total)) for total in summed(spoiled))
    assert all(np.all(np.isfinite(total)) for total in summed(of_step(0)))
    if name == "Cast":  # Which would round all of these.
        _check_exact(strategy, distributed, reduce)
    results[f"{name} bytes"] = _bytes(strategy, reduce.get_concrete_function(of_step(0)).graph)
    return results


def _check_exact(strategy: Any, distributed: Any, reduce: Any) -> None:
    """Asserts that no exchange rounds tiny packs, integers, rows, and values reduced alone."""
    replicas = strategy.num_replicas_in_sync
    expected = replicas + 2.0**-20 * replicas * (replicas + 1) / 2

    def near_one(*shape: int) -> Any:
        return distributed(lambda replica: tf.fill(shape, 1 + 2.0**-20 * (replica + 1)))

    def rows(replica: int) -> tf.IndexedSlices:
        values = tf.fill([_ROWS, 50], 1 + 2.0**-20 * (replica + 1))
        return tf.IndexedSlices(values, tf.range(_ROWS), tf.constant([_ROWS, 50]))

    tables = distributed(rows)
    # A value that is reduced alone is not taken for a gradient.
    for value in (*([near_one(size)] * 2 for size in SMALL), near_one(3000), [tables, tables]):
        for total in strategy.experimental_local_results(tf.nest.flatten(reduce(value))[0]):
            found = tf.convert_to_tensor(total).numpy()
            np.testing.assert_allclose(found, np.full_like(found, expected), rtol=2.0**-22)
    integers = distributed(lambda replica: tf.fill([3000], 1_000_003 * (replica + 1)))
    for total in strategy.experimental_local_results(reduce([integers, integers])[0]):
        assert np.all(total == 1_000_003 * replicas * (replicas + 1) // 2)
    _check_read(strategy, expected / replicas)


def _check_state(ops: Any, result: Any) -> None:
    """Asserts that a checkpoint holds all that the next step depends on."""
    with tempfile.TemporaryDirectory() as folder:
        saved = tf.train.Checkpoint(ops=ops).save(f"{folder}/saved")
        expected = result()
        result()
        tf.train.Checkpoint(ops=ops).restore(saved).assert_consumed()
        for one, other in zip(expected, result(), strict=True):
            np.testing.assert_array_equal(one, other)


def _check_read(strategy: Any, expected: float) -> None:
    """Reads a moving statistic of more than 4 KiB: the exact mean, which a checkpoint holds."""
    with strategy.scope():
        statistic = tf.Variable(
            tf.zeros([2000]),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )

    @tf.function(autograph=False)
    def assign() -> None:
        def step() -> None:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            statistic.assign(tf.fill([2000], 1.0 + 2.0**-20 * (1 + tf.cast(replica, tf.float32))))

        strategy.run(step)

    assign()
    for read in (statistic.read_value, tf.function(statistic.read_value, autograph=False)):
        np.testing.assert_array_equal(read(), np.full([2000], expected, np.float32))


def _bytes(strategy: Any, graph: tf.Graph) -> np.ndarray:
    hosts = strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)
    parts = {
        "CollectiveReduceV2": 2 * (hosts - 1) / hosts,
        "CollectiveAllToAllV2": (hosts - 1) / hosts,
        "CollectiveGatherV2": hosts - 1,
    }
    sent = 0.0
    for op in graph.get_operations():
        # Examples are counted in int64.
        if op.type in parts and op.inputs[0].dtype != tf.int64:
            size = op.inputs[0].shape.num_elements()
            sent += np.nan if size is None else size * op.inputs[0].dtype.size * parts[op.type]
    explained = strategy.explain(SHAPES).bytes_between_hosts
    return np.array([[explained, sent]] * len(strategy.extended.worker_devices))


def unlike(strategy: Any) -> None:
    exchange = tfcdo.exchange.TopK(0.01 if strategy.cluster_resolver.task_id == 0 else 0.02)

    def chosen(path: str | None, spec: Any) -> Any:
        return exchange

    other = other_strategy(strategy, exchange=chosen)

    def step() -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", [tf.ones([2000])] * 2)

    with disagreeing("function", "differ: .*packs.*by TopK"):
        other.run(step)


def by_path(strategy: Any) -> dict[str, np.ndarray]:
    asked: dict[str, Any] = {}

    def chosen(path: str | None, spec: Any) -> Any:
        if path:
            asked[path.partition("/")[2]] = spec.shape
        return "int8" if path and path.endswith("kernel") else tfcdo.exchange.Sum()

    other = other_strategy(strategy, exchange=chosen)
    with other.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50, name="first")])
        model.compile("sgd", "mse")  # Only plans of graphs are remembered.
    draw = np.random.default_rng(5).normal
    model.fit(draw(size=(32, 40)), draw(size=(32, 50)), 32, shuffle=False, verbose=0)
    assert asked == {"first/kernel": (40, 50), "first/bias": (50,)}, asked
    plans = [one.plan for one in recently_planned() if len(one.plan.values) == 2]
    packs = [{type(pack.root.exchange).__name__ for pack in plan.packs} for plan in plans]
    assert {"Blocks", "Sum"} in packs, packs
    return weights(other, model.weights)


_TIMEOUT = 600.0


class HostsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        # Hosts that have disagreed are not meant to go on: nothing comes after "unlike".
        (2, 2, ("contract", "by_path", "unlike")),
        (3, 1, ("contract",)),
    )
    def test_hosts(self, hosts, devices, names):
        results, _ = clusters.run_scenarios(hosts, __file__, devices, names, _TIMEOUT)
        self.check_contract(self.alike(results["contract"], hosts, devices), hosts, devices)
        if "by_path" in names:
            self.alike(results["by_path"], hosts, devices)

    def alike(self, of_hosts, hosts, devices):
        results = {}
        for key in of_hosts[0]:
            replicas = [replica for own in of_hosts for replica in own[key]]
            self.assertLen(replicas, hosts * devices)
            self.assertLen({replica.tobytes() for replica in replicas}, 1, key)
            results[key] = replicas[0]
        return results

    def check_contract(self, results, hosts, devices):
        for name in {key.rsplit(" ", 2)[0] for key in results if key.split()[-2].isdigit()}:
            with self.subTest(name):
                self.check_as_rehearsed(name, results, hosts, devices)
                explained, sent = results[f"{name} bytes"]
                if not CASES[name].is_late:  # Its first steps send more.
                    self.assertEqual(explained, round(sent))

    def check_as_rehearsed(self, name, results, hosts, devices):
        exchange = CASES[name].exchange
        order = results[f"{name} order"]
        rehearsal = Rehearsal(exchange, shapes_for(exchange, order), hosts)
        for step in range(STEPS):
            # A host's sum of two is the same bits in any order.
            by_replica = [numbers(replica, step) for replica in range(hosts * devices)]
            by_host = [
                [np.sum(each, 0) for each in zip(*by_replica[first : first + devices], strict=True)]
                for first in range(0, len(by_replica), devices)
            ]
            sums = rehearsal.step([given(exchange, values, order) for values in by_host])
            if not exchange.whole_values:
                cuts = np.cumsum([np.prod(SHAPES[index]) for index in order])[:-1]
                sums = np.split(sums[0], cuts)
            for index, wanted in zip(order, sums, strict=True):
                found = results[f"{name} {step} {index}"]
                self.assertAllClose(np.reshape(wanted, SHAPES[index]), found, rtol=0, atol=1e-4)


if __name__ == "__main__":
    tf.test.main()
