"""Files of this format are read, and others are refused."""

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
    def test_topologies(self):
        self.assertEqual(Topology.from_json(_text("topology_format2")), preset("pcie", 2))

    def test_measurements(self):
        found = measurement.read(_FOLDER / "measured_format2.json")
        self.assertEqual(found.topology, preset("pcie", 2))
        self.assertEqual(found.nccl, ((4096, 1e-5), (1 << 20, 1e-4)))

    def test_plans(self):
        found = Evaluation.from_json(_text("plan_format2"))
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
            ValueError, "format must be 2; got 3; a newer version of tfcdo has written"
        ):
            _READERS[kind](text) if kind in _READERS else measurement.read(path)

    @parameterized.parameters(("1", "must be 2; got 1$"), ('"a"', "expected `int`"))
    def test_other_formats_are_refused(self, found, message):
        text = _text("topology_format2").replace('"format": 2', f'"format": {found}')
        with self.assertRaisesRegex(ValueError, message):
            Topology.from_json(text)

    def test_unknown_fields_are_refused(self):
        text = _text("topology_format2").replace('"via_host"', '"detour"')
        with self.assertRaisesRegex(ValueError, "unknown field `detour`"):
            Topology.from_json(text)


if __name__ == "__main__":
    absltest.main()
