from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import pathlib
import sys
import tempfile
from typing import Any
from unittest import mock

import keras
import numpy as np
import rich.console
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo import tf_internals
from tfcdo import virtual_devices
from tfcdo.bench import fit
from tfcdo.bench import implementations
from tfcdo.bench import measure
from tfcdo.bench import memory
from tfcdo.bench import profile
from tfcdo.bench import steps
from tfcdo.bench import workloads
from tfcdo.bench.devices import choose
from tfcdo.cli import bench_report
from tfcdo.cli import commands
from tfcdo.plot import bench

virtual_devices.configure_virtual_cpus(8)

_environment = contextlib.ExitStack()


def setUpModule() -> None:
    # Another test file of this process may have loaded NCCL's kernel for CPUs.
    _environment.enter_context(tu.kernels_for("GPU"))


def tearDownModule() -> None:
    _environment.close()


_SMALL = workloads.Workload("small", ((3, 2), (5,), ()))
_QUICK = measure.Settings(iterations=2, warmup=1)
_NO_FUNCTION = "tf.ReductionToOneDevice(accumulation_fn=5)"
_TF_HIERARCHICAL = "tf.HierarchicalCopyAllReduce(num_packs=1)"


def _tfcdo(*arguments: str) -> tuple[int, str, str]:
    """Runs the command in this process; returns its exit status, its output and its complaints."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = commands.run(arguments)
    return status, output.getvalue(), errors.getvalue()


def _bench(*arguments: str) -> tuple[int, str, str]:
    warmup = () if "--fit" in arguments else ("-w", "0")
    return _tfcdo("bench", "-n", "1", *warmup, *arguments)


def _implementation(name: str) -> implementations.Implementation:
    (found,) = implementations.parse(name)
    return found


def _names(found: list[implementations.Implementation]) -> list[str]:
    return [one.name for one in found]


class _ForgetsTheLastDevice(tf.distribute.CrossDeviceOps):
    """Sums all values but the last device's."""

    def batch_reduce(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any = None
    ) -> Any:
        del reduce_op, options
        return [_broadcast(tf.add_n(value.values[:-1])) for value, _ in value_destination_pairs]


def _broadcast(total: tf.Tensor, count: int = 3) -> Any:
    copies = []
    for rank in range(count):
        with tf.device(f"CPU:{rank}"):
            copies.append(tf.identity(total))
    return tf_internals.mirrored(copies)


def _measurement(name: str, kind: str, seconds: float, wrong: int = 0) -> measure.Measurement:
    return measure.Measurement("w", 4000, 1000, "float32", 4, name, kind, seconds, 0.0, 0.0, wrong)


class WorkloadTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        ("resnet50", keras.applications.ResNet50), ("mobilenet", keras.applications.MobileNetV2)
    )
    def test_shapes_are_those_of_the_keras_model(self, name: str, model: Any):
        variables = model(weights=None).trainable_variables
        expected = [tuple(variable.shape) for variable in variables]
        self.assertEqual(list(workloads.gradients_of(name).shapes), expected)

    @parameterized.parameters(
        # The published number of parameters of BERT-base, uncased.
        ("bert-base", 199, 109_482_240),
        ("tiny", 500, 32_000),
        ("tiny-matrices", 500, 32_000),
    )
    def test_number_of_values_and_elements(self, name: str, num_values: int, count: int):
        workload = workloads.gradients_of(name, "float16")
        self.assertLen(workload.shapes, num_values)
        self.assertEqual((workload.count, workload.size), (count, 2 * count))

    def test_sizes_go_up_to_the_last_one(self):
        self.assertEqual(list(workloads.sizes(8, 512, 4)), [8, 32, 128, 512])
        self.assertEqual(list(workloads.sizes(8, 500, 4)), [8, 32, 128])

    @parameterized.parameters((0, 8, 2), (8, 4, 2), (8, 16, 1))
    def test_sizes_that_lead_nowhere(self, begin: int, end: int, factor: int):
        with self.assertRaisesRegex(ValueError, f"begin={begin}, end={end}, factor={factor}"):
            list(workloads.sizes(begin, end, factor))

    def test_one_value_holds_whole_elements(self):
        self.assertEqual(workloads.one_value(1, "float64").shapes, ((1,),))
        self.assertEqual(workloads.one_value(31, "float64").size, 24)

    @parameterized.parameters(*workloads.DTYPES.values())
    def test_sums_are_exact_in_every_dtype(self, dtype: str):
        workload = workloads.Workload("w", ((1000,),), dtype)
        arrays = [workloads.numbers(workload, seed)[0] for seed in range(16)]
        exact = np.sum(arrays, axis=0, dtype=np.int64)
        summed = tf.add_n([tf.cast(array, dtype) for array in arrays])
        self.assertAllEqual(tf.cast(summed, tf.int64), exact)
        self.assertGreater(len(np.unique(exact)), 10)


class ImplementationTest(parameterized.TestCase):
    def test_all_are_all_of_both_packages(self):
        found = _names(implementations.parse("all"))
        self.assertEqual(
            found, _names([*implementations.parse("tfcdo"), *implementations.parse("tf")])
        )
        self.assertContainsSubset(
            [
                "tfcdo.ReductionToOneDevice",
                "tfcdo.HierarchicalCopyAllReduce",
                "tfcdo.NcclAllReduce",
                "tf.HierarchicalCopyAllReduce(num_packs=0)",
                "tf.HierarchicalCopyAllReduce(num_packs=8)",
                "tf.ReductionToOneDevice",
                "tf.NcclAllReduce",
                "tf.CollectiveAllReduce",
            ],
            found,
        )

    def test_a_call_is_read_with_its_arguments(self):
        ops = _implementation("tfcdo.AllReduceCrossDeviceOps(all_reduce_alg='ring', num_packs=3)")
        made = ops.cross_device_ops()
        self.assertIsInstance(made, tfcdo.AllReduceCrossDeviceOps)
        self.assertEqual(dict(ops.arguments), {"all_reduce_alg": "ring", "num_packs": 3})

    def test_the_long_name_of_a_tensorflow_class(self):
        made = _implementation("tf.distribute.ReductionToOneDevice()").cross_device_ops()
        self.assertIs(type(made), tf.distribute.ReductionToOneDevice)

    def test_the_strategys_own_choice(self):
        strategy = _implementation("tf.CollectiveAllReduce").strategy(["CPU:0", "CPU:1"])
        self.assertEqual(
            type(strategy.extended._get_cross_device_ops(tf.constant(0.0))).__name__,
            "CollectiveAllReduce",
        )

    @parameterized.parameters(
        ("tf.NcclAllReduce", True),
        ("tf.ReductionToOneDevice", False),
        ("tf.CollectiveAllReduce", False),
        ("tfcdo.NcclAllReduce(num_packs=2)", True),
        ("tfcdo.AutoAllReduce", False),
        ("tfcdo.AllReduceCrossDeviceOps", True),
        ("tfcdo.AllReduceCrossDeviceOps(all_reduce_alg='nccl', num_packs=2)", True),
        ("tfcdo.AllReduceCrossDeviceOps(all_reduce_alg='ring')", False),
    )
    def test_nccl_does_not_run_on_processors(self, name: str, is_nccl: bool):
        why_not = _implementation(name).why_not(["CPU:0", "CPU:1"], "float32")
        if is_nccl:
            self.assertIn("no NcclAllReduce kernel is registered for CPU", str(why_not))
        else:
            self.assertIsNone(why_not)

    @parameterized.parameters(
        # An argument that tfcdo's own check names, and one that TensorFlow has no check for.
        ("tfcdo.ReductionToOneDevice(reduce_to_device='CPU:99')", "reduce_to_device must name a"),
        ("tf.ReductionToOneDevice(reduce_to_device='x')", "Unknown attribute 'x'"),
        (_NO_FUNCTION, "'int' object is not callable"),
    )
    def test_arguments_that_only_prove_wrong_when_they_are_used(self, name: str, told: str):
        data = steps.place(_SMALL, choose(2))
        for build in (steps.build_graph, steps.build_eager):
            with self.assertRaises(implementations.UnusableArgumentsError) as caught:
                _build(_implementation(name), build, data)
            self.assertStartsWith(str(caught.exception), f"{name}: ")
            self.assertIn(told, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))

    @parameterized.parameters("tfcdo", "tf")
    def test_a_bug_is_not_blamed_on_the_arguments(self, package: str):
        one = implementations.Implementation("x", package, "x", (("num_packs", 1),))

        def build(_: implementations.Implementation) -> None:
            raise ValueError("a bug")

        with self.assertRaisesRegex(ValueError, "^a bug$"):
            one.make(build)

    @parameterized.parameters("tfcdo.ReductionToOneDevice", "tf.ReductionToOneDevice")
    def test_what_has_no_arguments_has_no_wrong_ones(self, name: str):
        build = mock.Mock(side_effect=[TypeError("reduce_to_device must be"), None])
        with self.assertRaisesRegex(TypeError, "^reduce_to_device must be$"):
            _implementation(name).make(build)
        build.assert_called_once()


def _build(one: implementations.Implementation, build: Any, data: steps.Data) -> steps.Built:
    return one.make(lambda made: build(data, made.reducer(data.devices.names)))


class StepTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(steps.build_graph, steps.build_eager)
    def test_wrong_elements_are_counted(self, build: Any):
        data = steps.place(_SMALL, choose(3))
        last = [variable.numpy() for variable in data.variables[-1]]
        # What is left out is missed wherever it is not 0, on each of the three devices.
        expected = 3 * sum(np.count_nonzero(array) for array in last)
        self.assertGreater(expected, 0)
        ops = _ForgetsTheLastDevice()
        wrong = build(data, lambda values: ops.batch_reduce(None, [(v, v) for v in values])).wrong
        self.assertEqual(wrong, expected)

    def test_a_wrong_shape_is_wrong_in_every_element(self):
        data = steps.place(_SMALL, choose(2))
        held = [[tf.reshape(total, [1, -1]) for total in data.sums]] * 2
        self.assertEqual(data.num_wrong(held), 2 * _SMALL.count)

    @parameterized.parameters(*_names(implementations.parse("all")))
    def test_every_implementation_is_right_on_two_devices(self, name: str):
        devices = choose(2)
        one = _implementation(name)
        if one.why_not(devices.names, "float32"):
            self.assertIn("Nccl", name)
            return
        built = steps.build_graph(steps.place(_SMALL, devices), one.reducer(devices.names))
        self.assertEqual(built.wrong, 0)
        self.assertIsInstance(built.first_call, float)

    def test_each_device_has_other_values(self):
        data = steps.place(_SMALL, choose(2))
        first, second = data.variables
        self.assertNotAllEqual(first[0], second[0])
        self.assertEqual([value.device for value in second], [data.devices.names[1]] * 3)
        self.assertAllEqual(first[0] + second[0], data.sums[0])

    def test_small_values_of_one_shape_are_read_together(self):
        shapes = ((2, 3), (2**14 + 1,), (5,), (2, 3), (2**14 + 1,), (5,), (), (2, 3))
        data = steps.place(workloads.Workload("w", shapes), choose(2))
        self.assertEqual(data.together, ((0, 3, 7), (1,), (2, 5), (4,), (6,)))
        self.assertTrue(data.has_small)
        held = data.read()
        self.assertEqual([value.shape for value in held[1]], list(shapes))
        for own, total in zip(zip(*held, strict=True), data.sums, strict=True):
            self.assertAllEqual(tf.add_n(own), total)
        self.assertFalse(steps.place(_SMALL, choose(2)).has_small)

    def test_packing_and_unpacking_changes_nothing(self):
        shapes = ((2, 3), (2**14 + 1,), (5,), (2, 3), (2**14 + 1,), (5,), (), (), (2, 3))
        data = steps.place(workloads.Workload("w", shapes), choose(2))
        held = data.read()
        ops: list[str] = []

        @tf.function(autograph=False)
        def repack() -> Any:
            results = steps.reduce_held(measure.floor.repack(data), held)
            ops.extend(op.type for op in tf.compat.v1.get_default_graph().get_operations())
            return results

        for results, own in zip(repack(), held, strict=True):
            self.assertAllEqual([value.shape for value in results], shapes)
            for result, value in zip(results, own, strict=True):
                self.assertAllEqual(result, value)
        # On each of the two devices.
        counts = {op: ops.count(op) for op in ("Pack", "Unpack", "ConcatV2", "SplitV")}
        self.assertEqual(counts, {"Pack": 4, "Unpack": 4, "ConcatV2": 2, "SplitV": 2})

    def test_only_what_the_all_reduce_adds_is_counted(self):
        devices = choose(3)
        data = steps.place(_SMALL, devices)
        nodes = [
            steps.num_nodes(steps.trace(data, reduce))
            for reduce in (
                None,
                lambda values: [_broadcast(value.values[0]) for value in values],
            )
        ]
        self.assertEqual(nodes[1] - nodes[0], len(_SMALL.shapes) * 3)

    def test_the_graph_is_a_tenth_of_tensorflows(self):
        # The graph of ResNet-50's gradients has as many nodes as that of values of other sizes, but
        # not fewer: which values are packed depends on them.
        data = steps.place(workloads.gradients_of("resnet50"), choose(8))
        base = steps.num_nodes(steps.trace(data, None))

        def added(name: str) -> int:
            reduce = _implementation(name).reducer(data.devices.names)
            return steps.num_nodes(steps.trace(data, reduce)) - base

        self.assertLessEqual(added("tfcdo.AutoAllReduce"), 0.10 * added(_TF_HIERARCHICAL))


class MeasureTest(parameterized.TestCase, tf.test.TestCase):
    def test_steps_take_turns(self):
        taken: list[str] = []
        now = 0.0

        def step_of(name: str, seconds: float) -> steps.Step:
            def step() -> None:
                nonlocal now
                now += seconds
                taken.append(name)

            return step

        compared = {"a": step_of("a", 1.0), "b": step_of("b", 0.002)}
        with (
            mock.patch.object(measure.time, "perf_counter", lambda: now),
            # As if two threads had computed all the time.
            mock.patch.object(measure.time, "process_time", lambda: 2 * now),
        ):
            times = measure.interleave(compared, measure.Settings(iterations=2, warmup=1))
        # After the first round, as many calls of the short step as fill a sample.
        self.assertEqual(taken, [*"ab", *"abbb", *"abbb"])
        self.assertAllClose(times["a"].wall, [1.0, 1.0])
        self.assertAllClose(times["b"].wall, [0.002, 0.002])
        self.assertAllClose(times["b"].cpu, [0.004, 0.004])

    def test_algbw_and_busbw(self):
        one = _measurement("x", "tf", 2e-6)
        self.assertAllClose(one.algbw, 2e9)
        self.assertAllClose(one.busbw, 2e9 * 2 * 3 / 4)
        self.assertTrue(math.isnan(_measurement("x", "tf", -1e-6).busbw))

    @parameterized.parameters(False, True)
    def test_what_packing_takes_is_measured_if_there_are_small_values(self, eager: bool):
        workload = workloads.Workload("w", ((3,), (3,)))
        one = _implementation("tfcdo.ReductionToOneDevice")
        results = measure.run(workload, choose(2), [one], measure.Settings(2, 1, eager))
        *_, packing, baseline = results
        self.assertEqual((packing.kind, packing.wrong), (measure.PACKING, None))
        self.assertEqual(baseline.kind, measure.BASELINE)

    @parameterized.parameters(False, True)
    def test_a_run_measures_all_of_them(self, eager: bool):
        names = ["tfcdo.ReductionToOneDevice", _TF_HIERARCHICAL]
        told: list[str] = []
        settings = measure.Settings(2, 1, eager)
        results = measure.run(
            _SMALL,
            choose(3),
            [_implementation(name) for name in names],
            settings,
            told.append,
        )
        self.assertEqual(
            [(one.name, one.kind) for one in results],
            [
                (names[0], "tfcdo"),
                (names[1], "tf"),
                ("floor (XLA)", measure.FLOOR),
                ("floor (add_n)", measure.FLOOR),
                ("baseline", measure.BASELINE),
            ],
        )
        self.assertLen(told, measure.num_pieces(settings, len(names)))
        ours, theirs, *floors, baseline = results
        self.assertEqual((ours.size, ours.count, ours.num_devices), (48, 12, 3))
        self.assertEqual([one.wrong for one in (ours, *floors)], [0, 0, 0])
        # TensorFlow's class leaves a device out of an odd number, which has to show.
        self.assertNotEqual(theirs.wrong, 0)
        self.assertIsNone(baseline.wrong)
        self.assertGreater(baseline.seconds, 0.0)
        self.assertEqual([one.first_call is None for one in (ours, baseline)], [eager, eager])
        self.assertEqual([one.nodes is None for one in (ours, baseline)], [eager, eager])

    def test_the_baseline_of_the_same_round_is_subtracted(self):
        # The median of the differences, which is not the difference of the medians.
        walls = {
            "baseline": [1.0, 5.0, 9.0],
            "tfcdo.ReductionToOneDevice": [3.0, 6.0, 20.0],
            "baseline of the floor": [0.5, 0.5, 0.5],
            "floor (XLA)": [1.0, 1.5, 2.0],
            "floor (add_n)": [0.5, 0.5, 0.5],
        }
        times = {
            name: measure.Times(np.array(wall), np.array(wall) * 10) for name, wall in walls.items()
        }
        with mock.patch.object(measure, "interleave", return_value=times) as interleave:
            one = _implementation("tfcdo.ReductionToOneDevice")
            results = measure.run(_SMALL, choose(2), [one], _QUICK)
        self.assertSameElements(walls, interleave.call_args.args[0])
        self.assertAllClose([one.seconds for one in results], [2.0, 1.0, 0.0, 5.0])
        self.assertAllClose([one.spread for one in results], [5.0, 0.5, 0.0, 4.0])
        self.assertAllClose([one.cpu_seconds for one in results], [20.0, 10.0, 0.0, 50.0])

    def test_the_floor_adds_as_many_bytes(self):
        workload = workloads.one_value(5 * 2**20 + 8)
        data = measure.floor.place(workload, choose(2))
        self.assertEqual(data.workload.shapes, ((2**20,), (2**18 + 2,)))
        self.assertEqual(len(set(data.devices.names)), 1)
        for name, reduce in measure.floor.passes(data.devices.names[0]).items():
            self.assertEqual(steps.build_graph(data, reduce).wrong, 0, name)


class MemoryTest(tf.test.TestCase):
    def test_peak_is_what_a_step_makes_at_the_same_time(self):
        devices = choose(2)
        data = steps.place(workloads.Workload("w", ((2**20,),)), devices)

        def reduce(values: Any) -> Any:
            first, second = values[0].values
            # Two temporary tensors that live at the same time, the product in the place of one.
            return [_broadcast(tf.negative(first) * tf.exp(second), 2)]

        step = steps.build_graph(data, reduce).step
        # Not every build of TensorFlow has an allocator for processors that counts.
        self.assertIn(memory.peak_of(step, devices), (2 * 4 * 2**20, None))
        self.assertIn(memory.peak_of(steps.build_graph(data, None).step, devices), (0, None))

    def test_peak_is_counted_from_what_was_in_use_before(self):
        in_use = [{"current": 5, "peak": 9}]
        info = mock.patch.object(
            tf.config.experimental, "get_memory_info", side_effect=lambda _: in_use[-1]
        )
        reset = mock.patch.object(tf.config.experimental, "reset_memory_stats")
        with info, reset:
            peak = memory.peak_of(lambda: in_use.append({"current": 6, "peak": 105}), choose(2))
        self.assertEqual(peak, 100)

    def test_no_count_is_no_number(self):
        error = ValueError("Allocator stats not available")
        with mock.patch.object(tf.config.experimental, "get_memory_info", side_effect=error):
            self.assertIsNone(memory.peak_of(lambda: None, choose(2)))


class ProfileTest(tf.test.TestCase):
    def test_ops_and_their_bytes(self):
        workload = workloads.Workload("w", ((300, 300),))
        found = profile.profile(workload, 2, _implementation("tf.ReductionToOneDevice"))
        by_op = {entry.op: entry for entry in found}
        self.assertEqual((by_op["AddN"].count, by_op["AddN"].size), (1, workload.size))
        self.assertGreaterEqual(by_op["AddN"].seconds, 0.0)
        self.assertNotIn("ReadVariableOp", by_op)


class DevicesTest(tf.test.TestCase):
    def test_cards_are_taken_if_there_are_enough(self):
        cards = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in range(2)]

        def list_devices(kind: str) -> list[tf.config.PhysicalDevice]:
            return cards if kind == "GPU" else processors

        processors = tf.config.list_physical_devices("CPU")
        details = {"device_name": "Some Card"}
        with (
            mock.patch.object(tf.config, "list_physical_devices", list_devices),
            mock.patch.object(tf.config.experimental, "get_device_details", lambda _: details),
        ):
            two, three = choose(2), choose(3)
        self.assertEqual(two.description, "2 x Some Card")
        self.assertFalse(two.on_cpu)
        self.assertEndsWith(two.names[1], "device:GPU:1")
        self.assertEqual(three.description, "3 virtual CPU devices, because there are only 2 GPUs")
        self.assertEndsWith(three.names[2], "device:CPU:2")


class ReportTest(parameterized.TestCase, tf.test.TestCase):
    def test_what_is_wrong_is_not_the_fastest(self):
        results = [
            _measurement("tf.Wrong", "tf", 1.0, wrong=1),
            _measurement("tf.Slow", "tf", 3.0),
            _measurement("tf.Right", "tf", 2.0),
            _measurement("tfcdo.X", "tfcdo", 0.5),
        ]
        self.assertIs(bench_report.fastest(results, "tf"), results[2])
        self.assertIsNone(bench_report.fastest(results, measure.FLOOR))

    @parameterized.parameters(80, 160)
    def test_the_table_fits(self, width: int):
        results = [
            dataclasses.replace(_measurement("tf.CollectiveAllReduce", "tf", 0.2), size=437928960),
            dataclasses.replace(_measurement(_TF_HIERARCHICAL, "tf", 0.2), size=437928960),
        ]
        output = io.StringIO()
        bench_report.show(results, rich.console.Console(file=output, width=width))
        self.assertNotIn("…", output.getvalue())
        for shown in ("437928960", "1000", "float32", "sum", "tf.HierarchicalCopyAllReduce(1)"):
            self.assertIn(shown, output.getvalue())
        self.assertLessEqual(max(map(len, output.getvalue().splitlines())), width)

    def test_ratios_to_what_is_lost_in_its_spread_are_not_shown(self):
        reference = _measurement("tf.X", "tf", 2e-3)
        ours = _measurement("tfcdo.X", "tfcdo", 1e-3)
        for spread, shown in ((1e-3, "0.50"), (3e-3, "-")):
            output = io.StringIO()
            noisy = dataclasses.replace(reference, spread=spread)
            bench_report.show([ours, noisy], rich.console.Console(file=output, width=160))
            row = next(line for line in output.getvalue().splitlines() if "tfcdo.X" in line)
            self.assertEqual(row.split()[-2:], [shown, "-"])

    def test_cores_where_nobody_tells_which_may_be_used(self):
        with (
            mock.patch.object(os, "sched_getaffinity", create=True),
            mock.patch.object(os, "cpu_count", return_value=48),
        ):
            del os.sched_getaffinity
            found = bench_report.circumstances(choose(2))
        self.assertEqual(found["machine"]["cores"], 48)


class PlotTest(tf.test.TestCase):
    def test_lines_leave_out_what_is_lost_in_its_spread(self):
        # 4000 bytes over 4 devices: busbw is 6000 bytes over the time.
        times = ((1e-6, 0.9e-6), (1e-6, 1.1e-6), (-1e-6, 0.0), (3e-6, 0.0))
        measured = [
            dataclasses.replace(_measurement("tfcdo.X", "tfcdo", seconds), spread=spread)
            for seconds, spread in times
        ]
        figure = bench._lines(measured)
        self.addCleanup(bench.plt.close, figure)
        (line,) = figure.axes[0].lines
        self.assertAllClose(line.get_ydata(), [6.0, math.nan, math.nan, 2.0])

    def test_error_bars_are_as_long_as_the_spread(self):
        measured = dataclasses.replace(_measurement("tfcdo.X", "tfcdo", 5e-3), spread=2e-3)
        figure = bench._bars([[measured]])
        self.addCleanup(bench.plt.close, figure)
        (axes,) = figure.axes
        (bar,) = axes.patches
        self.assertAllClose(bar.get_width(), 5.0)
        ((ends,),) = [bars.get_segments() for bars in axes.collections]
        self.assertAllClose(ends[:, 0], [4.0, 6.0])


class FitTest(tf.test.TestCase):
    def test_the_second_step_of_each_round_counts(self):
        one = _implementation("tfcdo.ReductionToOneDevice")
        # The first step, the call that traces once more, and three rounds of two steps.
        steps_of_calls = [[70.0], [60.0], [50.0, 1.0], [40.0, 4.0], [30.0, 2.0]]
        with (
            mock.patch.object(fit, "_compiled"),
            mock.patch.object(fit, "_train", side_effect=steps_of_calls),
        ):
            (found,) = fit.run("mobilenet", choose(2), [one], 3)
        self.assertAllClose((found.first_step, found.seconds, found.spread), (70.0, 2.0, 1.5))


class CommandTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_a_sweep(self):
        json_file, plot_file = self.folder / "out.json", self.folder / "out.png"
        status, output, _ = _bench(
            *("-b", "64", "-e", "4K", "-f", "64", "-g", "2", "-d", "double"),
            *("--ops", "tfcdo.ReductionToOneDevice", "--ops", "tf.ReductionToOneDevice"),
            *("--json", str(json_file), "--plot", str(plot_file)),
        )
        self.assertEqual(status, 0, output)
        self.assertIn("2 virtual CPU devices", output)
        header = next(line for line in output.splitlines() if "algbw" in line)
        self.assertEqual(
            " ".join(header.split()),
            "size count type redop implementation time ± algbw busbw #wrong of of",
        )
        rows = [line.split() for line in output.splitlines() if " sum " in line]
        self.assertLen(rows, 2 * (2 + 2 + 1))
        self.assertEqual(rows[0][:5], ["64", "8", "float64", "sum", "tfcdo.ReductionToOneDevice"])
        self.assertEqual(rows[5][:2], ["4096", "512"])
        for heading in ("CPU time", "first call", "graph nodes", "peak memory"):
            self.assertIn(heading, output)

        written = json.loads(json_file.read_text())
        self.assertEqual(written["versions"]["tensorflow"], tf.__version__)
        self.assertEqual(written["devices"], "2 virtual CPU devices")
        self.assertGreaterEqual(written["machine"]["cores"], 1)
        self.assertLen(written["results"], len(rows))
        self.assertEqual({one["wrong"] for one in written["results"]}, {0, None})
        self.assertEqual(plot_file.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")

    def test_models_eagerly(self):
        plot_file = self.folder / "bars.png"
        status, output, _ = _bench(
            *("--model", "tiny", "--model", "tiny-matrices", "-g", "2", "--eager"),
            *("--ops", "tfcdo.ReductionToOneDevice", "--plot", str(plot_file)),
        )
        self.assertEqual(status, 0, output)
        rows = [line.split()[:4] for line in output.splitlines() if " sum " in line]
        # The implementation, the floors, packing and the baseline of each model.
        self.assertEqual(rows, [["128000", "32000", "float32", "sum"]] * 2 * (1 + 2 + 1 + 1))
        self.assertIn("pack and unpack: what TensorFlow's ops take", output)
        self.assertGreater(plot_file.stat().st_size, 1000)

    @parameterized.parameters(
        (("-b", "1", "-e", "8", "-f", "2"), ["4", "8"]),
        (("--model", "tiny", "--model", "tiny"), ["128000"]),
    )
    def test_each_workload_is_measured_once(self, arguments: tuple[str, ...], sizes: list[str]):
        ours = "tfcdo.ReductionToOneDevice"
        status, output, _ = _bench(*arguments, "-g", "2", "--ops", ours)
        self.assertEqual(status, 0, output)
        rows = [line.split() for line in output.splitlines() if " sum " in line]
        self.assertEqual([row[0] for row in rows if row[4] == ours], sizes)

    def test_a_wrong_result_of_tensorflow_is_shown(self):
        status, output, _ = _bench("-b", "4K", "-e", "4K", "-g", "3", "--ops", _TF_HIERARCHICAL)
        # Only what tfcdo gets wrong fails.
        self.assertEqual(status, 0)
        (row,) = [
            line
            for line in output.splitlines()
            if "tf.HierarchicalCopyAllReduce(1)" in line and " sum " in line
        ]
        self.assertGreater(int(row.split()[9]), 0)

    def test_a_wrong_result_of_ours_fails(self):
        with (
            mock.patch.object(tfcdo, "Wrong", _ForgetsTheLastDevice, create=True),
            # One that is wrong is enough.
            mock.patch.object(tfcdo, "__all__", ["Wrong", "ReductionToOneDevice"]),
        ):
            status, output, _ = _bench("-b", "4K", "-e", "4K", "-g", "3", "--ops", "tfcdo")
        self.assertEqual(status, 1, output)

    def test_what_cannot_run_is_named_and_left_out(self):
        status, output, _ = _bench("-b", "64", "-e", "64", "-g", "2", "--ops", "tf")
        self.assertEqual(status, 0, output)
        self.assertIn("Without tf.NcclAllReduce: ", output)
        self.assertIn("tf.CollectiveAllReduce", output)

    def test_square_brackets_in_names_are_printed(self):
        status, output, _ = _bench(
            *("-b", "64", "-e", "64", "-g", "2", "--ops", "tf.NcclAllReduce()  # [/x]"),
            *("--ops", "tfcdo.ReductionToOneDevice()  # [bold]"),
        )
        self.assertEqual(status, 0, output)
        self.assertIn("Without tf.NcclAllReduce()  # [/x]: ", output)
        self.assertIn(" tfcdo.ReductionToOneDevice()  # [bold] ", output)

    @parameterized.parameters(
        (("-b", "8X"), "'8X' is no number of bytes"),
        (("-b", "0"), "'0' is no number of bytes"),
        (("-f", "1"), "--stepfactor"),
        (("-g", "1"), "--devices"),
        (("-n", "0"), "--iters"),
        (("-d", "float8"), "float8"),
        (("--model", "vgg"), "'vgg'"),
        (("--ops", "ring"), "'ring' names no implementation"),
        (("--ops", "tfcdo.Ring"), "no class 'Ring' in tfcdo"),
        (("--ops", "tf.("), "cannot read 'tf.('"),
        (("--ops", "tf.HierarchicalCopyAllReduce(8)"), "written as in num_packs=8"),
        (("--ops", "tfcdo.HierarchicalCopyAllReduce(num_packs=-1)"), "num_packs"),
        (("--ops", "tf.HierarchicalCopyAllReduce(packs=1)"), "packs"),
        (("--ops", "tf.CollectiveAllReduce(foo=1)"), "a strategy makes it without arguments"),
        (("--ops", "tf.NcclAllReduce(num_packs=1, num_packs=2)"), "num_packs is given twice"),
        (("--ops", _NO_FUNCTION), "not callable"),
        (("--ops", "tf.NcclAllReduce"), "none of the implementations can run here"),
    )
    def test_a_wrong_option_gets_one_line(self, arguments: tuple[str, ...], named: str):
        self.assert_one_line(named, *arguments)

    @parameterized.parameters(
        (("-b", "1K", "-e", "8"), "--minbytes must be at most --maxbytes; got 1024 and 8 bytes"),
        (("--model", "vgg"), "'vgg' is not one of 'resnet50', "),
        (("--json", "out.txt"), "does not end in .json"),
        (("--json", "folder.json"), "'folder.json' is a folder"),
        (("--plot", "no-such-folder/out.png"), "there is no folder 'no-such-folder'"),
        (("--fit", "--model", "tiny"), "mobilenet or resnet50, not tiny"),
        (("--fit", "--plot", "out.png"), "--plot cannot be given beside --fit"),
        (("--fit", "-b", "8"), "--minbytes cannot"),
        (("--fit", "-e", "8", "-f", "2"), "--maxbytes and --stepfactor cannot"),
        (("--fit", "-w", "5", "-d", "float"), "--warmup and --datatype cannot"),
        (("--fit", "--eager"), "--eager cannot"),
        (("--model", "tiny", "-b", "8"), "--minbytes cannot be given beside --model"),
        (("--model", "tiny", "-e", "8"), "--maxbytes cannot"),
        (("--model", "tiny", "-f", "2"), "--stepfactor cannot"),
    )
    def test_a_wrong_option_is_found_before_tensorflow_starts(
        self, arguments: tuple[str, ...], named: str
    ):
        (self.folder / "folder.json").mkdir()
        self.addCleanup(os.chdir, pathlib.Path.cwd())
        os.chdir(self.folder)
        with mock.patch.dict(sys.modules, tensorflow=None):
            self.assert_one_line(named, *arguments)

    def assert_one_line(self, named: str, *arguments: str) -> None:
        status, _, errors = _bench(*arguments)
        self.assertEqual(status, 2)
        (line,) = errors.splitlines()
        self.assertStartsWith(line, "tfcdo: ")
        self.assertIn(named, line)

    def test_devices_are_chosen_before_anything_is_constructed(self):
        # As in a process where what was constructed has started TensorFlow with one device.
        error = RuntimeError("TensorFlow has already started with 1")
        with (
            mock.patch("tfcdo.bench.devices.choose", side_effect=error),
            mock.patch.object(implementations, "parse") as parse,
        ):
            status, _, errors = _bench("-b", "64", "-e", "64", "-g", "2")
        self.assertEqual((status, errors), (1, f"tfcdo: {error}\n"))
        parse.assert_not_called()

    def test_a_file_that_cannot_be_written_gets_one_line_after_the_results(self):
        path = self.folder / "out.json"
        path.symlink_to(self.folder / "missing" / "out.json")
        status, output, errors = _bench(
            *("-b", "64", "-e", "64", "-g", "2", "--json", str(path)),
            *("--ops", "tfcdo.ReductionToOneDevice"),
        )
        self.assertEqual(status, 1)
        self.assertIn(" tfcdo.ReductionToOneDevice ", output)
        # What was logged comes before it, if this process logs to standard error.
        self.assertEndsWith(errors, f"tfcdo: {path}: {os.strerror(errno.ENOENT)}\n")
        self.assertNotIn("Traceback", errors)

    def test_fit(self):
        json_file = self.folder / "fit.json"
        with mock.patch.dict(fit.MODELS, {"mobilenet": _small_model}):
            status, output, _ = _bench(
                *("--fit", "-g", "2", "--json", str(json_file)),
                *("--model", "mobilenet", "--model", "mobilenet"),
                *("--ops", "tfcdo.ReductionToOneDevice", "--ops", "tf.ReductionToOneDevice"),
            )
        self.assertEqual(status, 0, output)
        for heading in ("step", "first step", "of"):
            self.assertIn(heading, output)
        results = json.loads(json_file.read_text())["results"]
        self.assertEqual(
            [one["name"] for one in results],
            ["tfcdo.ReductionToOneDevice", "tf.ReductionToOneDevice"],
        )
        for one in results:
            self.assertGreater(one["seconds"], 0.0)
            self.assertGreater(one["first_step"], 0.0)

    def test_fit_with_arguments_that_cannot_be_used(self):
        with mock.patch.dict(fit.MODELS, {"mobilenet": _small_model}):
            status, _, errors = _bench("--fit", "-g", "2", "--ops", _NO_FUNCTION)
        self.assertEqual(status, 2)
        self.assertEndsWith(errors, f"tfcdo: {_NO_FUNCTION}: 'int' object is not callable\n")
        self.assertNotIn("Traceback", errors)


def _small_model(weights: None, input_shape: tuple[int, ...], classes: int) -> Any:
    del weights
    return keras.Sequential(
        [
            keras.layers.Input(input_shape),
            keras.layers.Flatten(),
            keras.layers.Dense(classes, activation="softmax"),
        ]
    )


if __name__ == "__main__":
    tf.test.main()
