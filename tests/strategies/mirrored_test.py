"""`tfcdo.MirroredStrategy`, and what both strategies make of values that are reduced."""

import contextlib
import dataclasses
import functools
import json
import os
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras_training import model_of

import tfcdo
from tfcdo import keras_internals, log, strategies, version, virtual_devices
from tfcdo.cluster import protocol
from tfcdo.exchange import DiLoCo
from tfcdo.plan import copy_tree
from tfcdo.topology.presets import preset


class ReduceTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(tu.kernels_for("GPU"))
        self.strategy = tfcdo.MirroredStrategy(tu.device_names(3))

    def test_is_what_user_code_asks_for(self):
        self.assertIsInstance(self.strategy, tf.distribute.MirroredStrategy)
        self.assertIsInstance(self.strategy.extended._cross_device_ops, tfcdo.AutoAllReduce)
        devices, ops = tu.device_names(2), tf.distribute.ReductionToOneDevice()
        self.assertIs(ops, tfcdo.MirroredStrategy(devices, ops).extended._cross_device_ops)
        with mock.patch.object(strategies.nccl, "nccl_status") as status:
            status.return_value.can_run = True
            strategy = tfcdo.MirroredStrategy(devices)
        self.assertIsInstance(strategy.extended._cross_device_ops, tfcdo.NcclAllReduce)
        everything = tf.distribute.MirroredStrategy().extended.worker_devices
        self.assertEqual(everything, tfcdo.MirroredStrategy([]).extended.worker_devices)

    def test_numbers_of_variables(self):
        """As callbacks read the learning rate, or the count of steps."""
        with tfcdo.MirroredStrategy(tu.device_names(2)).scope():
            optimizer, array = keras.optimizers.SGD(0.5), np.asarray(tf.Variable(3.5))
            statistic = keras.Variable(2.5, trainable=False)
        numbers = float(optimizer.learning_rate), float(statistic), int(optimizer.iterations), array
        self.assertEqual((0.5, 2.5, 0, 3.5), numbers)

    def test_explains_what_it_runs(self):
        own = tfcdo.AllReduceCrossDeviceOps("ring", num_packs=0)
        devices = tu.device_names(4)[::-1][:3]
        told = tfcdo.MirroredStrategy(devices, own).explain([(100,), (20, 30)], "float64")
        self.assertEqual(("ring", devices, repr(own)), (told.algorithm, told.devices, told.ops))
        self.assertEqual([800, 4800], [pack.num_bytes for pack in told.packs])
        theirs = tfcdo.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
        with self.assertRaisesRegex(TypeError, "cross_device_ops must be one of tfcdo's .*; got <"):
            theirs.explain([(100,)])

    def test_gathers_structures(self):
        """In one go; along an axis other than the first; what is not distributed stays."""
        own = [np.full([2, rank + 1], rank, np.float32) for rank in range(3)]
        value = {"uneven": tu.per_replica(own), "list": [tu.per_replica([own[0]] * 3)]}
        ops = self.strategy.extended._cross_device_ops
        # AutoGraph would convert all that the mock calls.
        for mode in (lambda body: body, functools.partial(tf.function, autograph=False)):
            with mock.patch.object(ops, "_batch_gather", wraps=ops._batch_gather) as gather:
                result = mode(lambda: self.strategy.gather(value, axis=1))()
            gather.assert_called_once()
            self.assertAllEqual(np.concatenate(own, 1), result["uneven"])
            self.assertAllEqual(np.zeros([2, 3]), result["list"][0])
        plain = {"a": tf.constant([1, 2]), "b": [tf.constant([3.0])]}
        for scope in (contextlib.nullcontext(), self.strategy.scope()):
            with scope:
                self.assertAllEqual(plain, self.strategy.gather(plain, 0))
        # Nothing is gathered on a replica: hosts would take its tensor for a component.
        begin = mock.patch.object(type(self.strategy.extended), "_batch_gather_to")
        with begin as gather, self.assertRaisesRegex(RuntimeError, "cross-replica context"):
            self.strategy.run(lambda: self.strategy.gather([tf.ones([1])], 0))
        gather.assert_not_called()

    @parameterized.parameters(
        ("auto", None, True, True, None),
        ("nccl", tfcdo.NcclAllReduce(), True, True, None),
        ("ring", None, True, False, None),
        ("auto", tfcdo.HierarchicalCopyAllReduce(), True, False, None),
        ("auto", None, False, False, None),
        ("nccl", None, False, False, "no GPU; buy one"),
        ("nccl", tfcdo.HierarchicalCopyAllReduce(), True, False, "HierarchicalCopyAllReduce"),
    )
    def test_one_collective_over_all_gpus(self, hint, ops, can_run, expected, warning):
        status = strategies.nccl.NcclStatus(can_run, "no GPU", "buy one")
        with (
            mock.patch.object(strategies.nccl, "nccl_status", return_value=status),
            mock.patch.object(strategies.log, "warn_once") as warn,
        ):
            self.assertEqual(expected, strategies._runs_flat(hint, ops, tu.device_names(2)))
            self.assertFalse(strategies._runs_flat(hint, ops, tu.device_names(1)))
        told = [call.args[0] for call in warn.call_args_list]
        self.assertLen(told, 1 if warning else 0)
        self.assertIn(warning or "", "".join(told))

    @parameterized.parameters(False, True)
    def test_a_step_runs_where_all_replicas_have_data(self, nested):
        """Seven batches, on three replicas: the first one alone has data for a third step."""
        with self.strategy.scope():
            steps = tf.Variable(0, dtype=tf.int64)
            decayed = tf.Variable(tf.ones([4, 4]))
            total = tf.Variable(0.0)

        def step(value):
            steps.assign_add(1)
            for _ in range(3):
                decayed.assign(decayed - tf.linalg.matmul(decayed, decayed) / 64)
            summed, count = tf.distribute.get_replica_context().all_reduce("SUM", [value, 1])
            if count == 3:  # A sum of int32, too.
                total.assign_add(summed)

        step = tf.function(step) if nested else step
        train = tf.function(lambda data: self.strategy.run(step, (next(data),)))
        data = tf.data.Dataset.from_tensor_slices(np.ones(7, np.float32))
        batches = iter(self.strategy.distribute_datasets_from_function(lambda _: data))
        with self.assertRaises(tf.errors.OutOfRangeError):
            while True:
                train(batches)
        expected = np.ones([4, 4])
        for _ in range(2 * 3):
            expected -= expected @ expected / 64
        for rank in range(3):
            self.assertAllEqual(2, steps.values[rank])
            self.assertAllEqual(6.0, total.values[rank])
            self.assertAllClose(expected, decayed.values[rank])

    def test_a_step_that_fails_on_one_replica_counts_on_none(self):
        inputs = np.ones([4, 2], np.float32)
        inputs[-1] = np.nan  # On the last replica.
        with tfcdo.MirroredStrategy(tu.device_names(2)).scope():
            check = keras.layers.Lambda(lambda x: tf.debugging.check_numerics(x, "bad"))
            model = model_of(lambda: [keras.Input([2]), check, keras.layers.Dense(1)], "sgd", False)
        model.fit(inputs[:3], inputs[:3, :1], verbose=0)
        for _ in range(3):
            with self.assertRaises(tf.errors.InvalidArgumentError):
                model.fit(inputs, inputs[:, :1], verbose=0)
        counts = [int(one.numpy()) for one in model.optimizer._iterations.value.values]
        self.assertEqual([1, 1], counts)

    def test_datasets_that_may_have_elements_are_not_warned_of(self):
        log.warn_once.cache_clear()
        numbers = tf.data.Dataset.range(6)
        with self.assertNoLogs("absl", "WARNING"):
            for dataset in (numbers, numbers.filter(lambda number: number > 2), numbers.repeat()):
                self.strategy.experimental_distribute_dataset(dataset.batch(3))
        with self.assertLogs("absl", "WARNING"):
            self.strategy.experimental_distribute_dataset(numbers.take(0).batch(3))

    def test_a_step_creates_variables_and_gets_others_beside_tensors(self):
        with self.strategy.scope():
            variable = tf.Variable([1.0, 2.0])
        made: list[tf.Variable] = []

        def step(value, variable):
            if not made:
                made.extend([tf.Variable(tf.fill([2], 3.0)), tf.Variable(lambda: tf.ones([2]))])
            made[0].assign_add(value * made[1])
            variable.assign_add(value)

        train = tf.function(lambda value: self.strategy.run(step, (2 * value, variable)))
        for _ in range(2):
            train(tf.constant([1.0, 1.0]))
        for one, other in zip(made[0].values, variable.values, strict=True):
            self.assertAllEqual([7.0, 7.0], one)
            self.assertAllEqual([5.0, 6.0], other)

    def test_keras_trains_on_strings_under_a_strategy_that_inherits(self):
        """Also where the first batch does not divide."""

        class Strategy(tfcdo.MirroredStrategy):
            def reduce(self, reduce_op, value, axis=None):
                return self.counted(super().reduce, reduce_op, value, axis)

            def counted(self, reduce, *arguments):
                return reduce(*arguments)

        with Strategy(tu.device_names(3)).scope():
            lookup = keras.layers.StringLookup(vocabulary=["a", "b", "c"], output_mode="one_hot")
            model = model_of(lambda: [lookup, keras.layers.Dense(1)], "sgd", run_eagerly=False)
        words = np.array([["a"], ["b"], ["c"], ["a"], ["d"]])
        data = tf.data.Dataset.from_tensor_slices((words, np.arange(5.0)[:, None])).batch(4)
        [loss] = model.fit(data, verbose=0).history["loss"]
        self.assertTrue(np.isfinite(loss))
        self.assertNotAllEqual([0.0], model.get_weights()[-1])  # The bias has moved.


class MetricsTest(tf.test.TestCase):
    def test_of_keras_that_asks_for_sums_only(self):
        own = {"trainable": False, "dtype": "float32", "aggregation": tf.VariableAggregation.SUM}
        for installed, expected in (("3.6.0", 5.0), ("3.8.0", 3.0), ("3.10.0", 5.0)):
            strategy = tfcdo.MirroredStrategy(tu.device_names(2))
            twice = version.adds_metrics_twice(installed)
            with mock.patch.object(keras_internals, "adds_metrics_twice", twice), strategy.scope():
                total = keras.Variable(0.0, trainable=False, aggregation="sum")
                of_the_user = tf.Variable(0.0, **own)

            def step(total=total, of_the_user=of_the_user):
                for variable in (total, of_the_user):
                    variable.assign(variable + tf.constant(1.0))
                rank = tf.distribute.get_replica_context().replica_id_in_sync_group
                total.assign(total + tf.cast(rank, tf.float32))

            strategy.run(step)
            self.assertAllEqual(expected, total.value)
            self.assertAllEqual(2.0, of_the_user)


_SHARDED = {"devices": None, "shard_optimizer_state": True}
_99_GPUS = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec({}), num_accelerators={"GPU": 99}
)
_ONE_DEVICE = tfcdo.ReductionToOneDevice()
_CLASS = {"cross_device_ops": tfcdo.AutoAllReduce}
_UNFROZEN = type("Own", (tfcdo.exchange.Sum,), {})()


class ArgumentsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("communication_options must be .* or None; got 5", {"communication_options": 5}),
        ("cross_device_ops must be one of tfcdo's.*; got 'ring'", {"cross_device_ops": "ring"}),
        ("devices_per_worker must be an int; got '2'", {"devices_per_worker": "2"}),
        ("cluster_resolver must be .*ClusterResolver or None; got 5", {"cluster_resolver": 5}),
        ("GPUs that TensorFlow sees, .* here; got 99", {"cluster_resolver": _99_GPUS}),
        ("exchange must be 'bfloat16', 'float16', 'int8', .* got 'int4'", {"exchange": "int4"}),
        ("exchange must be .* got <class", {"exchange": tfcdo.exchange.PowerSGD}),
        ("exchange must be of a class with @dataclasses.*frozen", {"exchange": _UNFROZEN}),
        ("devices must be a list of device names or None; got 'CPU:0'", {"devices": "CPU:0"}),
        ("devices must be a list of .* got array", {"devices": np.array("CPU:0")}),
        ("each of devices must be a device name; got 3", {"devices": ["CPU:0", 3]}),
        ("each of devices must name a device; got 'nonsense'", {"devices": ["nonsense"]}),
        ("each of devices must name a device that exists; got 'CPU:99'", {"devices": ["CPU:99"]}),
        ("devices must be different; got .*CPU:1', .*CPU:1'", {"devices": ["CPU:1", "cpu:1"]}),
        ("must be an object .*; got 'auto'", {"devices": None, "cross_device_ops": "auto"}),
        ("must be an object such as .*AutoAllReduce'>", {"devices": None, **_CLASS}),
        ("shard_optimizer_state must be .*; got 1", _SHARDED | {"shard_optimizer_state": 1}),
        ("is one of tfcdo's all-reduce classes", _SHARDED | {"cross_device_ops": _ONE_DEVICE}),
    )
    def test_types(self, message, arguments):
        one_host = "devices" in arguments
        make: Any = tfcdo.MirroredStrategy if one_host else tfcdo.MultiWorkerMirroredStrategy
        self.assertRaisesRegex((TypeError, ValueError), message, make, **arguments)

    @mock.patch.object(virtual_devices, "_num_visible", return_value=2)
    def test_some_of_the_gpus_that_a_resolver_counts(self, _):
        self.assertEqual(("GPU", 2), virtual_devices.devices_here(_99_GPUS, wanted=1))

    def test_a_name_is_no_optimizer(self):
        strategy = tfcdo.MirroredStrategy(tu.device_names(2))
        with self.assertRaisesRegex(TypeError, "optimizer must be a Keras 3 .*; got 'adam'"):
            strategy.state_bytes("adam")

    def test_each_argument_is_compared_among_hosts(self):
        auto, nccl, one = tfcdo.AutoAllReduce, tfcdo.NcclAllReduce, tfcdo.ReductionToOneDevice
        hierarchical, of_algorithm = tfcdo.HierarchicalCopyAllReduce, tfcdo.AllReduceCrossDeviceOps
        ring = functools.partial(of_algorithm, "ring")
        trees = [of_algorithm([tree]) for tree in (copy_tree.chain(2, 0), copy_tree.star(2, 1))]
        pcie = preset("pcie", 2)
        machines = [pcie, dataclasses.replace(pcie, addition_bandwidth=1.0)]
        wires = [auto(wire_dtype=name) for name in ("float16", "bfloat16")]
        fed_back = auto(wire_dtype="float16", error_feedback=True)
        by_nccl = tf.distribute.experimental.CommunicationImplementation.NCCL
        for key, first, other, left, right in (
            ("", hierarchical(), auto(), "HierarchicalCopyAllReduce", "AutoAllReduce"),
            ("", auto(), None, "AutoAllReduce", "by default"),
            ("num_packs", ring(2), ring(0, 3000), "2", "0"),
            ("agg_small_grads_max_bytes", ring(0, 3000), ring(0, 5000), "3000", "5000"),
            ("agg_small_grads_max_group", ring(0, 3000, 2), ring(0, 3000, 3), "2", "3"),
            ("all_reduce_alg", ring(), of_algorithm("shuffle"), "ring", "shuffle"),
            ("all_reduce_alg", *trees, "None, 0", "1, None"),
            ("topology", hierarchical(topology=pcie), hierarchical(), "'pcie'", "None"),
            ("topology", *(hierarchical(topology=one) for one in machines), *["'pcie', "] * 2),
            ("wire_dtype", *wires, "float16", "bfloat16"),
            ("error_feedback", wires[0], fed_back, "False", "True"),
            ("sparse_as_dense", auto(), auto(sparse_as_dense=True), "False", "True"),
            ("sum_equal_rows", auto(), auto(sum_equal_rows=True), "False", "True"),
            ("require_nccl", nccl(), nccl(require_nccl=True), "False", "True"),
            ("nccl", auto(), auto(nccl=False), "True", "False"),
            ("reduce_to_device", one("/cpu:0"), one("CPU:1"), "CPU:0", "CPU:1"),
            ("exchange", {}, {"exchange": lambda path, spec: None}, "Sum", "<lambda>"),
            ("outer.*3", {"outer": DiLoCo(3, ring)}, {"outer": DiLoCo(3)}, "=partial", "=None"),
            ("bytes_per_pack", {}, {"bytes_per_pack": 64}, "0", "64"),
            ("implementation", {}, {"implementation": by_nccl}, "AUTO", "NCCL"),
        ):
            given, others = (
                self.settings(**(one if isinstance(one, dict) else {"ops": one}))
                for one in (first, other)
            )
            with self.subTest(f"{key}: {left}, {right}"):
                shown = rf"{key}: [^:]*{left}[^:]* on host 0, [^:]*{right}[^:]* on host 1"
                self.assertRegex(protocol.differences(given, "host 0", others, "host 1"), shown)

    def settings(self, ops=None, exchange=None, outer=None, **options):
        made = tf.distribute.experimental.CommunicationOptions(**options)
        return strategies._settings(made, ops, exchange or tfcdo.exchange.Sum(), outer)

    def test_a_wrong_tf_config_is_told_before_anything_starts(self):
        for call in (tfcdo.MirroredStrategy, tfcdo.MultiWorkerMirroredStrategy, tfcdo.is_chief):
            with (
                mock.patch.dict(os.environ, {"TF_CONFIG": "{'cluster'"}),
                self.assertRaisesRegex(ValueError, "TF_CONFIG must be JSON with 'cluster'"),
            ):
                call()

    @parameterized.parameters("", " ")
    def test_an_empty_tf_config_is_none(self, empty):
        one, several = tfcdo.MirroredStrategy, tfcdo.MultiWorkerMirroredStrategy
        for make, options in ((one, {"devices": ["CPU:0"]}), (several, {"devices_per_worker": 1})):
            with mock.patch.dict(os.environ, TF_CONFIG=empty):
                self.assertEqual(make(**options).num_replicas_in_sync, 1)

    def test_one_host_of_several_is_told_that_it_trains_alone(self):
        cluster = {"worker": ["a:1", "b:1"], "evaluator": ["e:1"]}
        for job, expected in (("worker", 1), ("evaluator", 0)):
            text = json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})
            with (
                mock.patch.dict(os.environ, TF_CONFIG=text),
                mock.patch.object(log, "warn_once") as warn,
            ):
                tfcdo.MirroredStrategy(["CPU:0"])
            self.assertEqual(warn.call_count, expected)

    def test_too_late(self):
        tf.config.list_logical_devices()
        config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
        with mock.patch.dict(os.environ, {"TF_CONFIG": config}):
            self.assertFalse(tfcdo.is_chief())
            with self.assertRaisesRegex(RuntimeError, "before anything else of TensorFlow runs"):
                tfcdo.MultiWorkerMirroredStrategy()

    @parameterized.parameters(
        lambda: tfcdo.MirroredStrategy(tu.device_names(2)),
        lambda: tfcdo.MultiWorkerMirroredStrategy(devices_per_worker=2),
    )
    def test_replicas_reduce_through_the_extended(self, make):
        """As other libraries do, and variables that are aggregated when they are assigned."""
        strategy = make()
        with strategy.scope():
            self.assertTrue(tfcdo.is_chief())
            variable = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

        def step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            value = tf.cast(replica + 1, tf.float32)
            variable.assign_add(value)
            sums = strategy.extended._replica_ctx_all_reduce("SUM", {"a": [value]})
            rows = tf.IndexedSlices(value[tf.newaxis], tf.constant([1]), tf.constant([2]))
            return sums["a"][0], strategy.extended._replica_ctx_all_reduce(tu.MEAN, rows).values

        for mode in (lambda body: body, tf.function):
            variable.assign(0.0)
            sums, rows = mode(lambda: strategy.run(step))()
            self.assertAllEqual([3.0, 3.0], sums.values)
            self.assertAllEqual([[0.5, 1.0]] * 2, rows.values)
            self.assertAllEqual(3.0, variable)

    def test_reduces_along_an_axis_where_a_replica_has_no_rows(self):
        """As a mask may select none of a replica's."""
        strategy = tfcdo.MirroredStrategy(tu.device_names(3))
        rows = tu.distributed(strategy, lambda replica: tf.ones([replica, 2]))
        for mode in (lambda reduce: reduce, tf.function):
            for reduce_op, expected in (("SUM", [3.0, 3.0]), ("MEAN", [1.0, 1.0])):
                reduced = mode(lambda rows, to=reduce_op: strategy.reduce(to, rows, axis=0))(rows)
                self.assertAllEqual(expected, reduced)

    def test_more_devices_than_there_are(self):
        # Another test file of this process may have asked for more devices than this one.
        too_many = len(tf.config.list_logical_devices("CPU")) + 1
        with self.assertRaisesRegex(RuntimeError, "devices_per_worker.*|virtual CPU devices"):
            tfcdo.MultiWorkerMirroredStrategy(devices_per_worker=too_many)


if __name__ == "__main__":
    tf.test.main()
