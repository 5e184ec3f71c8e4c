from __future__ import annotations

import math
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from absl.testing import absltest
from absl.testing import parameterized

from tfcdo.plan import algorithms
from tfcdo.plan import draw
from tfcdo.plan import schedule as schedule_lib
from tfcdo.plan import simulate
from tfcdo.plan import topology as topology_lib
from tfcdo.plan import tree as tree_lib


def _plan(
    name: str, algorithm: str, devices: int | None = None
) -> tuple[schedule_lib.Schedule, topology_lib.Topology]:
    machine = topology_lib.preset(name, devices)
    return algorithms.make_schedule(algorithm, machine, 10**8), machine


# What is drawn is looked at by attributes that only some of matplotlib's artists have.
_gantt: Callable[..., Any] = draw.gantt
_machine_and_trees: Callable[..., Any] = draw.machine_and_trees


class GanttTest(parameterized.TestCase):
    @parameterized.parameters(
        ("dgx1", "hierarchical_copy"), ("pcie", "ring"), ("shared_memory", "shuffle")
    )
    def test_each_task_is_a_bar_in_each_lane_that_it_holds(self, name: str, algorithm: str):
        schedule, machine = _plan(name, algorithm)
        timeline = simulate.simulate(schedule, machine)
        axes = _gantt(schedule, machine).axes[0]
        bars = sorted((bar.get_x(), bar.get_width()) for bar in axes.patches)
        held = []
        for task in timeline.tasks:
            lanes = 1
            if task.kind != "add":
                lanes = len(machine.routes[task.source, task.target].resources)
            held += [(task.start * 1e3, (task.end - task.start) * 1e3)] * lanes
        # Copies in shared memory take no time, and wires that are never busy have no lane.
        wanted = sorted((start, width) for start, width in held if width)
        self.assertLen(bars, len(wanted))
        for bar, other in zip(bars, wanted):
            self.assertSequenceAlmostEqual(bar, other, places=6)
        self.assertAlmostEqual(axes.get_xlim()[1], timeline.seconds * 1e3)

    def test_lanes_are_links_and_say_how_busy_they_are(self):
        # One tree over two links of 25 GB/s: 0.5 ms up from 2, then from 1, and back.
        machine = topology_lib.preset("fully_connected", 3)
        pack = schedule_lib.Pack(0, 12_500_000, tree_lib.chain(3))
        schedule = schedule_lib.Schedule(3, 12_500_000, (pack,))
        axes = _gantt(schedule, machine).axes[0]
        lanes = [label.get_text() for label in axes.get_yticklabels()]
        self.assertEqual(lanes, ["0→1", "1→0", "1→2", "2→1"])
        starts = {lanes[round(bar.get_y() + 0.42)]: bar.get_x() for bar in axes.patches}
        for lane, start in {"2→1": 0, "1→0": 0.51, "0→1": 1.02, "1→2": 1.53}.items():
            self.assertAlmostEqual(starts[lane], start)
        texts = [text.get_text() for text in axes.texts]
        self.assertEqual(texts.count("25%"), 4)

    def test_copies_down_are_pale(self):
        schedule, machine = _plan("pcie", "one_device")
        axes = _gantt(schedule, machine).axes[0]
        fills = {bar.get_x() >= axes.get_xlim()[1] / 2: bar.get_facecolor() for bar in axes.patches}
        self.assertGreater(min(fills[True][:3]), min(fills[False][:3]))

    def test_many_lanes(self):
        schedule, machine = _plan("fully_connected", "shuffle", 16)
        figure = _gantt(schedule, machine)
        self.assertLen(figure.axes[0].get_yticks(), 64)
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        self.assertIn(f"{16 * 15 - 64} more lanes not shown", legend)

    def test_the_bound_is_a_line(self):
        schedule, machine = _plan("dgx1", "hierarchical_copy")
        axes = _gantt(schedule, machine).axes[0]
        (line,) = axes.lines
        self.assertAlmostEqual(line.get_xdata()[0], 1e3 * 14 / 48 * 1e8 / 25e9)

    def test_nothing_to_transfer(self):
        schedule, machine = _plan("dgx1", "ring", 1)
        axes = _gantt(schedule, machine).axes[0]
        self.assertEmpty(axes.patches)


class MachineAndTreesTest(parameterized.TestCase):
    def test_one_picture_for_each_tree(self):
        schedule, machine = _plan("dgx1", "hierarchical_copy")
        machine_axes, *trees = _machine_and_trees(schedule, machine).axes
        self.assertLen(trees, 8)
        self.assertEqual(trees[3].get_title(), "pack 3\n12.5 MB")
        # Seven edges of the tree, each an arrow.
        self.assertLen(trees[3].patches, 7)
        numbers = sorted(text.get_text() for text in machine_axes.texts)
        self.assertEqual(numbers, [*"01234567"])
        legend = [text.get_text() for text in machine_axes.get_legend().get_texts()]
        self.assertEqual(
            legend,
            ["25 GB/s each way", "50 GB/s each way", "no line: through the host, 10 GB/s"],
        )

    def test_packs_on_the_same_tree_share_a_picture(self):
        machine = topology_lib.preset("pcie")
        schedule = algorithms.make_schedule("ring", machine, 800, 8)
        _, *trees = _machine_and_trees(schedule, machine).axes
        self.assertEqual([axes.get_title() for axes in trees][1], "packs 1, 5\n200 B")

    def test_many_trees(self):
        schedule, machine = _plan("pcie", "shuffle", 34)
        figure = _machine_and_trees(schedule, machine)
        self.assertLen(figure.axes, 1 + 32)
        self.assertStartsWith(figure.subfigs[1].get_suptitle(), "34 copy trees, 32 of them shown")

    @parameterized.parameters(1, 2, 3)
    def test_few_devices(self, devices: int):
        schedule, machine = _plan("shared_memory", "ring", devices)
        self.assertLen(_machine_and_trees(schedule, machine).axes, 1 + devices)

    def test_well_joined_devices_are_neighbours(self):
        machine = topology_lib.preset("dgx1")
        places = draw._circle(machine)
        side = 2 * math.sin(math.pi / 8)
        neighbours = [
            (a, b)
            for a in range(8)
            for b in range(a)
            if math.dist(places[a], places[b]) < side + 1e-6
        ]
        self.assertLen(neighbours, 8)
        self.assertEqual({machine.bandwidth(*pair) for pair in neighbours}, {50e9})


class SaveTest(parameterized.TestCase):
    @parameterized.parameters("machine_and_trees", "gantt")
    def test_writes_a_picture_with_something_in_it(self, name: str):
        from matplotlib import image

        figure = getattr(draw, name)(*_plan("pcie", "hierarchical_copy"), "a title")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "a.png"
            draw.save(figure, path)
            self.assertLess(path.stat().st_size, 300_000)
            pixels = image.imread(path)
        self.assertGreater(pixels.shape[1], 800)
        self.assertGreater(len({tuple(pixel) for row in pixels[::9] for pixel in row}), 20)


class FormatTest(parameterized.TestCase):
    @parameterized.parameters(
        (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (10**8, "100 MB"), (25 * 10**8, "2.50 GB"),
        (4 * 10**12, "4000 GB"), (999_499, "999 kB"), (999_999, "1.00 MB"), (99_960_000, "100 MB"),
    )  # fmt: skip
    def test_bytes(self, size: int, text: str):
        self.assertEqual(draw.format_bytes(size), text)

    @parameterized.parameters(
        (0.0, "0 s"), (2.0, "2.000 s"), (0.01204, "12.04 ms"), (4e-7, "0.4000 µs"),
        (9.99999e-4, "1.000 ms"), (0.9999, "999.9 ms"), (12345.6, "12350 s"),
    )  # fmt: skip
    def test_seconds(self, seconds: float, text: str):
        self.assertEqual(draw.format_seconds(seconds), text)


if __name__ == "__main__":
    absltest.main()
