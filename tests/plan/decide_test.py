"""Decisions: the packs, order, slices, trees, codecs and root steps of batches of every kind."""

import dataclasses
from typing import Any

import plan_testing
from absl.testing import absltest, parameterized

from tfcdo.exchange import Blocks, Cast, Exchange, PowerSGD, Sum
from tfcdo.plan import copy_tree
from tfcdo.plan.algorithms import PackingOptions, deal_owners
from tfcdo.plan.copy_tree import star
from tfcdo.plan.decide import (
    MIN_EXCHANGED_BYTES,
    BetweenHosts,
    Machine,
    Options,
    decide,
    nccl_dtypes,
)
from tfcdo.plan.plan import Batch, Plan, Request, RootStep, ValueSpec, plan_of_bytes
from tfcdo.topology.presets import preset

K = 3
SUM = RootStep(Sum())
SIZES = [300, 700, 20, 20, 500, 1, 0, 90]
# float32 values of this size are just encoded between hosts.
LARGE = MIN_EXCHANGED_BYTES // 4


def f32(*shape: int) -> ValueSpec:
    return ValueSpec("float32", shape)


def batch(
    *values: ValueSpec,
    op: Any = "sum",
    to: tuple[int, ...] | None = None,
    nodes: int | None = None,
    replicas: int = K,
    hosts: int = 1,
    exact: bool = False,
    exchange: Exchange | None = None,
    **settings: Any,
) -> Batch:
    """A batch of values on CPUs; `nodes` counts destinations that are not replicas too."""
    to = tuple(range(replicas)) if to is None else to
    names = tuple(f"CPU:{node}" for node in range(nodes or replicas))
    requests = tuple(Request(value, to, exact, exchange) for value in values)
    return Batch(op, replicas, hosts, names, requests, **settings)


def plan(asked: Batch, topology: str = "nvswitch", reasons: Any = (), **choices: Any) -> Plan:
    """Decides for a class with some choices; packs of "hierarchical_copy" unless it says others."""
    machine = Machine(preset(topology, asked.replicas), "was detected", reasons, "not asked for")
    return decide(asked, Options(**{"algorithm": "hierarchical_copy", **choices}), machine)


def contents(made: Plan) -> list[list[tuple[int, int, int | None]]]:
    return [[(part.value, part.start, part.stop) for part in pack.slices] for pack in made.packs]


class OneHostTest(parameterized.TestCase):
    def test_exact_values_share_packs_where_nothing_is_encoded(self):
        requests = (Request(f32(4), (0, 1, 2)), Request(f32(), (0, 1, 2), exact=True))
        asked = dataclasses.replace(batch(f32(4)), requests=requests)
        self.assertEqual(contents(plan(asked)), [[(0, 0, 4), (1, 0, 1)]])
        made = plan(asked, wire=Cast("bfloat16"))
        self.assertEqual(contents(made), [[(0, 0, 4)], [(1, 0, 1)]])
        self.assertEqual([pack.wire for pack in made.packs], [Cast("bfloat16"), None])

    @parameterized.parameters(
        ("float32", "bfloat16", True, False), ("float32", "float16", True, True),
        ("float64", "bfloat16", True, True), ("int32", "float16", False, False),
        ("float16", "float16", False, False),
    )  # fmt: skip
    def test_casts(self, dtype, wire, is_cast, scaled):
        asked = batch(ValueSpec(dtype, (8,)))
        for cast in (Cast(wire), Cast(wire, error_feedback=True)):
            [pack] = plan(asked, wire=cast).packs
            self.assertEqual(pack.wire, cast if is_cast else None)
            self.assertEqual(pack.scaled, scaled)
        self.assertIsNone(plan(asked).packs[0].wire)
        # One replica sends nothing; of a result elsewhere, no device keeps errors.
        for where, expected in (
            ({"replicas": 1}, None),
            ({"replicas": 1, "to": (1,), "nodes": 2}, Cast(wire)),
            ({"to": (1,)}, Cast(wire)),
        ):
            self.assertEqual(plan(batch(f32(8), **where), wire=cast).packs[0].wire, expected)

    def test_scaled_values_are_planned_on_their_own(self):
        asked = batch(f32(300), ValueSpec("float64", (300,)))
        for wire, count in (("bfloat16", 2 * K), ("float16", K + 1)):
            made = plan(asked, algorithm="ring", packing=PackingOptions(None), wire=Cast(wire))
            self.assertLen(made.packs, count)

    def test_limits_are_of_the_bytes_that_are_sent(self):
        options = PackingOptions(1, bytes_per_pack=8)
        self.assertLen(plan(batch(f32(8)), packing=options).packs, 4)
        self.assertLen(plan(batch(f32(8)), packing=options, wire=Cast("float16")).packs, 2)

        # What is sent in 16 bits is added in 32, so as many values are concatenated.
        limit = int(6.5e-6 * preset("shared_memory", K).addition_bandwidth) // 4
        for wire in (None, Cast("float16")):
            for size, count in ((limit, 1), (limit + 1, 2)):
                [pack] = plan(batch(f32(size), f32(3)), "shared_memory", wire=wire).packs
                self.assertLen(pack.tensors, count)

    def test_windows_are_within_their_own_group(self):
        """Values that are encoded unlike are planned apart, and follow each other in the plan."""
        halves = plan_of_bytes(K, [(1, star(K), None), (1, star(K), 0)])
        settings: Any = {"algorithm": halves, "packing": PackingOptions(None)}
        made = plan(batch(f32(8), ValueSpec("int64", (8,))), wire=Cast("float16"), **settings)
        # Values of two dtypes share the first pack of bytes; leaves wait for the last part.
        shared = plan(batch(f32(10), ValueSpec("int64", (15,))), **settings)
        self.assertEqual([pack.after for pack in made.packs], [None, 0, None, 2])
        self.assertEqual([pack.after for pack in shared.packs], [None, None, 1])
        self.assertEqual(contents(shared), [[(0, 0, 10)], [(1, 0, 5)], [(1, 5, 15)]])


class HostsTest(parameterized.TestCase):
    BETWEEN = BetweenHosts(64)
    CAST = Cast("bfloat16")

    def test_packs_in_the_order_of_the_backward_pass(self):
        asked = batch(f32(20), f32(3), f32(5), hosts=2)
        made = plan(asked, between=self.BETWEEN)
        # The last values first, in packs of at most 64 bytes.
        self.assertEqual(contents(made), [[(2, 0, 5), (1, 0, 3), (0, 0, 6)], [(0, 6, 20)]])
        self.assertEqual({pack.root for pack in made.packs}, {SUM})
        made = plan(asked, between=self.BETWEEN, packing=PackingOptions(bytes_per_pack=112))
        self.assertLen(made.packs, 1)

    def test_small_packs_are_not_encoded(self):
        for size, expected in ((LARGE, RootStep(self.CAST)), (LARGE - 1, SUM)):
            [pack] = plan(batch(f32(size), hosts=2, exchange=self.CAST)).packs
            self.assertEqual((pack.root, pack.wire), (expected, None))
        for exchange in (self.CAST, Blocks(error_feedback=True)):
            asked = batch(ValueSpec("float64", (LARGE,)), op="mean", hosts=2, exchange=exchange)
            self.assertEqual(plan(asked).packs[0].root, RootStep(exchange, 2 * K))

    def test_values_stay_whole_where_the_exchange_wants_that(self):
        values = [f32(40, 50), f32(1000, 2), f32(3), f32(70, 100)]
        between = BetweenHosts(4 << 12)
        made = plan(batch(*values, hosts=2, exchange=PowerSGD(2)), between=between)
        # The last values first; 16 KiB hold no more than one of the matrices and the vector.
        self.assertEqual(contents(made), [[(3, 0, 7000)], [(2, 0, 3), (1, 0, 2000), (0, 0, 2000)]])
        self.assertEqual(made.spec(made.packs[1]).shapes, ((3,), (1000, 2), (40, 50)))
        made = plan(batch(*values, hosts=2, exchange=self.CAST), between=between)
        self.assertEqual(made.spec(made.packs[0]).shapes, ((3667,),))

    @parameterized.parameters(
        {"exact": True}, {"to": (1,)}, {"size": None}, {"value": "float16"}, {"value": "int32"}
    )
    def test_other_values_are_not_encoded(
        self, value: str = "float32", size: int | None = 4 * LARGE, **where: Any
    ):
        asked = batch(ValueSpec(value, (size,)), hosts=2, op="mean", exchange=self.CAST, **where)
        made = plan(asked, between=BetweenHosts(4 << 20))
        self.assertEqual({pack.root for pack in made.packs}, {RootStep(Sum(), divide=2 * K)})

    def test_auto_gives_every_device_a_share_of_the_network(self):
        asked = batch(f32(64), hosts=2)
        made = plan(asked, "shared_memory", algorithm="auto", between=self.BETWEEN)
        self.assertEqual({pack.tree.root for pack in made.packs if pack.tree}, {0, 1, 2})


class NcclTest(parameterized.TestCase):
    def test_it_is_required_between_hosts(self):
        settings: Any = {"between": BetweenHosts(64), "nccl": "always", "require_nccl": True}
        with self.assertRaisesRegex(RuntimeError, r"\(require_nccl=True\): not asked for"):
            plan(batch(f32(4), hosts=2), **settings)

    @parameterized.parameters(
        (batch(ValueSpec("int8", (4,)), op="mean"), "always", None, {"float32"}),
        (batch(f32(4)), "always", "float16", {"float16"}),
        (batch(f32(4), replicas=1), "always", None, set()),
        (batch(f32(4), to=(1,)), "always", None, set()),
        (batch(f32(4), op="gather"), "always", None, set()),
        (batch(ValueSpec("float32", (None, 2), rows=True)), "always", None, set()),
    )
    def test_only_dtypes_that_it_would_add_are_asked_for(self, asked, nccl, wire, expected):
        self.assertEqual(nccl_dtypes(asked, Options(nccl=nccl, wire=wire and Cast(wire))), expected)
        reasons = tuple((dtype, None) for dtype in expected)
        packs = plan(asked, "nvswitch", reasons, nccl=nccl, wire=wire and Cast(wire)).packs
        self.assertEqual([pack.tree is None for pack in packs], [bool(expected)] * len(packs))

    def test_auto_does_not_add_in_16_bits(self):
        settings = {"algorithm": "auto", "nccl": "auto", "wire": Cast("float16")}
        made = plan(batch(f32(4)), "nvswitch", (("float16", None),), **settings)
        self.assertNotIn(None, [pack.tree for pack in made.packs])


def owned_plan(
    algorithm: Any, count: int = 2, machine: str = "nvswitch", rows: bool = False, **choices: Any
) -> Plan:
    """Decides for values of two hosts, whose sums are formed on the devices that own variables."""
    specs = [ValueSpec("float32", (None, size) if rows else (size,), rows) for size in SIZES]
    asked = batch(*specs, replicas=count, hosts=2)
    owned = zip(asked.requests, deal_owners(SIZES, count), strict=True)
    requests = tuple(dataclasses.replace(request, owner=owner) for request, owner in owned)
    asked = dataclasses.replace(asked, requests=requests)
    return plan(asked, machine, algorithm=algorithm, **choices)


class OwnersTest(plan_testing.PlanTestCase):
    @parameterized.product(
        # The smallest first would give one of two devices 9 of the 12 of the second list.
        sizes=(SIZES, [1, 1, 1, 1, 1, 1, 6]),
        count=(1, 2, 3, 8),
    )
    def test_no_share_is_larger_than_the_best_largest_by_a_third(self, sizes, count):
        shares = [0] * count
        for size, owner in zip(sizes, deal_owners(sizes, count), strict=True):
            shares[owner] += size
        self.assertEqual(sum(shares), sum(sizes))
        self.assertLessEqual(max(shares), 4 / 3 * max(max(sizes), sum(sizes) / count))

    @parameterized.parameters(
        ("dgx1", "packed_trees", True), ("dgx1", "auto", False), ("nvswitch", "one_device", False)
    )
    def test_packs_are_rooted_at_owners(self, machine, algorithm, rows):
        plan = owned_plan(algorithm, 4, machine, rows)
        owner = deal_owners(SIZES, 4)
        for pack, tree in zip(plan.packs, plan.trees, strict=True):
            self.assertEqual(pack.root, RootStep(None if rows else Sum(), update=True))
            self.assertEqual({owner[part.value] for part in pack.slices}, {tree.root})

    def test_other_trees_are_rooted_again(self):
        plan = owned_plan((copy_tree.path((0, 1, 2, 3), 0),), 4)
        edges = {frozenset(edge) for tree in plan.trees for edge in tree.edges}
        self.assertEqual(edges, {frozenset(pair) for pair in ((0, 1), (1, 2), (2, 3))})

    def test_nccl_does_not_sum_on_owners(self):
        self.assertNotIn(None, [pack.tree for pack in owned_plan("ring", nccl="always").packs])
        with self.assertRaisesRegex(RuntimeError, "shard_optimizer_state each sum is formed on o"):
            owned_plan("ring", nccl="always", require_nccl=True)


if __name__ == "__main__":
    absltest.main()
