"""The tests' CPU kernel for NcclAllReduce: errors instead of hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import nccl_on_cpu
import tensorflow as tf
from absl.testing import absltest, parameterized
from nccl_testing import delayed

from tfcdo.virtual_devices import configure_virtual_cpus

# More than ten, as CPU:10 is a trap for those who sort names instead of numbers.
DEVICES = configure_virtual_cpus(11)
# Seconds. Where the devices must not wait for one another, the kernel has more patience than the
# test, so that a test that hangs fails.
TEST_PATIENCE, KERNEL_PATIENCE = 60.0, 90.0


def setUpModule() -> None:
    nccl_on_cpu.load()


def all_reduce(
    values: Sequence[Any], num_devices: int | None = None, devices: Sequence[str] = DEVICES
) -> list[tf.Tensor]:
    """One op on each device, with nothing that holds them together."""
    results = []
    for value, device in zip(values, devices, strict=False):
        with tf.device(device):
            results.append(
                tf.raw_ops.NcclAllReduce(
                    input=value,
                    reduction="sum",
                    num_devices=len(values) if num_devices is None else num_devices,
                    shared_name="pack",
                )
            )
    return results


def without_hanging(function: Callable[[], Any]) -> Any:
    """Returns what the function returns and raises what it raises, unless it hangs."""
    outcome: futures.Future = futures.Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except Exception as error:
            outcome.set_exception(error)

    # Not a pool: one of its threads that hangs would keep the test from ending.
    threading.Thread(target=call, daemon=True).start()
    return outcome.result(TEST_PATIENCE)


class ErrorTest(tf.test.TestCase, parameterized.TestCase):
    """Each error comes without waiting, or when the time is up; the next step works."""

    def tearDown(self):
        self.assertAllEqual([4.0, 4.0], tf.function(lambda: all_reduce([1.0, 3.0]))())
        super().tearDown()

    @parameterized.parameters(
        (lambda: all_reduce([tf.zeros([2]), tf.zeros([2], tf.int32)]), "float[2]", "int32[2]"),
        (lambda: all_reduce([0.0] * 2, devices=["CPU:3", "CPU:3"]), "CPU:3 came twice"),
        # Who comes after an error does not wait either.
        (
            lambda: all_reduce([tf.zeros([2]), tf.zeros([3]), delayed(tf.zeros([2]), 0.3)]),
            "float[2]",
            "float[3]",
        ),
    )
    def test_devices_that_disagree(self, body, *parts):
        step = tf.function(body)
        with nccl_on_cpu.patience(KERNEL_PATIENCE):
            for _ in range(5):  # The devices come in another order each time.
                with self.assertRaises(tf.errors.InvalidArgumentError) as caught:
                    without_hanging(step)
                for part in ("NcclAllReduce 'pack'", *parts):
                    self.assertIn(part, str(caught.exception))

    @parameterized.parameters(
        (
            lambda: all_reduce([0.0] * 2, num_devices=3, devices=["CPU:0", "CPU:10"]),
            "within 0.2 s 2 of 3 devices came: CPU:0, CPU:10.",
        ),
        (lambda: all_reduce([0.0, delayed(tf.constant(0.0), 0.6)]), "1 of 2 devices came: CPU:0."),
    )
    def test_a_device_that_does_not_come_in_time(self, body, message):
        with (
            nccl_on_cpu.patience(0.2),
            self.assertRaisesRegex(tf.errors.DeadlineExceededError, message),
        ):
            without_hanging(tf.function(body))


if __name__ == "__main__":
    absltest.main()
