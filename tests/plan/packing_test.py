"""Packing: every element of every value is in exactly one pack, and the packs are as asked for."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any
from unittest import mock

import hypothesis
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from tfcdo import topology
from tfcdo.plan import algorithms
from tfcdo.plan import batch_plan
from tfcdo.plan import packing
from tfcdo.plan.copy_tree import chain
from tfcdo.plan.copy_tree import star

ITEMSIZES = {"float16": 2, "float32": 4, "int64": 8}
MACHINES = ("shared_memory", "nvswitch")  # With and without a limit on what is concatenated.


def specs(
    *shapes: tuple[int, ...] | None, dtype: str = "float32"
) -> tuple[batch_plan.ValueSpec, ...]:
    return tuple(batch_plan.ValueSpec(dtype, ITEMSIZES[dtype], shape) for shape in shapes)


def plan_of(
    values: Sequence[batch_plan.ValueSpec],
    how: packing.PackingOptions,
    algorithm: str = "hierarchical_copy",
    num_devices: int = 3,
    machine: str = "shared_memory",
) -> batch_plan.BatchPlan:
    return packing.plan_batch(tuple(values), how, algorithm, topology.preset(machine, num_devices))


def contents(plan: batch_plan.BatchPlan) -> list[list[Any]]:
    """The slices of each pack, whatever tensors they are fused in, in the order of the values."""
    return [
        sorted(
            (part.value, part.start, part.stop)
            for fused in pack.fused_tensors
            for part in fused.slices
        )
        for pack in plan.packs
    ]


_SHAPES = st.none() | st.lists(st.integers(0, 40), max_size=3).map(tuple)
_VALUES = st.lists(
    st.builds(
        lambda dtype, shape: batch_plan.ValueSpec(dtype, ITEMSIZES[dtype], shape),
        st.sampled_from(sorted(ITEMSIZES)),
        _SHAPES,
    ),
    max_size=12,
)
_PACKINGS = st.builds(
    packing.PackingOptions,
    num_packs=st.none() | st.integers(0, 9) | st.just(10**6),
    agg_small_grads_max_bytes=st.integers(0, 300),
    agg_small_grads_max_group=st.integers(0, 4),
    bytes_per_pack=st.just(0) | st.integers(1, 500),
)


class EveryPlanTest(absltest.TestCase):
    """Tests of what holds whatever is asked for."""

    @hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
    @hypothesis.given(
        values=_VALUES,
        how=_PACKINGS,
        algorithm=st.sampled_from(sorted(algorithms.CLASSICS)),
        num_devices=st.integers(1, 9),
        machine=st.sampled_from(MACHINES),
    )
    def test_every_plan(self, values, how, algorithm, num_devices, machine):
        # Values of tens of thousands of elements, cut into packs of a few bytes, take long.
        hypothesis.assume(sum(value.size or 0 for value in values) < 5000)
        plan = plan_of(values, how, algorithm, num_devices, machine)
        self.check_elements(plan, values)
        self.check_packs(plan, values, how)
        self.check_fused_tensors(plan, values)
        for pack in plan.packs:
            self.assertEqual(num_devices, pack.tree.num_devices)

    def check_elements(self, plan, values):
        """Every element of every value is in exactly one place."""
        seen = collections.Counter(
            (value, element)
            for content in contents(plan)
            for value, start, stop in content
            if stop is not None
            for element in range(start, stop)
        )
        expected = {
            (index, element)
            for index, value in enumerate(values)
            for element in range(value.size or 0)
        }
        self.assertEqual(expected, set(seen))
        self.assertLen(expected, sum(seen.values()))
        self.assertEqual(tuple(value.size for value in values), plan.sizes)
        self.assertLen(values, len(plan.slices_of))
        for index, (value, slices) in enumerate(zip(values, plan.slices_of, strict=True)):
            self.assertTrue(all(part.value == index for part in slices))
            self.assertNotEmpty(slices)  # Empty values and those of unknown size too.
            stops = [part.stop for part in slices]
            self.assertEqual([0, *stops[:-1]], [part.start for part in slices])
            self.assertEqual(value.size, stops[-1])
            self.assertEqual([len(slices) == 1] * len(slices), [part.whole for part in slices])

    def check_packs(self, plan, values, how):
        """No pack mixes dtypes, nor is too large, nor empty unless its value is."""
        for content in contents(plan):
            self.assertNotEmpty(content)
            self.assertLen({values[value].dtype for value, _, _ in content}, 1)
            if len(content) > 1:
                self.assertTrue(
                    all(stop is not None and stop > start for _, start, stop in content)
                )
            itemsize = values[content[0][0]].itemsize
            size = sum(stop - start for _, start, stop in content if stop is not None)
            if how.bytes_per_pack:
                self.assertLessEqual(size * itemsize, max(how.bytes_per_pack, itemsize))

    def check_fused_tensors(self, plan, values):
        for pack in plan.packs:
            for fused in pack.fused_tensors:
                self.assertNotEmpty(fused.slices)
                if len(fused.slices) > 1:
                    self.assertNotIn(None, [part.stop for part in fused.slices])
                if fused.stacked:
                    self.assertTrue(all(part.whole for part in fused.slices))
                    self.assertLen({values[part.value].shape for part in fused.slices}, 1)


class NumPacksTest(parameterized.TestCase):
    """Mode 1: all values of a dtype are laid end to end and cut."""

    @parameterized.product(num_packs=(1, 2, 3, 7, 35, 36, 100), machine=MACHINES)
    def test_cuts_evenly(self, num_packs, machine):
        values = specs((4, 5), (), (0,), (3,), (11,))  # 35 elements.
        plan = plan_of(values, packing.PackingOptions(num_packs), machine=machine)
        sizes = [sum(stop - start for _, start, stop in content) for content in contents(plan)]
        full = [size for size in sizes if size]
        self.assertLen(full, min(num_packs, 35))
        self.assertEqual(35, sum(full))
        self.assertLessEqual(max(full) - min(full), 1)
        self.assertLen(sizes, len(full) + 1)  # The empty value travels alone.

    def test_in_the_order_of_the_values(self):
        plan = plan_of(specs((5,), (2,), (5,)), packing.PackingOptions(3))
        self.assertEqual(
            [[(0, 0, 4)], [(0, 4, 5), (1, 0, 2), (2, 0, 1)], [(2, 1, 5)]], contents(plan)
        )

    def test_each_dtype_has_its_own_packs(self):
        values = specs((8,)) + specs((6,), dtype="int64") + specs((4,))
        plan = plan_of(values, packing.PackingOptions(2))
        self.assertEqual(
            [[(0, 0, 6)], [(0, 6, 8), (2, 0, 4)], [(1, 0, 3)], [(1, 3, 6)]], contents(plan)
        )

    def test_takes_precedence_over_small_groups(self):
        values = specs((2,), (2,), (100,))
        self.assertEqual(
            contents(plan_of(values, packing.PackingOptions(1))),
            contents(
                plan_of(
                    values,
                    packing.PackingOptions(
                        1, agg_small_grads_max_bytes=100, agg_small_grads_max_group=2
                    ),
                )
            ),
        )

    @parameterized.parameters("ring", "shuffle", "halving_doubling", "hierarchical_copy")
    def test_roots_are_spread_over_the_devices(self, algorithm):
        for num_devices in range(2, 9):
            plan = plan_of(specs((1000,)), packing.PackingOptions(21), algorithm, num_devices)
            roots = collections.Counter(pack.tree.root for pack in plan.packs)
            self.assertEqual(set(range(num_devices)), set(roots))
            self.assertLessEqual(max(roots.values()) - min(roots.values()), 1)

    def test_the_algorithm_decides(self):
        plan = plan_of(specs((80,)), packing.PackingOptions(None), "ring", num_devices=4)
        self.assertEqual([[(0, 20 * i, 20 * i + 20)] for i in range(4)], contents(plan))
        self.assertEqual(list(algorithms.CLASSICS["ring"](4)), [pack.tree for pack in plan.packs])

    @parameterized.parameters((3, [0, 1, 0], [3, 3, 3]), (None, [0, 1], [5, 4]))
    def test_given_trees_are_dealt_out(self, num_packs, expected, sizes):
        trees = (star(3, 1), chain(3, 2))
        machine = topology.preset("nvswitch", 3)
        values = specs((9,))
        plan = packing.plan_batch(values, packing.PackingOptions(num_packs), trees, machine)
        self.assertEqual([trees[index] for index in expected], [pack.tree for pack in plan.packs])
        self.assertEqual(sizes, [stop - start for ((_, start, stop),) in contents(plan)])

    @parameterized.product(algorithm=algorithms.ALGORITHMS, machine=("dgx1", "shared_memory"))
    def test_every_algorithm_decides(self, algorithm, machine):
        place = topology.preset(machine, 8)
        options = packing.PackingOptions(None)
        plan = packing.plan_batch(specs((1000, 25), (0,)), options, algorithm, place)
        schedule = algorithms.make_schedule(algorithm, place, 4 * 25_000)
        self.assertEqual(
            [pack.tree for pack in schedule.packs], [pack.tree for pack in plan.packs[:-1]]
        )
        self.assertLen(plan.packs, len(schedule.packs) + 1)  # The empty value travels alone.

    @parameterized.parameters(
        ((), packing.PackingOptions(3), r"algorithm must be .* at least one copy tree; got \(\)"),
        ((star(3), star(2)), packing.PackingOptions(3), r"algorithm\[1\] must span the 3 devices"),
        ("bogus", packing.PackingOptions(None), "algorithm must be one of .* got 'bogus'"),
    )
    def test_what_gives_no_trees(self, algorithm, how, message):
        for values in ((), specs((9,))):
            with self.assertRaisesRegex(ValueError, message):
                packing.plan_batch(values, how, algorithm, topology.preset("nvswitch", 3))

    def test_trees_are_sought_for_packs_without(self):
        for values, counts in (
            (specs((80,)), [None]),
            (specs((80,), (0, 3), None), [None, 2]),  # Whose size is 0 or not known.
        ):
            with mock.patch.object(
                algorithms, "make_schedule", wraps=algorithms.make_schedule
            ) as asked:
                # Unwrapped, because the plan may be remembered.
                plan = packing.plan_batch.__wrapped__(
                    values, packing.PackingOptions(None), "ring", topology.preset("nvswitch", 4)
                )
            given = [(*call.args, None)[3] for call in asked.mock_calls]
            self.assertEqual(counts, given)
            expected = [*range(4), *range(len(values) - 1)]
            self.assertEqual(expected, [pack.tree.root for pack in plan.packs])

    @parameterized.parameters(
        ({"num_packs": 3.0}, TypeError, "num_packs must be an int; got 3.0"),
        ({"num_packs": True}, TypeError, "num_packs must be an int; got True"),
        ({"num_packs": -1}, ValueError, "num_packs must be at least 0; got -1"),
        (
            {"agg_small_grads_max_bytes": 1e6},
            TypeError,
            "agg_small_grads_max_bytes must be an int; got 1000000.0",
        ),
        (
            {"agg_small_grads_max_group": None},
            TypeError,
            "agg_small_grads_max_group must be an int; got None",
        ),
        ({"bytes_per_pack": -8}, ValueError, "bytes_per_pack must be at least 0; got -8"),
    )
    def test_no_such_packing(self, arguments, error, message):
        with self.assertRaisesRegex(error, message):
            packing.PackingOptions(**arguments)


class SmallGroupsTest(parameterized.TestCase):
    """Mode 2: small values are put together."""

    def test_groups(self):
        # Of 4 bytes each element; "smaller than 16 bytes" leaves out 4 elements.
        values = specs((3,), (4,), (), (1,), (50,), (2,), (3,))
        plan = plan_of(
            values,
            packing.PackingOptions(0, agg_small_grads_max_bytes=16, agg_small_grads_max_group=2),
        )
        self.assertEqual(
            [
                [(0, 0, 3), (2, 0, 1)],
                [(3, 0, 1), (5, 0, 2)],
                [(6, 0, 3)],
                [(1, 0, 4)],
                [(4, 0, 50)],
            ],
            contents(plan),
        )

    @parameterized.parameters((1, 5), (2, 3), (4, 2), (5, 1), (10, 1))
    def test_no_group_is_larger(self, small_group, expected_packs):
        plan = plan_of(specs(*[(2,)] * 5), packing.PackingOptions(0, 100, small_group))
        sizes = [len(content) for content in contents(plan)]
        self.assertLen(sizes, expected_packs)
        self.assertLessEqual(max(sizes), small_group)
        self.assertEqual(5, sum(sizes))

    def test_dtypes_are_not_grouped_together(self):
        values = specs((1,), (1,)) + specs((1,), (1,), dtype="float16")
        plan = plan_of(values, packing.PackingOptions(0, 100, 10))
        self.assertEqual([[(0, 0, 1), (1, 0, 1)], [(2, 0, 1), (3, 0, 1)]], contents(plan))

    def test_the_limit_is_in_bytes(self):
        values = specs((5,)) + specs((5,), dtype="float16") + specs((5,), dtype="float16")
        plan = plan_of(
            values + specs((5,)),
            packing.PackingOptions(0, agg_small_grads_max_bytes=20, agg_small_grads_max_group=9),
        )
        self.assertEqual([[(0, 0, 5)], [(3, 0, 5)], [(1, 0, 5), (2, 0, 5)]], contents(plan))


class NoPackingTest(parameterized.TestCase):
    """Mode 3: each value travels alone."""

    @parameterized.parameters((0, 0), (100, 0), (0, 10))
    def test_one_pack_each(self, small_bytes, small_group):
        values = specs((3,), (), (200, 3))
        plan = plan_of(values, packing.PackingOptions(0, small_bytes, small_group))
        self.assertEqual([[(0, 0, 3)], [(1, 0, 1)], [(2, 0, 600)]], contents(plan))
        for pack in plan.packs:
            self.assertTrue(pack.fused_tensors[0].slices[0].whole)

    def test_no_values_no_packs(self):
        for num_packs in (1, 0, None):
            self.assertEqual((), plan_of((), packing.PackingOptions(num_packs)).packs)


class BytesPerPackTest(parameterized.TestCase):
    @parameterized.parameters(
        (packing.PackingOptions(1, bytes_per_pack=16), [4, 4, 4]),
        (packing.PackingOptions(1, bytes_per_pack=20), [4, 4, 4]),
        (packing.PackingOptions(1, bytes_per_pack=47), [6, 6]),
        (packing.PackingOptions(1, bytes_per_pack=48), [12]),
        (packing.PackingOptions(5, bytes_per_pack=48), [2, 2, 3, 2, 3]),
        (packing.PackingOptions(0, bytes_per_pack=48), [12]),
        (packing.PackingOptions(0, bytes_per_pack=40), [6, 6]),
        (packing.PackingOptions(1, bytes_per_pack=1), [1] * 12),
        (packing.PackingOptions(0, bytes_per_pack=7), [1] * 12),
    )
    def test_caps(self, how, expected):
        plan = plan_of(specs((3, 4)), how)
        sizes = [sum(stop - start for _, start, stop in content) for content in contents(plan)]
        self.assertEqual(expected, sizes)

    def test_small_groups_are_capped_too(self):
        plan = plan_of(specs(*[(3,)] * 4), packing.PackingOptions(0, 100, 10, bytes_per_pack=24))
        self.assertEqual([[(0, 0, 3), (1, 0, 3)], [(2, 0, 3), (3, 0, 3)]], contents(plan))


class UnknownSizesTest(parameterized.TestCase):
    @parameterized.parameters(
        packing.PackingOptions(1),
        packing.PackingOptions(4),
        packing.PackingOptions(0),
        packing.PackingOptions(0, 99, 9),
        packing.PackingOptions(1, bytes_per_pack=1),
        packing.PackingOptions(None),
    )
    def test_travel_alone_and_whole(self, how):
        values = specs(None, (1,), (0, 4), None)
        plan = plan_of(values, how)
        for index, size in [(0, None), (2, 0), (3, None)]:
            (part,) = plan.slices_of[index]
            self.assertEqual(batch_plan.ValueSlice(index, 0, size, whole=True), part)
            self.assertIn([(index, 0, size)], contents(plan))
        with self.assertRaisesRegex(ValueError, "value 0.*not known"):
            _ = plan.slices_of[0][0].size


class CacheTest(absltest.TestCase):
    def test_the_same_question_has_the_same_answer(self):
        values = specs((4, 2), (3,))
        first = plan_of(values, packing.PackingOptions(2))
        self.assertIs(first, plan_of(list(values), packing.PackingOptions(2)))
        self.assertIsNot(first, plan_of(values, packing.PackingOptions(3)))
        self.assertIsNot(first, plan_of(values, packing.PackingOptions(2), "ring"))
        self.assertIsNot(first, plan_of(values, packing.PackingOptions(2), num_devices=4))
        self.assertIsNot(first, plan_of(specs((2, 4), (3,)), packing.PackingOptions(2)))

    def test_planning_anew_gives_an_equal_plan(self):
        values = specs((4, 2), None, (0,), (30,))
        first = plan_of(values, packing.PackingOptions(2))
        again = packing.plan_batch.__wrapped__(
            values,
            packing.PackingOptions(2),
            "hierarchical_copy",
            topology.preset("shared_memory", 3),
        )
        self.assertEqual(first.packs, again.packs)


class LargeBatchTest(absltest.TestCase):
    def test_thousands_of_values(self):
        values = specs(*[(index % 7, 3) for index in range(3000)])
        plan = plan_of(values, packing.PackingOptions(16), num_devices=8)
        total = sum(value.size or 0 for value in values)
        sizes = [sum(stop - start for _, start, stop in content) for content in contents(plan)]
        self.assertEqual(total, sum(sizes))


if __name__ == "__main__":
    absltest.main()
