"""The contract with NCCL: its ops run, on virtual CPU devices, by the tests' own kernel.

What NCCL does not take, other dtypes for one, goes along copy trees, so the ops are not strict.
"""

from __future__ import annotations

import contract
import tensorflow as tf
import testing_utils as tu
from absl.testing import absltest
from nccl_on_cpu import (
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)

import tfcdo


def nccl() -> tfcdo.NcclAllReduce:
    return tfcdo.AllReduceCrossDeviceOps(
        "nccl", num_packs=0, agg_small_grads_max_bytes=40, agg_small_grads_max_group=3
    )


# The rest of the contract is of code that knows no NCCL, and nccl_test has numbers of packs.
globals().update(contract.settings_tests(contract.BatchesContract, {"Nccl": nccl}, __name__))


class KernelTest(absltest.TestCase):
    def test_the_contract_is_kept_by_nccl(self):
        value = tu.per_replica([tf.ones([8])] * 3)
        traced = tu.traced_ops(lambda: nccl().reduce(tu.SUM, value, value).values)
        self.assertEmpty([op for op in traced if op.type == "AddN"])
        devices = {op.device for op in traced if op.type == "NcclAllReduce"}
        self.assertEqual(set(tu.device_names(3)), devices)


if __name__ == "__main__":
    tf.test.main()
