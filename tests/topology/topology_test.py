"""Topologies as values: subsets, fingerprints, routes, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import pickle

import hypothesis
from absl.testing import absltest, parameterized
from hypothesis import strategies as st
from topology_testing import meet

from tfcdo.topology.links import Link, Resource, Route
from tfcdo.topology.presets import PRESETS, dgx1, preset
from tfcdo.topology.topology import Topology


class TopologyTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(
        st.sampled_from(PRESETS),
        st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
    )
    def test_subset_keeps_the_links_between_its_devices(self, name, devices):
        machine = preset(name, 8)
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

    @parameterized.parameters(((),), ((0, 0),), ((0, 8),), ((-1,),))
    def test_devices_of_a_subset_must_exist(self, *devices):
        with self.assertRaisesRegex(ValueError, "devices must be different devices of 'dgx1'"):
            preset("dgx1").subset(devices[0])

    def test_a_topology_is_a_key(self):
        machine, same = dgx1(), dgx1()
        self.assertIsNot(machine, same)
        self.assertEqual({machine: 1}[same], 1)
        self.assertEqual(pickle.loads(pickle.dumps(machine)), machine)
        keys = {preset(name, 8) for name in PRESETS}
        self.assertLen(keys, len(PRESETS))

    def test_fingerprints_ignore_names_only(self):
        machine = preset("pcie")
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
        # What a cached plan is found by: another speed, or a path via the host, makes another plan.
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

    def test_direct_links_are_all_links_where_others_do_not_reach_every_device(self):
        machine = preset("dgx1")
        self.assertLen(machine.direct_links, 32)
        self.assertLen(machine.subset([0, 5]).direct_links, 2)
        self.assertLen(machine.subset([0, 1, 5]).direct_links, 4)

    @parameterized.parameters(
        ({"num_devices": 0}, "num_devices"),
        ({"num_devices": 3}, r"6 links; got 2; missing or too many .*: \[\(0, 2\)"),
        ({"addition_bandwidth": 0.0}, "addition_bandwidth"),
        ({"addition_bandwidth": math.nan}, "addition_bandwidth"),
        ({"resources": (Resource("a", 1.0),) * 2}, "'a' is there twice"),
        ({"num_devices": 2.0}, "num_devices must be an int; got 2.0"),
        ({"links": (Link(0, 1, 0.0, (0,)),) * 2}, "2 links; got 2; .*: .*0, 1.*1, 0"),
        ({"links": (Link(0, 1, 0.0, (0,)),) * 3}, "2 links; got 3"),
        ({"links": (Link(0, 1, 0.0, (2,)),)}, "indices from 0 to 1"),
        (
            {"links": (Link(0, 1, 0.0, (1, 0, 1)),)},
            r"resources of the link 0→1 must be different; got \(1, 0, 1\)",
        ),
        (
            {"links": (Link(0, 1, -1e-6, (0,)),)},
            "latency of the link 0→1 .* got -1e-06",
        ),
    )
    def test_wrong_arguments_are_named(self, change, message):
        machine = preset("fully_connected", 2)
        with self.assertRaisesRegex((ValueError, TypeError), message):
            dataclasses.replace(machine, **change)

    @parameterized.parameters(0.0, -1.0, math.nan)
    def test_bandwidths_must_be_above_0(self, bandwidth):
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


if __name__ == "__main__":
    absltest.main()
