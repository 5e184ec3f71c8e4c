"""The simulator: reference times, the laws that every timeline obeys, and a plainer simulator."""

import collections
import dataclasses
import math
import statistics
from typing import Any

import hypothesis
import plan_testing
from absl.testing import absltest, parameterized

from tfcdo.exchange import Exchange, TopK
from tfcdo.exchange.protocol import SUM
from tfcdo.plan import algorithms, copy_tree, simulator
from tfcdo.plan.plan import Plan, RootStep, in_turn
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

MB = 10**6
DGX1 = preset("dgx1")


def seconds_of(schedule: Plan, topology: Topology, **options: Any) -> float:
    return simulator.simulate(schedule, topology, **options).seconds


def plain_simulation(schedule: Plan, topology: Topology) -> float:
    """First come, first served, as plainly as can be: look at everything whenever anything ends."""
    # For each task: what it waits for, what it holds, how long.
    tasks: list[tuple[list[int], set[Any], float]] = []
    results: list[dict[int, list[int]]] = []

    def add(after, held, seconds):
        tasks.append((after, held, seconds))
        return [len(tasks) - 1]

    for pack, tree in zip(schedule.packs, schedule.trees, strict=True):

        def copy(after, source, target, size=pack.num_bytes):
            link = topology.link_by_pair[source, target]
            seconds = link.latency + size / topology.bandwidth(source, target)
            return add(after, set(link.resources), seconds)

        heard: dict[int, list[int]] = collections.defaultdict(list)
        if pack.after is not None:
            for leaf in set(range(topology.num_devices)) - set(tree.parents):
                heard[leaf] = list(results[pack.after][leaf])
        for child, parent in reversed(tree.edges):
            last = copy(heard[child], child, parent)
            if topology.addition_bandwidth < math.inf:
                adder = {"adder" if topology.serial_reduction else ("adder", parent)}
                last = add(last, adder, pack.num_bytes / topology.addition_bandwidth)
            heard[parent] += last
        has = {tree.root: heard[tree.root]}
        for child, parent in tree.edges:
            has[child] = copy(has[parent], parent, child)
        results.append(has)
    now = 0.0
    came: dict[int, float] = {}
    end: dict[int, float] = {}
    while True:
        for task, (after, _, _) in enumerate(tasks):
            if task not in came and all(a in end and end[a] <= now + 1e-12 for a in after):
                came[task] = now
        busy = set().union(*(tasks[t][1] for t, e in end.items() if e > now + 1e-12))
        for task in sorted(came.keys() - end.keys(), key=lambda t: (came[t], t)):
            if not tasks[task][1] & busy:
                busy |= tasks[task][1]
                end[task] = now + tasks[task][2]
        later = [e for e in end.values() if e > now + 1e-12]
        if not later:
            break
        now = min(later)
    return max(end.values(), default=0.0)


class TimelineTest(plan_testing.PlanTestCase):
    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(plan_testing.any_plans())
    def test_a_plainer_simulator_agrees(self, plan):
        schedule, machine = plan
        timeline = simulator.simulate(schedule, machine)
        self.assertAlmostEqual(timeline.seconds, plain_simulation(schedule, machine), delta=1e-9)
        self.assertEqual(timeline, simulator.simulate(schedule, machine))
        jittered = [simulator.simulate(schedule, machine, jitter=0.05, seed=1) for _ in range(2)]
        self.assertEqual(*jittered)
        # The schedule's, and with links that are up to 5 % slower or faster.
        found, other = (
            {(t.pack, t.source, t.target): t.end - t.start for t in each.copies}
            for each in (timeline, jittered[0])
        )
        self.assertEqual(found.keys(), other.keys())
        for edge, seconds in found.items():
            self.assertAlmostEqual(other[edge], seconds, delta=0.05 * seconds + 1e-9)

    def test_of_equals_the_earlier_pack_goes_first(self):
        machine = preset("fully_connected", 2)
        schedule = in_turn([MB, MB], [copy_tree.star(2)])
        copies = simulator.simulate(schedule, machine).copies
        self.assertEqual([copy.pack for copy in copies if copy.kind == "reduce"], [0, 1])
        firsts = {simulator.simulate(schedule, machine, seed=s).copies[0].pack for s in range(9)}
        self.assertEqual(firsts, {0, 1})

    def test_robust_time_is_a_median_over_seeds(self):
        schedule = algorithms.make_plan("hierarchical_copy", DGX1, 25 * MB)
        times = [seconds_of(schedule, DGX1, jitter=0.05, seed=seed) for seed in range(20)]
        robust = simulator.robust_seconds(schedule, DGX1)
        self.assertAlmostEqual(robust, statistics.median(times), places=12)

    def test_only_what_is_much_slower_than_the_cutoff_is_not_run_on(self):
        schedule = algorithms.make_plan("hierarchical_copy", DGX1, 25 * MB)
        exact = simulator.robust_seconds(schedule, DGX1)
        for part in (0.95, 1.0, 2.0):
            self.assertEqual(simulator.robust_seconds(schedule, DGX1, cutoff=part * exact), exact)
        with plan_testing.counted_work() as work:
            hopeless = simulator.robust_seconds(schedule, DGX1, cutoff=exact / 2)
        self.assertGreater(hopeless, exact / 2)
        self.assertEqual(work["tasks"], work["longest"])

    @parameterized.parameters(
        ({}, 7, "plan must be for the 7 devices of .*; got one for 8"),
        ({"jitter": 0.1}, 8, "seed must be a number for a jitter of 0.1; got None"),
        ({"jitter": math.nan, "seed": 1}, 8, "jitter must be from 0 to 1; got nan"),
        ({"jitter": "0.1", "seed": 1}, 8, "jitter must be a number; got '0.1'"),
        ({"hosts": 2}, 8, "hosts must be a Hosts; got 2"),
        ({"cutoff": "1"}, 8, "cutoff must be a number; got '1'", simulator.robust_seconds),
        ({"num_seeds": 10**6}, 8, "num_seeds .* to 10000; got 1000000", simulator.robust_seconds),
    )
    def test_nonsense(self, options, devices, message, call=simulator.simulate):
        schedule = algorithms.make_plan("ring", DGX1, MB)
        with self.assertRaisesRegex((ValueError, TypeError), message):
            call(schedule, DGX1.subset(range(devices)), **options)


def _between(hosts: int, plan: Plan, exchange: Exchange = SUM) -> Plan:
    packs = (dataclasses.replace(pack, root=RootStep(exchange)) for pack in plan.packs)
    return dataclasses.replace(plan, hosts=hosts, packs=tuple(packs))


class HostsTest(parameterized.TestCase):
    def test_packs_cross_the_network_one_after_another(self):
        machine = preset("fully_connected", 2)
        # Each pack sends 3/4 of its bytes twice, as a ring of 4 hosts does.
        schedule = _between(4, in_turn([MB, MB], [copy_tree.star(2)]))
        hosts = simulator.Hosts(4, 1e9, latency=5e-6)
        timeline = simulator.simulate(schedule, machine, hosts=hosts)
        # 2 x 3/4 of 1 MB at 1 GB/s twice, after the first copy up; then 6 messages, and down.
        self.assertAlmostEqual(timeline.seconds, 50e-6 + 2 * 1.5e-3 + 6 * 5e-6 + 50e-6)
        self.assertLen(timeline.copies, 4)
        few = seconds_of(_between(4, schedule, TopK(0.01)), machine, hosts=hosts)
        self.assertBetween(few / timeline.seconds, 0.1, 0.2)

    def test_one_device_a_host_has_a_network_alone(self):
        schedule = _between(2, in_turn([MB], [copy_tree.star(1)]))
        hosts = simulator.Hosts(2, 1e9, latency=0.0)
        self.assertAlmostEqual(seconds_of(schedule, preset("nvswitch", 1), hosts=hosts), 1e-3)


if __name__ == "__main__":
    absltest.main()
