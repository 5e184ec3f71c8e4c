"""Algorithms: each of their plans is an all-reduce of even packs; `auto` takes the fastest."""

from unittest import mock

import hypothesis
import plan_testing
from absl.testing import absltest, parameterized
from drawn_machines import draw_machine
from hypothesis import strategies as st

from tfcdo import log
from tfcdo.plan import algorithms, simulator, tree_program
from tfcdo.plan.copy_tree import binomial, chain, star, two_level
from tfcdo.plan.plan import in_turn, plan_of_bytes
from tfcdo.topology.presets import PRESETS, preset

MB, GB = 10**6, 10**9
CLASSICS = {
    "one_device": star,
    "ring": chain,
    "shuffle": star,
    "halving_doubling": binomial,
    "hierarchical_copy": two_level,
}


class AlgorithmsTest(plan_testing.PlanTestCase):
    tasks_per_search = 100

    @hypothesis.settings(max_examples=40, deadline=None)
    @hypothesis.given(
        algorithm=st.sampled_from(algorithms.ALGORITHMS),
        machine=st.builds(preset, st.sampled_from(PRESETS), st.sampled_from([1, 2, 3, 5])),
        num_bytes=st.sampled_from([0, 1, 5, 100, 1000]),
        num_packs=st.none() | st.sampled_from([1, 2, 7, 500]),
    )
    def test_every_plan_is_an_all_reduce(self, algorithm, machine, num_bytes, num_packs):
        # That the packs tile the data, and trees span the devices, `Plan` checks itself.
        schedule = algorithms.make_plan(algorithm, machine, num_bytes, num_packs)
        self.assertEqual(schedule.replicas, machine.num_devices)
        self.assertEqual(schedule.num_sent_bytes, num_bytes)
        if num_packs is not None:
            self.assertLen(schedule.packs, min(num_packs, num_bytes))
            sizes = {pack.num_bytes for pack in schedule.packs}
            self.assertLessEqual(max(sizes, default=0) - min(sizes, default=0), 1)
        if algorithm in CLASSICS:  # They turn the root with the pack.
            for index, tree in enumerate(schedule.trees):
                root = 0 if algorithm == "one_device" else index % machine.num_devices
                self.assertEqual(tree, CLASSICS[algorithm](machine.num_devices, root))

    @parameterized.parameters(
        (ValueError, "one of one_device, ring, .*auto; got 'rings'", "rings"),
        (ValueError, r"copy trees must span the 4 devices .* a tree over 3", [star(3, 0)]),
        (ValueError, "a name or at least one copy tree; got", []),
        (TypeError, r"a name or a list of copy trees; got \[\(None, 0\)\]", [(None, 0)]),
        (TypeError, "num_bytes must be an int; got 100000000.0 of type float$", "ring", 1e8),
        (TypeError, "num_packs must be an int; got True of type bool$", "ring", 10**8, True),
        (ValueError, "num_bytes must be from 0 to 9.*07; got -100", "ring", -100),
        (ValueError, "num_packs must be from 1 to 4096; got 1000000", "ring", 10**8, 10**6),
    )
    def test_wrong_arguments(self, error, message, algorithm, num_bytes=10**8, num_packs=None):
        topology = preset("nvswitch", 4)
        algorithms.make_plan("ring", topology, 10**8, 1)  # To a cache the same as 1e8 and True.
        with self.assertRaisesRegex(error, message):
            algorithms.make_plan(algorithm, topology, num_bytes, num_packs)

    def test_a_name_is_not_a_topology(self):
        plan = algorithms.make_plan("ring", preset("pcie", 2), 100)
        told = "topology must be .*preset.*; got 'pcie'"
        self.assertRaisesRegex(TypeError, told, algorithms.make_plan, "ring", "pcie", 100)
        self.assertRaisesRegex(TypeError, told, tree_program.lower_bound_seconds, "pcie", 100)
        self.assertRaisesRegex(TypeError, told, simulator.robust_seconds, plan, "pcie")
        told = "plan must be .*make_plan.*; got 'ring'"
        self.assertRaisesRegex(TypeError, told, simulator.simulate, "ring", preset("pcie", 2))


class ResizedTest(absltest.TestCase):
    def test_rounds_to_the_nearest_unit(self):
        trees = [star(3, root) for root in range(3)]
        # Thirds of eight: 2.67 and 5.33; of four: 1.33 and 2.67; of one: 0.33 and 0.67.
        for size, sizes in ((8, [3, 2, 3]), (4, [1, 2, 1]), (1, [0, 1, 0])):
            resized = algorithms.resized(in_turn([1, 1, 1], trees), size)
            wanted = [pair for pair in zip(sizes, trees) if pair[0]]
            self.assertEqual([(pack.size, pack.tree) for pack in resized.packs], wanted)

    def test_waits_for_the_pack_that_an_empty_one_waited_for(self):
        sizes = (100, 1, 199, 100, 100)
        packs = [(size, star(2), i - 1 if i else None) for i, size in enumerate(sizes)]
        small = algorithms.resized(plan_of_bytes(2, packs), 50)
        self.assertEqual([pack.after for pack in small.packs], [None, 0, 1, 2])


class AutoTest(plan_testing.PlanTestCase):
    tasks_per_search = 200

    @hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
    @hypothesis.given(
        # Not st.integers, which draws numbers that it finds in the modules of this process, and so
        # other machines, some slow, after other tests.
        st.builds(preset, st.sampled_from(PRESETS), st.sampled_from(range(1, 7)))
        | st.builds(draw_machine, st.sampled_from(range(2, 7)), st.sampled_from(range(100))),
        st.sampled_from([0, 4, 1000, MB, 30 * MB, GB]),
        st.sampled_from([None, *range(1, 13)]),
    )
    def test_never_loses(self, machine, num_bytes, num_packs):
        times = {
            algorithm: simulator.robust_seconds(
                algorithms.make_plan(algorithm, machine, num_bytes, num_packs), machine
            )
            for algorithm in algorithms.ALGORITHMS
        }
        self.assertLessEqual(times["auto"], 1.01 * min(times.values()))

    def test_says_once_what_was_decided(self):
        log.info_once.cache_clear()
        # Without jitter, shuffle is as fast as a ring; with it, stars get in each other's way.
        machine = preset("nvswitch", 4)
        with (
            mock.patch.object(log.logging, "info") as info,
            mock.patch.object(algorithms.time, "monotonic", side_effect=[0.0, 2.5, 10.0, 10.9]),
        ):
            for num_bytes in (99 * MB, 100 * MB, GB):
                algorithms.make_plan("auto", machine, num_bytes)
        lines = [call.args[0] % call.args[1:] for call in info.mock_calls]
        for line, told in zip(
            lines, ("92 MB .*took 2.5 s$", r"1e\+03 MB .*nvswitch$"), strict=True
        ):
            self.assertRegex(line, f"auto takes ring, 4 packs, for about {told}")


class WorkTest(plan_testing.PlanTestCase):
    def test_virtual_devices_are_decided_at_once(self):
        # Wherever virtual CPUs add, they add with the same cores: one pack, one star.
        with plan_testing.counted_work() as work:
            schedule = algorithms.make_plan("auto", preset("shared_memory", 80), 100 * MB)
        self.assertLen(schedule.packs, 1)
        self.assertEqual(work["searches"], 0)
        self.assertEqual(work["longest"], 3 * 79)  # Up, added and down.
        self.assertLessEqual(work["tasks"], 20 * work["longest"])

    @parameterized.parameters((None, "ring"), (3, "halving_doubling"))
    def test_more_devices_are_not_simulated(self, num_packs, expected):
        with plan_testing.counted_work() as work:
            chosen = algorithms.fastest_algorithm(preset("nvswitch", 65), 100 * MB, num_packs)
        self.assertEqual(chosen, expected)
        self.assertEqual(work["longest"], 2 * 64)  # One device alone.
        self.assertEqual(work["searches"], 0)


if __name__ == "__main__":
    absltest.main()
