"""JSON: what is written is read, and a mistake in a file is named."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import random

import hypothesis
from absl.testing import absltest, parameterized
from hypothesis import strategies as st
from topology_testing import meet

from tfcdo.plan.evaluation import Evaluation
from tfcdo.topology import measurement
from tfcdo.topology.presets import PRESETS, preset
from tfcdo.topology.topology import Topology


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

    def test_a_path_is_not_a_text(self):
        with self.assertRaisesRegex(ValueError, '^not a JSON text: .*; got "machine.json"$'):
            Topology.from_json("machine.json")
        for read in (Topology.from_json, Topology.from_nvidia_smi):
            with self.assertRaisesRegex(TypeError, "^text must be .*; got .*machine.json"):
                read(pathlib.Path("machine.json"))  # type: ignore[arg-type]

    @parameterized.parameters(
        ("name", 5, "name: expected `str`; got 5"),
        ("num_devices", 1000, "each ordered pair of the 1000 devices once, 999000 links; got 2"),
        ("num_devices", 2**70, f"each ordered pair of the {2**70} devices once"),
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

    def test_a_topology_is_not_taken_for_a_measurement_by_its_name(self):
        machine = dataclasses.replace(preset("pcie", 2), name="date")
        self.assertEqual(machine, measurement.parse(machine.to_json().encode()).topology)

    @parameterized.parameters(
        Topology.from_json,
        Evaluation.from_json,
        lambda text: measurement.parse(text.encode()),
    )
    def test_those_of_other_versions_are_refused(self, read):
        for given in (1, 3):
            with self.assertRaisesRegex(ValueError, f"format must be 2; got {given}, of another"):
                read(json.dumps({"format": given, "date": "2026-01-01"}))


if __name__ == "__main__":
    absltest.main()
