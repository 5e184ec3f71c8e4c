"""Owners of variables: how evenly they are dealt, and their packs in a plan."""

from __future__ import annotations

import dataclasses

from absl.testing import absltest, parameterized

from tfcdo.exchange import Cast
from tfcdo.plan import copy_tree
from tfcdo.plan.decide import BetweenHosts, Machine, Options, decide
from tfcdo.plan.packing import deal_owners, owned_sizes
from tfcdo.plan.plan import Batch, Request, ValueSpec
from tfcdo.topology.presets import preset

SIZES = [300, 700, 20, 20, 500, 1, 0, 90]


def _batch(count: int, owned: bool = True, hosts: int = 1, rows: bool = False) -> Batch:
    owner = deal_owners(SIZES, count)
    requests = tuple(
        Request(
            ValueSpec("float32", (None, size) if rows else (size,), rows),
            tuple(range(count)),
            owner=owner[index] if owned else None,
        )
        for index, size in enumerate(SIZES)
    )
    return Batch("sum", count, hosts, tuple(f"CPU:{i}" for i in range(count)), requests)


class DealTest(parameterized.TestCase):
    @parameterized.product(
        # The smallest first would give one of two devices 9 of the 12 of the second list.
        sizes=(SIZES, [1, 1, 1, 1, 1, 1, 6]),
        count=(1, 2, 3, 5, 8),
    )
    def test_no_share_is_larger_than_the_best_largest_by_a_third(self, sizes, count):
        shares = owned_sizes(sizes, deal_owners(sizes, count), count)
        self.assertEqual(sum(shares), sum(sizes))
        least = max(max(sizes), sum(sizes) / count)
        self.assertLessEqual(max(shares), 4 / 3 * least)


class PlanTest(parameterized.TestCase):
    @parameterized.parameters(
        ("dgx1", "auto", False), ("dgx1", "packed_trees", True),
        ("dgx1", "hierarchical_copy", False), ("shared_memory", "auto", True),
        ("shared_memory", "one_device", False),
        ("nvswitch", "ring", True), ("nvswitch", "packed_trees", False),
    )  # fmt: skip
    def test_packs_are_rooted_at_owners(self, machine, algorithm, rows):
        batch = _batch(4, rows=rows)
        plan = decide(batch, Options(algorithm), Machine(preset(machine, 4)))
        for pack in plan.packs:
            self.assertTrue(pack.root.update)
            assert pack.tree is not None
            for part in pack.slices:
                self.assertEqual(pack.tree.root, batch.requests[part.value].owner)

    def test_other_trees_are_rooted_again(self):
        tree = copy_tree.path((0, 1, 2, 3), 0)
        plan = decide(_batch(4), Options((tree,)), Machine(preset("nvswitch", 4)))
        trees = [pack.tree for pack in plan.packs if pack.tree is not None]
        edges = {frozenset(edge) for tree in trees for edge in tree.edges}
        self.assertEqual(edges, {frozenset(pair) for pair in ((0, 1), (1, 2), (2, 3))})

    def test_as_many_bytes_as_an_all_reduce(self):
        machine = Machine(preset("nvswitch", 4))
        totals = [
            sum(decide(_batch(4, owned), Options("ring"), machine).bytes_by_edge().values())
            for owned in (True, False)
        ]
        self.assertEqual(*totals)

    def test_weights_are_sent_in_their_own_dtype(self):
        options = Options("one_device", wire=Cast("bfloat16"))
        plan = decide(_batch(2), options, Machine(preset("nvswitch", 2)))
        total = sum(plan.bytes_by_edge().values())
        cast = sum(size for size in SIZES if size != 1)
        self.assertGreaterEqual(total, cast * (2 + 4))
        self.assertLess(total, cast * (2 + 4) + 50)

    def test_bytes_between_hosts_do_not_grow(self):
        machine = Machine(preset("shared_memory", 4))
        options = Options("auto", between=BetweenHosts(2**20))
        plans = [decide(_batch(4, owned, hosts=2), options, machine) for owned in (True, False)]
        self.assertEqual(*(plan.bytes_between_hosts for plan in plans))

    def test_nccl_does_not_sum_on_owners(self):
        machine = Machine(preset("nvswitch", 2))
        plan = decide(_batch(2), Options("hierarchical_copy", nccl="always"), machine)
        self.assertNotIn(None, [pack.tree for pack in plan.packs])
        options = Options("hierarchical_copy", nccl="always", require_nccl=True)
        with self.assertRaisesRegex(RuntimeError, "shard_optimizer_state each sum is formed on o"):
            decide(_batch(2), options, machine)

    def test_hosts_see_who_owns_what(self):
        machine = Machine(preset("nvswitch", 2))
        batch = _batch(2)
        first, *rest = batch.requests
        other = dataclasses.replace(first, owner=1 - (first.owner or 0))
        unlike = dataclasses.replace(batch, requests=(other, *rest))
        prints = {decide(each, Options(), machine).fingerprint for each in (batch, unlike)}
        self.assertLen(prints, 2)
        unowned = _batch(2, owned=False)
        prints |= {decide(unowned, Options(), machine).fingerprint}
        self.assertLen(prints, 3)


if __name__ == "__main__":
    absltest.main()
