"""The machine and its copy trees: lines, arrows and legend, as matplotlib holds them."""

import itertools
import math
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

from absl.testing import absltest, parameterized

from tfcdo import plot
from tfcdo.plan import algorithms
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.plan import in_turn
from tfcdo.plot import draw_trees, save_figure
from tfcdo.topology.links import Resource, Route, link_name, ordered_pairs
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

# What is drawn is looked at by attributes that only some of matplotlib's artists have.
_draw: Callable[..., Any] = draw_trees


def _machine(
    devices: int,
    wires: Mapping[tuple[int, int], float],
    both_ways: Sequence[tuple[int, int]] = (),
    host: Callable[[int], float] = lambda source: 10e9,
) -> Topology:
    routes = []
    for pair in ordered_pairs(devices):
        name = "wire" if pair in both_ways else link_name(*pair)
        resource = Resource(name, wires.get(pair, host(pair[0])))
        routes.append(Route(*pair, [resource], via_host=pair not in wires))
    return Topology.from_routes("mine", devices, routes)


def _machine_axes(machine: Topology) -> Any:
    figure = _draw(algorithms.make_plan("ring", machine, 10**6), machine)
    figure.draw_without_rendering()  # Else arrows do not know where their ends are.
    return figure.axes[0]


def _legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def _places(axes: Any) -> dict[int, tuple[float, float]]:
    return {int(text.get_text()): text.get_position() for text in axes.texts}


def _nearest(places: Mapping[int, Any], point: Sequence[float]) -> int:
    return min(places, key=lambda device: math.dist(places[device], point))


def _lines(axes: Any) -> list[Any]:
    return [collection for collection in axes.collections if hasattr(collection, "get_segments")]


def _joined_pairs(axes: Any) -> set[tuple[int, int]]:
    """Returns the pairs `a < b` that a line without an arrow joins."""
    places = _places(axes)
    segments = [segment for group in _lines(axes) for segment in group.get_segments()]
    ends = [sorted(_nearest(places, point) for point in segment) for segment in segments]
    return {(a, b) for a, b in ends}


def _arrows(axes: Any) -> set[tuple[int, int]]:
    """Returns the `(source, target)` of each arrow, whose path is a tail and then mostly head."""
    places = _places(axes)
    paths = [arrow.get_path().vertices for arrow in axes.patches]
    return {(_nearest(places, path[0]), _nearest(places, path[-2])) for path in paths}


def _neighbours(axes: Any) -> set[tuple[int, int]]:
    """Returns the pairs `a < b` of devices that stand next to each other on the circle."""
    places = _places(axes)
    near = 2 * math.sin(math.pi / len(places)) + 1e-6
    pairs = itertools.combinations(sorted(places), 2)
    return {(a, b) for a, b in pairs if math.dist(places[a], places[b]) < near}


class TreesTest(parameterized.TestCase):
    def test_one_picture_for_each_tree(self):
        machine = preset("dgx1")
        schedule = algorithms.make_plan("hierarchical_copy", machine, 10**8)
        machine_axes, *trees = _draw(schedule, machine).axes
        self.assertLen(trees, 8)
        self.assertEqual(trees[3].get_title(), "pack 3\n12.5 MB")
        self.assertEqual(sorted(_places(machine_axes)), [*range(8)])
        wires = ["25 GB/s each way", "50 GB/s each way"]
        self.assertEqual(_legend(machine_axes), [*wires, "no line: through the host, 10 GB/s"])
        neighbours = _neighbours(machine_axes)
        self.assertLen(neighbours, 8)
        self.assertEqual({machine.bandwidth(*pair) for pair in neighbours}, {50e9})

    def test_arrows_of_a_tree_point_to_its_root(self):
        figure = _draw(in_turn([800], [CopyTree((1, 2, None, 2, 0))]), preset("pcie", 5))
        figure.draw_without_rendering()
        self.assertEqual(_arrows(figure.axes[1]), {(0, 1), (1, 2), (3, 2), (4, 0)})

    @parameterized.parameters(("pcie", 4, True), ("nvswitch", 3, True), ("dgx1", 4, False))
    def test_links_that_share_their_path_are_dashed(self, name: str, devices: int, dashed: bool):
        axes = _machine_axes(preset(name, devices))
        styles = {pattern is not None for one in _lines(axes) for _, pattern in one.get_linestyle()}
        self.assertEqual(styles, {dashed})
        self.assertEqual({line.get_linestyle() for line in axes.lines}, {"--" if dashed else "-"})
        for text in _legend(axes):
            self.assertEqual("shares its path with others" in text, dashed)

    def test_links_of_different_speeds_or_one_way_are_arrows(self):
        speeds = {(0, 1): 50e9, (1, 0): 10e9, (1, 2): 25e9, (2, 1): 25e9, (2, 0): 50e9}
        axes = _machine_axes(_machine(3, speeds))
        self.assertEqual(_arrows(axes), {(0, 1), (1, 0), (2, 0)})
        self.assertEqual(_joined_pairs(axes), {(1, 2)})
        lines = ["10 GB/s, along the arrow", "25 GB/s each way", "50 GB/s, along the arrow"]
        detours = "no line, or against the arrow: through the host, 10 GB/s"
        self.assertEqual(_legend(axes), [*lines, detours])

    def test_a_wire_for_both_directions_has_no_speed_each_way(self):
        both_ways = [(0, 1), (1, 0)]
        wires = {(1, 2): 5e9, (2, 1): 5e9} | dict.fromkeys(both_ways, 20e9)
        axes = _machine_axes(_machine(3, wires, both_ways, lambda source: (4 + source) * 1e9))
        self.assertEqual(_joined_pairs(axes), {(0, 1), (1, 2)})
        lines = ["5 GB/s each way", "20 GB/s, one way at a time"]
        self.assertEqual(_legend(axes), [*lines, "no line: through the host, 4 GB/s or more"])

    def test_packs_on_the_same_tree_share_a_picture(self):
        machine = preset("pcie")
        with mock.patch.object(plot, "_MAX_TREES", 2):
            figure = _draw(algorithms.make_plan("ring", machine, 800, 8), machine)
        titles = [axes.get_title() for axes in figure.axes[1:]]
        self.assertEqual(titles, ["packs 0, 4\n200 B", "packs 1, 5\n200 B"])
        self.assertStartsWith(figure.subfigs[1].get_suptitle(), "4 copy trees, 2 of them shown")

    def test_one_device(self):
        machine = preset("shared_memory", 1)
        self.assertLen(_draw(algorithms.make_plan("ring", machine, 10**8), machine).axes, 2)


class SaveTest(parameterized.TestCase):
    @parameterized.parameters("png", "svg")
    def test_the_same_plan_gives_the_same_file(self, kind: str):
        from matplotlib import image

        odd = r"$\x$"  # Names are not read as formulas.
        wire = [Resource(odd, 1e9)]
        machine = Topology.from_routes(odd, 2, [Route(0, 1, wire), Route(1, 0, wire)])
        schedule = algorithms.make_plan("ring", machine, 10**6)
        path = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), f"a.{kind}")
        contents = []
        for given in (path, str(path)):
            save_figure(draw_trees(schedule, machine, odd), given)
            contents.append(path.read_bytes())
        self.assertEqual(*contents)
        self.assertStartsWith(contents[0], b"\x89PNG\r\n" if kind == "png" else b"<?xml")
        if kind == "png":
            self.assertLess(len(contents[0]), 300_000)
            pixels = image.imread(path)
            self.assertGreater(pixels.shape[1], 800)
            self.assertGreater(len({tuple(pixel) for row in pixels[::9] for pixel in row}), 20)

    def test_wrong_arguments(self):
        machine = preset("pcie", 2)
        schedule = algorithms.make_plan("ring", machine, 10**6)
        save: Callable[..., Any] = save_figure
        for error, message, call, *arguments in (
            (TypeError, "plan must be a Plan.*; got 'ring'", _draw, "ring", machine),
            (ValueError, "plan must be for the 3", _draw, schedule, preset("pcie", 3)),
            (TypeError, "title .* str; got 5", _draw, schedule, machine, 5),
            (ValueError, "in .svg or .png; got 'a.jpg'", save, None, "a.jpg"),
            (TypeError, "must be a Figure, .*; got None", save, None, "a.png"),
        ):
            self.assertRaisesRegex(error, message, call, *arguments)

    def test_a_long_title_is_not_clipped(self):
        title = "auto: packed_trees on measured 3 CPU devices of " + "x " * 60
        figure = plot._make_figure(9, 5, title)
        figure.draw_without_rendering()
        (text,) = [text for text in figure.texts if "measured" in text.get_text()]
        extent = text.get_window_extent()
        self.assertGreaterEqual(extent.x0, 0)
        self.assertLessEqual(extent.x1, figure.bbox.width)


if __name__ == "__main__":
    absltest.main()
