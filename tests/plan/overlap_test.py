"""What hides behind a backward pass, by hand and by brute force."""

from __future__ import annotations

import dataclasses
import math

from absl.testing import absltest
from absl.testing import parameterized

from tfcdo.bench import workloads
from tfcdo.plan import algorithms
from tfcdo.plan import simulator
from tfcdo.plan.overlap import Gradient
from tfcdo.plan.overlap import plan_overlap
from tfcdo.plan.overlap import ready_times
from tfcdo.topology.presets import preset


def _gradients(model: str) -> list[Gradient]:
    return [
        Gradient(4 * math.prod(shape), len(shape)) for shape in workloads.gradients_of(model).shapes
    ]


class OverlapTest(parameterized.TestCase):
    def test_the_last_layers_are_ready_first(self):
        times = ready_times(_gradients("resnet50"), 60e-3)
        self.assertEqual(times, sorted(times, reverse=True))
        self.assertAlmostEqual(times[0], 60e-3)
        # The last layer's bias, then its matrix: one of 54 parts, as 53 are convolutions.
        self.assertEqual(times[-1], 0.0)
        self.assertAlmostEqual(times[-2], 60e-3 / 54)

    def test_one_slow_link_by_hand(self):
        # Two layers of 1 MB, ready at 10 and 20 ms; each takes 1 ms up and 1 ms down.
        machine = preset("fully_connected", 2)
        wires = [dataclasses.replace(wire, bandwidth=1e9) for wire in machine.resources]
        links = [dataclasses.replace(link, latency=0.0) for link in machine.links]
        machine = dataclasses.replace(machine, resources=tuple(wires), links=tuple(links))
        layers = [Gradient(10**6, 2), Gradient(10**6, 2)]
        found = plan_overlap(layers, machine, 20e-3, "one_device")
        # As two packs the last is all that is left; smaller ones go up while others go down.
        self.assertGreater(len(found.schedule.packs), 1)
        self.assertLess(found.exposed, 2e-3)
        self.assertGreater(found.exposed, 1e-3)  # 1 MB must go up after 20 ms.
        for pack, ready in zip(found.schedule.packs, found.ready, strict=True):
            self.assertAlmostEqual(ready, 10e-3 if pack.stop <= 10**6 else 20e-3)
        for pack, ready, done in zip(found.schedule.packs, found.ready, found.done, strict=True):
            self.assertGreaterEqual(done, ready + 2 * pack.size / 1e9 - 1e-12)

    @parameterized.parameters(("dgx1", "resnet50"), ("pcie", "mobilenet"))
    def test_auto_leaves_least(self, machine, model):
        topology, gradients = preset(machine), _gradients(model)
        auto = plan_overlap(gradients, topology, 20e-3)
        for name in ("ring", "hierarchical_copy", "packed_trees"):
            other = plan_overlap(gradients, topology, 20e-3, name)
            self.assertLessEqual(auto.exposed, other.exposed / 0.99)
        size = sum(gradient.num_bytes for gradient in gradients)
        alone = algorithms.make_schedule("auto", topology, size)
        self.assertLess(auto.exposed, simulator.robust_seconds(alone, topology))

    def test_a_short_pass_hides_nothing(self):
        gradients, machine = _gradients("resnet50"), preset("pcie")
        found = plan_overlap(gradients, machine, 1e-6)
        size = found.schedule.size
        schedule = algorithms.make_schedule(found.algorithm, machine, size, len(found.ready))
        self.assertLess(abs(found.exposed / simulator.robust_seconds(schedule, machine) - 1), 0.3)


if __name__ == "__main__":
    absltest.main()
