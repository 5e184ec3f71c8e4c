from __future__ import annotations

from absl.testing import absltest
from absl.testing import parameterized

from tfcdo.plan import algorithms
from tfcdo.plan import simulator
from tfcdo.plan.several_hosts import Cluster
from tfcdo.plan.several_hosts import Network
from tfcdo.plan.several_hosts import evaluate_across_hosts
from tfcdo.plan.several_hosts import evaluate_flat_ring
from tfcdo.plan.several_hosts import lower_bound_across_hosts
from tfcdo.topology.presets import preset

MB = 10**6


def _cluster(name: str, num_devices: int | None, num_hosts: int, *network: float) -> Cluster:
    return Cluster(preset(name, num_devices), num_hosts, Network(*network))


class SeveralHostsTest(parameterized.TestCase):
    @parameterized.parameters("ring", "hierarchical_copy")
    def test_one_host_is_todays_plan(self, algorithm: str):
        cluster = _cluster("dgx1", None, 1, 1e9)
        found = evaluate_across_hosts(algorithm, cluster, 64 * MB, bytes_per_pack=8 * MB)
        schedule = algorithms.make_schedule(algorithm, cluster.topology, 64 * MB, 8)
        expected = simulator.robust_seconds(schedule, cluster.topology, jitter=0.0)
        # The order of packs that are ready at once is drawn.
        self.assertAlmostEqual(found.seconds, expected, delta=0.2 * expected)

    def test_hosts_with_one_device_are_a_ring_of_hosts(self):
        # 4 hosts send 2 x 3/4 of 100 MB at 1 GB/s, and the last pack waits 6 times for the network.
        found = evaluate_across_hosts("auto", _cluster("nvswitch", 1, 4, 1e9, 1e-3), 100 * MB)
        self.assertAlmostEqual(found.seconds, 0.150 + 0.006)

    def test_a_pack_goes_up_then_across_then_down(self):
        # Two devices of 1 x 150 GB/s: one copy up, one down, and one pack in between.
        cluster = _cluster("nvswitch", 2, 2, 1e9, 0.0)
        link = cluster.topology.link_by_pair[0, 1]
        copy = link.latency + 4 * MB / cluster.topology.bandwidth(0, 1)
        found = evaluate_across_hosts("one_device", cluster, 4 * MB)
        self.assertEqual(found.num_packs, 1)
        self.assertAlmostEqual(found.seconds, 2 * copy + 0.004)

    def test_packs_hide_behind_the_backward_pass(self):
        cluster = _cluster("nvswitch", 1, 2, 1e9, 0.0)
        # Ten packs of 10 ms each, made every 20 ms: only the last one is left.
        found = evaluate_across_hosts(
            "auto", cluster, 100 * MB, backward=0.2, bytes_per_pack=10 * MB
        )
        self.assertAlmostEqual(found.exposed, 0.010)
        self.assertAlmostEqual(found.hidden, 0.9)
        # Made every 5 ms, the first comes after 5 ms and then the network is always busy.
        found = evaluate_across_hosts(
            "auto", cluster, 100 * MB, backward=0.05, bytes_per_pack=10 * MB
        )
        self.assertAlmostEqual(found.exposed, 0.005 + 0.100 - 0.050)

    def test_a_flat_ring_sends_more_and_hides_nothing(self):
        cluster = _cluster("nvswitch", 4, 2, 1e9, 0.0)
        # 2 x 7 steps of an eighth.
        ring = evaluate_flat_ring(cluster, 80 * MB)
        self.assertAlmostEqual(ring.seconds, 14 * 0.010)
        self.assertEqual(ring.hidden, 0.0)
        self.assertAlmostEqual(lower_bound_across_hosts(cluster, 80 * MB), 0.080)

    def test_half_of_the_bytes_take_half_of_the_time_between_hosts(self):
        cluster = Cluster(preset("nvswitch", 1), 4, Network(1e9, 0.0, sent=0.5))
        found = evaluate_across_hosts("auto", cluster, 100 * MB)
        self.assertAlmostEqual(found.seconds, 0.075)
        self.assertAlmostEqual(lower_bound_across_hosts(cluster, 100 * MB), 0.075)
        # TensorFlow's ring casts nothing.
        self.assertAlmostEqual(evaluate_flat_ring(cluster, 100 * MB).seconds, 0.150)

    def test_no_algorithm_beats_the_bound(self):
        for num_hosts in (1, 2, 7, 1024):
            cluster = _cluster("dgx1", None, num_hosts, 12.5e9)
            for algorithm in algorithms.ALGORITHMS:
                with self.subTest(f"{algorithm} on {num_hosts} hosts"):
                    found = evaluate_across_hosts(algorithm, cluster, 20 * MB)
                    bound = lower_bound_across_hosts(cluster, 20 * MB)
                    self.assertGreaterEqual(found.seconds, bound)

    @parameterized.parameters(0, 1025, -1)
    def test_a_number_of_hosts_that_is_not_accepted(self, num_hosts: int):
        with self.assertRaisesRegex(
            ValueError, f"num_hosts must be from 1 to 1024; got {num_hosts}"
        ):
            _cluster("dgx1", None, num_hosts, 1e9)


if __name__ == "__main__":
    absltest.main()
