"""Topologies as values: presets, subsets, fingerprints, routes, JSON, and what is refused."""

import dataclasses
import itertools
import json
import math
import pathlib
import random
import re
from typing import Any

import hypothesis
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import strategies as st
from topology_testing import meet

from tfcdo.plan.evaluation import Evaluation
from tfcdo.topology import measurement
from tfcdo.topology.links import Link, Resource, Route, ordered_pairs
from tfcdo.topology.presets import PRESETS, preset
from tfcdo.topology.topology import Topology

_NO_NUMBER: Any = None
# NVLinks per pair, as NVIDIA draws them; for V100 see `nvidia_smi_test`.
DGX1_P100 = "0-1 0-2 0-3 1-2 1-3 2-3   4-5 4-6 4-7 5-6 5-7 6-7   0-4 1-5 2-6 3-7"


class PresetsTest(parameterized.TestCase):
    def test_dgx1_with_p100(self):
        machine = preset("dgx1_p100")
        for a, b in ordered_pairs(8):
            wired = f"{min(a, b)}-{max(a, b)}" in DGX1_P100
            self.assertEqual(machine.bandwidth(a, b), 20e9 if wired else 10e9)
            self.assertEqual(machine.link_by_pair[a, b].via_host, not wired)

    @parameterized.parameters(
        # Host traffic meets if it goes from the same socket to the same socket.
        ("dgx1", ["06 17", "06 07"], ["06 60", "01 10", "01 02"]),
        ("nvswitch", ["01 02", "02 12"], ["01 10", "01 23"]),
        ("pcie", ["02 13", "01 02"], ["02 31", "01 23"]),
    )
    def test_what_copies_share(self, name, meeting, apart):
        for found in (*meeting, *apart):
            a, b, c, d = map(int, found.replace(" ", ""))
            self.assertEqual(meet(preset(name), (a, b), (c, d)), found in meeting, found)

    @parameterized.parameters(
        ("dgx2", None, "name must be one of dgx1, .*; got 'dgx2'"),
        ("dgx1", 9, "at most 8; got 9"),
        (["pcie"], None, r"name must be one of .*; got \['pcie'\]"),
        ("pcie", True, "num_devices must be an int; got True"),
        ("pcie", 1.0, "num_devices must be an int; got 1.0"),
    )
    def test_wrong_arguments(self, name, num_devices, message):
        self.assertRaisesRegex((ValueError, TypeError), message, preset, name, num_devices)


class TopologyTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=30, deadline=None)
    @hypothesis.given(
        st.sampled_from(PRESETS), st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True)
    )
    def test_subset_keeps_the_links_between_its_devices(self, name, devices):
        machine = preset(name, 8)
        part = machine.subset(devices)
        pairs = {(i, j): (devices[i], devices[j]) for i, j in ordered_pairs(len(devices))}
        for own, whole in pairs.items():
            self.assertEqual(part.bandwidth(*own), machine.bandwidth(*whole))
            self.assertEqual(part.latency(*own), machine.latency(*whole))
        for one, other in itertools.combinations(pairs, 2):
            self.assertEqual(meet(part, one, other), meet(machine, pairs[one], pairs[other]))
        self.assertEqual(part.subset(range(len(devices))), part)

    def test_fingerprints_ignore_names_only(self):
        machine, replace = preset("pcie"), dataclasses.replace
        resources = tuple(replace(one, name=f"my {one.name}") for one in machine.resources)
        renamed = replace(machine, name="mine", resources=resources)
        self.assertNotEqual(renamed, machine)
        self.assertEqual(renamed.fingerprint, machine.fingerprint)
        # What a cached plan is found by: another speed, or a path via the host, makes another plan.
        (first, *others), (port, *ports) = machine.links, machine.resources
        changed = (
            replace(machine, resources=(replace(port, bandwidth=2e9), *ports)),
            replace(machine, links=(replace(first, via_host=True), *others)),
            replace(machine, links=(replace(first, latency=1e-3), *others)),
            replace(machine, links=(replace(first, resources=first.resources[:1]), *others)),
            replace(machine, addition_bandwidth=1e9),
            replace(machine, addition_bandwidth=1e9, serial_reduction=True),
            machine.subset([0, 2, 1, 3]),
        )
        self.assertLen({machine.fingerprint, *(one.fingerprint for one in changed)}, 8)

    def test_direct_links_are_all_links_where_others_do_not_reach_every_device(self):
        machine = preset("dgx1")
        self.assertLen(machine.direct_links, 32)
        self.assertLen(machine.subset([0, 5]).direct_links, 2)
        self.assertLen(machine.subset([0, 1, 5]).direct_links, 4)
        wires = [(*pair, [Resource(f"{pair}", 1e9)]) for pair in ordered_pairs(3)]
        routes = [Route(*wire, via_host=wire[0] > wire[1]) for wire in wires]
        self.assertLen(Topology.from_routes("one way", 3, routes).direct_links, 6)

    @parameterized.parameters(
        ({"name": None}, "name must be a str; got None"),
        ({"links": 5}, "links must be a list of Link; got 5"),
        ({"links": (Link(0, 1, 0.0, [0]),)}, "0→1 must be a tuple of .*; got .0."),  # type: ignore[arg-type]
        ({"num_devices": 0}, "num_devices"),
        ({"num_devices": 2.0}, "num_devices must be an int; got 2.0"),
        ({"num_devices": 3}, r"6 links; got 2; missing or too many .*: \[\(0, 2\)"),
        ({"addition_bandwidth": math.nan}, "addition_bandwidth"),
        ({"serial_reduction": "no"}, "serial_reduction must be True or False; got 'no'"),
        ({"addition_bandwidth": "1G"}, "addition_bandwidth must be a number; got '1G'"),
        ({"addition_bandwidth": 10**400}, "addition_bandwidth must be at most 1.*308; got 1000"),
        ({"resources": (Resource("a", 1.0),) * 2}, "'a' is duplicated"),
        ({"links": (Link(0, 1, 0.0, (0,)),) * 2}, "2 links; got 2; .*: .*0, 1.*1, 0"),
        ({"links": (Link(0, 1, 0.0, (2,)),)}, "indices from 0 to 1"),
        ({"links": (Link(0, 1, 0.0, (1, 0, 1)),)}, r"0→1 must be different; got \(1, 0, 1\)"),
        ({"links": (Link(0, 1, -1e-6, (0,)),)}, "latency of the link 0→1 .* got -1e-06"),
        ({"links": (Link(0, 1, _NO_NUMBER, (0,)),)}, "latency of the link 0→1 .* number; got None"),
    )
    def test_wrong_arguments_are_named(self, change, message):
        with self.assertRaisesRegex((ValueError, TypeError), message):
            dataclasses.replace(preset("fully_connected", 2), **change)

    def test_other_devices_and_routes_are_named(self):
        machine = preset("pcie")
        for of_pair in (machine.bandwidth, machine.latency, machine.route):
            self.assertRaisesRegex(ValueError, "source and .* 0 to 3; got 4 ", of_pair, 4, 1)
        for devices in ((), (0, 0), (0, 4), (-1,)):
            told = "devices must be different devices of 'pcie'"
            self.assertRaisesRegex(ValueError, told, machine.subset, devices)
        for wrong in (None, np.array(0)):
            told = re.escape(f"devices must be a list of int; got {wrong!r}")
            self.assertRaisesRegex(TypeError, told, machine.subset, wrong)
        with self.assertRaisesRegex(TypeError, "routes must be a list of Route; got {'a': 1}"):
            Topology.from_routes("two", 2, {"a": 1})  # type: ignore[dict-item]
        with self.assertRaisesRegex(TypeError, "resources of the link 0→1 .* Resource; got 'abc'"):
            Topology.from_routes("two", 2, [Route(0, 1, "abc")])  # type: ignore[arg-type]

    def test_resources_of_one_name_are_one_resource(self):
        bus, same, plug = Resource("bus", 1e9), Resource("bus", 1e9), Resource("plug", 5e8)
        routes = [Route(1, 0, [same, plug], via_host=True, latency=2e-6), Route(0, 1, [bus])]
        machine = Topology.from_routes("two", 2, routes, addition_bandwidth=7.0)
        self.assertEqual(machine.resources, (bus, plug))
        links = (Link(0, 1, 1e-5, (0,)), Link(1, 0, 2e-6, (0, 1), via_host=True))
        self.assertEqual(machine.links, links)
        self.assertEqual((machine.addition_bandwidth, machine.serial_reduction), (7.0, False))
        with self.assertRaisesRegex(ValueError, "bandwidth of 'bus' must be 2.*got 1.* link 1→0"):
            Topology.from_routes("two", 2, [routes[0], Route(0, 1, [Resource("bus", 2e9)])])


class JsonTest(parameterized.TestCase):
    @parameterized.product(name=PRESETS, num_devices=[1, 5])
    def test_reads_what_it_writes(self, name, num_devices):
        machine = preset(name, num_devices)
        self.assertEqual(Topology.from_json(machine.to_json()), machine)
        pairs = np.array([*ordered_pairs(num_devices)], int).reshape(-1, 2)
        wires = [Route(a, b, [Resource("a", 1)], via_host=a > b, latency=0) for a, b in pairs]
        whole = Topology.from_routes("b", num_devices, wires, addition_bandwidth=np.float32(2))
        self.assertEqual(Topology.from_json(whole.to_json()).fingerprint, whole.fingerprint)

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
        self.assertRaisesRegex(ValueError, message, Topology.from_json, text)

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
        self.assertRaisesRegex(ValueError, message, Topology.from_json, json.dumps(content))

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
        for text in (machine.to_json(), f"\ufeff{machine.to_json()}"):  # As Windows begins it.
            self.assertEqual(machine, measurement.parse(text.encode()).topology)

    @parameterized.parameters(
        Topology.from_json, Evaluation.from_json, lambda text: measurement.parse(text.encode())
    )
    def test_those_of_other_versions_are_refused(self, read):
        for given in (1, 3):
            with self.assertRaisesRegex(ValueError, f"format must be 2; got {given}, of another"):
                read(json.dumps({"format": given, "date": "2026-01-01"}))


if __name__ == "__main__":
    absltest.main()
