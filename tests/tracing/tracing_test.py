"""What the profiler saw of an all-reduce, on virtual CPU devices: one training, looked at often."""

import contextlib
import io
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest import mock

import tensorflow as tf
import testing_utils as tu
from absl.testing import absltest, parameterized
from cli_testing import run_tfcdo

import tfcdo
from tfcdo import keras_internals, log, tf_internals
from tfcdo.execute.interpreter import Planned, recently_planned
from tfcdo.keras import callbacks
from tfcdo.plan import copy_tree
from tfcdo.plan.plan import Plan
from tfcdo.tracing import profile, recording
from tfcdo.tracing.profile import Event

_STEPS = 3
_DEVICES = 3


def step_on(ops: Any, devices: Sequence[int], op: Any = tu.SUM, dtype: Any = tf.float32) -> Any:
    names = [tu.device_name(device) for device in devices]
    values = tu.per_replica([tf.ones([60_000], dtype)] * len(names), names)

    @tf.function
    def step() -> Any:
        factors = []
        for name, value in zip(names, values.values):
            with tf.name_scope("computation"), tf.device(name):
                factors.append(tf.math.sin(value))
        own = tf_internals.per_replica(factors)
        return ops.reduce(op, own, own).values

    return step


def profiled(*steps: Any) -> Any:
    profiler = recording.Profiler()
    profiler.start()
    for step in steps:
        step()
    return profiler.stop()


def edges_of(runs: Any) -> list[Any]:
    return [(run.pack, run.kind, run.sources, run.target) for run in runs]


def edges_of_star(pack: int, root: int) -> list[Any]:
    children = tuple({0, 1, 2} - {root})
    edges = [(pack, profile.REDUCE, (child,), root) for child in children]
    edges += [(pack, profile.BROADCAST, (root,), child) for child in children]
    return [(pack, profile.ADD, children, root), *edges]


class TraceTest(tf.test.TestCase):
    def test_a_trace(self):
        # Two packs, whose trees have 0 and 1 as roots and two edges each.
        step = step_on(tfcdo.HierarchicalCopyAllReduce(num_packs=2), range(_DEVICES))
        step()
        path = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "out.json")
        with tfcdo.trace(path) as traced:
            for _ in range(_STEPS):
                step()
        recorded: Any = traced.recording
        edges = [*edges_of_star(0, 0), *edges_of_star(1, 1)]
        self.assertCountEqual(edges_of(recorded.runs), edges * _STEPS)
        self.assertGreaterEqual(min(run.end - run.start for run in recorded.runs), 0.0)
        (by_scope,) = recorded.runs_of_step().values()
        for added in (run for run in by_scope if run.kind == profile.ADD):
            for run in by_scope:
                if (run.pack, run.kind) == (added.pack, profile.REDUCE):
                    self.assertLessEqual(run.start, added.start)
                if (run.pack, run.kind) == (added.pack, profile.BROADCAST):
                    self.assertGreaterEqual(run.start, added.end)

        found = traced.summary
        self.assertEqual(found.num_steps, _STEPS)
        self.assertBetween(found.all_reduce, 1e-9, found.step)
        self.assertBetween(found.exposed, 0.0, found.all_reduce)
        self.assertRegex(
            str(found), "^3 steps of .* all-reduce .* exposed; slowest edge tfcdo/pack"
        )

        content = json.loads(path.read_text(encoding="utf-8"))
        self.assertEqual(content["otherData"]["summary"], str(found))
        bars = [bar for bar in content["traceEvents"] if bar["ph"] == "X"]
        all_ops, ran, planned = ([bar for bar in bars if bar["pid"] == pid] for pid in (1, 2, 3))
        self.assertIn("computation/", " ".join(bar["name"] for bar in all_ops))
        self.assertLen(ran, 2 * 5 * _STEPS)
        self.assertLen(planned, 2 * (4 + 2))
        begin = min(run.start for run in by_scope)
        self.assertGreater(begin, 0.0)
        self.assertAlmostEqual(min(bar["ts"] for bar in planned), begin * 1e6)


def _chain() -> Any:
    return tfcdo.AllReduceCrossDeviceOps([copy_tree.chain(_DEVICES, 0)])


class OtherPlansTest(tf.test.TestCase):
    def test_an_op_that_reads_the_sum_of_another_device(self):
        reduce = step_on(tfcdo.HierarchicalCopyAllReduce(), range(_DEVICES)).python_function

        @tf.function
        def step() -> Any:
            sums = reduce()
            with tf.device(tu.device_name(1)):
                return sums, tf.math.cos(sums[2])

        step()
        self.assertCountEqual(edges_of(profiled(step).runs), edges_of_star(0, 0))

    def test_the_same_devices_in_another_order(self):
        step, other = (step_on(_chain(), order) for order in ((0, 1, 2), (2, 0, 1)))
        step()
        other()
        found = profiled(step, step)
        (runs,) = found.runs_of_step().values()
        plans = {run.planned for run in runs if run.planned}
        self.assertEqual([tu.device_names(_DEVICES)], [plan.devices for plan in plans])
        ways = ["1→0", "2→1"]
        self.assertEqual({*ways}, {run.way for run in runs if run.kind == profile.REDUCE})
        self.assertContainsSubset(ways, {run.lane for run in found.planned_runs(runs)})
        runs = profiled(step, other).runs
        self.assertCountEqual(ways * 2, [run.way for run in runs if run.kind == profile.REDUCE])

    def test_explaining_is_no_plan(self):
        before = recently_planned()
        told = _chain().explain([(60_000,)], devices=tu.device_names(_DEVICES)[::-1])
        self.assertLen(told.packs, 1)
        self.assertEqual(before, recently_planned())

    def test_copies_that_are_cast_are_found(self):
        ops = tfcdo.ReductionToOneDevice("CPU:1", wire_dtype="bfloat16")
        for asked in ((tu.SUM, tf.float32), (tu.MEAN, tf.bfloat16)):
            step = step_on(ops, range(_DEVICES), *asked)
            step()
            self.assertCountEqual(edges_of(profiled(step).runs), edges_of_star(0, 1))


class ArgumentsTest(parameterized.TestCase):
    def test_a_trace_is_there_at_the_end_of_its_block(self):
        path = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "out.json")
        self.addCleanup(os.chdir, pathlib.Path.cwd())
        os.chdir(path.parent)
        with self.assertRaises(KeyError), tfcdo.trace(path.name) as traced:
            os.chdir("..")
            with self.assertRaisesRegex(RuntimeError, "when its block has ended"):
                traced.summary  # noqa: B018
            raise KeyError
        self.assertIn("traceEvents", json.loads(path.read_text()))
        self.assertStartsWith(str(traced.summary), "no all-reduce of tfcdo ran in a graph")

    @parameterized.parameters(
        ({"path": None}, TypeError, "path must be a path; got None"),
        ({"path": "out.txt"}, ValueError, "path must end in .json; got 'out.txt'"),
        ({"path": "no-such-folder/out.json"}, FileNotFoundError, "path must be .* in a folder"),
        ({"path": "out.json", "topology": "dgx1"}, TypeError, "topology must be"),
    )
    def test_wrong_arguments(self, arguments: dict[str, Any], error: Any, message: str):
        with self.assertRaisesRegex(error, message), tfcdo.trace(**arguments):
            self.fail("nothing may be recorded")

    def test_a_folder_is_no_file(self):
        folder = self.enter_context(tempfile.TemporaryDirectory(suffix=".json"))
        refused = self.assertRaisesRegex(FileNotFoundError, "a file .* got '.*json'")
        with refused, tfcdo.trace(folder):
            self.fail("nothing may be recorded")


def _op(name: str, start: float, end: float, op: str = "Add", *ends: str) -> Event:
    return Event(name, op, start, end, "thread", *ends)


class SummaryTest(absltest.TestCase):
    def test_shares(self):
        # A step of 10 s: all-reduce from 2 to 6, of which a computation hides 1 s; one of 20 s
        # with an all-reduce of 2 s; and a call without any.
        call = "EagerLocalExecute: __inference_step_1"
        events = [
            _op(call, 0, 10, ""), _op("a", 0, 3), _op("tfcdo/fuse/x", 2, 5),
            _op("tfcdo/fuse/y", 2.5, 3), _op("tfcdo/pack0/reduce/1to0", 4, 6, "AddN"),
            _op("tfcdo/fuse/x/_1", 6, 9, "_Send"), _op("y/_2", 0, 9, "_Recv"),
            _op(call, 10, 30, ""), _op(call, 11, 29, ""),
            _op("f/tfcdo_1/pack2/reduce/0and2to1_1", 12, 14, "AddN"),
            _op(call, 30, 31, ""), _op("b", 30, 31),
        ]  # fmt: skip
        found = recording.summarize(events, profile.find(events, []))
        self.assertEqual(found.num_steps, 2)
        self.assertEqual((found.step, found.all_reduce, found.exposed), (15.0, 3.0, 2.5))
        self.assertIn(found.slowest, ("tfcdo/pack0 add 1→0", "tfcdo_1/pack2 add 0, 2→1"))
        self.assertEqual(found.slowest_seconds, 1.0)

    def test_a_copy_lasts_from_when_both_are_ready(self):
        cpu = "/job:localhost/replica:0/task:0/device:CPU:{}".format
        name = "tfcdo/pack4/reduce/1and2to0"
        events = [
            _op("x/_6", 0.0, 1.0, "_Recv"),
            _op("x/_6", 3.0, 5.0, "_Recv"),
            _op("x/_5", 2.0, 2.5, "_Send", "f/tfcdo/pack4/receive/2to0/Cast", cpu(2), cpu(0)),
            _op("y/_8", 5.0, 9.0, "_Recv"),
            _op("y/_7", 6.0, 6.5, "_Send", name, cpu(2), cpu(0)),
            _op("z/_9", 7.0, 7.5, "_Send", "elsewhere", cpu(2), cpu(0)),
            _op(f"{name}/_3", 7, 7, "_Send", "tfcdo/pack4/across_hosts/0to0/y", cpu(0), cpu(1)),
            _op(f"{name}/_11", 9.0, 9.5, "_Send", "user", cpu(0), cpu(1)),
            # As between GPUs, where the op that sends came first.
            _op("w/_4", 9.6, 10.0, "_Recv"),
            _op("w/_4", 9.7, 9.8, "_Recv", name, cpu(1), cpu(0)),
        ]
        plan = Planned("f/tfcdo", tuple(map(cpu, range(3))), Plan(("CPU:0",) * 3, 3, 1, (), ()))
        # Where TensorFlow leaves the copy down out, the op that uses the sum receives it.
        wanted = [
            ("tfcdo", 4, profile.REDUCE, (2,), 0, 3.0, 5.0),
            ("tfcdo", 4, profile.REDUCE, (2,), 0, 6.0, 9.0),
            ("tfcdo", 4, profile.BROADCAST, (0,), 1, 9.0, 9.5),
            ("tfcdo", 4, profile.REDUCE, (1,), 0, 9.7, 10.0),
        ]
        self.assertEqual(profile.find(events, [plan]), [profile.EdgeRun(*run) for run in wanted])

    def test_halves_of_an_op_are_joined_in_their_order(self):
        """A receive of one name waits in two steps at once: the first to begin ends first."""
        halves = [
            _op("x/_2", 4, 4, "_Recv Done"), _op("x/_2", 1, 1, "_Recv Start"),
            _op("x/_2", 2, 2, "_Recv Start"), _op("y/_2", 3, 3, "_Recv Done"),
            _op("x/_2", 7, 7, "_Recv Done"), _op("z", 0, 8),
        ]  # fmt: skip
        wanted = [_op("x/_2", 1, 4, "_Recv"), _op("x/_2", 2, 7, "_Recv"), _op("z", 0, 8)]
        self.assertCountEqual(profile._joined(halves), wanted)


_SCRIPT = """
import os, sys
import tensorflow as tf, testing_utils as tu, tfcdo

own = tu.per_replica([tf.ones([1000])] * 2, tu.device_names(2))
tf.function(lambda: tfcdo.HierarchicalCopyAllReduce().reduce(tu.SUM, own, own).values)()
sys.exit(int(sys.argv[1]) * os.path.isabs(__file__))
"""


class CommandTest(parameterized.TestCase):
    def run_trace(self, *arguments: str, script: str = _SCRIPT) -> tuple[int, str, list[str]]:
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        path = folder / "script.py"
        elsewhere = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "linked.py")
        elsewhere.write_text(script)
        path.symlink_to(elsewhere)
        self.enter_context(mock.patch.multiple(sys, argv=[], path=list(sys.path)))
        command = ("trace", "-o", str(folder / "out.json"), *arguments, os.path.relpath(path), "3")
        status, output, errors = run_tfcdo(*command)
        self.assertNotIn("tfcdo: ", output)  # Standard output is the script's.
        self.assertEqual(sys.path[0], str(elsewhere.parent))
        return status, output + errors, sorted(file.name for file in folder.iterdir())

    def test_a_script_with_a_status_of_its_own(self):
        status, output, files = self.run_trace()
        self.assertEqual((status, files), (3, ["out.json", "script.py"]))
        self.assertRegex(output, r"(?s)tfcdo: 1 step of .*out\.json")

    @parameterized.parameters(
        ("open('no-such-file')", "FileNotFoundError: .*'no-such-file'"),
        ("import sklearn.no_such_module", "ModuleNotFoundError: No module named 'sklearn"),
        ("if", "SyntaxError: "),
    )
    def test_a_script_that_fails(self, script, error):
        status, output, files = self.run_trace(script=script)
        self.assertEqual((status, files), (1, ["out.json", "script.py"]))
        # As Python prints it, with no line of this command or of runpy.
        self.assertRegex(output, rf'(?s)script.py", line 1.*\n{error}')
        self.assertEqual(re.findall(r'File ".*/(\w+\.py)"', output), ["script.py"])
        self.assertNotRegex(output, "runpy|pip install")

    def test_a_script_that_ends_too_early(self):
        status, output, files = self.run_trace("--after", "60", script="raise SystemExit('bye')")
        self.assertEqual((status, files), (1, ["script.py"]))
        self.assertRegex(output, "(?s)bye.*the script ended before --after 60 s")
        error = tf.errors.AlreadyExistsError(None, None, "Another profiler is running.")
        self.enter_context(mock.patch.object(callbacks.Profiler, "start", side_effect=error))
        status, output, files = self.run_trace()
        self.assertEqual((status, files), (1, ["script.py"]))
        self.assertEndsWith(output, "tfcdo: not recorded: Another profiler is running.\n")


class TraceSummaryTest(absltest.TestCase):
    def run_epoch(self, callback: Any, epoch: int, step: Any) -> None:
        """Calls what `fit` calls in an epoch of four steps."""
        callback.on_epoch_begin(epoch)
        for batch in range(4):
            callback.on_train_batch_begin(batch)
            step()
            callback.on_train_batch_end(batch)
        callback.on_epoch_end(epoch)

    def test_every_second_epoch(self):
        step = step_on(_chain(), range(_DEVICES))
        callback = tfcdo.keras.TraceSummary(every=2, skip=1, steps=2)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            for epoch in range(3):
                self.run_epoch(callback, epoch, step)
        line = r"2 steps of .*: all-reduce .* exposed; slowest edge tfcdo.*\n"
        self.assertRegex(output.getvalue(), f"^{line}{line}$")

    def test_after_a_fit_that_failed(self):
        step = step_on(_chain(), range(_DEVICES))
        made = [tfcdo.keras.TraceSummary(skip=0, steps=2)]

        def begin() -> None:
            made[0].on_epoch_begin(0)
            made[0].on_train_batch_begin(0)
            step()

        begin()
        with contextlib.redirect_stdout(io.StringIO()) as output:
            self.run_epoch(made[0], 0, step)
        self.assertStartsWith(output.getvalue(), "2 steps of ")
        made[0]._model = mock.Mock()
        with keras_internals.fitting(made[0].model):
            begin()
        self.assertIsNone(made[0]._profiler)
        begin()
        made.clear()
        self.assertEqual(profiled(step).summary.num_steps, 1)

    def test_where_something_else_profiles(self):
        error = tf.errors.AlreadyExistsError(None, None, "another profiler")
        log.warn_once.cache_clear()
        with (
            mock.patch.object(callbacks.Profiler, "start", side_effect=error),
            self.assertLogs(level="WARNING") as logged,
        ):
            self.run_epoch(tfcdo.keras.TraceSummary(skip=0), 0, lambda: None)
        self.assertLen(logged.output, 1)
        self.assertIn("set profile_batch=0", logged.output[0])

    def test_wrong_arguments(self):
        for name, value in {"every": 0, "skip": -1, "steps": 0}.items():
            self.assertRaisesRegex(ValueError, name, tfcdo.keras.TraceSummary, **{name: value})
        with self.assertRaisesRegex(TypeError, "^tfcdo.keras.TraceSummary needs Keras 3.*; got <"):
            tfcdo.keras.TraceSummary().set_model(object())


if __name__ == "__main__":
    tf.test.main()
