"""The contract with NCCL: its ops run, on virtual CPU devices, by the tests' own kernel.

What NCCL does not take, other dtypes for one, goes along copy trees, so the ops are not strict.
"""

from __future__ import annotations

import contract
import contract_instances
import contract_values
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from nccl_on_cpu import (
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)

import tfcdo

SETTINGS = {
    "Nccl": tfcdo.NcclAllReduce,
    "AllReduceNccl": lambda: tfcdo.AllReduceCrossDeviceOps(
        "nccl", num_packs=0, agg_small_grads_max_bytes=40, agg_small_grads_max_group=3
    ),
}
# A pack is one tensor to NCCL, whatever it holds (nccl_test has other numbers of packs), and
# cross_device_ops_test has values in groups: one setting for each part.
for part, name in (
    (contract_values.ValuesContract, "Nccl"),
    (contract_instances.InstancesContract, "AllReduceNccl"),
):
    globals().update(contract.settings_tests(part, {name: SETTINGS[name]}, __name__))
del part  # No test class of this module.


class KernelTest(parameterized.TestCase):
    @parameterized.named_parameters(*SETTINGS.items())
    def test_the_contract_is_kept_by_nccl(self, make):
        value = tu.per_replica([tf.ones([8])] * 3)
        ops = make()
        traced = tu.traced_ops(lambda: ops.reduce(tu.SUM, value, value).values)
        self.assertEmpty([op for op in traced if op.type == "AddN"])
        devices = {op.device for op in traced if op.type == "NcclAllReduce"}
        self.assertEqual(set(tu.device_names(3)), devices)


if __name__ == "__main__":
    tf.test.main()
