"""The whole contract with NCCL: its ops run, on virtual CPU devices, by the tests' own kernel."""

from __future__ import annotations

import os
import unittest
from unittest import mock

import contract
import nccl_cpu_kernel
import tensorflow as tf

import tfcdo

SETTINGS = {
    "Nccl": tfcdo.NcclAllReduce,
    "AllReduceNccl": lambda: tfcdo.AllReduceCrossDeviceOps(
        "nccl", num_packs=0, agg_small_grads_max_bytes=40, agg_small_grads_max_group=3
    ),
}
globals().update(contract.settings_tests(SETTINGS, __name__))

_patience = mock.patch.dict(os.environ, {nccl_cpu_kernel.TIMEOUT_VARIABLE: "10"})


def setUpModule() -> None:
    reason = nccl_cpu_kernel.why_unavailable()
    if reason is not None:
        raise unittest.SkipTest(reason)
    nccl_cpu_kernel.load()
    _patience.start()


def tearDownModule() -> None:
    _patience.stop()


if __name__ == "__main__":
    tf.test.main()
