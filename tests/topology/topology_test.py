"""Topologies: presets as documented, subsets, JSON, and what nvidia-smi prints."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import pickle
import random
import tracemalloc

import hypothesis
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from tfcdo.plan import plan_cache
from tfcdo.topology import presets
from tfcdo.topology.isomorphism import isomorphisms
from tfcdo.topology.links import Link
from tfcdo.topology.links import Resource
from tfcdo.topology.links import ordered_pairs
from tfcdo.topology.presets import PRESETS
from tfcdo.topology.presets import dgx1
from tfcdo.topology.routes import Route
from tfcdo.topology.topology import Topology

SAMPLES = pathlib.Path(__file__).parent / "data"
# NVLinks per pair, as NVIDIA draws them.
DGX1 = """
    0-1:2 0-2:1 0-3:1 0-4:2   1-2:1 1-3:2 1-5:1   2-3:2 2-6:2   3-7:1
    4-5:2 4-6:1 4-7:1   5-6:1 5-7:2   6-7:2
"""
DGX1_P100 = """
    0-1:1 0-2:1 0-3:1 1-2:1 1-3:1 2-3:1   4-5:1 4-6:1 4-7:1 5-6:1 5-7:1 6-7:1
    0-4:1 1-5:1 2-6:1 3-7:1
"""


def sample(name: str) -> Topology:
    text = (SAMPLES / f"nvidia_smi_{name}.txt").read_text(encoding="utf-8")
    return Topology.from_nvidia_smi(text)


def table(rows: list[list[str]]) -> Topology:
    """Reads a table that holds nothing but these entries."""
    names = [f"GPU{i}" for i in range(len(rows))]
    lines = [" ".join([name, *row]) for name, row in zip(names, rows, strict=True)]
    return Topology.from_nvidia_smi("\n".join(["  ".join(names), *lines]))


def all_alike(num_devices: int, nvlinks: int) -> Topology:
    """Reads a table in which each pair is joined by the same number of NVLinks."""
    gpus = range(num_devices)
    return table([["X" if a == b else f"NV{nvlinks}" for b in gpus] for a in gpus])


def gigabytes(topology: Topology, source: int, target: int) -> float:
    return topology.bandwidth(source, target) / 1e9


def meet(topology: Topology, one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two transfers would have to wait for one another."""
    return bool(
        set(topology.link_by_pair[one].resources) & set(topology.link_by_pair[other].resources)
    )


class PresetsTest(parameterized.TestCase):
    @parameterized.parameters(("dgx1", DGX1, 25, 6), ("dgx1_p100", DGX1_P100, 20, 4))
    def test_dgx1(self, name, drawn, nvlink, links_per_device):
        machine = presets.preset(name)
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
        machine = presets.preset("nvswitch", 16)
        self.assertEqual({link.via_host for link in machine.links}, {False})
        self.assertEqual({gigabytes(machine, 0, other) for other in range(1, 16)}, {300})
        self.assertTrue(meet(machine, (0, 1), (0, 2)))
        self.assertTrue(meet(machine, (0, 2), (1, 2)))
        self.assertFalse(meet(machine, (0, 1), (1, 0)))
        self.assertFalse(meet(machine, (0, 1), (2, 3)))

    def test_pcie(self):
        machine = presets.preset("pcie")
        self.assertEqual([gigabytes(machine, 0, other) for other in (1, 2, 3)], [12, 10, 10])
        self.assertTrue(meet(machine, (0, 2), (1, 3)))
        self.assertTrue(meet(machine, (0, 1), (0, 2)))
        self.assertFalse(meet(machine, (0, 2), (3, 1)))
        self.assertFalse(meet(machine, (0, 1), (2, 3)))
        odd = presets.preset("pcie", 5)
        self.assertEqual(gigabytes(odd, 4, 0), 10)

    def test_shared_memory(self):
        machine = presets.preset("shared_memory", 3)
        self.assertEqual(machine.bandwidth(0, 2), math.inf)
        self.assertLess(machine.addition_bandwidth, math.inf)

    @parameterized.parameters(
        ("dgx2", None, "'dgx2'; known are dgx1, dgx1_p100, nvswitch, pcie, shared_memory"),
        ("dgx1", 9, "at most 8; got 9"),
        ("pcie", 0, "num_devices"),
        ("dgx1", -1, "num_devices"),
    )
    def test_no_such_preset(self, name, num_devices, message):
        with self.assertRaisesRegex(ValueError, message):
            presets.preset(name, num_devices)

    @parameterized.product(name=["pcie", "dgx1"], num_devices=[True, 1.0, "1"])
    def test_what_a_cache_would_take_for_an_int(self, name, num_devices):
        presets.preset(name, 1)
        with self.assertRaisesRegex(TypeError, "num_devices must be an int; got (True|1.0|'1')"):
            presets.preset(name, num_devices)


class TopologyTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(
        st.sampled_from(PRESETS),
        st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
    )
    def test_subset_keeps_the_links_between_its_devices(self, name, devices):
        machine = presets.preset(name, 8)
        part = machine.subset(devices)
        for i, source in enumerate(devices):
            for j, target in enumerate(devices):
                if i == j:
                    continue
                self.assertEqual(part.bandwidth(i, j), machine.bandwidth(source, target))
                self.assertEqual(part.latency(i, j), machine.latency(source, target))
                for k, third in enumerate(devices):
                    if k != i:
                        self.assertEqual(
                            meet(part, (i, j), (i, k)),
                            meet(machine, (source, target), (source, third)),
                        )
        self.assertEqual(part.subset(range(len(devices))), part)

    @parameterized.product(shared=[False, True], devices=[(1, 0), (2,), (0, 1, 3)])
    def test_subset_adds_like_the_whole(self, shared, devices):
        machine = dataclasses.replace(
            presets.preset("pcie"), addition_bandwidth=5e9, serial_reduction=shared
        )
        part = machine.subset(devices)
        self.assertEqual((part.addition_bandwidth, part.serial_reduction), (5e9, shared))

    @parameterized.parameters(((),), ((0, 0),), ((0, 8),), ((-1,),))
    def test_subset_of_what_is_not_there(self, *devices):
        with self.assertRaisesRegex(ValueError, "devices must be different devices of 'dgx1'"):
            presets.preset("dgx1").subset(devices[0])

    def test_a_topology_is_a_key(self):
        machine, same = dgx1(), dgx1()
        self.assertIsNot(machine, same)
        self.assertEqual({machine: 1}[same], 1)
        self.assertEqual(pickle.loads(pickle.dumps(machine)), machine)
        keys = {presets.preset(name, 8) for name in PRESETS}
        self.assertLen(keys, len(PRESETS))

    def test_fingerprints_ignore_names_only(self):
        machine = presets.preset("pcie")
        resources = tuple(
            dataclasses.replace(resource, name=f"my {resource.name}")
            for resource in machine.resources
        )
        renamed = dataclasses.replace(machine, name="mine", resources=resources)
        self.assertNotEqual(renamed, machine)
        self.assertEqual(renamed.fingerprint, machine.fingerprint)
        slower = dataclasses.replace(machine, addition_bandwidth=1e9)
        unshared = [
            dataclasses.replace(link, resources=link.resources[:1]) for link in machine.links
        ]
        # What a cached plan is found by: another speed, or a detour, makes another plan.
        faster = [
            dataclasses.replace(resource, bandwidth=2 * resource.bandwidth)
            for resource in machine.resources
        ]
        longer = dataclasses.replace(machine.links[0], via_host=True)
        later = dataclasses.replace(machine.links[0], latency=1e-3)
        changed = (
            dataclasses.replace(machine, resources=tuple(faster)),
            dataclasses.replace(machine, links=(longer, *machine.links[1:])),
            dataclasses.replace(machine, links=(later, *machine.links[1:])),
            slower,
            dataclasses.replace(slower, serial_reduction=True),
            dataclasses.replace(machine, links=tuple(unshared)),
            machine.subset([0, 2, 1, 3]),
        )
        self.assertLen({machine.fingerprint, *(one.fingerprint for one in changed)}, 8)

    def test_direct_links_are_all_links_where_detours_are_needed(self):
        machine = presets.preset("dgx1")
        self.assertLen(machine.direct_links, 32)
        self.assertLen(machine.subset([0, 5]).direct_links, 2)
        self.assertLen(machine.subset([0, 1, 5]).direct_links, 4)

    @parameterized.parameters(
        ({"num_devices": 0}, "num_devices"),
        ({"num_devices": 3}, r"6 links; got 2; missing or too many .*: \[\(0, 2\)"),
        ({"links": ()}, r"\[\(0, 1\), \(1, 0\)\]"),
        ({"addition_bandwidth": 0.0}, "addition_bandwidth"),
        ({"addition_bandwidth": math.nan}, "addition_bandwidth"),
        ({"resources": (Resource("a", 1.0),) * 2}, "'a' is there twice"),
        ({"num_devices": 2.0}, "num_devices must be an int; got 2.0"),
        ({"num_devices": 1000}, r"at most 5 shown\): \[(\(0, [2-6]\)(, )?){5}\]$"),
        ({"links": (Link(0, 1, 0.0, (0,)),) * 2}, "2 links; got 2; .*: .*0, 1.*1, 0"),
        ({"links": (Link(0, 0, 0.0, (0,)),) * 2}, r": \[\(0, 0\), \(0, 1\), "),
        ({"links": (Link(0, 1, 0.0, (0,)),) * 3}, "2 links; got 3"),
        ({"links": (Link(0, 1, 0.0, (2,)),)}, "indices from 0 to 1"),
        ({"links": (Link(0, 1, 0.0, ()),)}, "indices from 0 to 1"),
        (
            {"links": (Link(0, 1, 0.0, (1, 0, 1)),)},
            "resources of the link 0→1 must be different; '1→0' is there twice",
        ),
        (
            {"links": (Link(0, 1, -1e-6, (0,)),)},
            "latency of the link 0→1 .* got -1e-06",
        ),
        ({"links": (Link(0, 1, math.inf, (0,)),)}, "latency"),
    )
    def test_what_is_no_topology_is_named(self, change, message):
        machine = presets.preset("fully_connected", 2)
        with self.assertRaisesRegex((ValueError, TypeError), message):
            dataclasses.replace(machine, **change)

    @parameterized.parameters(0.0, -1.0, math.nan)
    def test_no_bandwidth(self, bandwidth):
        with self.assertRaisesRegex(ValueError, "bandwidth of 'wire'"):
            Resource("wire", bandwidth)


class RoutesTest(parameterized.TestCase):
    def test_resources_of_one_name_are_one_resource(self):
        bus, same, plug = Resource("bus", 1e9), Resource("bus", 1e9), Resource("plug", 5e8)
        routes = [Route(1, 0, [same, plug], via_host=True, latency=2e-6), Route(0, 1, [bus])]
        machine = Topology.from_routes("two", 2, routes, addition_bandwidth=7.0)
        self.assertEqual(machine.resources, (bus, plug))
        self.assertEqual(
            machine.links, (Link(0, 1, 1e-5, (0,)), Link(1, 0, 2e-6, (0, 1), via_host=True))
        )
        self.assertEqual((machine.addition_bandwidth, machine.serial_reduction), (7.0, False))

    def test_a_resource_has_one_bandwidth(self):
        routes = [Route(0, 1, [Resource("bus", 1e9)]), Route(1, 0, [Resource("bus", 2e9)])]
        with self.assertRaisesRegex(ValueError, "bandwidth of 'bus' must be 1.*got 2.* link 1→0"):
            Topology.from_routes("two", 2, routes)

    @parameterized.product(name=PRESETS, num_devices=[1, 3, 8])
    def test_a_topology_is_its_routes(self, name, num_devices):
        machine = presets.preset(name, num_devices)
        routes = [machine.route(*pair) for pair in ordered_pairs(num_devices)]
        again = Topology.from_routes(
            machine.name,
            num_devices,
            routes[::-1],
            addition_bandwidth=machine.addition_bandwidth,
            serial_reduction=machine.serial_reduction,
        )
        self.assertEqual(again, machine)


class IsomorphismsTest(parameterized.TestCase):
    def test_a_dgx1_has_four_symmetries(self):
        machine = presets.preset("dgx1")
        found = list(isomorphisms(machine, machine, 100))
        self.assertLen(found, 4)
        self.assertEqual(found[0], tuple(range(8)))
        for images in found:
            self.assertEqual(machine.subset(images).fingerprint, machine.fingerprint)

    @hypothesis.settings(max_examples=30, deadline=None)
    @hypothesis.given(st.sampled_from(["dgx1", "dgx1_p100", "pcie"]), st.permutations(range(8)))
    def test_a_renumbered_machine_is_found(self, name, order):
        machine = presets.preset(name, 8)
        other = machine.subset(order)
        images = next(iter(isomorphisms(machine, other, 1)))
        for (source, target), kind in machine.link_kinds.items():
            self.assertEqual(other.link_kinds[images[source], images[target]], kind)

    def test_different_machines_are_not_alike(self):
        one, other = presets.preset("dgx1"), presets.preset("dgx1_p100")
        self.assertEmpty(list(isomorphisms(one, other, 1)))
        self.assertEmpty(list(isomorphisms(one, one.subset(range(7)), 1)))

    @parameterized.parameters((0, 1), (1, 0))
    def test_both_ways_must_be_alike(self, *fast):
        def machine(speeds):
            routes = [
                Route(*pair, [Resource(f"{pair}", speeds.get(pair, 10e9))])
                for pair in ordered_pairs(2)
            ]
            return Topology.from_routes("two", 2, routes)

        one, turned, even = machine({fast: 50e9}), machine({fast[::-1]: 50e9}), machine({})
        self.assertEmpty(list(isomorphisms(one, even, 2)))
        self.assertEmpty(list(isomorphisms(even, one, 2)))
        self.assertEqual(list(isomorphisms(one, one, 2)), [(0, 1)])
        self.assertEqual(list(isomorphisms(one, turned, 2)), [(1, 0)])


class JsonTest(parameterized.TestCase):
    @parameterized.product(name=PRESETS, num_devices=[1, 2, 5, 8])
    def test_what_is_written_is_read(self, name, num_devices):
        machine = presets.preset(name, num_devices)
        self.assertEqual(Topology.from_json(machine.to_json()), machine)

    def test_a_person_may_leave_out_the_usual(self):
        text = """{"name": "two", "num_devices": 2,
            "resources": [{"name": "wire", "bandwidth": 1e9}],
            "links": [{"source": 0, "target": 1, "resources": ["wire"]},
                      {"source": 1, "target": 0, "resources": ["wire"]}]}"""
        machine = Topology.from_json(text)
        self.assertEqual(machine.addition_bandwidth, math.inf)
        self.assertEqual(machine.latency(0, 1), 1e-5)
        self.assertTrue(meet(machine, (0, 1), (1, 0)))

    def test_files_with_the_former_names_of_two_fields_are_read(self):
        part = presets.preset("dgx1").subset([0, 5, 6])
        machine = dataclasses.replace(part, addition_bandwidth=1e9, serial_reduction=True)
        text = machine.to_json()
        for name, former in (("via_host", "detour"), ("serial_reduction", "shared_adder")):
            self.assertIn(f'"{name}": true', text)
            text = text.replace(f'"{name}"', f'"{former}"')
        self.assertEqual(Topology.from_json(text), machine)

    @parameterized.parameters(
        ("", "not a JSON text"),
        ("{", "not a JSON text"),
        ("[]", r"not a topology: expected `object` \(fields: name, .*, links\); got \[\]"),
        ("7", "not a topology: expected `object` .*; got 7"),
        ("{}", "missing required field `name` .*; got {}"),
        ('{"name": "a", "num_devices": 1, "resources": []}', "missing required field `links`"),
        (
            '{"name": "a", "num_devices": [], "resources": [], "links": []}',
            r"num_devices: expected `int`; got \[\]",
        ),
        ('{"name": "a", "name": "b"}', 'not a topology: "name" is given twice'),
        ('{"links": [{"detour": true, "via_host": false}]}', '"via_host" is given twice'),
    )
    def test_what_does_not_describe_a_topology(self, text, message):
        with self.assertRaisesRegex(ValueError, message):
            Topology.from_json(text)

    @parameterized.parameters(
        ("name", 5, "name: expected `str`; got 5"),
        ("num_devices", 2.9, "num_devices: expected `int`; got 2.9"),
        ("num_devices", True, "num_devices: expected `int`; got true"),
        ("num_devices", 1000, "each ordered pair of the 1000 devices once, 999000 links; got 2"),
        ("serial_reduction", "false", 'serial_reduction: expected `bool`; got "false"'),
        ("serial_reduction", 0, "serial_reduction: expected `bool`; got 0"),
        ("addition_bandwidth", "1e9", 'addition_bandwidth: expected `float . null`; got "1e9"'),
        ("addition_bandwith", 1e9, "unknown field `addition_bandwith` .fields: name, .*, links.;"),
        ("resources", {}, "resources: expected `array`; got {}"),
        ("links", None, "links: expected `array`; got null"),
        ("resources.1", "wire", 'resources.1.: .*`object` .fields: name, bandwidth.; got "wire"'),
        ("resources.1.name", None, "resources.1..name: expected `str`; got null"),
        ("resources.1.bandwidth", "fast", 'resources.1..bandwidth: expected `f.*`; got "fast"'),
        ("resources.1.bandwidth", True, "resources.1..bandwidth: expected `float .*`; got true"),
        ("resources.1.bandwidth", 10**400, "resources.1..bandwidth: .*; got 10{76}[.]{3}$"),
        ("resources.1.bandwidth", math.nan, "bandwidth of '1→0' must be above 0 B/s; got nan"),
        ("resources.1.bandwidth", 0, "bandwidth of '1→0' must be above 0 B/s; got 0"),
        ("resources.1.speed", 1, "resources.1.: .* field `speed` .fields: name, bandwidth.;"),
        ("links.1.source", 1.0, "links.1..source: expected `int`; got 1.0"),
        ("links.1.target", "0", 'links.1..target: expected `int`; got "0"'),
        ("links.1.latency", None, "links.1..latency: expected `float`; got null"),
        ("links.1.latency", math.inf, "latency of the link 1→0 must be a number of seconds"),
        ("links.1.via_host", "false", 'links.1..via_host: expected `bool`; got "false"'),
        ("links.1.resources", ["wires"], 'links.1..resources must .*; got "wires"'),
        ("links.1.resources", "0→1", 'links.1..resources: expected `array`; got "0→1"'),
        ("links.1.resources", [["0→1"]], r'links.1..resources.0.: expected `str`; got \["0→1"\]'),
        ("links.1.resources", ["1→0"] * 2, "link 1→0 must be different; '1→0' is there twice"),
        ("links.1.way", [], "links.1.: .* field `way` .fields: source, .*, via_host.; got {.*$"),
    )
    def test_a_field_is_taken_as_it_is_written(self, place, value, message):
        content = json.loads(presets.preset("fully_connected", 2).to_json())
        *parents, field = place.split(".")
        node = content
        for parent in parents:
            node = node[int(parent) if parent.isdigit() else parent]
        node[int(field) if field.isdigit() else field] = value
        with self.assertRaisesRegex(ValueError, message):
            Topology.from_json(json.dumps(content))

    def test_errors_about_many_missing_links_are_short(self):
        content = json.loads(presets.preset("fully_connected", 2).to_json())
        text = json.dumps(content | {"num_devices": 1000})
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        with self.assertRaises(ValueError) as caught:
            Topology.from_json(text)
        self.assertLess(len(str(caught.exception)), 300)
        # Nor are a million pairs listed to find the first few.
        self.assertLess(tracemalloc.get_traced_memory()[1], 10**6)

    def test_nests_of_lists(self):
        with self.assertRaisesRegex(ValueError, "nested too deeply"):
            Topology.from_json("[" * 100_000)

    @hypothesis.settings(max_examples=100, deadline=None)
    @hypothesis.given(st.randoms(use_true_random=False))
    def test_a_broken_file_is_never_more_than_a_value_error(self, rng: random.Random):
        content = json.loads(presets.preset("pcie").to_json())
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


class NvidiaSmiTest(parameterized.TestCase):
    def test_dgx1_is_the_preset_with_other_numbers(self):
        machine = sample("dgx1_v100")
        preset = presets.preset("dgx1")
        orders = list(isomorphisms(preset, machine, 4))
        self.assertLen(orders, 4)
        self.assertEqual(machine.subset(orders[0]).fingerprint, preset.fingerprint)
        # So what was found for the preset serves the real machine.
        self.assertLen(plan_cache.presets(machine), len(plan_cache.presets(preset)))

    def test_nvswitch_has_ports(self):
        machine = sample("hgx_h100")
        self.assertEqual(gigabytes(machine, 0, 7), 450)
        self.assertTrue(meet(machine, (0, 1), (0, 2)))
        self.assertTrue(meet(machine, (0, 2), (1, 2)))

    def test_bridged_pairs_meet_in_the_host(self):
        machine = sample("nvlink_bridges_4")
        self.assertEqual([gigabytes(machine, 0, other) for other in (1, 2, 3)], [100, 10, 10])
        self.assertTrue(meet(machine, (0, 2), (1, 3)))
        self.assertFalse(meet(machine, (0, 2), (2, 0)))

    def test_pcie_pairs_are_the_preset(self):
        machine = sample("pcie_4")
        self.assertEqual(machine.fingerprint, presets.preset("pcie").fingerprint)

    @parameterized.parameters("pcie_8_two_sockets", "pcie_8_old_driver")
    def test_two_sockets(self, name):
        machine = sample(name)
        self.assertEqual([gigabytes(machine, 0, other) for other in (1, 2, 4)], [12, 10, 10])
        # Between sockets all share one way; within a socket only what their switches share.
        self.assertTrue(meet(machine, (0, 4), (2, 6)))
        self.assertFalse(meet(machine, (0, 2), (4, 6)))
        self.assertFalse(meet(machine, (0, 1), (2, 3)))
        self.assertTrue(meet(machine, (0, 2), (1, 3)))

    def test_one_card(self):
        self.assertEqual(sample("one_h200").num_devices, 1)

    @parameterized.parameters("dgx1_v100", "hgx_h100", "pcie_8_two_sockets", "one_h200")
    def test_how_the_text_came_does_not_matter(self, name):
        text = (SAMPLES / f"nvidia_smi_{name}.txt").read_text(encoding="utf-8")
        indented = "".join(f"    {line}" for line in text.splitlines(keepends=True))
        for changed in (indented, f"\ufeff{text}", f"\ufeff{indented}"):
            self.assertEqual(Topology.from_nvidia_smi(changed), sample(name))
        # As the first line of the text is that of the columns, if somebody cut off what is before.
        table = text[text.index("GPU0") :]
        for changed in (table, f"\ufeff{table}"):
            self.assertEqual(Topology.from_nvidia_smi(changed), sample(name))

    @parameterized.parameters(
        (3, 6, False), (3, 9, False), (3, 10, True), (3, 12, True), (4, 6, False), (4, 7, True)
    )
    def test_more_nvlinks_than_a_gpu_has_are_those_of_a_switch(
        self, num_devices, nvlinks, switched
    ):
        # A GPU has at most 18 NVLinks: where a row of the table adds up to more, a switch hands
        # them out. For three GPUs that is from NV10 on, for four from NV7 on.
        machine = all_alike(num_devices, nvlinks)
        self.assertEqual(meet(machine, (0, 1), (0, 2)), switched)
        self.assertEqual(gigabytes(machine, 0, 1), 25 * nvlinks)

    def test_two_gpus_have_no_switch(self):
        self.assertEqual([link.resources for link in all_alike(2, 18).links], [(0,), (1,)])

    def test_pairs_of_unlike_numbers_of_nvlinks_have_no_switch(self):
        rows = [["X", "NV12", "NV10"], ["NV12", "X", "NV12"], ["NV10", "NV12", "X"]]
        machine = table(rows)
        self.assertFalse(meet(machine, (0, 1), (0, 2)))
        self.assertEqual([gigabytes(machine, 0, other) for other in (1, 2)], [300, 250])

    @parameterized.parameters(
        ("", "no table"),
        ("NVIDIA-SMI has failed because it couldn't communicate", "no table"),
        ("     GPU0  GPU1\nGPU0  X  NV1\n", "has no row GPU1"),
        ("     GPU0  GPU1\nGPU0  X  NV1\nGPU1  NV1\n", "row GPU1 has 1 entries for 2 GPUs"),
        (
            "     GPU0  GPU1\nGPU0  X  NV1\nGPU1  NVX  X\n",
            "column GPU0: expected NV# or PIX, .*; got NVX",
        ),
        (
            "     GPU0  GPU1\nGPU0  X  NV1\nGPU1  NV1  NV1\n",
            "line 3: row GPU1, column GPU1: expected X; got NV1",
        ),
        ("     GPU0  GPU1\nGPU0  X  NV1\nGPU1  NV2  X\n", "expected NV1, as in row GPU0; got NV2"),
    )
    def test_what_is_no_table(self, text, message):
        with self.assertRaisesRegex(ValueError, message):
            Topology.from_nvidia_smi(text)


if __name__ == "__main__":
    absltest.main()
