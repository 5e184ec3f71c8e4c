"""JSON: what is written is read, also by later versions, and a mistake in a file is named."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import random
from collections.abc import Callable
from typing import Any

import hypothesis
from absl.testing import absltest, parameterized
from hypothesis import strategies as st
from topology_testing import meet

from tfcdo.plan.evaluation import Evaluation
from tfcdo.topology import measurement, serialization
from tfcdo.topology.presets import PRESETS, preset
from tfcdo.topology.topology import Topology

_FOLDER = pathlib.Path(__file__).parent / "data" / "formats"
_READERS: dict[str, Callable[[str], Any]] = {
    "topology": Topology.from_json,
    "plan": Evaluation.from_json,
    "measured": lambda text: measurement.parse(text.encode()),
}


def _text(name: str) -> str:
    return (_FOLDER / f"{name}.json").read_text(encoding="utf-8")


class JsonTest(parameterized.TestCase):
    @parameterized.product(name=PRESETS, num_devices=[1, 5])
    def test_reads_what_it_writes(self, name, num_devices):
        machine = preset(name, num_devices)
        self.assertEqual(Topology.from_json(machine.to_json()), machine)

    def test_fields_with_defaults_may_be_left_out(self):
        text = """{"name": "two", "num_devices": 2,
            "resources": [{"name": "wire", "bandwidth": 1e9}],
            "links": [{"source": 0, "target": 1, "resources": ["wire"]},
                      {"source": 1, "target": 0, "resources": ["wire"]}]}"""
        machine = Topology.from_json(text)
        self.assertEqual(machine.addition_bandwidth, math.inf)
        self.assertEqual(machine.latency(0, 1), 1e-5)
        self.assertTrue(meet(machine, (0, 1), (1, 0)))

    @parameterized.parameters(
        ("[]", r"not a topology: expected `object` \(fields: format, .*, links\); got \[\]"),
        ("{}", "missing required field `name` .*; got {}"),
        ("[" * 100_000, "nested too deeply"),
    )
    def test_other_texts_are_refused(self, text, message):
        with self.assertRaisesRegex(ValueError, message):
            Topology.from_json(text)

    @parameterized.parameters(
        ("name", 5, "name: expected `str`; got 5"),
        ("num_devices", 1000, "each ordered pair of the 1000 devices once, 999000 links; got 2"),
        ("addition_bandwidth", "1e9", 'addition_bandwidth: expected `float . null`; got "1e9"'),
        ("addition_bandwith", 1e9, "field `addition_bandwith` .fields: format, .*, links.;"),
        ("resources.1", "wire", 'resources.1.: .*`object` .fields: name, bandwidth.; got "wire"'),
        ("resources.1.bandwidth", 10**400, "resources.1..bandwidth: .*; got 10{76}[.]{3}$"),
        ("resources.1.bandwidth", math.nan, "bandwidth of '1→0' must be above 0 B/s; got nan"),
        ("resources.1.bandwidth", 0, "bandwidth of '1→0' must be above 0 B/s; got 0.0"),
        ("links.1.latency", math.inf, "latency of the link 1→0 must be a number of seconds"),
        ("links.1.resources", ["wires"], 'links.1..resources must .*; got "wires"'),
        ("links.1.resources", [["0→1"]], r'links.1..resources.0.: expected `str`; got \["0→1"\]'),
        ("links.1.way", [], "links.1.: .* field `way` .fields: source, .*, via_host.; got {.*$"),
    )
    def test_fields_of_the_wrong_type_are_named(self, place, value, message):
        content = json.loads(preset("fully_connected", 2).to_json())
        *parents, field = [int(step) if step.isdigit() else step for step in place.split(".")]
        node = content
        for parent in parents:
            node = node[parent]
        node[field] = value
        with self.assertRaisesRegex(ValueError, message):
            Topology.from_json(json.dumps(content))

    @hypothesis.settings(max_examples=50, deadline=None)
    @hypothesis.given(st.randoms(use_true_random=False))
    def test_a_broken_file_is_never_more_than_a_value_error(self, rng: random.Random):
        content = json.loads(preset("pcie", 3).to_json())
        node, key = content, rng.choice(list(content))
        while isinstance(node[key], (list, dict)) and node[key] and rng.random() < 0.8:
            node = node[key]
            key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if rng.random() < 0.3:
            del node[key]
        else:
            node[key] = rng.choice([None, -1, 0, 99, "x", [], {}, 1e400, True])
        try:
            Topology.from_json(json.dumps(content))
        except ValueError as error:
            self.assertNotIn("\n", str(error))


class FormatsTest(parameterized.TestCase):
    """Files of earlier versions: one that each has written is read, and newer ones are refused."""

    @parameterized.parameters("0_1_0", "576c665", "format2")
    def test_machines(self, version):
        self.assertEqual(Topology.from_json(_text(f"topology_{version}")), preset("pcie", 2))
        found = measurement.read(_FOLDER / f"measured_{version}.json")
        self.assertEqual(found.topology, preset("pcie", 2))
        self.assertEqual(found.nccl, ((4096, 1e-5), (1 << 20, 1e-4)))

    def test_a_topology_is_not_taken_for_a_measurement_by_its_name(self):
        machine = dataclasses.replace(preset("pcie", 2), name="date")
        self.assertEqual(machine, measurement.parse(machine.to_json().encode()).topology)

    def test_two_fields_that_had_other_names(self):
        machine = Topology.from_json(_text("topology_detour"))
        self.assertTrue(machine.serial_reduction)
        self.assertEqual([link.via_host for link in machine.links], [True, True])
        self.assertEqual(machine.addition_bandwidth, 5e9)
        # They are not of this format.
        text = _text("topology_format2").replace('"via_host"', '"detour"')
        with self.assertRaisesRegex(ValueError, "unknown field `detour`"):
            Topology.from_json(text)

    @parameterized.parameters("plan_576c665", "plan_format2")
    def test_plans(self, name):
        found = Evaluation.from_json(_text(name))
        self.assertEqual(
            (found.algorithm, found.topology), ("hierarchical_copy", preset("dgx1", 4))
        )
        self.assertTrue(0 < found.bound <= found.seconds < math.inf)

    @parameterized.parameters(*_READERS)
    def test_each_kind_says_its_format_and_newer_ones_are_refused(self, kind):
        text = _text(f"{kind}_format2")
        # A new format needs a file of the last one here.
        self.assertEqual(serialization.FORMAT, 2)
        self.assertEqual(next(iter(json.loads(text).items())), ("format", 2))
        for given, message in (
            ("3", "format must be from 1 to 2; got 3; a newer version of tfcdo has written it"),
            ("0", "from 1 to 2; got 0$"),
            ('"a"', "(?i)expected `int`"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                _READERS[kind](text.replace('"format": 2', f'"format": {given}'))


if __name__ == "__main__":
    absltest.main()
