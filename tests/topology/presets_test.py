"""The presets are the machines that their documentation describes."""

from __future__ import annotations

import math

from absl.testing import absltest, parameterized
from topology_testing import gigabytes, meet

from tfcdo.topology.presets import preset

# NVLinks per pair, as NVIDIA draws them.
DGX1 = """
    0-1:2 0-2:1 0-3:1 0-4:2   1-2:1 1-3:2 1-5:1   2-3:2 2-6:2   3-7:1
    4-5:2 4-6:1 4-7:1   5-6:1 5-7:2   6-7:2
"""
DGX1_P100 = """
    0-1:1 0-2:1 0-3:1 1-2:1 1-3:1 2-3:1   4-5:1 4-6:1 4-7:1 5-6:1 5-7:1 6-7:1
    0-4:1 1-5:1 2-6:1 3-7:1
"""


class PresetsTest(parameterized.TestCase):
    @parameterized.parameters(("dgx1", DGX1, 25, 6), ("dgx1_p100", DGX1_P100, 20, 4))
    def test_dgx1(self, name, drawn, nvlink, links_per_device):
        machine = preset(name)
        counts = dict(entry.split(":") for entry in drawn.split())
        for source in range(8):
            total = 0
            for target in set(range(8)) - {source}:
                count = int(counts.get(f"{min(source, target)}-{max(source, target)}", 0))
                self.assertEqual(gigabytes(machine, source, target), nvlink * count or 10)
                self.assertEqual(machine.link_by_pair[source, target].via_host, count == 0)
                total += count
            self.assertEqual(total, links_per_device)
        # Host traffic meets if it goes from the same socket to the same socket.
        self.assertTrue(meet(machine, (0, 6), (1, 7)))
        self.assertTrue(meet(machine, (0, 6), (0, 7)))
        self.assertFalse(meet(machine, (0, 6), (6, 0)))
        self.assertFalse(meet(machine, (0, 1), (1, 0)))
        self.assertFalse(meet(machine, (0, 1), (0, 2)))

    def test_nvswitch(self):
        machine = preset("nvswitch", 16)
        self.assertEqual({link.via_host for link in machine.links}, {False})
        self.assertEqual({gigabytes(machine, 0, other) for other in range(1, 16)}, {300})
        self.assertTrue(meet(machine, (0, 1), (0, 2)))
        self.assertTrue(meet(machine, (0, 2), (1, 2)))
        self.assertFalse(meet(machine, (0, 1), (1, 0)))
        self.assertFalse(meet(machine, (0, 1), (2, 3)))

    def test_pcie(self):
        machine = preset("pcie")
        self.assertEqual([gigabytes(machine, 0, other) for other in (1, 2, 3)], [12, 10, 10])
        self.assertTrue(meet(machine, (0, 2), (1, 3)))
        self.assertTrue(meet(machine, (0, 1), (0, 2)))
        self.assertFalse(meet(machine, (0, 2), (3, 1)))
        self.assertFalse(meet(machine, (0, 1), (2, 3)))
        odd = preset("pcie", 5)
        self.assertEqual(gigabytes(odd, 4, 0), 10)

    def test_shared_memory(self):
        machine = preset("shared_memory", 3)
        self.assertEqual(machine.bandwidth(0, 2), math.inf)
        self.assertLess(machine.addition_bandwidth, math.inf)

    @parameterized.parameters(
        ("dgx2", None, "'dgx2'; known are dgx1, dgx1_p100, nvswitch, pcie, shared_memory"),
        ("dgx1", 9, "at most 8; got 9"),
        ("pcie", 0, "num_devices"),
        ("dgx1", -1, "num_devices"),
    )
    def test_unknown_presets_and_sizes_are_refused(self, name, num_devices, message):
        with self.assertRaisesRegex(ValueError, message):
            preset(name, num_devices)

    @parameterized.product(name=["pcie", "dgx1"], num_devices=[True, 1.0, "1"])
    def test_only_ints_are_numbers_of_devices(self, name, num_devices):
        preset(name, 1)
        with self.assertRaisesRegex(TypeError, "num_devices must be an int; got (True|1.0|'1')"):
            preset(name, num_devices)


if __name__ == "__main__":
    absltest.main()
