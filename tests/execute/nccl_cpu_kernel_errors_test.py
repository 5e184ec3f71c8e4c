"""The CPU kernel for NcclAllReduce: errors instead of hangs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures

import nccl_cpu_kernel
import nccl_cpu_kernel_testing
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized
from nccl_cpu_kernel_testing import DEVICES
from nccl_cpu_kernel_testing import KERNEL_PATIENCE
from nccl_cpu_kernel_testing import all_reduce
from nccl_cpu_kernel_testing import delayed
from nccl_cpu_kernel_testing import waiting_at_most
from nccl_cpu_kernel_testing import without_hanging


def setUpModule() -> None:
    nccl_cpu_kernel_testing.load_kernel()


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


if __name__ == "__main__":
    absltest.main()
