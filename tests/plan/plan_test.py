"""Plans: no plan with a fault can be built, equal plans have equal fingerprints, and summaries."""

import dataclasses
from typing import Any

from absl.testing import absltest, parameterized

from tfcdo.exchange import Blocks, Cast, Exchange, PowerSGD, TopK, casts
from tfcdo.exchange.protocol import identity
from tfcdo.plan.copy_tree import star
from tfcdo.plan.plan import FusedTensor, Pack, Plan, RootStep, Slice, ValueSpec

VALUES = (ValueSpec("float32", (10,)), ValueSpec("float32", (5,)))


def pack(*slices: tuple[int, int, int], **settings: Any) -> Pack:
    """A pack of one tensor, of slices (value, start, stop)."""
    tensor = FusedTensor(tuple(Slice(*part) for part in slices))
    return Pack("sum", (tensor,), "float32", settings.pop("tree", star(3)), **settings)


def plan(*packs: Pack, values: tuple[ValueSpec, ...] = VALUES, hosts: int = 1) -> Plan:
    return Plan(("CPU:0", "CPU:1", "CPU:2"), 3, hosts, values, packs)


PACKS = (pack((0, 0, 5)), pack((0, 5, 10)), pack((1, 0, 5)))


class CheckedTest(parameterized.TestCase):
    @parameterized.parameters(
        (PACKS[1:], r"value 0, of size 10, once; got it cut at \[0, 10\]"),
        ((PACKS[0], PACKS[2]), r"value 0, of size 10, once; got it cut at \[0, 5\]"),
        (PACKS[:2], "value 1, of size 5, once"),
        ((*PACKS, pack((2, 0, 5))), r"packs\[3\] must be of values that exist; got "),
        ((*PACKS, pack((-1, 0, 5))), r"packs\[3\] must be of values that exist; got "),
        ((*PACKS, PACKS[0]), r"value 0, of size 10, once; got it cut at \[0, 5, 5, 10\]"),
        ((PACKS[0], pack((0, 5, 10), tree=star(2)), PACKS[2]), r"packs\[1\] must have a tree over"),
        ((pack((0, 0, 10), after=0), PACKS[2]), r"packs\[0\].after must be an earlier pack"),
        ((PACKS[0], PACKS[1], pack((1, 0, 5), after=3)), r"packs\[2\].after .*; got 3"),
        (
            (*PACKS[:2], pack((1, 0, 5), tree=star(3, 1), after=0)),
            r"packs\[2\].after must be an earlier pack of the same tree; got 0",
        ),
    )
    def test_refused(self, packs, message):
        self.assertRaisesRegex(ValueError, message, plan, *packs)


class FingerprintTest(parameterized.TestCase):
    def test_is_equal_for_equal_plans_whatever_people_are_told(self):
        made = plan(*PACKS)
        self.assertEqual(made.fingerprint, plan(*PACKS).fingerprint)
        told = dataclasses.replace(made, algorithm="ring", why="it was asked for")
        self.assertEqual(made.fingerprint, told.fingerprint)

    def test_is_different_for_each_other_plan(self):
        plans = [
            plan(*PACKS),
            plan(PACKS[1], PACKS[0], PACKS[2]),
            plan(pack((0, 0, 5), tree=star(3, 1)), *PACKS[1:]),
            plan(pack((0, 0, 5), wire=Cast("bfloat16")), *PACKS[1:]),
            *(plan(pack((0, 0, 5), root=RootStep(divide=n)), *PACKS[1:]) for n in (2, 3)),
            *(plan(pack((0, 0, 5), root=RootStep(TopK(f))), *PACKS[1:]) for f in (0.1, 0.2)),
            plan(*PACKS[:2], pack((1, 0, 5), after=0)),
            plan(pack((0, 0, 10)), pack((1, 0, 5))),
            *(plan(pack((0, 0, 10), (1, 0, 5)), hosts=hosts) for hosts in (1, 2)),
            plan(pack((1, 0, 5), (0, 0, 10))),  # The order of the slices in a tensor.
        ]
        self.assertLen({one.fingerprint for one in plans}, len(plans))


class SummaryTest(parameterized.TestCase):
    def test_the_key_of_residuals_stays(self):
        """A checkpoint of today must be found by later versions."""
        wire = Cast("bfloat16", error_feedback=True)
        one = pack((0, 0, 6), tree=star(2), wire=wire)
        made = Plan(("CPU:0", "CPU:1"), 2, 1, (ValueSpec("float32", (6,)),), (one,))
        key = made.residual_key
        self.assertEqual(key, "2-2918e1c5074c1d04")
        # Nothing is part of it that changes no residual.
        replace = dataclasses.replace
        for other in (
            replace(made, why="told", algorithm="ring"),
            replace(made, packs=(replace(one, root=RootStep(divide=2)),)),
            replace(made, hosts=2),
        ):
            self.assertEqual(key, other.residual_key)
        shared = replace(one, root=RootStep(Blocks(error_feedback=True)))
        on_two = replace(made, hosts=2, packs=(shared,))
        self.assertTrue(on_two.has_state)
        others = (
            on_two,
            replace(on_two, hosts=3),
            replace(made, packs=(replace(one, tree=star(2, 1)),)),
            replace(made, nodes=("GPU:0", "GPU:1")),
        )
        self.assertLen({key, *(other.residual_key for other in others)}, 5)

    def test_the_names_of_exchanges_in_that_key_stay(self):
        exchanges: tuple[Exchange, ...] = (Cast("float16", True), PowerSGD(4), TopK(0.5))
        names = [
            "casts.Cast(dtype='float16', error_feedback=True)",
            "compression.PowerSGD(rank=4, error_feedback=True, start_step=0)",
            "compression.TopK(fraction=0.5, error_feedback=True)",
        ]
        self.assertEqual([*map(identity, exchanges)], [f"tfcdo.exchange.{name}" for name in names])

    @parameterized.parameters(
        ("bfloat16", 1, 2, (1, 32), 64),
        ("float16", 65, 2, (1, 64), 132),
        ("int8", 512, 2, (1, 256), 260),
        ("int8", 513, 2, (2, 130), 268),
    )
    def test_layout_of_shares(self, wire, size, hosts, layout, num_bytes):
        """Blocks of int8 are equal and at most 256 values; each has a scale of 4 bytes."""
        exchange = casts.BY_NAME[wire]
        self.assertEqual(exchange.layout(size, hosts), layout)
        values = (ValueSpec("float32", (size,)),)
        made = plan(pack((0, 0, size), root=RootStep(exchange)), values=values, hosts=hosts)
        self.assertEqual(made.bytes_between_hosts, 2 * (hosts - 1) * num_bytes)


if __name__ == "__main__":
    absltest.main()
