"""The CPU kernel for NcclAllReduce, on which tests of NCCL run: results, errors, and its build."""

from __future__ import annotations

import itertools
import os
import pathlib
import stat
import tempfile
import threading
from collections.abc import Callable
from concurrent import futures
from unittest import mock

import nccl_cpu_kernel
import nccl_cpu_kernel_testing
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized
from nccl_cpu_kernel_testing import DEVICES
from nccl_cpu_kernel_testing import DTYPES
from nccl_cpu_kernel_testing import KERNEL_PATIENCE
from nccl_cpu_kernel_testing import REDUCTIONS
from nccl_cpu_kernel_testing import all_reduce
from nccl_cpu_kernel_testing import all_reduce_constants
from nccl_cpu_kernel_testing import delayed
from nccl_cpu_kernel_testing import waiting_at_most
from nccl_cpu_kernel_testing import without_hanging


def setUpModule() -> None:
    nccl_cpu_kernel_testing.load_kernel()


class ReductionTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(reduction=list(REDUCTIONS), dtype=DTYPES)
    def test_agrees_with_numpy_on_every_device_count(self, reduction, dtype):
        random = np.random.default_rng(7)
        for count in range(1, 9):
            if dtype.is_integer:
                values = random.integers(-9, 10, size=(count, 3, 5)).astype(dtype.as_numpy_dtype)
            else:
                values = random.uniform(-2, 2, size=(count, 3, 5)).astype(dtype.as_numpy_dtype)

            expected = REDUCTIONS[reduction](values.astype(np.float64), axis=0)
            results = all_reduce_constants(values, reduction)
            self.assertLen(results, count)
            for result in results:
                self.assertEqual(result.dtype, dtype)
                self.assertAllClose(
                    expected,
                    tf.cast(result, tf.float64),
                    rtol=0 if dtype.is_integer else 8 * np.finfo(dtype.as_numpy_dtype).eps,
                    atol=0 if dtype.is_integer else 8 * np.finfo(dtype.as_numpy_dtype).eps,
                    msg=f"{count} devices",
                )

    @parameterized.parameters(((),), ((0,),), ((2, 0, 3),), ((1,),), ((70_001,),))
    def test_keeps_the_shape(self, shape):
        for result in all_reduce_constants([np.full(shape, float(i)) for i in range(3)]):
            self.assertAllEqual(np.full(shape, 3.0), result)
            self.assertEqual(result.shape, shape)

    def test_rounds_16_bit_floats_once(self):
        # Between 2048 and 4096 float16 knows the even numbers alone: rounded after each addition,
        # every 1 would be lost.
        values = np.array([2048] + 6 * [1], np.float16)
        for result in all_reduce_constants(values):
            self.assertAllEqual(2054.0, result)

    @parameterized.parameters("min", "max")
    def test_minimum_and_maximum_hand_on_nan(self, reduction):
        for values in ([np.nan, 1.0, 2.0], [1.0, np.nan, 2.0], [1.0, 2.0, np.nan]):
            for result in all_reduce_constants(values, reduction):
                self.assertAllEqual(np.nan, result)

    def test_adds_in_the_order_of_the_devices_whoever_comes_first(self):
        # In float32 (1e8 + 1) - 1e8 is 0, but (1e8 - 1e8) + 1 is 1.
        values = dict(zip(("CPU:2", "CPU:9", "CPU:10"), (1e8, 1.0, -1e8), strict=True))
        for arrival in itertools.permutations(values):

            @tf.function
            def reduce_all(arrival=arrival):
                inputs = []
                for rank, device in enumerate(arrival):
                    with tf.device(device):
                        inputs.append(delayed(tf.constant(values[device]), 0.03 * rank))
                return all_reduce(inputs, "pack", devices=arrival)

            for result in reduce_all():
                self.assertAllEqual(0.0, result, msg=f"arrival: {arrival}")


class StepTest(tf.test.TestCase, parameterized.TestCase):
    """Which ops belong together: functions, loops, branches, threads, sessions."""

    def test_calls_at_the_same_time_of_a_function_that_is_not_inlined(self):
        # Each call is a step of its own. Inlined, the calls would share one: see the next test.
        @tf.function(experimental_attributes={"_noinline": True})
        def inner(a, b):
            return all_reduce([a, b], "pack")

        @tf.function
        def outer(a, b):
            return [inner(a * factor, b * factor) for factor in (1.0, 10.0, 100.0)]

        for _ in range(20):
            self.assertAllEqual(
                [[3.0, 3.0], [30.0, 30.0], [300.0, 300.0]],
                outer(tf.constant(1.0), tf.constant(2.0)),
            )

    def test_two_inlined_calls_at_the_same_time_share_a_step(self):
        @tf.function
        def inner(a):
            return all_reduce([a], "pack", num_devices=2)

        @tf.function
        def outer(a):
            return inner(a), inner(a + 1.0)

        # CPU:0 alone comes, from either call, so that it does not depend on who is quicker.
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "CPU:0 came twice"):
            outer(tf.constant(1.0))

    def test_iterations_of_a_loop_do_not_mix(self):
        count = 40

        @tf.function
        def loop():
            def body(i, left, right):
                x = tf.cast(i, tf.float32)
                results = all_reduce([x, 100 * x], "pack")
                return i + 1, left.write(i, results[0]), right.write(i, results[1])

            arrays = [tf.TensorArray(tf.float32, count) for _ in range(2)]
            _, left, right = tf.while_loop(
                lambda i, *_: i < count, body, [0, *arrays], parallel_iterations=10
            )
            return left.stack(), right.stack()

        for _ in range(10):
            for result in loop():
                self.assertAllEqual(101.0 * np.arange(count), result)

    def test_waiting_takes_no_thread(self):
        # 64 packs, and one device that comes late: 640 ops wait, and still others have to run.
        packs, count = 64, len(DEVICES)

        @tf.function
        def reduce_all():
            results = []
            for pack in range(packs):
                values = [tf.constant(float(pack)) for _ in range(count - 1)]
                with tf.device(DEVICES[-1]):
                    values.append(delayed(tf.constant(float(pack)), 0.001))
                results.append(all_reduce(values, f"pack {pack}"))
            return results

        with waiting_at_most(KERNEL_PATIENCE):
            results = without_hanging(reduce_all)
        self.assertAllEqual(np.outer(np.arange(packs), np.full(count, count)), results)


class ErrorTest(tf.test.TestCase, parameterized.TestCase):
    """Each error comes without waiting, or when the time is up; the next step works."""

    def setUp(self):
        super().setUp()
        self.enter_context(waiting_at_most(KERNEL_PATIENCE))

    def tearDown(self):
        @tf.function
        def reduce_all():
            return all_reduce([tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])], "pack")

        for result in reduce_all():
            self.assertAllEqual([4.0, 6.0], result)
        super().tearDown()

    def assert_fails(
        self, function: Callable[[], object], kind: type[Exception], *parts: str
    ) -> None:
        """Calls a function several times, as the devices come in another order each time."""
        for _ in range(5):
            with self.assertRaises(kind) as caught:
                without_hanging(function)
            for part in ("NcclAllReduce 'pack'", *parts):
                self.assertIn(part, str(caught.exception))

    @parameterized.parameters(
        (([2], [3]), {}, ("float[2]", "float[3]", "CPU:0", "CPU:1")),
        (([2, 3], [3, 2]), {}, ("[2,3]", "[3,2]")),
        (([2], [2]), {"dtype": tf.int32}, ("float[2]", "int32[2]")),
        (([2], [2]), {"reduction": "max"}, ("sum of", "max of")),
        (([2], [2]), {"num_devices": 3}, ("over 2 devices", "over 3 devices")),
        (([2], [2]), {"devices": ["CPU:0"]}, ("CPU:0 came twice",)),
    )
    def test_devices_that_differ(self, shapes, other, parts):
        @tf.function
        def reduce_all():
            settings = {"devices": ["CPU:1"], "num_devices": 2, **other}
            values = [tf.zeros(shapes[0]), tf.zeros(shapes[1], settings.pop("dtype", tf.float32))]
            return [
                all_reduce([values[0]], "pack", num_devices=2),
                all_reduce([values[1]], "pack", **settings),
            ]

        self.assert_fails(reduce_all, tf.errors.InvalidArgumentError, *parts)

    def test_a_missing_device(self):
        @tf.function
        def reduce_all():
            values = [tf.zeros([2]), tf.zeros([2])]
            return all_reduce(values, "pack", num_devices=3, devices=["CPU:0", "CPU:10"])

        with waiting_at_most(0.2):
            self.assert_fails(
                reduce_all,
                tf.errors.DeadlineExceededError,
                "within 0.2 s 2 of 3 devices came: CPU:0, CPU:10.",
            )

    @parameterized.parameters("", "soon", "-1", "0", "nan", "inf", "5 s")
    def test_a_time_limit_that_is_none(self, text):
        @tf.function
        def reduce_all():
            return all_reduce([tf.zeros([2])], "pack")

        with (
            waiting_at_most(text),
            self.assertRaisesRegex(
                tf.errors.InvalidArgumentError, f"{nccl_cpu_kernel.TIMEOUT_VARIABLE} is '{text}'"
            ),
        ):
            reduce_all()

    def test_who_comes_after_an_error_does_not_wait(self):
        @tf.function
        def reduce_all():
            late = delayed(tf.zeros([2]), 0.3)
            return all_reduce([tf.zeros([2]), tf.zeros([3]), late], "pack")

        self.assert_fails(reduce_all, tf.errors.InvalidArgumentError, "float[2]", "float[3]")

    def test_an_error_elsewhere_cancels_the_waiting_devices(self):
        fails = tf.Variable(True)

        @tf.function
        def reduce_all():
            with tf.device("CPU:2"):
                fine = tf.logical_not(delayed(fails.read_value(), 0.1))
                with tf.control_dependencies([tf.debugging.Assert(fine, ["replica 2 failed"])]):
                    last = tf.constant(4.0)
            return all_reduce([tf.constant(1.0), tf.constant(2.0), last], "pack")

        for _ in range(3):
            fails.assign(True)
            with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "replica 2 failed"):
                without_hanging(reduce_all)
            fails.assign(False)
            self.assertAllEqual([7.0, 7.0, 7.0], reduce_all())


class LoaderTest(parameterized.TestCase):
    """Building the kernel, with a script in the compiler's place."""

    def directory(self) -> pathlib.Path:
        return pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    def fake_compiler(self, body: str) -> pathlib.Path:
        """Installs a shell script, which finds the path it has to write to in $out."""
        script = self.directory() / "compiler"
        script.write_text(
            "#!/bin/sh\n"
            'if [ "$1" = --version ]; then echo fake; exit; fi\n'
            'for argument in "$@"; do out=$argument; done\n'
            f"{body}\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        self.enter_context(mock.patch.dict(os.environ, {"CXX": str(script)}))
        return script

    def test_no_compiler(self):
        with mock.patch.dict(os.environ, {"CXX": "/no/such/compiler"}):
            self.assertRegex(str(nccl_cpu_kernel.why_unavailable()), "install g\\+\\+")
            with self.assertRaisesRegex(RuntimeError, "install g\\+\\+"):
                nccl_cpu_kernel.build(self.directory())

    def test_a_compiler_that_fails(self):
        self.fake_compiler("echo half >$out; echo 'no such header' >&2; exit 3")
        directory = self.directory()
        with self.assertRaisesRegex(RuntimeError, r"exit status 3(.|\n)*no such header"):
            nccl_cpu_kernel.build(directory)
        self.assertEmpty(list(directory.iterdir()))

    def test_builds_at_the_same_time(self):
        # The file is written in two pieces: nobody may see the first piece alone.
        script = self.fake_compiler(
            'echo . >>"${0%/*}/runs"; printf a >$out; sleep 0.2; printf b >>$out'
        )
        directory = self.directory()
        start = threading.Barrier(4)

        def build(_: int) -> str:
            start.wait()
            return nccl_cpu_kernel.build(directory).read_text()

        with futures.ThreadPoolExecutor(4) as pool:
            self.assertEqual(4 * ["ab"], list(pool.map(build, range(4))))
        self.assertLen(list(directory.iterdir()), 1)
        self.assertEqual(script.with_name("runs").read_text(), ".\n")

    def test_builds_again_only_if_something_changed(self):
        runs = self.fake_compiler('echo . >>"${0%/*}/runs"; : >$out').with_name("runs")
        directory = self.directory()
        first = nccl_cpu_kernel.build(directory)
        self.assertEqual(first, nccl_cpu_kernel.build(directory))
        self.assertEqual(runs.read_text(), ".\n")
        changed = self.directory() / "changed.cc"
        changed.write_text("// Another source.")
        with mock.patch.object(nccl_cpu_kernel, "_SOURCE", changed):
            self.assertNotEqual(first, nccl_cpu_kernel.build(directory))
        with mock.patch.object(tf.version, "VERSION", "0.0"):
            self.assertNotEqual(first, nccl_cpu_kernel.build(directory))
        with mock.patch.object(nccl_cpu_kernel, "_OWN_FLAGS", ("-O3",)):
            self.assertNotEqual(first, nccl_cpu_kernel.build(directory))


if __name__ == "__main__":
    absltest.main()
