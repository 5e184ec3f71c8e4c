"""Knowing when NCCL can run: the reason for each case."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from testing_utils import kernels_for

import tfcdo
from tfcdo.exchange import Cast
from tfcdo.execute import between
from tfcdo.plan.decide import BetweenHosts
from tfcdo.topology import preset

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
        (GPU_KERNEL, (0, 0), TWO_TASKS, "one process", TWO_TASKS[1], "MultiWorkerMirrored"),
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
        with kernels_for(*kernels), contextlib.nullcontext() if parts is None else gpus(*parts):
            self.check(tfcdo.nccl_status(devices), *said)

    def test_hidden_gpus_do_not_count(self):
        # TensorFlow numbers the GPUs that it may use from 0 on.
        with kernels_for("GPU"), gpus(2, 2, hidden=1):
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
        with kernels_for("GPU"), gpus(0, 0):
            self.check(tfcdo.nccl_status(names(0, 1), dtype), *said)

    def test_bad_arguments(self):
        with self.assertRaisesRegex(ValueError, "each of devices.*nonsense"):
            tfcdo.nccl_status(["/gpu:0", "nonsense"])

    def test_an_exchange_takes_copy_trees_also_where_nccl_is_asked_for(self):
        session = mock.Mock()
        session.cluster.tasks = [mock.Mock(device_prefix="/job:localhost/replica:0/task:0")] * 2
        session.cluster.index = 0
        network = between.Network(session, "nccl", tu.device_names(2), preset("pcie", 2))
        ops = tfcdo.NcclAllReduce()._between(network, BetweenHosts(exchange=Cast("bfloat16")))
        with kernels_for("CPU"):
            self.assertIn("leave exchange out", ops.explain([[3]]).reason)


if __name__ == "__main__":
    tf.test.main()
