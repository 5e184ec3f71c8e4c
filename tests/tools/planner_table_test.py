"""The planner's table: machines as they are said to be, and rows that say what was judged."""

from __future__ import annotations

import networkx as nx
import plan_testing
from absl.testing import absltest
from drawn_machines import FASTEST, SLOWEST, draw_machine

MB = 10**6


class PlannerTableTest(plan_testing.PlanTestCase):
    def test_drawn_machines_are_what_they_are_said_to_be(self):
        kinds = set()
        for seed in range(30):
            machine = draw_machine(7, seed)
            self.assertEqual(machine, draw_machine(7, seed))
            direct = [(x.source, x.target) for x in machine.links if not x.via_host]
            self.assertTrue(nx.is_connected(nx.Graph(direct)))
            for resource in machine.resources:
                self.assertBetween(resource.bandwidth, SLOWEST, FASTEST)
            kinds |= {
                ("asymmetric", any(machine.bandwidth(a, b) != machine.bandwidth(b, a)
                                   for a, b in direct)),
                ("ports", any(resource.name.endswith(" in") for resource in machine.resources)),
                ("bridges", any(link.via_host for link in machine.links)),
            }  # fmt: skip
        self.assertLen(kinds, 6)  # Some have each of these, and some have not.


if __name__ == "__main__":
    absltest.main()
