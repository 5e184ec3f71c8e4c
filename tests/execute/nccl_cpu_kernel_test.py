"""Tests of the CPU kernel for NcclAllReduce: results against numpy, and errors instead of hangs.

No test measures time. Where the devices must not wait for one another, the kernel is told to have
more patience than the test, so that a test that hangs fails with "still waiting".
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import stat
import tempfile
import threading
import time
import unittest
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any
from unittest import mock

import nccl_cpu_kernel
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfcdo.virtual_devices import configure_virtual_cpus

# More than ten, as CPU:10 is a trap for those who sort names instead of numbers.
DEVICES = configure_virtual_cpus(11)

# Seconds. What does not hang takes a small part of one; the machine may be busy.
TEST_PATIENCE = 60.0
KERNEL_PATIENCE = 90.0

REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.sum,
    "prod": np.prod,
    "min": np.min,
    "max": np.max,
}
DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def setUpModule() -> None:
    reason = nccl_cpu_kernel.why_unavailable()
    if reason is not None:
        raise unittest.SkipTest(reason)
    nccl_cpu_kernel.load()


def all_reduce(
    values: Sequence[tf.Tensor],
    shared_name: str,
    reduction: str = "sum",
    num_devices: int | None = None,
    devices: Sequence[str] | None = None,
) -> list[tf.Tensor]:
    """One op on each device, with nothing that holds them together."""
    results = []
    for value, device in zip(values, devices or DEVICES, strict=False):
        with tf.device(device):
            results.append(
                tf.raw_ops.NcclAllReduce(
                    input=value,
                    reduction=reduction,
                    num_devices=len(values) if num_devices is None else num_devices,
                    shared_name=shared_name,
                )
            )
    return results


def all_reduce_constants(values: Iterable[object], reduction: str = "sum") -> list[tf.Tensor]:
    @tf.function
    def run() -> list[tf.Tensor]:
        return all_reduce([tf.constant(value) for value in values], "pack", reduction)

    return run()


def delayed(value: tf.Tensor, seconds: float) -> tf.Tensor:
    """The same value, but only after a while."""

    def wait(array: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return array

    result = tf.numpy_function(wait, [value], value.dtype)
    result.set_shape(value.shape)
    return result


@contextlib.contextmanager
def waiting_at_most(seconds: float | str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {nccl_cpu_kernel.TIMEOUT_VARIABLE: str(seconds)}):
        yield


def without_hanging(function: Callable[[], Any]) -> Any:
    """Returns what the function returns and raises what it raises, unless it hangs."""
    outcome: futures.Future = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except Exception as error:
            outcome.set_exception(error)

    # Not a pool: one of its threads that hangs would keep the test from ending.
    threading.Thread(target=run, daemon=True).start()
    if not futures.wait([outcome], TEST_PATIENCE).done:
        raise AssertionError(f"still waiting after {TEST_PATIENCE:.0f} s")
    return outcome.result()


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

    def test_integers_wrap_around(self):
        for result in all_reduce_constants([tf.int32.max, 1]):
            self.assertAllEqual(tf.int32.min, result)

    @parameterized.parameters("min", "max")
    def test_minimum_and_maximum_hand_on_nan(self, reduction):
        for values in ([np.nan, 1.0, 2.0], [1.0, np.nan, 2.0], [1.0, 2.0, np.nan]):
            for result in all_reduce_constants(values, reduction):
                self.assertAllEqual(np.nan, result)

    def test_the_op_itself_refuses_bfloat16(self):
        # Which is why the kernel has none: TensorFlow's op definition leaves it out.
        with self.assertRaisesRegex((TypeError, tf.errors.InvalidArgumentError), "bfloat16"):
            tf.raw_ops.NcclAllReduce(
                input=tf.constant(1, tf.bfloat16), reduction="sum", num_devices=1, shared_name="p"
            )

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

    def test_repeats_bit_for_bit(self):
        values = np.random.default_rng(3).normal(size=(8, 1000)).astype(np.float32)

        @tf.function
        def reduce_all():
            return all_reduce([tf.constant(v) for v in values], "pack")

        total = values[0]
        for value in values[1:]:
            total = total + value
        for _ in range(30):
            for result in reduce_all():
                self.assertEqual(total.tobytes(), result.numpy().tobytes())


class StepTest(tf.test.TestCase, parameterized.TestCase):
    """Which ops belong together: functions, loops, branches, threads, sessions."""

    def test_functions_called_one_after_the_other(self):
        @tf.function
        def inner(a, b):
            return all_reduce([a, b], "pack")

        @tf.function
        def outer(a, b):
            return inner(*inner(*inner(a, b)))

        for _ in range(20):
            self.assertAllEqual([12.0, 12.0], outer(tf.constant(1.0), tf.constant(2.0)))

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

    def test_loops_that_run_at_the_same_time_do_not_mix(self):
        def loop(a, b):
            def body(i, a, b):
                return i + 1, *all_reduce([a, b], "pack")

            return tf.while_loop(lambda i, *_: i < 10, body, [0, a, b])[1:]

        # A session, because in a function the loops would run one after the other.
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            starts = (1.0, 10.0, 100.0)
            loops = [loop(tf.constant(start), tf.constant(0.0)) for start in starts]
            for _ in range(20):
                for start, results in zip(starts, session.run(loops), strict=True):
                    self.assertAllEqual([512 * start, 512 * start], results)

    def test_a_loop_in_a_loop(self):
        @tf.function
        def loops():
            def inner_body(j, a, b):
                return j + 1, *all_reduce([a, b], "pack")

            def outer_body(i, a, b):
                _, a, b = tf.while_loop(lambda j, *_: j < 2, inner_body, [0, a, b])
                return i + 1, a, b

            return tf.while_loop(
                lambda i, *_: i < 3, outer_body, [0, tf.constant(1.0), tf.constant(2.0)]
            )

        _, a, b = loops()
        self.assertAllEqual([96.0, 96.0], [a, b])  # 1 + 2, doubled five times.

    def test_a_branch(self):
        @tf.function
        def branch(condition):
            return tf.cond(
                condition,
                lambda: all_reduce([tf.constant(1.0), tf.constant(2.0)], "pack"),
                lambda: all_reduce([tf.constant(3.0), tf.constant(4.0)], "pack", "prod"),
            )

        self.assertAllEqual([3.0, 3.0], branch(tf.constant(True)))
        self.assertAllEqual([12.0, 12.0], branch(tf.constant(False)))

    def test_threads_that_call_the_same_function(self):
        @tf.function
        def reduce_all(a, b, c):
            return all_reduce([a, b, c], "pack")

        def call_often(thread: int) -> None:
            for i in range(100):
                x = float(1000 * thread + i)
                results = reduce_all(*(tf.constant(v) for v in (x, 2 * x, 3 * x)))
                self.assertAllEqual(3 * [6 * x], results)

        with futures.ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(call_often, thread) for thread in range(4)]:
                future.result()

    def test_a_session(self):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            results = all_reduce([tf.constant(1.0), tf.constant(2.0)], "pack")
            for _ in range(20):
                self.assertAllEqual([3.0, 3.0], session.run(results))

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

    def test_another_shape(self):
        @tf.function
        def reduce_all():
            return all_reduce([tf.zeros([2]), tf.zeros([3])], "pack")

        self.assert_fails(
            reduce_all, tf.errors.InvalidArgumentError, "float[2]", "float[3]", "CPU:0", "CPU:1"
        )

    def test_another_shape_of_the_same_size(self):
        @tf.function
        def reduce_all():
            return all_reduce([tf.zeros([2, 3]), tf.zeros([3, 2])], "pack")

        self.assert_fails(reduce_all, tf.errors.InvalidArgumentError, "[2,3]", "[3,2]")

    def test_another_dtype(self):
        @tf.function
        def reduce_all():
            return all_reduce([tf.zeros([2]), tf.zeros([2], tf.int32)], "pack")

        self.assert_fails(reduce_all, tf.errors.InvalidArgumentError, "float[2]", "int32[2]")

    def test_another_reduction(self):
        @tf.function
        def reduce_all():
            return [
                all_reduce([tf.zeros([2])], "pack", "sum", num_devices=2),
                all_reduce([tf.zeros([2])], "pack", "max", num_devices=2, devices=["CPU:1"]),
            ]

        self.assert_fails(reduce_all, tf.errors.InvalidArgumentError, "sum of", "max of")

    def test_another_number_of_devices(self):
        @tf.function
        def reduce_all():
            return [
                all_reduce([tf.zeros([2])], "pack", num_devices=2),
                all_reduce([tf.zeros([2])], "pack", num_devices=3, devices=["CPU:1"]),
            ]

        self.assert_fails(
            reduce_all, tf.errors.InvalidArgumentError, "over 2 devices", "over 3 devices"
        )

    def test_the_same_device_twice(self):
        @tf.function
        def reduce_all():
            return all_reduce([tf.zeros([2])] * 2, "pack", devices=["CPU:3", "CPU:3"])

        self.assert_fails(reduce_all, tf.errors.InvalidArgumentError, "CPU:3 came twice")

    def test_no_devices(self):
        @tf.function
        def reduce_all():
            return all_reduce([tf.zeros([2])], "pack", num_devices=0)

        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "num_devices is 0"):
            reduce_all()

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

    def test_a_device_that_comes_when_the_time_is_up(self):
        @tf.function
        def reduce_all():
            return all_reduce([tf.zeros([2]), delayed(tf.zeros([2]), 0.6)], "pack")

        with waiting_at_most(0.2), self.assertRaises(tf.errors.DeadlineExceededError):
            reduce_all()

    def test_ops_run_one_by_one_do_not_meet(self):
        with waiting_at_most(0.1):
            self.assert_fails(
                lambda: all_reduce([tf.zeros([2]), tf.zeros([2])], "pack"),
                tf.errors.DeadlineExceededError,
                "1 of 2 devices came: CPU:0.",
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

    def test_a_session_with_a_time_limit(self):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            results = all_reduce([tf.constant(1.0), tf.constant(2.0)], "pack")
            with self.assertRaises(tf.errors.DeadlineExceededError):
                options = tf.compat.v1.RunOptions(timeout_in_ms=200)
                without_hanging(lambda: session.run(results[0], options=options))
            self.assertAllEqual([3.0, 3.0], session.run(results))

    def test_errors_and_results_at_the_same_time(self):
        @tf.function
        def reduce_all(a, b):
            return all_reduce([a, b], "pack")

        def call_often(thread: int) -> None:
            a = tf.fill([2], float(thread))
            for _ in range(50):
                if thread % 2:
                    with self.assertRaises(tf.errors.InvalidArgumentError):
                        reduce_all(a, tf.zeros([3]))
                else:
                    self.assertAllEqual(2 * [[2.0 * thread, 2.0 * thread]], reduce_all(a, a))

        with futures.ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(call_often, thread) for thread in range(4)]:
                future.result()


class StrategyTest(tf.test.TestCase):
    def test_tensorflows_own_nccl_all_reduce_trains(self):
        devices = DEVICES[:4]
        strategy = tf.distribute.MirroredStrategy(
            devices, cross_device_ops=tf.distribute.NcclAllReduce()
        )
        inputs = np.random.default_rng(1).normal(size=(32, 3)).astype(np.float32)
        targets = inputs @ np.array([[1.0], [-2.0], [3.0]], np.float32)

        def train() -> np.ndarray:
            model = tf.keras.Sequential(
                [tf.keras.Input([3]), tf.keras.layers.Dense(1, kernel_initializer="zeros")]
            )
            model.compile(tf.keras.optimizers.SGD(0.1), "mse")
            model.fit(inputs, targets, batch_size=32, epochs=3, shuffle=False, verbose=0)
            return model.get_weights()[0]

        expected = train()  # On one device.
        with strategy.scope():
            self.assertAllClose(expected, train())


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

    def test_loads_once(self):
        with futures.ThreadPoolExecutor(8) as pool:
            libraries = list(pool.map(lambda _: nccl_cpu_kernel.load(), range(8)))
        self.assertLen(set(libraries), 1)
        self.assertTrue(libraries[0].is_file())

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

    def test_a_kept_library_needs_no_writable_directory(self):
        cache = self.directory()
        (cache / "tfcdo").mkdir()
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(cache)}):
            kept = cache / "tfcdo" / nccl_cpu_kernel._library_name()
            kept.touch()
            with (
                mock.patch.object(nccl_cpu_kernel, "_loaded_library", None),
                mock.patch.object(nccl_cpu_kernel, "_cache_directory") as writable,
                mock.patch.object(tf, "load_op_library") as load,
            ):
                self.assertEqual(kept, nccl_cpu_kernel.load())
        writable.assert_not_called()
        load.assert_called_once_with(str(kept))

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

    def test_a_cache_that_is_not_writable(self):
        not_a_directory = self.directory() / "file"
        not_a_directory.touch()
        with (
            mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(not_a_directory)}),
            self.assertLogs(level="WARNING") as logs,
        ):
            directory = nccl_cpu_kernel._cache_directory()
        self.assertTrue(directory.is_dir())
        self.assertLen(logs.output, 1)
        self.assertIn("Set XDG_CACHE_HOME", logs.output[0])


if __name__ == "__main__":
    absltest.main()
