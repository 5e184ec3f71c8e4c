"""When NCCL can run, and its ops on virtual CPU devices, where what would hang is an error."""

import contextlib
import dataclasses
import gc
import time
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import nccl_on_cpu
import numpy as np
import tensorflow as tf
import testing_utils as tu
import topology_testing
from absl.testing import parameterized
from testing_utils import EAGER, FUNCTION, MEAN, SUM, function
from wire_bounds import roundoff

import tfcdo
from tfcdo import log
from tfcdo.exchange import Cast
from tfcdo.execute import between
from tfcdo.plan import decide
from tfcdo.topology import detection, measurement
from tfcdo.topology.presets import preset

K = 4  # How many devices, where their number is not what is tested.
_environment = contextlib.ExitStack()


def setUpModule() -> None:
    _environment.enter_context(nccl_on_cpu.running())


def tearDownModule() -> None:
    _environment.close()


def nccl(num_packs: int = 1) -> tfcdo.NcclAllReduce:
    return tfcdo.NcclAllReduce(num_packs, require_nccl=True)


def all_reduce(ops: Any, *values: Sequence[Any]) -> list[Any]:
    replicated = [tu.per_replica(own) for own in values]
    results = ops.batch_reduce(SUM, [(value, value) for value in replicated])
    return [tuple(result.values) for result in results]


def one(*tensors: tf.Tensor, ops: Any = None) -> list[tf.Tensor]:
    return list(all_reduce(ops or nccl(), tensors)[0])


def ranks(scale: float = 1.0) -> list[tf.Tensor]:
    """One tensor per device: `scale` times 1, 2, 3, 4. Their sum is 10 times the scale."""
    return [tf.constant([scale * (rank + 1)]) for rank in range(K)]


class GraphTest(tf.test.TestCase):
    def test_sums_stay_on_their_devices(self):
        # What TensorFlow runs in the end, seen where it has taken the graph apart by device.
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            own = [tf.compat.v1.placeholder(tf.float32, [3]) for _ in range(K)]
            doubled = [tu.place(2 * tensor, tu.device_name(r)) for r, tensor in enumerate(own)]
            results = []
            for rank, total in enumerate(one(*doubled)):
                with tf.device(tu.device_name(rank)):
                    results.append(tf.reduce_sum(total) > 0)  # Only this leaves the device.
            metadata = tf.compat.v1.RunMetadata()
            options = tf.compat.v1.RunOptions(output_partition_graphs=True)
            session.run(results, {tensor: np.ones([3]) for tensor in own}, options, metadata)
        nodes = [node for graph in metadata.partition_graphs for node in graph.node]
        self.assertLen([node for node in nodes if node.op == "NcclAllReduce"], K)
        sent = {node.input[0] for node in nodes if node.op == "_Send" and "/ctrl/" not in str(node)}
        moved = {name for name in sent if not name.startswith(("_", "Placeholder"))}
        products = {tensor.op.inputs[0].op.name for tensor in doubled}
        self.assertContainsSubset(moved, products | {tensor.op.name for tensor in results})


class FunctionTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_a_function_called_several_times_in_one_step(self, noinline):
        inner = function(one, experimental_attributes={"_noinline": noinline})
        middle = function(lambda *own: [x + y for x, y in zip(inner(*own), inner(*own))])
        packs = function(lambda own: all_reduce(nccl(0), own, own)[1])
        outer = function(
            lambda: (middle(*ranks()), inner(*ranks(100.0)), middle(*ranks(1e3)), packs(ranks()))
        )
        expected = np.array([[[20.0]], [[1e3]], [[2e4]], [[10.0]]]) * np.ones([K, 1])
        for _ in range(10):
            self.assertAllEqual(expected, outer())

    @parameterized.parameters(False, True)
    def test_iterations_of_a_loop(self, by_function):
        steps = 8
        inner = function(one) if by_function else one

        def body(i: tf.Tensor, firsts: Any, lasts: Any) -> Any:
            scale = tf.cast(i, tf.float32)
            first = inner(*[scale * x for x in ranks()])[0]
            last = inner(*[scale * x for x in ranks(100.0)])[-1]
            return i + 1, firsts.write(i, first), lasts.write(i, last)

        def loop() -> Any:
            arrays = [tf.TensorArray(tf.float32, steps) for _ in range(2)]
            _, firsts, lasts = tf.while_loop(lambda i, *_: i < steps, body, [0, *arrays])
            return firsts.stack(), lasts.stack()

        step = function(loop)
        for _ in range(4):
            firsts, lasts = step()
            self.assertAllEqual(10.0 * np.arange(steps)[:, None], firsts)
            self.assertAllEqual(1000.0 * np.arange(steps)[:, None], lasts)

    def test_a_graph_and_a_session(self):
        """Also where nobody asks for the other devices' results, whose ops have to run."""

        def slowly(array: np.ndarray) -> np.ndarray:
            time.sleep(0.01)
            return array

        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            own = [tf.compat.v1.placeholder(tf.float32, [1]) for _ in range(K)]
            fed = {tensor: [rank + 1.0] for rank, tensor in enumerate(own)}
            direct = one(*own)
            by_function = function(one)(*own)
            loop = tf.while_loop(lambda i, *_: i < 3, lambda i, *x: (i + 1, *one(*x)), [0, *own])
            branch = tf.cond(own[0][0] > 0, lambda: one(*own), lambda: own)
            with tf.control_dependencies([tf.numpy_function(slowly, [own[1]], tf.float32)]):
                late = tf.identity(own[2])
            # The devices come to the packs in different orders.
            packs = all_reduce(nccl(0), [own[0], late, own[0]], [late, own[1], late])
            for rank in range(K):
                self.assertAllEqual([[10.0]] * K, session.run(direct, fed))
                self.assertAllEqual([10.0], session.run(direct[rank], fed))
                self.assertAllEqual([[10.0]] * K, session.run(by_function, fed))
                self.assertAllEqual([[160.0]] * K, session.run(loop[1:], fed))
                self.assertAllEqual([[10.0]] * K, session.run(branch, fed))
                self.assertAllEqual([[[5.0]] * 3, [[8.0]] * 3], session.run(packs, fed))

    def test_functions_that_xla_compiles_use_copy_trees(self):
        own = ranks()
        log.warn_once.cache_clear()
        with self.assertLogs("absl", "WARNING") as logs:
            step = function(lambda *own: one(*own, ops=tfcdo.NcclAllReduce()), jit_compile=True)
            self.assertAllEqual([[10.0]] * K, step(*own))
        [line] = logs.output
        self.assertIn("jit_compile=True", line)
        with self.assertRaisesRegex(RuntimeError, "(?s)require_nccl.*jit_compile=True"):
            function(one, jit_compile=True)(*own)
        double = function(lambda x: 2 * x, jit_compile=True)
        self.assertAllEqual([[20.0]] * K, function(lambda: one(*[double(x) for x in own]))())

    def test_six_threads(self):
        shared = function(one)

        def work(thread: int) -> None:
            for turn, step in enumerate((one, function(one)) * 2):
                own = [tf.fill([5], float(thread * 1000 + turn + r)) for r in range(2 + thread)]
                expected = np.sum([x.numpy() for x in own], axis=0)
                np.testing.assert_array_equal([expected] * len(own), step(*own))
                scale = float(100 * thread + turn)
                np.testing.assert_array_equal([[10 * scale]] * K, shared(*ranks(scale)))

        tu.call_in_six_threads(work)

    def test_an_error_in_one_replica(self):
        strategy = tf.distribute.MirroredStrategy(tu.device_names(3), nccl(2))

        def replica(x: tf.Tensor) -> tf.Tensor:
            checked = tf.debugging.check_numerics(x, "this replica fails")
            return tf.distribute.get_replica_context().all_reduce("SUM", checked)

        step = tf.function(lambda x: strategy.run(replica, [x]))
        good = tu.per_replica([1.0, 2.0, 4.0])
        for rank in range(3):
            self.assertAllEqual([7.0] * 3, step(good).values)
            bad = tu.per_replica([np.nan if i == rank else 1.0 for i in range(3)])
            with (
                # The others must not wait for their time to be up.
                nccl_on_cpu.patience(600),
                self.assertRaisesRegex(tf.errors.InvalidArgumentError, "this replica fails"),
            ):
                step(bad)
        self.assertAllEqual([7.0] * 3, step(good).values)


class GradientTest(tf.test.TestCase, parameterized.TestCase):
    """Against the derivatives written out: y_d = sum_i x_i^3 on each device d."""

    WEIGHTS = np.array([2.0, 3.0, 5.0, 7.0])
    X = np.arange(1.0, K + 1)

    def loss(self, own: Sequence[tf.Tensor], reduce: Any = one) -> tf.Tensor:
        results = reduce(*[x**3 for x in own])
        return tf.add_n([w * y**2 for w, y in zip(self.WEIGHTS, results, strict=True)])

    def check(self, first: Any, second: Any) -> None:
        """Compares with the gradient, and with the gradient of the gradients' sum."""
        scale, total, squares = 2 * np.sum(self.WEIGHTS), np.sum(self.X**3), 3 * self.X**2
        self.assertAllClose((scale * total * squares)[:, None], first, rtol=1e-12)
        expected = scale * (squares * np.sum(squares) + total * 6 * self.X)
        self.assertAllClose(expected[:, None], second, rtol=1e-12)

    @parameterized.parameters((False, True), (True, False))
    def test_tape(self, by_function, traced):
        reduce = function(one) if by_function else one

        def body(own: Any) -> Any:
            with tf.GradientTape() as outer:
                outer.watch(own)
                with tf.GradientTape() as inner:
                    inner.watch(own)
                    loss = self.loss(own, reduce)
                first = inner.gradient(loss, own)
                total = tf.add_n(first)
            return first, outer.gradient(total, own)

        step: Any = function(body) if traced else body
        for _ in range(3):
            own = [tf.constant([x], tf.float64) for x in self.X]
            self.check(*step(own))
        if traced:  # The graph ends with its function.
            graph = weakref.ref(step.get_concrete_function(own).graph)
            del step
            gc.collect()
            self.assertIsNone(graph())

    def test_tf_gradients(self):
        """In a function, and in a session; one alone, too, of whose pack nobody asks the others."""

        def gradients(own: Any) -> Any:
            first = tf.gradients(self.loss(own), own)
            return first, tf.gradients(tf.add_n(first), own)

        constants = [tf.constant([x], tf.float64) for x in self.X]
        self.check(*function(lambda: gradients([tf.identity(x) for x in constants]))())
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            own = [tf.compat.v1.placeholder(tf.float64, [1]) for _ in range(K)]
            fed = {tensor: [x] for tensor, x in zip(own, self.X, strict=True)}
            fetches = gradients(own)
            results = session.run(fetches, fed)
            self.check(*results)
            self.assertAllEqual(results[1][2], session.run(fetches[1][2], fed))

    def test_through_a_loop_and_a_branch(self):
        @function
        def gradients(which: tf.Tensor) -> Any:
            own = ranks()
            with tf.GradientTape() as tape:
                tape.watch(own)
                branch = tf.cond(which, lambda: one(*own), lambda: [2 * x for x in own])
                results = tf.while_loop(
                    lambda i, *_: i < 2,
                    lambda i, *x: (i + 1, *[y / 2 for y in one(*x)]),
                    [0, *branch],
                )
                loss = tf.add_n(results[1:])
            return tape.gradient(loss, own)

        # Each round doubles the sum of the gradients of the four, and gives each a half of it.
        self.assertAllEqual([[16.0]] * K, gradients(tf.constant(True)))
        self.assertAllEqual([[8.0]] * K, gradients(tf.constant(False)))


ROUNDOFF = roundoff("float16")


class NcclWireTest(tu.ValuesMixin, tf.test.TestCase, parameterized.TestCase):
    def make(self, **feedback: Any) -> Any:
        return tfcdo.NcclAllReduce(2, require_nccl=True, wire_dtype="float16", **feedback)

    @parameterized.parameters((EAGER, tf.float32, MEAN), (FUNCTION, tf.float64, SUM))
    def test_sums_are_within_the_bound_of_k_roundings(self, mode, dtype, op):
        drawn = np.random.default_rng(0)
        arrays = [(drawn.uniform(-0.2, 1, 50) * 1e5).astype(dtype.as_numpy_dtype) for _ in range(4)]
        (result,) = tu.all_reduce(self.make(), op, [tu.per_replica(arrays)], mode)
        # One rounding of each value, and K - 1 of partial sums.
        bound = ((1 + ROUNDOFF) ** 4 * (1 + 2.0**-20) - 1) * tu.oracle(op, [*map(np.abs, arrays)])
        self.assert_bitwise_equal(result.values)
        self.assertEqual(dtype, result.value.dtype)
        self.assertAllLessEqual(np.abs(tu.exact(result.value) - tu.oracle(op, arrays)) - bound, 0)
        self.assertNotAllEqual(tu.oracle(op, arrays), tu.exact(result.value))

    def test_sums_have_16_bits_and_one_scale_and_nothing_overflows(self):
        values = [np.array([rank * 6e4, np.nan, -6e4, np.inf], np.float32) for rank in range(4)]
        step = function(lambda: all_reduce(self.make(), values)[0])
        np.testing.assert_allclose(step()[0], [36e4, np.nan, -24e4, np.inf], rtol=4 * ROUNDOFF)
        kinds = {
            (op.get_attr("reduction"), op.get_attr("T"))
            for op in step.get_concrete_function().graph.get_operations()
            if op.type == "NcclAllReduce"
        }
        self.assertEqual({(b"sum", tf.float16), (b"max", tf.float32)}, kinds)

    def test_error_feedback_hands_on_what_casts_lose(self):
        # Additions round nothing of 2 and 1 + tiny: only the cast loses tiny.
        ops, tiny = self.make(error_feedback=True), 0.3 * 2.0**-10
        value = tu.per_replica([np.array([1 + tiny] * 2, np.float32), np.zeros(2, np.float32)])

        @tf.function
        def reduce() -> tf.Tensor:
            return ops.batch_reduce(SUM, [(value, value)])[0].values[0]

        total = np.sum([reduce().numpy()[0] for _ in range(20)], dtype=np.float64)
        self.assertLess(abs(total - 20 * (1 + tiny)), 2.0**-9)


class AutoTest(tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = topology_testing.measure_briefly(self)
        decide.decide.cache_clear()  # What was planned before is not logged again.

    def check(self, ops: Any, sizes: Sequence[int], takes: bool, said: str) -> None:
        """Asserts whether NCCL takes values of so many floats, in one pack, and what is logged."""
        log.info_once.cache_clear()
        with self.assertLogs("absl", "INFO") as logs:
            told = ops.explain([(size,) for size in sizes], devices=tu.device_names(K))
            log.info_once("end")
        self.assertEqual(takes, [pack.tree for pack in told.packs] == [None])
        logged = " ".join(record.getMessage() for record in logs.records)
        self.assertRegex(logged, said)
        if "has no measurement" in logged:
            # Trees that NCCL does not use are not planned, which may take seconds.
            self.assertEqual(1, logged.count("auto takes"), logged)

    def test_takes_nccl_where_it_runs_unless_asked_for_trees(self):
        auto, ring = tfcdo.AutoAllReduce, tfcdo.AllReduceCrossDeviceOps("ring")
        said = f"auto takes NCCL for about .* {K} devices: .*has no measurement"
        self.check(auto(), (5, 25_000), True, said)
        self.check(tfcdo.AllReduceCrossDeviceOps("auto"), (10,), True, said)
        self.check(auto(topology=preset("nvswitch", K)), (20,), True, said)
        for ops in (auto(nccl=False), ring):
            self.check(ops, (25_000,), False, "^((?!NCCL).)*$")
        with tu.kernels_for("GPU"):
            said = "auto takes copy trees, because NCCL cannot run: no NcclAllReduce"
            self.check(auto(), (30,), False, said)

    def test_nccl_is_measured_where_it_runs(self):
        sizes = (2**12, 2**16)
        with mock.patch.object(measurement, "_NCCL_SIZES", sizes):
            measurement.measure(tu.device_names(K), path=self.folder / "mine.json")
        found = measurement.parse((self.folder / "mine.json").read_bytes())
        self.assertEqual(tuple(size for size, _ in found.nccl), sizes)
        self.assertTrue(all(seconds > 0 for _, seconds in found.nccl))

    def test_a_measurement_that_is_passed_decides_by_size(self):
        name = detection.name_of_measured(tu.device_names(K))
        assert name is not None
        machine = dataclasses.replace(preset("shared_memory", K), name=name)
        found = measurement.Measured(machine, "2026-01-02", ((1000, 1e-9), (10**6, 1.0)))
        file = self.folder / "mine.json"
        measurement.save(found, file)
        large = (125_000, 125_000)
        self.check(tfcdo.AutoAllReduce(), large, True, "auto takes NCCL .* has no measurement")
        ops, date = tfcdo.AutoAllReduce(topology=file), "as measured on 2026-01-02"
        self.check(ops, (250,), True, f"auto takes NCCL for about .*{date}, NCCL takes")
        self.assertIn(date, ops.explain([(250,)], devices=tu.device_names(K)).reason)
        self.check(ops, large, False, "auto takes copy trees for about .* NCCL takes .* copy trees")


REMEDY = "use tfcdo.AutoAllReduce()"


def gpus(*parts: int, hidden: int = 0) -> Any:
    """Pretends that there are GPUs, each divided into so many logical devices; 0 for undivided."""
    physical = [
        tf.config.PhysicalDevice(f"/physical_device:GPU:{hidden + index}", "GPU")
        for index in range(len(parts))
    ]
    part = tf.config.LogicalDeviceConfiguration()
    divisions = {gpu.name: [part] * count for gpu, count in zip(physical, parts) if count}
    return mock.patch.multiple(
        tf.config,
        get_visible_devices=lambda device_type=None: physical,
        get_logical_device_configuration=lambda gpu: divisions.get(gpu.name),
    )


def names(*indices: int) -> list[str]:
    return [f"/gpu:{index}" for index in indices]


GPU_KERNEL, NO_KERNEL, CPU_KERNEL, BOTH = ("GPU",), (), ("CPU",), ("GPU", "CPU")
TWO_TASKS = [f"/job:worker/task:{task}/gpu:0" for task in range(2)]
SPELLED = ["gpu:0", "/device:GPU:1", "/job:localhost/replica:0/task:0/device:GPU:2"]


class StatusTest(tf.test.TestCase, parameterized.TestCase):
    def check(self, status: tfcdo.NcclStatus, *said: str) -> None:
        self.assertEqual(not said, status.can_run)
        expected = (status.reason, status.remedy) if said else (status.reason,)
        self.assertNotIn("", expected)
        self.assertEqual("; ".join(expected), str(status))
        for part in said or ("an NcclAllReduce kernel is registered for these devices",):
            self.assertIn(part, str(status))

    @parameterized.parameters(
        # The device types with a kernel, the parts of each GPU (0: not divided), the devices, and
        # what reason and remedy say; nothing where NCCL can run.
        (GPU_KERNEL, (0, 0), names(1), "only one device"),
        (GPU_KERNEL, (0, 0), ["/cpu:0", "/cpu:1"], "no NcclAllReduce kernel", "CPU", REMEDY),
        (NO_KERNEL, (0, 0), names(0, 1), "no NcclAllReduce kernel", "GPU", REMEDY),
        (BOTH, (0, 0), ["/gpu:0", "/cpu:0"], "mix", "CPU and GPU", "one type"),
        (GPU_KERNEL, (0, 0), TWO_TASKS, "one process", TWO_TASKS[1], "tfcdo.MultiWorkerMirrored"),
        (BOTH, (0, 0), ["/gpu:0", ""], "not known while this function is traced", "strategy.run"),
        (GPU_KERNEL, (0, 0), names(0, 1, 2), "no GPU:2", "sees 2 GPU devices"),
        (CPU_KERNEL, None, ["/cpu:0", "/cpu:77"], "no CPU:77", "sees", "CPU devices"),
        (BOTH, (0, 0), names(0, 1, 0), "on one device", "each replica"),
        (CPU_KERNEL, None, ["/cpu:3", "/device:CPU:3"], "on one device"),
        (GPU_KERNEL, (2,), names(0, 1), "logical devices of one physical GPU", "GPU:0", REMEDY),
        (GPU_KERNEL, (0, 3, 2), names(0, 1, 4, 5), "/physical_device:GPU:2,", REMEDY),
        (GPU_KERNEL, (0, 3, 2), names(1, 3), "/physical_device:GPU:1,", REMEDY),
        (GPU_KERNEL, (0,) * 8, names(*range(8))),
        (GPU_KERNEL, (0, 0, 0), tuple(SPELLED)),
        # One logical device of each GPU will do; a processor's share no GPU.
        (GPU_KERNEL, (0, 3, 2), names(0, 3, 5)),
        (CPU_KERNEL, None, tu.ALL_DEVICES),
    )
    def test_devices(self, kernels, parts, devices, *said):
        with tu.kernels_for(*kernels), contextlib.nullcontext() if parts is None else gpus(*parts):
            self.check(tfcdo.nccl_status(devices), *said)

    def test_hidden_gpus_do_not_count(self):
        # TensorFlow numbers the GPUs that it may use from 0 on.
        with tu.kernels_for("GPU"), gpus(2, 2, hidden=1):
            self.check(tfcdo.nccl_status(names(0, 1)), "/physical_device:GPU:1,")
            self.check(tfcdo.nccl_status(names(2, 3)), "/physical_device:GPU:2,")
            self.check(tfcdo.nccl_status(names(1, 2)))

    @parameterized.parameters(
        (tf.float16,),
        ("int64",),
        (float,),
        ("bfloat16", "not take bfloat16 but float16, float32,", "cast"),
        ("bool", "not take bool but float16, float32,", "cast"),
    )
    def test_dtypes(self, dtype, *said):
        with tu.kernels_for("GPU"), gpus(0, 0):
            self.check(tfcdo.nccl_status(names(0, 1), dtype), *said)

    def test_bad_arguments(self):
        with self.assertRaisesRegex(ValueError, "each of devices.*nonsense"):
            tfcdo.nccl_status(["/gpu:0", "nonsense"])

    def test_an_exchange_takes_copy_trees_also_where_nccl_is_asked_for(self):
        session = mock.Mock()
        session.cluster.tasks = [mock.Mock(device_prefix="/job:localhost/replica:0/task:0")] * 2
        session.cluster.index = 0
        net = between.Network(session, "nccl", tu.device_names(2), preset("pcie", 2))
        ops = tfcdo.NcclAllReduce()._between(net, decide.BetweenHosts(exchange=Cast("bfloat16")))
        with tu.kernels_for("CPU"):
            self.assertIn("leave exchange out", ops.explain([[3]]).reason)


if __name__ == "__main__":
    tf.test.main()
