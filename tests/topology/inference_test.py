"""What copies share is inferred from their times: of machines that the test knows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from absl.testing import absltest, parameterized
from topology_testing import meet

from tfcdo.topology.links import Resource, Route, ordered_pairs
from tfcdo.topology.measurement import infer_routes
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

_BYTES = 10**7


class _Clock:
    """Times at most two copies: one after the other if they share anything, else at once."""

    def __init__(self, machine: Topology, noise: float = 0.0) -> None:
        self.machine, self.noise, self.calls = machine, noise, 0

    def __call__(self, pairs: Sequence[tuple[int, int]], num_bytes: int) -> float:
        self.calls += 1
        times = [
            self.machine.latency(*pair) + num_bytes / self.machine.bandwidth(*pair)
            for pair in pairs
        ]
        one_by_one = len(pairs) == 2 and meet(self.machine, *pairs)
        seconds = sum(times) if one_by_one else max(times)
        return seconds * (1 + self.noise * (-1) ** self.calls)


def _half_duplex() -> Topology:
    wires = [Resource("a", 5e9), Resource("b", 20e9), Resource("c", 20e9)]
    routes = [Route(*pair, [wires[sum(pair) - 1]], latency=3e-6) for pair in ordered_pairs(3)]
    return Topology.from_routes("half duplex", 3, routes)


class InferenceTest(parameterized.TestCase):
    @parameterized.product(
        machine=(
            preset("nvswitch", 4),
            preset("pcie", 4),
            preset("fully_connected", 3),
            preset("dgx1").subset([0, 1, 2, 4, 5]),
            _half_duplex(),
        ),
        noise=(0.0, 0.1),
    )
    def test_finds_the_links_and_what_they_share(self, machine, noise):
        clock = _Clock(machine, noise)
        pairs = list(ordered_pairs(machine.num_devices))
        alone = [
            Route(*pair, [Resource(str(pair), machine.bandwidth(*pair))], False, latency)
            for pair in pairs
            for latency in [machine.latency(*pair)]
        ]
        routes = infer_routes(alone, clock, _BYTES)
        found = Topology.from_routes("found", machine.num_devices, routes)
        for pair in pairs:
            self.assertEqual(found.bandwidth(*pair), machine.bandwidth(*pair))
            self.assertEqual(found.latency(*pair), machine.latency(*pair))
        for one, other in itertools.combinations(pairs, 2):
            self.assertEqual(meet(found, one, other), meet(machine, one, other), (one, other))

    def test_fast_links_without_a_device_in_common_are_not_tried_together(self):
        clock = _Clock(preset("nvswitch", 4))
        alone = [Route(*pair, [Resource(str(pair), 1e11)]) for pair in ordered_pairs(4)]
        infer_routes(alone, clock, _BYTES)
        # Fewer than the 66 pairs of 12 links: 12 of one source, 12 of one target, 6 back and forth.
        self.assertEqual(clock.calls, 30)


if __name__ == "__main__":
    absltest.main()
