"""Tables of `nvidia-smi topo -m`, as machines print them and as they may be broken."""

import pathlib

from absl.testing import absltest, parameterized
from topology_testing import meet

from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

_TWO_SOCKETS = (
    [12, 10, 10, 10],
    [((0, 4), (2, 6)), ((0, 2), (1, 3))],
    [((0, 2), (4, 6)), ((0, 1), (2, 3))],
)


def text_of(name: str) -> str:
    return (pathlib.Path(__file__).parent / "data" / f"nvidia_smi_{name}.txt").read_text("utf-8")


def sample(name: str) -> Topology:
    return Topology.from_nvidia_smi(text_of(name))


def table(rows: list[list[str]]) -> Topology:
    names = [f"GPU{i}" for i in range(len(rows))]
    lines = [" ".join([name, *row]) for name, row in zip(names, rows, strict=True)]
    return Topology.from_nvidia_smi("\n".join(["  ".join(names), *lines]))


def all_alike(num_devices: int, nvlinks: int) -> Topology:
    gpus = range(num_devices)
    return table([["X" if a == b else f"NV{nvlinks}" for b in gpus] for a in gpus])


class NvidiaSmiTest(parameterized.TestCase):
    @parameterized.parameters(
        ("dgx1_v100", (0, 3, 1, 2, 4, 7, 5, 6), "dgx1"), ("pcie_4", range(4), "pcie")
    )
    def test_presets(self, name, order, expected):
        self.assertEqual(sample(name).subset(order).fingerprint, preset(expected).fingerprint)

    @parameterized.parameters(
        # A switch has ports; bridged pairs meet in the host.
        ("hgx_h100", [450, 450], [((0, 1), (0, 2)), ((0, 2), (1, 2))], []),
        ("nvlink_bridges_4", [100, 10], [((0, 2), (1, 3))], [((0, 2), (2, 0))]),
        # Between sockets all share one path; within a socket only what their switches share.
        ("pcie_8_two_sockets", *_TWO_SOCKETS),
        ("pcie_8_old_driver", *_TWO_SOCKETS),
        ("one_h200", [], [], []),
    )
    def test_samples(self, name, speeds, meeting, apart):
        machine = sample(name)
        found = [machine.bandwidth(0, other) / 1e9 for other in range(1, 1 + len(speeds))]
        self.assertEqual(found, speeds)
        found = [meet(machine, *pairs) for pairs in (*meeting, *apart)]
        self.assertEqual(found, [True] * len(meeting) + [False] * len(apart))

    @parameterized.parameters("dgx1_v100", "pcie_8_two_sockets", "one_h200")
    def test_spaces_and_marks_around_the_table_do_not_matter(self, name):
        text = text_of(name)
        indented = "".join(f"    {line}" for line in text.splitlines(keepends=True))
        # The first line of the text names the columns, if somebody cut off what is before.
        table = text[text.index("GPU0") :]
        for changed in (indented, f"\ufeff{indented}", table, f"\ufeff{table}"):
            self.assertEqual(Topology.from_nvidia_smi(changed), sample(name))

    @parameterized.parameters((3, 9, False), (3, 10, True), (4, 6, False), (4, 7, True))
    def test_more_nvlinks_than_a_gpu_has_are_those_of_a_switch(
        self, num_devices, nvlinks, switched
    ):
        # A GPU has at most 18 NVLinks: a switch hands them out where a row adds up to more.
        machine = all_alike(num_devices, nvlinks)
        self.assertEqual(meet(machine, (0, 1), (0, 2)), switched)
        self.assertEqual(machine.bandwidth(0, 1), 25e9 * nvlinks)

    def test_two_gpus_and_unlike_numbers_of_nvlinks_have_no_switch(self):
        self.assertEqual([link.resources for link in all_alike(2, 18).links], [(0,), (1,)])
        machine = table([["X", "NV12", "NV10"], ["NV12", "X", "NV12"], ["NV10", "NV12", "X"]])
        self.assertFalse(meet(machine, (0, 1), (0, 2)))
        self.assertEqual([machine.bandwidth(0, other) for other in (1, 2)], [300e9, 250e9])

    @parameterized.parameters(
        ("NVIDIA-SMI has failed because it couldn't communicate", "no table"),
        ("GPU0  GPU1\nGPU0  X  NV1\n", "has no row GPU1"),
        ("GPU0  GPU1\nGPU0  X  NV1\nGPU1  NV1\n", "row GPU1 has 1 entries for 2 GPUs"),
        ("GPU0  GPU1\nGPU0  X  NV1\nGPU1  NVX  X\n", "column GPU0: expected NV# or PIX, .* NVX"),
        ("GPU0  GPU1\nGPU0  X  NV1\nGPU1  NV1  NV1\n", "line 3: .* GPU1: expected X; got NV1"),
        ("GPU0  GPU1\nGPU0  X  NV1\nGPU1  NV2  X\n", "expected NV1, as in row GPU0; got NV2"),
    )
    def test_broken_tables_are_refused(self, text, message):
        self.assertRaisesRegex(ValueError, message, Topology.from_nvidia_smi, text)


if __name__ == "__main__":
    absltest.main()
