"""The CPU kernel for NcclAllReduce: results against numpy, whatever the order of the devices."""

from __future__ import annotations

import itertools
from concurrent import futures

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


if __name__ == "__main__":
    absltest.main()
