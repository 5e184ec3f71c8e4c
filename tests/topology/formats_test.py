"""Files of earlier versions: one that each has written is read, and newer ones are refused."""

from __future__ import annotations

import json
import math
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from tfcdo.plan.evaluation import Evaluation
from tfcdo.topology import measurement, serialization
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

_FOLDER = pathlib.Path(__file__).parent / "data" / "formats"
_READERS = {
    "topology": lambda text: Topology.from_json(text),
    "plan": lambda text: Evaluation.from_json(text),
}


def _text(name: str) -> str:
    return (_FOLDER / f"{name}.json").read_text(encoding="utf-8")


class FormatsTest(parameterized.TestCase):
    @parameterized.parameters("topology_0_1_0", "topology_576c665", "topology_format2")
    def test_topologies(self, name):
        self.assertEqual(Topology.from_json(_text(name)), preset("pcie", 2))

    def test_two_fields_that_had_other_names(self):
        machine = Topology.from_json(_text("topology_detour"))
        self.assertTrue(machine.serial_reduction)
        self.assertEqual([link.via_host for link in machine.links], [True, True])
        self.assertEqual(machine.addition_bandwidth, 5e9)

    @parameterized.parameters("measured_0_1_0", "measured_576c665", "measured_format2")
    def test_measurements(self, name):
        found = measurement.read(_FOLDER / f"{name}.json")
        self.assertEqual(found.topology, preset("pcie", 2))
        self.assertEqual(found.nccl, ((4096, 1e-5), (1 << 20, 1e-4)))

    @parameterized.parameters("plan_576c665", "plan_format2")
    def test_plans(self, name):
        found = Evaluation.from_json(_text(name))
        self.assertEqual(
            (found.algorithm, found.topology), ("hierarchical_copy", preset("dgx1", 4))
        )
        self.assertTrue(0 < found.bound <= found.seconds < math.inf)

    def test_each_kind_says_its_format(self):
        for kind in ("topology", "measured", "plan"):
            content = json.loads(_text(f"{kind}_format2"))
            self.assertEqual((next(iter(content)), content["format"]), ("format", 2))
        self.assertEqual(serialization.FORMAT, 2)  # A new one needs a file of the last one here.

    @parameterized.parameters("topology", "measured", "plan")
    def test_newer_ones_are_refused(self, kind):
        text = _text(f"{kind}_format2").replace('"format": 2', '"format": 3')
        folder = self.enter_context(tempfile.TemporaryDirectory())
        path = pathlib.Path(folder, "newer.json")
        path.write_text(text, encoding="utf-8")
        with self.assertRaisesRegex(
            ValueError, "format must be from 1 to 2; got 3; a newer version of tfcdo has written"
        ):
            _READERS[kind](text) if kind in _READERS else measurement.read(path)

    @parameterized.parameters(("0", "from 1 to 2; got 0$"), ('"a"', "expected `int`"))
    def test_formats_that_are_none(self, found, message):
        text = _text("topology_format2").replace('"format": 2', f'"format": {found}')
        with self.assertRaisesRegex(ValueError, message):
            Topology.from_json(text)

    def test_former_names_are_not_of_this_format(self):
        text = _text("topology_format2").replace('"via_host"', '"detour"')
        with self.assertRaisesRegex(ValueError, "unknown field `detour`"):
            Topology.from_json(text)


if __name__ == "__main__":
    absltest.main()
