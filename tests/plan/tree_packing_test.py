"""Tree packings: packs in the ratio of the weights; candidates that a search begins with."""

from __future__ import annotations

import hypothesis
import msgspec
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from tfcdo.plan import simulator
from tfcdo.plan.candidates import initial_candidates
from tfcdo.plan.candidates import ring_paths
from tfcdo.plan.copy_tree import chain
from tfcdo.plan.copy_tree import star
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.tree_packing import MAX_PACKS
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.plan.tree_packing import TreePackingDocument
from tfcdo.topology.presets import PRESETS
from tfcdo.topology.presets import preset

MB = 10**6
DGX1 = preset("dgx1")


class TreePackingTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=100, deadline=None)
    @hypothesis.given(
        st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), st.integers(0, 10**10)
    )
    def test_packs_have_sizes_in_the_ratio_of_the_weights(self, weights, num_bytes):
        trees = [star(20, root) for root in range(len(weights))]
        schedule = TreePacking(tuple(trees), tuple(weights)).schedule(num_bytes)
        sizes = {pack.tree.root: pack.size for pack in schedule.packs}
        for root, weight in enumerate(weights):
            # Both ends are rounded; a tree without a whole byte gets no pack.
            expected = num_bytes * weight / sum(weights)
            self.assertAlmostEqual(sizes.get(root, 0), expected, delta=1.01)

    @parameterized.parameters(
        ((), (), "as many as trees"),
        ((star(2),), (1.0, 1.0), "2 weights for 1 trees"),
        ((star(2),), (0.0,), "positive"),
        ((star(2),), (float("nan"),), "positive"),
        ((star(2),) * 3, (1e308,) * 3, "a sum that is a number; got .1e.308, "),
        ((star(2), star(3)), (1.0, 1.0), r"same devices; got trees over \[2, 3\]"),
    )
    def test_rejects(self, trees, weights, message):
        with self.assertRaisesRegex(ValueError, message):
            TreePacking(trees, weights)

    @parameterized.parameters(2**53 + 1, 2**60 - 1, 2**60 + 129, 10**19 - 1, 10**300)
    def test_more_bytes_than_a_float_can_count(self, num_bytes):
        # The last weight is far too small to count among so many.
        for weights in ((1.0,), (1.0, 3.0), (1.0, 3.0, 1e-30)):
            trees = tuple(star(3, root) for root in range(len(weights)))
            schedule = TreePacking(trees, weights).schedule(num_bytes)
            self.assertAlmostEqual(schedule.packs[0].size / num_bytes, weights[0] / sum(weights))

    def test_ends_are_rounded_to_the_nearest_byte(self):
        packing = TreePacking((star(2),) * 3, (1.0,) * 3)
        self.assertEqual([pack.stop for pack in packing.schedule(8).packs], [3, 5, 8])

    def test_a_weight_as_large_as_a_float(self):
        schedule = TreePacking((star(2),) * 2, (1e307, 3e307)).schedule(100 * MB)
        self.assertEqual([pack.size for pack in schedule.packs], [25 * MB, 75 * MB])

    def test_round_robin_deals_trees_out_in_turn(self):
        packing = TreePacking((star(2, 0), star(2, 1)), (5.0, 1.0)).round_robin(5)
        self.assertEqual([tree.root for tree in packing.trees], [0, 1, 0, 1, 0])
        self.assertLen(set(packing.weights), 1)

    @parameterized.parameters((0, ValueError, "0"), (-1, ValueError, "-1"), (2.0, TypeError, "2.0"))
    def test_round_robin_rejects(self, num_packs, error, given):
        packing = TreePacking((star(2),), (1.0,))
        with self.assertRaisesRegex(error, f"num_packs must be .*; got {given}"):
            packing.round_robin(num_packs)

    def test_images(self):
        packing = TreePacking((chain(3),), (2.0,)).expanded([(0, 1, 2), (1, 2, 0)])
        self.assertEqual([tree.parents for tree in packing.trees], [(None, 0, 1), (2, None, 1)])
        self.assertEqual(packing.weights, (2.0, 2.0))

    def test_json_and_back(self):
        packing = TreePacking((chain(3), star(3, 1)), (2.0, 0.1))
        text = msgspec.json.encode(packing.to_document())
        document = msgspec.json.decode(text, type=TreePackingDocument)
        self.assertEqual(TreePacking.from_document(document, 3), packing)
        with self.assertRaisesRegex(ValueError, "must span 4 devices; got 3"):
            TreePacking.from_document(document, 4)


class CandidatesTest(parameterized.TestCase):
    def test_rings_fill_a_dgx1(self):
        packing = ring_paths(DGX1)
        assert packing is not None
        carried = simulator.bytes_by_resource(packing.schedule(24 * 7 * MB), DGX1)
        busy = {
            resource.name: carried[resource.name] / resource.bandwidth
            for resource in DGX1.resources
        }
        wires = [seconds for name, seconds in busy.items() if "host" not in name]
        self.assertLen(wires, 32)
        self.assertAlmostEqual(min(wires) / max(wires), 1)
        self.assertEqual({tree.depth for tree in packing.trees}, {4})

    @parameterized.parameters((100 * MB, 1.21), (1000 * MB, 1.10))
    def test_rings_need_no_search(self, num_bytes, ratio):
        packing = ring_paths(DGX1, copies=2)
        assert packing is not None
        robust = simulator.robust_seconds(packing.schedule(num_bytes), DGX1)
        self.assertLessEqual(robust / lower_bound(DGX1, num_bytes, direct=True), ratio)

    def test_no_ring(self):
        self.assertIsNone(ring_paths(DGX1.subset([0, 1])))
        self.assertIsNone(ring_paths(DGX1.subset([0, 1, 2, 4])))

    @parameterized.product(name=PRESETS, devices=[2, 3, 8])
    def test_candidates_are_different_and_small(self, name, devices):
        machine = preset(name, devices)
        packings = initial_candidates(machine)
        self.assertNotEmpty(packings)
        self.assertLen(set(packings), len(packings))
        for packing in packings:
            self.assertEqual(packing.schedule(MB).num_devices, devices)
            self.assertLessEqual(len(packing.trees), MAX_PACKS)


if __name__ == "__main__":
    absltest.main()
