"""Packing: every element of every value is in exactly one pack, and the packs are as asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tfcdo import topology
from tfcdo.plan import algorithms
from tfcdo.plan.plan import Pack, ValueSpec

ITEMSIZES = {"float16": 2, "float32": 4, "int64": 8}
Options = algorithms.PackingOptions


def mixed(*kinds: tuple[str, tuple[int, ...] | None]) -> dict[int, ValueSpec]:
    return {index: ValueSpec(dtype, shape) for index, (dtype, shape) in enumerate(kinds)}


def items(*shapes: tuple[int, ...]) -> dict[int, ValueSpec]:
    return mixed(*[("float32", shape) for shape in shapes])


def pack(
    values: Mapping[int, ValueSpec],
    how: Options,
    algorithm: str | None = "hierarchical_copy",
    num_devices: int = 3,
    machine: str = "shared_memory",
) -> list[Pack]:
    return algorithms.pack(values, how, algorithm, topology.preset(machine, num_devices))


def contents(packs: Sequence[Pack]) -> list[list[Any]]:
    """The slices of each pack, whatever tensors they are fused in, in the order of the values."""
    return [sorted((part.value, part.start, part.stop) for part in one.slices) for one in packs]


_SHAPES = st.none() | st.lists(st.integers(0, 9), max_size=2).map(tuple)
_KINDS = st.lists(st.tuples(st.sampled_from(sorted(ITEMSIZES)), _SHAPES), max_size=8)
_PACKINGS = st.builds(
    Options,
    num_packs=st.none() | st.just(0) | st.integers(1, 9) | st.just(10**6),
    agg_small_grads_max_bytes=st.integers(0, 300),
    agg_small_grads_max_group=st.just(0) | st.integers(1, 4),
    bytes_per_pack=st.just(0) | st.integers(1, 500),
)


class EveryPlanTest(absltest.TestCase):
    @hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
    @hypothesis.given(
        values=_KINDS.map(lambda kinds: mixed(*kinds)),
        how=_PACKINGS,
        algorithm=st.sampled_from(sorted(algorithms.CLASSICS)),
        num_devices=st.sampled_from(range(1, 10)),
        machine=st.sampled_from(["shared_memory", "nvswitch"]),
    )
    def test_every_plan(self, values, how, algorithm, num_devices, machine):
        packs = pack(values, how, algorithm, num_devices, machine)
        self.assertContainsSubset({p.tree and p.tree.num_devices for p in packs}, {num_devices})
        # Every element of every value is in exactly one place; empty values have one too.
        slices = [part for content in contents(packs) for part in content]
        for position, value in values.items():
            own = sorted((start, stop) for index, start, stop in slices if index == position)
            stops = [stop for _, stop in own]
            self.assertEqual([0, *stops[:-1]], [start for start, _ in own])
            self.assertEqual(value.size, stops[-1])
        for one, content in zip(packs, contents(packs)):
            self.check_pack(one, content, values, how)
        if how.bytes_per_pack or how.num_packs is None:
            return
        for dtype in {value.dtype for value in values.values()}:
            known = [value.size for value in values.values() if value.dtype == dtype and value.size]
            full = [one.size for one in packs if one.dtype == dtype and one.size]
            if how.num_packs:
                self.assertLen(full, min(how.num_packs, sum(known)))
                self.assertLessEqual(max(full, default=0) - min(full, default=0), 1)
            elif not how.agg_small_grads_max_bytes or not how.agg_small_grads_max_group:
                self.assertCountEqual(known, full)

    def check_pack(self, one, content, values, how):
        self.assertEqual({values[value].dtype for value, _, _ in content}, {one.dtype})
        if len(content) > 1:
            self.assertTrue(all(stop is not None and stop > start for _, start, stop in content))
        if how.bytes_per_pack:
            self.assertLessEqual(one.num_bytes, max(how.bytes_per_pack, ITEMSIZES[one.dtype]))
        for fused in one.tensors:
            self.assertNotEmpty(fused.slices)
            if len(fused.slices) > 1:
                self.assertNotIn(None, [part.stop for part in fused.slices])
            if fused.stacked:
                for part in fused.slices:
                    self.assertEqual(values[part.value].size, part.size)
                self.assertLen({values[part.value].shape for part in fused.slices}, 1)


class ContentsTest(parameterized.TestCase):
    @parameterized.parameters(
        (
            items((5,), (2,), (5,)),
            Options(3),
            [[(0, 0, 4)], [(0, 4, 5), (1, 0, 2), (2, 0, 1)], [(2, 1, 5)]],
        ),
        # Elements have 4 bytes; "smaller than 16 bytes" leaves out 4 elements.
        (
            items((3,), (4,), (), (1,), (9,), (2,), (3,)),
            Options(0, 16, 2),
            [[(0, 0, 3), (2, 0, 1)], [(3, 0, 1), (5, 0, 2)], [(6, 0, 3)], [(1, 0, 4)], [(4, 0, 9)]],
        ),
        (
            mixed(("float32", (5,)), ("float16", (5,)), ("float16", (5,)), ("float32", (5,))),
            Options(0, 20, 9),
            [[(0, 0, 5)], [(3, 0, 5)], [(1, 0, 5), (2, 0, 5)]],
        ),
    )
    def test_contents(self, values, how, expected):
        self.assertEqual(expected, contents(pack(values, how)))

    @parameterized.parameters(
        # In shared memory large values are not concatenated, and values of one shape are stacked.
        (items((4,), (10**6,), (5,)), "shared_memory", [([0, 2], False), ([1], False)]),
        (items((2, 3), (6,), (2, 3)), "shared_memory", [([0, 2], True), ([1], False)]),
        # Flat values are concatenated as they are.
        (items((6,), (4,), (2, 3), (6,)), "shared_memory", [([0, 1, 2, 3], False)]),
        # Where each tensor costs the latency of a link, all is one tensor.
        (items((4,), (10**6,), (5,)), "nvswitch", [([0, 1, 2], False)]),
        (items((2, 3), (4,), (2, 3), (), ()), "nvswitch", [([0, 1, 2, 3, 4], False)]),
    )
    def test_slices_that_are_sent_as_one_tensor(self, values, machine, expected):
        [one] = pack(values, Options(1), machine=machine)
        found = [([part.value for part in t.slices], t.stacked) for t in one.tensors]
        self.assertEqual(expected, found)


if __name__ == "__main__":
    absltest.main()
