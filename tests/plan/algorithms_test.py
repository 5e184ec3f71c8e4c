"""Algorithms: every plan of theirs reduces everything everywhere; packs of even sizes."""

from __future__ import annotations

import itertools

import hypothesis
import numpy as np
import plan_testing
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tfcdo.plan import algorithms, packed_trees
from tfcdo.plan.copy_tree import binomial, star
from tfcdo.plan.plan import Plan, cut, in_turn, plan_of_bytes
from tfcdo.topology.presets import PRESETS, preset

MACHINES = [
    (name, devices)
    for name in PRESETS
    for devices in (1, 2, 3, 5, 8, 13)
    if devices <= (8 if name.startswith("dgx1") else 16)
]


def all_reduce(schedule: Plan, values: np.ndarray) -> np.ndarray:
    """Does what a plan says, copy by copy, to one row of values for each device.

    Each pack is a set of messages; a device sends one as soon as it has heard from all others of
    its neighbours (up, or down) whose data it needs. Nothing of the planning code is used but the
    parents of the trees.
    """
    held = values.copy()
    for pack, tree in zip(schedule.packs, schedule.trees, strict=True):
        [part] = (slice(own.start, own.stop) for own in pack.slices)
        children: dict[int, set[int]] = {device: set() for device in range(len(values))}
        for device, parent in enumerate(tree.parents):
            if parent is not None:
                children[parent].add(device)
        waiting = set(children)
        while waiting:  # Up: a device that waits for no child any more sends its sum and is done.
            device = min(device for device in waiting if not children[device] & waiting)
            waiting.remove(device)
            parent = tree.parents[device]
            if parent is not None:
                held[parent, part] += held[device, part]
        informed = {tree.parents.index(None)}
        while len(informed) < len(values):  # Down: a device whose parent has the result gets it.
            for device, parent in enumerate(tree.parents):
                if parent in informed and device not in informed:
                    held[device, part] = held[parent, part]
                    informed.add(device)
    return held


class AlgorithmsTest(plan_testing.PlanTestCase):
    tasks_per_search = 100

    @hypothesis.settings(max_examples=100, deadline=None)
    @hypothesis.given(
        algorithm=st.sampled_from(algorithms.ALGORITHMS),
        machine=st.sampled_from(MACHINES),
        num_bytes=st.sampled_from([0, 1, 5, 100, 1000]),
        num_packs=st.none() | st.sampled_from([1, 2, 7, 20]),
    )
    def test_every_plan_is_an_all_reduce(self, algorithm, machine, num_bytes, num_packs):
        topology = preset(*machine)
        schedule = algorithms.make_plan(algorithm, topology, num_bytes, num_packs)
        self.assertEqual((schedule.replicas, schedule.num_sent_bytes), (machine[1], num_bytes))
        values = np.random.default_rng(0).integers(0, 1000, (machine[1], num_bytes))
        np.testing.assert_array_equal(
            all_reduce(schedule, values), np.broadcast_to(values.sum(axis=0), values.shape)
        )
        if num_packs is not None:
            self.assertLen(schedule.packs, min(num_packs, num_bytes))
            sizes = {pack.num_bytes for pack in schedule.packs}
            self.assertLessEqual(max(sizes, default=0) - min(sizes, default=0), 1)

    @parameterized.parameters(
        *zip(2 * algorithms.ALGORITHMS, itertools.cycle(PRESETS)),
        *[("packed_trees", name) for name in PRESETS],
    )
    def test_a_schedule_is_made_once(self, algorithm, name):
        topology = preset(name)
        schedule = algorithms.make_plan(algorithm, topology, 10**6)
        again = algorithms._make_plan.__wrapped__(algorithm, topology, 10**6, None)
        self.assertEqual(schedule.packs, again.packs)

    @parameterized.parameters(
        ("one_device", [0]),
        ("ring", range(8)),
        ("shuffle", range(8)),
        ("halving_doubling", range(8)),
        ("hierarchical_copy", range(8)),
    )
    def test_classics_turn_the_root_with_the_pack(self, algorithm, roots):
        topology = preset("dgx1")
        schedule = algorithms.make_plan(algorithm, topology, 800)
        self.assertEqual([tree.root for tree in schedule.trees], list(roots))
        twice = algorithms.make_plan(algorithm, topology, 800, 2 * len(schedule.packs) + 1)
        self.assertEqual([tree.root for tree in twice.trees], [*roots, *roots, 0])

    def test_unknown_algorithm(self):
        with self.assertRaisesRegex(ValueError, "one of one_device, ring, .*auto; got 'rings'"):
            algorithms.make_plan("rings", preset("dgx1"), 100)

    def test_trees_of_a_user_get_the_packs_in_turn(self):
        trees = [star(4, 2), binomial(4, 1)]
        schedule = algorithms.make_plan(trees, preset("nvswitch", 4), 10, 3)
        self.assertEqual([pack.tree for pack in schedule.packs], [*trees, trees[0]])
        self.assertEqual([pack.size for pack in schedule.packs], [3, 3, 4])

    @parameterized.parameters(
        ([star(3, 0)], ValueError, r"algorithm\[0\] must span the 4 devices .* a tree over 3"),
        ([], ValueError, "a name or at least one copy tree; got"),
        ([(None, 0)], TypeError, r"a name or a list of copy trees; got \[\(None, 0\)\]"),
        (5, TypeError, "a name or a list of copy trees; got 5"),
    )
    def test_invalid_trees(self, trees, error, message):
        with self.assertRaisesRegex(error, message):
            algorithms.make_plan(trees, preset("nvswitch", 4), 10)

    @parameterized.parameters(
        lambda *sizes: algorithms.make_plan("ring", *sizes),
        algorithms.fastest_algorithm,
        packed_trees.packed_trees,
    )
    def test_no_such_sizes(self, plan):
        """Also of numbers that a cache would take for ints."""
        topology = preset("dgx1")
        plan(topology, 10**8, 1)
        plan(topology, 1)
        for num_bytes, num_packs, error, message in (
            (1e8, None, TypeError, "num_bytes must be an int; got 100000000.0 of type float$"),
            (10**8, True, TypeError, "num_packs must be an int; got True of type bool$"),
            (-100, None, ValueError, "num_bytes .*0; got -100"),
            (100, 0, ValueError, "num_packs .*1"),
        ):
            with self.assertRaisesRegex(error, f"^{message}"):
                plan(topology, num_bytes, num_packs)


class CutTest(plan_testing.PlanTestCase):
    @hypothesis.settings(max_examples=200, deadline=None)
    @hypothesis.given(st.integers(0, 10**9), st.integers(1, 50))
    def test_cut_tiles_evenly(self, size, num_packs):
        sizes = cut(size, num_packs)
        self.assertLen(sizes, min(size, num_packs))
        self.assertEqual(sum(sizes), size)
        self.assertLessEqual(max(sizes, default=0) - min(sizes, default=0), 1)
        self.assertGreater(min(sizes, default=1), 0)

    @parameterized.parameters(
        (5, 0, ValueError, "num_packs must be at least 1; got 0"),
        (5, -1, ValueError, "num_packs must be at least 1; got -1"),
        (-5, 2, ValueError, "size must be at least 0; got -5"),
        (5, 2.0, TypeError, "num_packs must be an int; got 2.0"),
        (5.0, 2, TypeError, "size must be an int; got 5.0"),
    )
    def test_no_such_cut(self, size, num_packs, error, message):
        with self.assertRaisesRegex(error, message):
            cut(size, num_packs)

    def test_no_trees_to_assign(self):
        with self.assertRaisesRegex(ValueError, r"trees must .* at least one .*got \[\]"):
            in_turn([3], [])

    def test_resized_rounds_to_the_nearest_unit(self):
        thirds = in_turn([1, 1, 1], [star(2)])
        # Thirds of eight: 2.67 and 5.33; of four: 1.33 and 2.67; of one: 0.33 and 0.67.
        for size, sizes in ((8, [3, 2, 3]), (4, [1, 2, 1]), (1, [1])):
            resized = algorithms.resized(thirds, size)
            self.assertEqual([pack.size for pack in resized.packs], sizes)

    def test_resized_waits_for_the_pack_that_an_empty_one_waited_for(self):
        sizes = (100, 1, 199, 100, 100)
        packs = [(size, star(2), i - 1 if i else None) for i, size in enumerate(sizes)]
        small = algorithms.resized(plan_of_bytes(2, packs), 50)
        self.assertEqual([pack.after for pack in small.packs], [None, 0, 1, 2])

    @hypothesis.settings(max_examples=100, deadline=None)
    @hypothesis.given(st.integers(0, 4 * 10**9))
    def test_resized_keeps_shares_and_trees(self, size):
        schedule = algorithms.make_plan("packed_trees", preset("dgx1"), 10**6)
        resized = algorithms.resized(schedule, size)
        self.assertEqual(resized.num_sent_bytes, size)
        if len(resized.packs) == len(schedule.packs):
            for old, new in zip(schedule.packs, resized.packs, strict=True):
                self.assertEqual(new.tree, old.tree)
                self.assertAlmostEqual(new.size, old.size * size / 10**6, delta=1)


if __name__ == "__main__":
    absltest.main()
