"""Batch plans: what travels as one tensor, and that no plan with a fault can be built."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from absl.testing import absltest
from absl.testing import parameterized

from tfcdo import topology
from tfcdo.plan import batch_plan
from tfcdo.plan import packing
from tfcdo.plan.copy_tree import star


def specs(*shapes: tuple[int, ...]) -> tuple[batch_plan.ValueSpec, ...]:
    return tuple(batch_plan.ValueSpec("float32", 4, shape) for shape in shapes)


def plan_of(
    values: Sequence[batch_plan.ValueSpec],
    how: packing.PackingOptions,
    machine: str = "shared_memory",
) -> batch_plan.BatchPlan:
    place = topology.preset(machine, 3)
    return packing.plan_batch(tuple(values), how, "hierarchical_copy", place)


class DtypesTest(absltest.TestCase):
    def test_dtypes_share_the_packs_of_all_bytes(self):
        values = (*specs((500,)), batch_plan.ValueSpec("int64", 8, (100,)), *specs((300,)))
        how, machine = packing.PackingOptions(None), topology.preset("nvswitch", 4)
        plan = packing.plan_batch(values, how, "ring", machine)
        # Four packs of 1000 bytes, the last of which has the end of the floats, and all integers.
        found = [
            (pack.tree.root, [(part.value, part.start, part.stop) for part in fused.slices])
            for pack in plan.packs
            for fused in pack.fused_tensors
        ]
        self.assertEqual(
            found,
            [
                (0, [(0, 0, 250)]),
                (1, [(0, 250, 500)]),
                (2, [(2, 0, 250)]),
                (3, [(2, 250, 300)]),
                (3, [(1, 0, 100)]),
            ],
        )


class FusedTensorsTest(parameterized.TestCase):
    def test_large_values_are_not_concatenated_in_shared_memory(self):
        values = specs((4,), (10**6,), (5,))
        (pack,) = plan_of(values, packing.PackingOptions(1), machine="shared_memory").packs
        tensors = [[part.value for part in fused.slices] for fused in pack.fused_tensors]
        self.assertCountEqual([[0, 2], [1]], tensors)
        # Where each tensor costs the latency of a link, all is one tensor.
        (pack,) = plan_of(values, packing.PackingOptions(1), machine="nvswitch").packs
        self.assertEqual([[0, 1, 2]], [[p.value for p in b.slices] for b in pack.fused_tensors])

    @parameterized.parameters((1e10, 60_000, 1), (1e10, 70_000, 2), (2e10, 120_000, 1))
    def test_concatenates_what_memory_passes_in_the_time_of_an_op(self, speed, size, tensors):
        # An op takes 6.5 microseconds, in which 10 GB/s pass over 65 kB.
        machine = dataclasses.replace(topology.preset("shared_memory", 3), addition_bandwidth=speed)
        values = specs((size // 4,), (1,))
        (pack,) = packing.plan_batch(
            values, packing.PackingOptions(1), "hierarchical_copy", machine
        ).packs
        self.assertLen(pack.fused_tensors, tensors)

    def test_shapes_do_not_matter_where_each_tensor_costs_a_latency(self):
        values = specs((2, 3), (4,), (2, 3), (), ())
        (pack,) = plan_of(values, packing.PackingOptions(1), machine="nvswitch").packs
        (fused,) = pack.fused_tensors
        self.assertEqual([part.value for part in fused.slices], [0, 1, 2, 3, 4])
        self.assertFalse(fused.stacked)

    def test_values_of_one_shape_are_stacked(self):
        (pack,) = plan_of(specs((2, 3), (6,), (2, 3), (2, 3)), packing.PackingOptions(1)).packs
        stacks = [b for b in pack.fused_tensors if b.stacked]
        self.assertEqual([[0, 2, 3]], [[p.value for p in b.slices] for b in stacks])

    def test_flat_values_are_concatenated_as_they_are(self):
        (pack,) = plan_of(specs((6,), (4,), (2, 3), (6,), (6,)), packing.PackingOptions(1)).packs
        self.assertEqual(
            [([0, 1, 2, 3, 4], False)],
            [([part.value for part in b.slices], b.stacked) for b in pack.fused_tensors],
        )

    def test_cut_values_are_not_stacked(self):
        for pack in plan_of(specs((2, 3), (2, 3)), packing.PackingOptions(3)).packs:
            for fused in pack.fused_tensors:
                if fused.stacked:
                    self.assertTrue(all(part.whole for part in fused.slices))


class CheckedTest(parameterized.TestCase):
    """A plan that would leave something out, or add it twice, cannot be built."""

    SIZES = (10, 5)

    def packs(self) -> list[batch_plan.PackPlan]:
        return list(plan_of(specs((10,), (5,)), packing.PackingOptions(3)).packs)

    def test_plans_cannot_be_changed(self):
        plan: Any = plan_of(specs((4,)), packing.PackingOptions(2))
        with self.assertRaises(dataclasses.FrozenInstanceError):
            plan.packs = ()
        with self.assertRaises(dataclasses.FrozenInstanceError):
            plan.packs[0].tree = None
        with self.assertRaises(dataclasses.FrozenInstanceError):
            plan.packs[0].fused_tensors[0].slices[0].start = 1
        self.assertIsInstance(plan.packs, tuple)
        self.assertIsInstance(plan.packs[0].fused_tensors, tuple)
        self.assertIsInstance(plan.packs[0].fused_tensors[0].slices, tuple)

    def test_accepts_the_plan(self):
        batch_plan.BatchPlan(tuple(self.packs()), self.SIZES)

    @parameterized.parameters(0, 1, 2)
    def test_rejects_a_gap(self, index):
        packs = self.packs()
        del packs[index]
        with self.assertRaisesRegex(ValueError, "value [01], of size"):
            batch_plan.BatchPlan(tuple(packs), self.SIZES)

    def test_rejects_an_overlap(self):
        with self.assertRaisesRegex(ValueError, "value 0, of size 10, once; got it cut at"):
            batch_plan.BatchPlan((*self.packs(), self.packs()[0]), self.SIZES)

    def test_rejects_a_slice_that_is_too_long(self):
        fused = batch_plan.FusedTensor((batch_plan.ValueSlice(1, 0, 6, whole=False),))
        packs = self.packs()
        packs[2] = dataclasses.replace(packs[2], fused_tensors=(fused,))
        with self.assertRaisesRegex(ValueError, "value 1, of size 5"):
            batch_plan.BatchPlan(tuple(packs), self.SIZES)

    def test_rejects_trees_over_different_devices(self):
        packs = self.packs()
        packs[1] = dataclasses.replace(packs[1], tree=star(2))
        with self.assertRaisesRegex(ValueError, r"same devices; got \[2, 3\] devices"):
            batch_plan.BatchPlan(tuple(packs), self.SIZES)


if __name__ == "__main__":
    absltest.main()
