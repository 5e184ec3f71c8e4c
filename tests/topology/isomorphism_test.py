"""Machines that are wired alike, whatever the numbers of their devices."""

from __future__ import annotations

import hypothesis
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from tfcdo.topology.isomorphism import isomorphisms
from tfcdo.topology.links import Resource
from tfcdo.topology.links import ordered_pairs
from tfcdo.topology.presets import preset
from tfcdo.topology.routes import Route
from tfcdo.topology.topology import Topology


class IsomorphismsTest(parameterized.TestCase):
    def test_a_dgx1_has_four_symmetries(self):
        machine = preset("dgx1")
        found = list(isomorphisms(machine, machine, 100))
        self.assertLen(found, 4)
        self.assertEqual(found[0], tuple(range(8)))
        for images in found:
            self.assertEqual(machine.subset(images).fingerprint, machine.fingerprint)

    @hypothesis.settings(max_examples=30, deadline=None)
    @hypothesis.given(st.sampled_from(["dgx1", "dgx1_p100", "pcie"]), st.permutations(range(8)))
    def test_a_renumbered_machine_is_found(self, name, order):
        machine = preset(name, 8)
        other = machine.subset(order)
        images = next(iter(isomorphisms(machine, other, 1)))
        for (source, target), kind in machine.link_kinds.items():
            self.assertEqual(other.link_kinds[images[source], images[target]], kind)

    def test_different_machines_are_not_alike(self):
        one, other = preset("dgx1"), preset("dgx1_p100")
        self.assertEmpty(list(isomorphisms(one, other, 1)))
        self.assertEmpty(list(isomorphisms(one, one.subset(range(7)), 1)))

    @parameterized.parameters((0, 1), (1, 0))
    def test_both_directions_must_be_alike(self, *fast):
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


if __name__ == "__main__":
    absltest.main()
