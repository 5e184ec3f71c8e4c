"""Files of pictures, and the Gantt chart as matplotlib holds it."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from absl.testing import absltest, parameterized

from tfcdo.plan import algorithms, simulator
from tfcdo.plan.copy_tree import chain
from tfcdo.plan.plan import Plan, in_turn
from tfcdo.plan.tree_program import lower_bound_seconds
from tfcdo.plot import gantt
from tfcdo.plot.figures import make_figure, save_figure
from tfcdo.plot.gantt import draw_gantt
from tfcdo.plot.trees import draw_trees
from tfcdo.topology.links import Resource, Route
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

# What is drawn is looked at by attributes that only some of matplotlib's artists have.
_draw: Callable[..., Any] = gantt.draw_gantt


def _plan(name: str, algorithm: str, devices: int | None = None) -> tuple[Plan, Topology]:
    machine = preset(name, devices)
    return algorithms.make_plan(algorithm, machine, 10**8), machine


class GanttTest(parameterized.TestCase):
    @parameterized.parameters(
        ("dgx1", "hierarchical_copy"), ("pcie", "ring"), ("shared_memory", "shuffle")
    )
    def test_each_task_is_a_bar_in_each_of_its_lanes(self, name: str, algorithm: str):
        schedule, machine = _plan(name, algorithm)
        timeline = simulator.simulate(schedule, machine)
        axes = _draw(schedule, machine).axes[0]
        bars = sorted((bar.get_x(), bar.get_width()) for bar in axes.patches)
        wanted = []
        for task in timeline.tasks:
            lanes = 1
            if task.kind != "add":
                lanes = len(machine.link_by_pair[task.source, task.target].resources)
            wanted += [(task.start * 1e3, (task.end - task.start) * 1e3)] * lanes
        # Copies in shared memory take no time, and wires that are never busy have no lane.
        wanted = sorted((start, width) for start, width in wanted if width)
        self.assertLen(bars, len(wanted))
        for bar, other in zip(bars, wanted):
            self.assertSequenceAlmostEqual(bar, other, places=6)
        self.assertAlmostEqual(axes.get_xlim()[1], timeline.seconds * 1e3)

    def test_lanes_are_links_and_say_how_busy_they_are(self):
        # One tree over two links of 25 GB/s: 0.5 ms up from 2, then from 1, and back.
        machine = preset("fully_connected", 3)
        schedule = in_turn([12_500_000], [chain(3)])
        axes = _draw(schedule, machine).axes[0]
        lanes = [label.get_text() for label in axes.get_yticklabels()]
        self.assertEqual(lanes, ["0→1", "1→0", "1→2", "2→1"])
        starts = {lanes[round(bar.get_y() + 0.42)]: bar.get_x() for bar in axes.patches}
        for lane, start in {"2→1": 0, "1→0": 0.51, "0→1": 1.02, "1→2": 1.53}.items():
            self.assertAlmostEqual(starts[lane], start)
        texts = [text.get_text() for text in axes.texts]
        # 0.5 of 2.04 ms on each link: latency is not work.
        self.assertEqual(texts.count("25%"), 4)

    def test_small_copies_leave_their_links_idle(self):
        machine = preset("fully_connected", 2)
        schedule = in_turn([250_000], [chain(2)])
        texts = [text.get_text() for text in _draw(schedule, machine).axes[0].texts]
        # 10 us of bytes after 10 us of latency, on each of two links in turn.
        self.assertEqual(texts.count("25%"), 2)

    def test_lanes_are_in_the_order_of_the_devices(self):
        schedule, machine = _plan("pcie", "shuffle")
        lanes = [label.get_text() for label in _draw(schedule, machine).axes[0].get_yticklabels()]
        ports = [f"{device} {way}" for way in ("out", "in") for device in range(4)]
        self.assertEqual(lanes[:8], ports)
        self.assertStartsWith(lanes[8], "switch ")
        _, dgx1 = _plan("dgx1", "shuffle")
        mirrored = dgx1.subset(range(7, -1, -1))
        schedule = algorithms.make_plan("shuffle", mirrored, 10**8)
        lanes = [label.get_text() for label in _draw(schedule, mirrored).axes[0].get_yticklabels()]
        wires = [lane for lane in lanes if "host" not in lane]
        # The wires of this machine are named as the other machine's.
        self.assertEqual(wires, sorted(wires, key=lambda name: (-int(name[0]), -int(name[2]))))
        self.assertEqual(lanes[: len(wires)], wires)

    def test_copies_down_are_pale(self):
        schedule, machine = _plan("pcie", "one_device")
        axes = _draw(schedule, machine).axes[0]
        fills = {bar.get_x() >= axes.get_xlim()[1] / 2: bar.get_facecolor() for bar in axes.patches}
        self.assertGreater(min(fills[True][:3]), min(fills[False][:3]))

    def test_many_lanes(self):
        schedule, machine = _plan("fully_connected", "shuffle", 9)
        figure = _draw(schedule, machine)
        self.assertLen(figure.axes[0].get_yticks(), 64)
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        self.assertIn(f"{9 * 8 - 64} more lanes not shown", legend)

    def test_the_bound_is_a_line(self):
        schedule, machine = _plan("dgx1", "hierarchical_copy")
        figure = _draw(schedule, machine)
        (line,) = figure.axes[0].lines
        self.assertAlmostEqual(line.get_xdata()[0], 1e3 * lower_bound_seconds(machine, 10**8))
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        self.assertIn("bound 1.196 ms", legend)

    def test_nothing_to_transfer(self):
        schedule, machine = _plan("dgx1", "ring", 1)
        axes = _draw(schedule, machine).axes[0]
        self.assertEmpty(axes.patches)


class SaveTest(parameterized.TestCase):
    @parameterized.parameters(draw_trees, draw_gantt)
    def test_writes_a_picture_with_something_in_it(self, draw: Callable[..., Any]):
        from matplotlib import image

        machine = preset("pcie")
        schedule = algorithms.make_plan("hierarchical_copy", machine, 10**8)
        figure = draw(schedule, machine, "a title")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "a.png"
            save_figure(figure, path)
            self.assertLess(path.stat().st_size, 300_000)
            pixels = image.imread(path)
        self.assertGreater(pixels.shape[1], 800)
        self.assertGreater(len({tuple(pixel) for row in pixels[::9] for pixel in row}), 20)

    def test_a_long_title_is_not_clipped(self):
        figure = make_figure(9, 5, "auto: packed_trees on measured 3 CPU devices of " + "x " * 60)
        figure.draw_without_rendering()
        (title,) = [text for text in figure.texts if "measured" in text.get_text()]
        extent = title.get_window_extent()
        self.assertGreaterEqual(extent.x0, 0)
        self.assertLessEqual(extent.x1, figure.bbox.width)

    @parameterized.parameters(draw_trees, draw_gantt)
    def test_names_are_not_read_as_formulas(self, draw: Callable[..., Any]):
        odd = r"$\x$"
        wire = [Resource(odd, 1e9)]
        machine = Topology.from_routes(odd, 2, [Route(0, 1, wire), Route(1, 0, wire)])
        schedule = algorithms.make_plan("ring", machine, 10**6)
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("png", "svg"):
                path = pathlib.Path(folder) / f"a.{kind}"
                save_figure(draw(schedule, machine, odd), path)
                self.assertGreater(path.stat().st_size, 1000)


if __name__ == "__main__":
    absltest.main()
