from __future__ import annotations

import math
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tfcdo.plan import algorithms
from tfcdo.plan import simulator
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.copy_tree import chain
from tfcdo.plan.schedule import Pack
from tfcdo.plan.schedule import Schedule
from tfcdo.plan.schedule import assign
from tfcdo.plot import plans
from tfcdo.topology.links import Resource
from tfcdo.topology.links import ordered_pairs
from tfcdo.topology.presets import preset
from tfcdo.topology.routes import Route
from tfcdo.topology.topology import Topology


def _plan(name: str, algorithm: str, devices: int | None = None) -> tuple[Schedule, Topology]:
    machine = preset(name, devices)
    return algorithms.make_schedule(algorithm, machine, 10**8), machine


# What is drawn is looked at by attributes that only some of matplotlib's artists have.
_gantt: Callable[..., Any] = plans.gantt
_machine_and_trees: Callable[..., Any] = plans.machine_and_trees


def _machine(
    devices: int,
    ways: Mapping[tuple[int, int], Sequence[tuple[str, float]]],
    host: Callable[[int, int], float] = lambda source, target: 10e9,
    name: str = "mine",
) -> Topology:
    """A machine of some links; any other pair has a detour of its own."""
    routes = []
    for source, target in ordered_pairs(devices):
        if (source, target) in ways:
            resources = [Resource(*resource) for resource in ways[source, target]]
            routes.append(Route(source, target, resources))
        else:
            bridge = Resource(f"host {source}→{target}", host(source, target))
            routes.append(Route(source, target, [bridge], via_host=True))
    return Topology.from_routes(name, devices, routes)


def _own_wires(speeds: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], Any]:
    return {(a, b): [(f"{a}→{b}", speed)] for (a, b), speed in speeds.items()}


def _machine_axes(machine: Topology) -> Any:
    figure = _machine_and_trees(algorithms.make_schedule("ring", machine, 10**6), machine)
    figure.draw_without_rendering()  # Else arrows do not know where their ends are.
    return figure.axes[0]


def _legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def _nearest(places: plans.Positions, point: Sequence[float]) -> int:
    return min(places, key=lambda device: math.dist(places[device], point))


def _lines(axes: Any, places: plans.Positions) -> set[tuple[int, int]]:
    """The pairs `a < b` that a line without an arrow joins."""
    ends = set()
    for collection in axes.collections:
        if hasattr(collection, "get_segments"):
            for start, stop in collection.get_segments():
                a, b = sorted((_nearest(places, start), _nearest(places, stop)))
                ends.add((a, b))
    return ends


def _arrows(axes: Any, places: plans.Positions) -> set[tuple[int, int]]:
    """The `(source, target)` of each arrow: its path begins at its tail, most of it is its head."""
    found = set()
    for arrow in axes.patches:
        points = arrow.get_path().vertices
        found.add((_nearest(places, points[0]), _nearest(places, points[-2])))
    return found


class GanttTest(parameterized.TestCase):
    @parameterized.parameters(
        ("dgx1", "hierarchical_copy"), ("pcie", "ring"), ("shared_memory", "shuffle")
    )
    def test_each_task_is_a_bar_in_each_lane_that_it_holds(self, name: str, algorithm: str):
        schedule, machine = _plan(name, algorithm)
        timeline = simulator.simulate(schedule, machine)
        axes = _gantt(schedule, machine).axes[0]
        bars = sorted((bar.get_x(), bar.get_width()) for bar in axes.patches)
        held = []
        for task in timeline.tasks:
            lanes = 1
            if task.kind != "add":
                lanes = len(machine.link_by_pair[task.source, task.target].resources)
            held += [(task.start * 1e3, (task.end - task.start) * 1e3)] * lanes
        # Copies in shared memory take no time, and wires that are never busy have no lane.
        wanted = sorted((start, width) for start, width in held if width)
        self.assertLen(bars, len(wanted))
        for bar, other in zip(bars, wanted):
            self.assertSequenceAlmostEqual(bar, other, places=6)
        self.assertAlmostEqual(axes.get_xlim()[1], timeline.seconds * 1e3)

    def test_lanes_are_links_and_say_how_busy_they_are(self):
        # One tree over two links of 25 GB/s: 0.5 ms up from 2, then from 1, and back.
        machine = preset("fully_connected", 3)
        pack = Pack(0, 12_500_000, chain(3))
        schedule = Schedule(3, 12_500_000, (pack,))
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
        figure = _gantt(schedule, machine)
        (line,) = figure.axes[0].lines
        self.assertAlmostEqual(line.get_xdata()[0], 1e3 * 14 / 48 * 1e8 / 25e9)
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        self.assertIn("bound 1.167 ms", legend)

    def test_there_is_no_line_of_a_bound_that_was_beaten(self):
        schedule, machine = _plan("dgx1", "hierarchical_copy")
        with mock.patch.object(plans, "lower_bound", return_value=1.0):
            figure = _gantt(schedule, machine)
        self.assertEmpty(figure.axes[0].lines)
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        self.assertNotIn("bound", " ".join(legend))

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

    def test_arrows_of_a_tree_point_to_its_root(self):
        machine = preset("dgx1")
        tree = CopyTree((1, 2, None, 2, 0, 1, 2, 3))
        schedule = assign(800, [(0, 800)], [tree])
        figure = _machine_and_trees(schedule, machine)
        figure.draw_without_rendering()
        wanted = {(0, 1), (1, 2), (3, 2), (4, 0), (5, 1), (6, 2), (7, 3)}
        self.assertEqual(_arrows(figure.axes[1], plans._circle(machine)), wanted)

    @parameterized.parameters(("pcie", True), ("nvswitch", True), ("dgx1", False))
    def test_links_that_share_their_way_are_dashed(self, name: str, dashed: bool):
        axes = _machine_axes(preset(name, 4))
        lines = [one for one in axes.collections if hasattr(one, "get_segments")]
        # Of a solid line there is no pattern.
        styles = {pattern is not None for one in lines for _, pattern in one.get_linestyle()}
        self.assertEqual(styles, {dashed})
        self.assertEqual({line.get_linestyle() for line in axes.lines}, {"--" if dashed else "-"})
        for text in _legend(axes):
            self.assertEqual("shares its way with others" in text, dashed)

    def test_ways_of_different_speeds_are_two_arrows(self):
        speeds = {(0, 1): 50e9, (1, 0): 10e9, (1, 2): 25e9, (2, 1): 25e9}
        machine = _machine(3, _own_wires(speeds))
        axes, places = _machine_axes(machine), plans._circle(machine)
        self.assertEqual(_arrows(axes, places), {(0, 1), (1, 0)})
        self.assertEqual(_lines(axes, places), {(1, 2)})
        self.assertEqual(
            _legend(axes),
            [
                "10 GB/s, along the arrow",
                "25 GB/s each way",
                "50 GB/s, along the arrow",
                "no line: through the host, 10 GB/s",
            ],
        )

    @parameterized.parameters(((0, 1, 2),), ((2, 1, 0),))
    def test_one_way_links_are_arrows(self, ring: tuple[int, int, int]):
        a, b, c = ring
        ways = {(a, b), (b, c), (c, a)}
        machine = _machine(3, _own_wires(dict.fromkeys(ways, 25e9)))
        axes, places = _machine_axes(machine), plans._circle(machine)
        self.assertEqual(_arrows(axes, places), ways)
        self.assertEmpty(_lines(axes, places))
        detours = "no line, or against the arrow: through the host, 10 GB/s"
        self.assertEqual(_legend(axes), ["25 GB/s, along the arrow", detours])

    def test_a_wire_of_both_ways_is_no_speed_each_way(self):
        half = [("wire", 20e9)]
        machine = _machine(
            3, {(0, 1): half, (1, 0): half, **_own_wires({(1, 2): 5e9, (2, 1): 5e9})}
        )
        axes, places = _machine_axes(machine), plans._circle(machine)
        self.assertEqual(_lines(axes, places), {(0, 1), (1, 2)})
        self.assertEqual(_legend(axes)[:2], ["5 GB/s each way", "20 GB/s, one way at a time"])

    def test_the_slowest_detour_is_told(self):
        ways = _own_wires({(0, 1): 25e9, (1, 0): 25e9, (1, 2): 25e9, (2, 1): 25e9})
        machine = _machine(3, ways, host=lambda source, target: (4 + source) * 1e9)
        self.assertEqual(
            _legend(_machine_axes(machine))[-1], "no line: through the host, 4 GB/s or more"
        )

    def test_packs_on_the_same_tree_share_a_picture(self):
        machine = preset("pcie")
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
        machine = preset("dgx1")
        places = plans._circle(machine)
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

        figure = getattr(plans, name)(*_plan("pcie", "hierarchical_copy"), "a title")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "a.png"
            plans.save(figure, path)
            self.assertLess(path.stat().st_size, 300_000)
            pixels = image.imread(path)
        self.assertGreater(pixels.shape[1], 800)
        self.assertGreater(len({tuple(pixel) for row in pixels[::9] for pixel in row}), 20)

    @parameterized.parameters("machine_and_trees", "gantt")
    def test_names_are_no_formulas(self, name: str):
        odd = r"$\x$"
        both = [(odd, 1e9)]
        machine = _machine(2, {(0, 1): both, (1, 0): both}, name=odd)
        schedule = algorithms.make_schedule("ring", machine, 10**6)
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("png", "svg"):
                path = pathlib.Path(folder) / f"a.{kind}"
                plans.save(getattr(plans, name)(schedule, machine, odd), path)
                self.assertGreater(path.stat().st_size, 1000)


class FormatTest(parameterized.TestCase):
    @parameterized.parameters(
        (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (10**8, "100 MB"), (25 * 10**8, "2.50 GB"),
        (4 * 10**12, "4000 GB"), (999_499, "999 kB"), (999_999, "1.00 MB"), (99_960_000, "100 MB"),
    )  # fmt: skip
    def test_bytes(self, size: int, text: str):
        self.assertEqual(plans.format_bytes(size), text)

    @parameterized.parameters(
        (0.0, "0 s"), (2.0, "2.000 s"), (0.01204, "12.04 ms"), (4e-7, "0.4000 µs"),
        (9.99999e-4, "1.000 ms"), (0.9999, "999.9 ms"), (12345.6, "12350 s"),
    )  # fmt: skip
    def test_seconds(self, seconds: float, text: str):
        self.assertEqual(plans.format_seconds(seconds), text)


if __name__ == "__main__":
    absltest.main()
