"""`auto`: as fast as any algorithm, decided once for similar sizes, and in bounded work."""

from __future__ import annotations

import random
from unittest import mock

import hypothesis
import plan_testing
from absl.testing import absltest, parameterized
from drawn_machines import draw_machine
from hypothesis import strategies as st

from tfcdo import log
from tfcdo.plan import algorithms, packed_trees, packing, simulator
from tfcdo.plan.plan import ValueSpec, size_class
from tfcdo.plan.tree_program import lower_bound_seconds
from tfcdo.topology.presets import PRESETS, preset

MB, GB = 10**6, 10**9


class AutoTest(plan_testing.PlanTestCase):
    tasks_per_search = 200

    @hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
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
        bound = lower_bound_seconds(machine, num_bytes)
        self.assertGreaterEqual(times["auto"] * (1 + 1e-9), bound)

    def test_takes_the_simplest_of_equals(self):
        # Wherever virtual CPUs add, they add with the same cores: one pack, one star.
        machine = preset("shared_memory", 8)
        self.assertEqual(algorithms.fastest_algorithm(machine, 100 * MB), "one_device")

    def test_judges_by_the_time_that_nothing_need_be_in_order_for(self):
        # Without jitter, shuffle is as fast as a ring; with it, stars get in each other's way.
        machine = preset("nvswitch")
        self.assertEqual(algorithms.fastest_algorithm(machine, 100 * MB), "ring")

    def test_says_once_what_was_decided(self):
        log.info_once.cache_clear()
        machine = preset("nvswitch")
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
            self.assertRegex(line, f"auto takes ring, 8 packs, for about {told}")

    def test_sizes_that_change_share_plans(self):
        # As eager calls do whose values have another size each time.
        machine = preset("dgx1")
        sizes = [random.Random(0).randrange(10 * MB, 11 * MB) for _ in range(50)]
        algorithms.make_plan("auto", machine, 10 * MB)
        algorithms.make_plan("auto", machine, 11 * MB)
        with plan_testing.counted_work() as work:
            for size in sizes:
                self.assertEqual(algorithms.make_plan("auto", machine, size).num_sent_bytes, size)
                options = packing.PackingOptions(None)
                values = {0: ValueSpec("float32", (size // 4,))}
                packs = packing.pack(values, options, "auto", machine)
                content = [part for one in packs for fused in one.tensors for part in fused.slices]
                self.assertEqual(sum(part.size for part in content), size // 4)
        self.assertEqual(work["tasks"], 0)


class SizeClassTest(parameterized.TestCase):
    @hypothesis.given(st.integers(100, 10**12))
    def test_no_size_is_far_from_that_of_its_class(self, num_bytes):
        self.assertAlmostEqual(size_class(num_bytes) / num_bytes, 1, delta=0.125)

    @hypothesis.given(st.integers(0, 10**6), st.integers(0, 10**6))
    def test_classes_are_in_order(self, one, other):
        smaller, larger = sorted((one, other))
        self.assertLessEqual(size_class(smaller), size_class(larger))
        self.assertEqual(size_class(larger) == 0, larger == 0)

    def test_sizes_too_large_for_a_float(self):
        self.assertLess(abs(size_class(10**400) - 10**400), 10**399)


class WorkTest(plan_testing.PlanTestCase):
    """Tests of how much is simulated and searched, which decides how long a first call takes."""

    tasks_per_search = packed_trees._TASKS

    @parameterized.parameters(8, 80)
    def test_virtual_devices_are_decided_at_once(self, devices):
        with plan_testing.counted_work() as work:
            schedule = algorithms.make_plan("auto", preset("shared_memory", devices), 100 * MB)
        self.assertLen(schedule.packs, 1)
        self.assertEqual(work["searches"], 0)
        self.assertEqual(work["longest"], 3 * (devices - 1))  # Up, added and down.
        self.assertLessEqual(work["tasks"], 20 * work["longest"])

    @parameterized.parameters((None, "ring"), (3, "halving_doubling"))
    def test_more_devices_are_not_simulated(self, num_packs, expected):
        machine = preset("nvswitch", 70)
        with plan_testing.counted_work() as work:
            chosen = algorithms.fastest_algorithm(machine, 100 * MB, num_packs)
        self.assertEqual(chosen, expected)
        self.assertEqual(work["longest"], 2 * 69)  # One device alone.
        self.assertEqual(work["searches"], 0)

    @parameterized.parameters(("pcie", 7), ("nvswitch", 16))
    def test_a_search_is_bounded(self, name, devices):
        with plan_testing.counted_work() as work:
            algorithms.make_plan("packed_trees", preset(name, devices), 100 * MB)
        self.assertEqual(work["searches"], 1)
        self.assertLessEqual(work["tasks"], 2 * packed_trees._TASKS)
        self.assertLessEqual(work["longest"], 2 * packed_trees.MAX_PACKS * 2 * (devices - 1))


if __name__ == "__main__":
    absltest.main()
